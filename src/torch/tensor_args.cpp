// SPDX-License-Identifier: Apache-2.0
#include "torch/tensor_args.h"

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <array>

namespace steadynorm::binding {

namespace {

// A condition on symbolic sizes that cannot be decided while tracing is left to the run: the kernels check
// again.
bool surely(const c10::SymBool& condition) { return TORCH_GUARD_OR_FALSE(condition); }

// A std::string in torch 2.11, a string_view in later ones.
std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

bool is_storage_type(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble;
}

DType require_dtype(const char* name, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(is_storage_type(dtype), "group_norm: ", name,
                    " must be float32, bfloat16, float16 or float64, got ", name_of(dtype));
  return to_dtype(dtype);
}

void require_rank(const Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() >= 2, "group_norm: input must have at least 2 dimensions, got ", input.dim());
}

void require_device(const char* name, const Tensor& tensor, const Tensor& input) {
  TORCH_CHECK_VALUE(tensor.device() == input.device(), "group_norm: ", name, " must be on input's device ",
                    input.device(), ", got ", tensor.device());
}

bool has_sizes(const Tensor& tensor, c10::ArrayRef<SymInt> sizes) {
  if (tensor.dim() != static_cast<std::int64_t>(sizes.size())) return false;
  for (std::size_t i = 0; i < sizes.size(); ++i)
    if (surely(tensor.sym_size(i).sym_ne(sizes[i]))) return false;
  return true;
}

Parameter require_parameter(const char* name, const OptionalTensor& tensor, const Tensor& input) {
  if (!present(tensor)) return {};
  const SymInt N = input.sym_size(0), C = input.sym_size(1);
  const bool per_channel = has_sizes(*tensor, {C});
  TORCH_CHECK_VALUE(per_channel || has_sizes(*tensor, {N, C}), "group_norm: ", name,
                    " must have shape [C] or [N, C] with N=", N, ", C=", C, ", got ", tensor->sym_sizes());
  require_device(name, *tensor, input);
  return {per_channel ? ParameterShape::per_channel : ParameterShape::per_sample,
          require_dtype(name, tensor->scalar_type())};
}

// Everything of the Problem but its sizes, which may be symbols: they are 1 here.
Problem checked(const Arguments& a) {
  const Tensor& x = a.input;
  require_rank(x);
  Problem problem;
  problem.samples = problem.channels = problem.groups = problem.positions = 1;
  problem.x = require_dtype("input", x.scalar_type());
  const SymInt C = x.sym_size(1);
  const SymInt& D = a.channels_per_group;
  TORCH_CHECK_VALUE(!surely(C.sym_le(0)), "group_norm: channels must be positive, got C=", C);
  for (std::int64_t i = 2; i < x.dim(); ++i)
    TORCH_CHECK_VALUE(!surely(x.sym_size(i).sym_le(0)),
                      "group_norm: every spatial size must be positive, got S=0");
  TORCH_CHECK_VALUE(!surely(D.sym_le(0)), "group_norm: channels per group must be positive, got D=", D);
  TORCH_CHECK_VALUE(!surely((C % D).sym_ne(0)),
                    "group_norm: channels must be divisible by channels per group, got C=", C, ", D=", D);
  problem.weight = require_parameter("weight", a.weight, x);
  problem.bias = require_parameter("bias", a.bias, x);
  problem.eps = a.eps;
  problem.activation = activation_from(std::string(a.activation));
  if (a.out_dtype) require_dtype("out_dtype", *a.out_dtype);
  validate(problem);
  return problem;
}

void require_array(const char* name, const Tensor& tensor, const Tensor& input, at::ScalarType dtype,
                   const char* shape, c10::ArrayRef<SymInt> sizes) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == dtype && has_sizes(tensor, sizes), "group_norm: ", name,
                    " must be ", name_of(dtype), " ", shape, " with sizes ", sizes, ", got ",
                    name_of(tensor.scalar_type()), " ", tensor.sym_sizes());
  require_device(name, tensor, input);
}

}  // namespace

SymInt channels_per_group(const Tensor& input, std::int64_t num_groups) {
  require_rank(input);
  const SymInt C = input.sym_size(1);
  TORCH_CHECK_VALUE(num_groups > 0, "group_norm: groups must be positive, got G=", num_groups);
  TORCH_CHECK_VALUE(!surely((C % num_groups).sym_ne(0)),
                    "group_norm: channels must be divisible by groups, got C=", C, ", G=", num_groups);
  // N·C·S = G means one value in each group and one sample. The sentence is that of
  // torch.nn.functional.group_norm.
  if (surely(input.sym_numel().sym_eq(num_groups))) {
    c10::SmallVector<SymInt, 5> sizes(input.sym_sizes().begin(), input.sym_sizes().end());
    sizes[0] = 1;
    sizes[1] = num_groups;
    TORCH_CHECK_VALUE(false, "Expected more than 1 value per channel when training, got input size ",
                      c10::ArrayRef<SymInt>(sizes));
  }
  return C / num_groups;
}

void check(const Arguments& a) {
  translated([&] { checked(a); });
}

void check_gradient(const Tensor& input, const Tensor& grad_output) {
  require_dtype("grad_output", grad_output.scalar_type());
  TORCH_CHECK_VALUE(has_sizes(grad_output, input.sym_sizes()),
                    "group_norm: grad_output must have input's sizes ", input.sym_sizes(), ", got ",
                    grad_output.sym_sizes());
  require_device("grad_output", grad_output, input);
}

void check_statistics(const Arguments& a, const Tensor& statistics) {
  const SymInt N = a.input.sym_size(0), G = a.input.sym_size(1) / a.channels_per_group;
  require_array("statistics", statistics, a.input, accumulate_dtype(a.input), "[3, N, G]", {SymInt(3), N, G});
}

void check_moments(const Arguments& a, const Tensor& moments) {
  const SymInt N = a.input.sym_size(0), G = a.input.sym_size(1) / a.channels_per_group;
  require_array("moments", moments, a.input, at::kDouble, "[N, G, 3]", {N, G, SymInt(3)});
}

void check_residual(const Tensor& input, const Tensor& residual) {
  // PyTorch would add a sparse one.
  TORCH_CHECK_VALUE(residual.layout() == at::kStrided,
                    "group_norm: residual must be a dense tensor, got layout ", residual.layout());
  TORCH_CHECK_VALUE(has_sizes(residual, input.sym_sizes()), "group_norm: residual must have input's sizes ",
                    input.sym_sizes(), ", got ", residual.sym_sizes());
  TORCH_CHECK_VALUE(residual.scalar_type() == input.scalar_type(),
                    "group_norm: residual must have input's dtype ", name_of(input.scalar_type()), ", got ",
                    name_of(residual.scalar_type()));
  require_device("residual", residual, input);
}

// With symbolic sizes is_contiguous(channels_last) is false for what torch.empty(memory_format=channels_last)
// returns (torch 2.11), so there the strides are compared one by one.
bool is_dense(const Tensor& input, at::MemoryFormat format) {
  if (!input.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return input.is_contiguous(format);
  if (surely(input.sym_size(0).sym_eq(0))) return true;
  SymInt expected = 1;
  const auto has_stride = [&](std::int64_t dim) {
    const SymInt size = input.sym_size(dim);
    const bool matches = surely(size.sym_eq(1)) || surely(input.sym_stride(dim).sym_eq(expected));
    expected *= size;
    return matches;
  };
  const bool last = format != at::MemoryFormat::Contiguous;
  if (last && !has_stride(1)) return false;
  for (std::int64_t dim = input.dim() - 1; dim >= 0; --dim)
    if (!(last && dim == 1) && !has_stride(dim)) return false;
  return true;
}

at::MemoryFormat format_of(const Tensor& input) {
  const auto last = input.dim() == 4   ? at::MemoryFormat::ChannelsLast
                    : input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                                       : at::MemoryFormat::Contiguous;
  return !is_dense(input, at::MemoryFormat::Contiguous) && is_dense(input, last)
             ? last
             : at::MemoryFormat::Contiguous;
}

at::ScalarType output_dtype(const Arguments& a) { return a.out_dtype.value_or(a.input.scalar_type()); }

at::ScalarType storage_dtype(at::ScalarType input, at::ScalarType wanted) {
  if (input == at::kDouble) return at::kDouble;
  return wanted == at::kDouble ? at::kFloat : wanted;
}

at::ScalarType accumulate_dtype(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

DType to_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kHalf:
      return DType::float16;
    case at::kDouble:
      return DType::float64;
    default:
      return DType::float32;
  }
}

Operands operands(const Arguments& a, at::ScalarType dtype_of_y) {
  Operands result;
  result.problem = checked(a);
  result.format = format_of(a.input);
  Problem& problem = result.problem;
  problem.samples = a.input.size(0);
  problem.channels = a.input.size(1);
  problem.groups = problem.channels / a.channels_per_group.expect_int();
  for (std::int64_t i = 2; i < a.input.dim(); ++i) problem.positions *= a.input.size(i);
  problem.layout = result.format == at::MemoryFormat::Contiguous ? Layout::contiguous : Layout::channels_last;
  problem.y = to_dtype(storage_dtype(a.input.scalar_type(), dtype_of_y));
  result.input = a.input.expect_contiguous(result.format);
  if (present(a.weight)) result.weight = a.weight->expect_contiguous();
  if (present(a.bias)) result.bias = a.bias->expect_contiguous();
  return result;
}

}  // namespace steadynorm::binding
