// SPDX-License-Identifier: Apache-2.0
// The operators over one backend: allocate, then call. A Backend has
//   Guard                            made current for the input's device before anything is allocated
//   empty(sizes, dtype, format)
//   allocator()                      of workspaces
//   forward_workspace, backward_workspace
//                                    bytes for a problem with these arguments, or with any
//   ForwardArguments, BackwardArguments, forward, backward, moments, apply
//   forward_double(arguments)        y in float64 and statistics [3, N, G]
#pragma once

#include <c10/core/Allocator.h>

#include <tuple>
#include <utility>

#include "torch/composition.h"
#include "torch/tensor_args.h"

namespace steadynorm::binding {

// What the Meta kernels return: of input's sizes, in the format that y has, and [3, N, G]. Sizes may be
// symbols.
Tensor dense_like(const Tensor& input, at::ScalarType dtype);
Tensor statistics_like(const Arguments&);

// Of `bytes`, which may be 0; no tensor, which would cost as much again.
template <class Backend>
at::DataPtr workspace(std::size_t bytes) {
  return bytes == 0 ? at::DataPtr() : Backend::allocator()->allocate(bytes);
}

// A workspace of at most so many bytes lies behind the statistics, in their allocation: a small tensor's call
// allocates once less, and what is saved for backward grows by no more than these.
constexpr std::size_t kWorkspaceBehind = 4096;

struct StatisticsAndWorkspace {
  Tensor statistics;  // float32 [3, N, G]
  at::DataPtr own;    // the workspace, unless it is behind
  void* workspace;
};

template <class Backend>
StatisticsAndWorkspace statistics_and_workspace(const Problem& problem, std::size_t bytes) {
  const std::int64_t sizes[] = {3, problem.samples, problem.groups};
  const auto make = [](at::IntArrayRef of) {
    return Backend::empty(of, at::kFloat, at::MemoryFormat::Contiguous);
  };
  if (bytes == 0 || bytes > kWorkspaceBehind) {
    Tensor statistics = make(sizes);
    at::DataPtr own = workspace<Backend>(bytes);
    void* space = own.get();
    return {std::move(statistics), std::move(own), space};
  }
  constexpr std::int64_t kAlignment = 256 / sizeof(float);
  const std::int64_t begin = (sizes[0] * sizes[1] * sizes[2] + kAlignment - 1) / kAlignment * kAlignment;
  const auto words = static_cast<std::int64_t>((bytes + sizeof(float) - 1) / sizeof(float));
  Tensor statistics = make({begin + words});
  void* space = statistics.mutable_data_ptr<float>() + begin;
  statistics.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return {std::move(statistics), {}, space};
}

template <class Backend>
Tensor output_like(const Operands& o, const Tensor& input, at::ScalarType dtype) {
  return Backend::empty(input.sizes(), dtype, o.format);
}

template <class Backend>
typename Backend::ForwardArguments forward_arguments(const Operands& o, const Tensor& y) {
  typename Backend::ForwardArguments arguments;
  arguments.x = data(*o.input);
  arguments.weight = data(*o.weight);
  arguments.bias = data(*o.bias);
  arguments.y = mutable_data(y);
  return arguments;
}

template <class Backend>
std::tuple<Tensor, Tensor> forward(const Tensor& input, const OptionalTensor& weight,
                                   const OptionalTensor& bias, std::int64_t channels_per_group, double eps,
                                   std::string_view activation, OptionalDType out_dtype) {
  return translated([&]() -> std::tuple<Tensor, Tensor> {
    const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
    const at::ScalarType wanted = output_dtype(a), stored = storage_dtype(input.scalar_type(), wanted);
    const Operands o = operands(a, wanted);
    const typename Backend::Guard guard(input.device());
    if (stored == at::kDouble) {
      const auto [y, statistics] = Backend::forward_double(a, o);
      return {y.to(wanted).contiguous(o.format), statistics};
    }
    Tensor y = output_like<Backend>(o, input, stored);
    auto arguments = forward_arguments<Backend>(o, y);
    auto made =
        statistics_and_workspace<Backend>(o.problem, Backend::forward_workspace(o.problem, arguments));
    arguments.statistics = static_cast<float*>(mutable_data(made.statistics));
    arguments.workspace = made.workspace;
    Backend::forward(o.problem, arguments);
    return {stored == wanted ? std::move(y) : y.to(wanted), std::move(made.statistics)};
  });
}

template <class Backend>
Gradients backward(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                   const OptionalTensor& weight, const OptionalTensor& bias, std::int64_t channels_per_group,
                   std::string_view activation, OutputMask wanted) {
  return translated([&]() -> Gradients {
    const Arguments a{.input = input,
                      .weight = weight,
                      .bias = bias,
                      .channels_per_group = channels_per_group,
                      .activation = activation};
    const Operands o = operands(a, grad_output.scalar_type());
    check_gradient(input, grad_output);
    check_statistics(a, statistics);
    const typename Backend::Guard guard(input.device());
    const at::ScalarType stored = storage_dtype(input.scalar_type(), grad_output.scalar_type());
    if (stored == at::kDouble) {
      auto [dx, dweight, dbias] = compose_backward(a, grad_output, statistics, wanted);
      return {dx.defined() ? dx.contiguous(o.format) : dx, dweight, dbias};
    }
    // Not by to() where there is nothing to do: it would dispatch.
    const Tensor dy =
        (grad_output.scalar_type() == stored ? grad_output : grad_output.to(stored)).contiguous(o.format);
    const auto three = statistics.expect_contiguous();
    const auto gradient = [](bool want, const Tensor& of, at::MemoryFormat format) {
      return want && of.defined() ? Backend::empty(of.sizes(), of.scalar_type(), format) : Tensor();
    };
    Tensor dx = gradient(wanted[0], *o.input, o.format);
    Tensor dweight = gradient(wanted[1], *o.weight, at::MemoryFormat::Contiguous);
    Tensor dbias = gradient(wanted[2], *o.bias, at::MemoryFormat::Contiguous);
    typename Backend::BackwardArguments arguments;
    arguments.x = data(*o.input);
    arguments.dy = data(dy);
    arguments.weight = data(*o.weight);
    arguments.bias = data(*o.bias);
    arguments.statistics = static_cast<const float*>(data(*three));
    arguments.dx = mutable_data(dx);
    arguments.dweight = mutable_data(dweight);
    arguments.dbias = mutable_data(dbias);
    const at::DataPtr space = workspace<Backend>(Backend::backward_workspace(o.problem, arguments));
    arguments.workspace = space.get();
    Backend::backward(o.problem, arguments);
    return {std::move(dx), std::move(dweight), std::move(dbias)};
  });
}

template <class Backend>
Tensor stats(const Tensor& input, std::int64_t channels_per_group) {
  return translated([&] {
    const OptionalTensor none;
    const Arguments a{.input = input, .weight = none, .bias = none, .channels_per_group = channels_per_group};
    const Operands o = operands(a, input.scalar_type());
    const typename Backend::Guard guard(input.device());
    if (o.problem.x == DType::float64) return compose_moments(a);
    const Tensor moments =
        Backend::empty({o.problem.samples, o.problem.groups, 3}, at::kDouble, at::MemoryFormat::Contiguous);
    const at::DataPtr space = workspace<Backend>(Backend::forward_workspace(o.problem));
    Backend::moments(o.problem, data(*o.input), static_cast<double*>(mutable_data(moments)), space.get());
    return moments;
  });
}

template <class Backend>
Tensor apply(const Tensor& input, const Tensor& moments, const OptionalTensor& weight,
             const OptionalTensor& bias, std::int64_t channels_per_group, double eps,
             std::string_view activation, OptionalDType out_dtype) {
  return translated([&]() -> Tensor {
    const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
    const at::ScalarType wanted = output_dtype(a), stored = storage_dtype(input.scalar_type(), wanted);
    const Operands o = operands(a, wanted);
    check_moments(a, moments);
    const typename Backend::Guard guard(input.device());
    if (stored == at::kDouble) return compose_apply(a, moments).contiguous(o.format);
    const Tensor three = moments.contiguous();
    const Tensor y = output_like<Backend>(o, input, stored);
    const at::DataPtr space = workspace<Backend>(Backend::forward_workspace(o.problem));
    auto arguments = forward_arguments<Backend>(o, y);
    arguments.workspace = space.get();
    Backend::apply(o.problem, arguments, static_cast<const double*>(data(three)));
    return stored == wanted ? y : y.to(wanted);
  });
}

// Registers `Backend` for the inner operators.
template <class Backend, class Library>
void register_kernels(Library& library) {
  library.impl("group_norm_forward", forward<Backend>);
  library.impl("group_norm_backward", backward<Backend>);
  library.impl("group_norm_stats", stats<Backend>);
  library.impl("group_norm_apply", apply<Backend>);
}

}  // namespace steadynorm::binding
