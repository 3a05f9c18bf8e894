// SPDX-License-Identifier: Apache-2.0
// From tensors to a Problem. Every check on a tensor is here, for real and for symbolic sizes alike, so that
// the Meta kernels raise the sentences that the others raise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>
#include <c10/util/MaybeOwned.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "steadynorm/problem.h"

namespace steadynorm::binding {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using OptionalDType = std::optional<at::ScalarType>;

// What the operators share. Refers to the caller's tensors: it lives no longer than the call.
struct Arguments {
  const Tensor& input;           // [N, C, *]
  const OptionalTensor& weight;  // [C] or [N, C]
  const OptionalTensor& bias;
  SymInt channels_per_group;
  double eps = 1e-5;
  std::string_view activation = "none";
  OptionalDType out_dtype = std::nullopt;
};

// The same data as backends take it: dense, channels first or last. What is so already stays the caller's.
struct Operands {
  Problem problem;
  at::MemoryFormat format;
  c10::MaybeOwned<Tensor> input, weight, bias;  // an absent parameter is undefined
};

inline bool present(const OptionalTensor& tensor) { return tensor.has_value() && tensor->defined(); }

inline const void* data(const Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
inline void* mutable_data(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// D of the differentiable operator, after its own checks: rank, groups, and more than one value per group.
SymInt channels_per_group(const Tensor& input, std::int64_t num_groups);

void check(const Arguments&);
void check_gradient(const Tensor& input, const Tensor& grad_output);
void check_residual(const Tensor& input, const Tensor& residual);
void check_statistics(const Arguments&, const Tensor& statistics);  // [3, N, G]
void check_moments(const Arguments&, const Tensor& moments);        // [N, G, 3]

// Whether memory has the elements in the order of `format`, with nothing in between.
bool is_dense(const Tensor&, at::MemoryFormat format);

// The memory format of `input` that y and dx keep. Dense channels-last stays; what is dense in both formats
// (C = 1, or one position) is contiguous; so is the result for any other strides.
at::MemoryFormat format_of(const Tensor& input);

// The dtype of y.
at::ScalarType output_dtype(const Arguments&);

// The dtype in which backends take and give y and dy: theirs, where it is one that they have for this input.
at::ScalarType storage_dtype(at::ScalarType input, at::ScalarType wanted);

// Of x̂ and the statistics: float64 for float64 input, else float32.
at::ScalarType accumulate_dtype(const Tensor& input);

DType to_dtype(at::ScalarType);

// Checks, describes, and copies what is not dense. `dtype_of_y`: of y in forward, of dy in backward.
Operands operands(const Arguments&, at::ScalarType dtype_of_y);

// Runs `call` with the library's errors as PyTorch's: ValueError, NotImplementedError (a RuntimeError) for
// what this build or device cannot serve, RuntimeError for what the device reports. Left alone, an
// std::invalid_argument from a backward pass reaches Python as RuntimeError.
template <class Call>
auto translated(Call&& call) -> decltype(call()) {
  try {
    return std::forward<Call>(call)();
  } catch (const InvalidArgument& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const Unsupported& error) {
    C10_THROW_ERROR(NotImplementedError, error.what());
  } catch (const DeviceError& error) {
    C10_THROW_ERROR(Error, std::string(error.what()));
  }
}

}  // namespace steadynorm::binding
