// SPDX-License-Identifier: Apache-2.0
// The operators over one backend: allocate, then call. A Backend has
//   Guard                      made current for the input's device before anything is allocated
//   empty(sizes, dtype, format)
//   ForwardArguments, BackwardArguments, forward_workspace, backward_workspace, forward, backward, moments,
//   apply forward_double(arguments)  y in float64 and statistics [3, N, G]
#pragma once

#include <tuple>

#include "torch/composition.h"
#include "torch/tensor_args.h"

namespace steadynorm::binding {

// What the Meta kernels return: of input's sizes, in the format that y has, and [3, N, G]. Sizes may be
// symbols.
Tensor dense_like(const Tensor& input, at::ScalarType dtype);
Tensor statistics_like(const Arguments&);

template <class Backend>
Tensor workspace(std::size_t bytes) {
  return Backend::empty({static_cast<std::int64_t>(bytes)}, at::kByte, at::MemoryFormat::Contiguous);
}

template <class Backend>
Tensor output_like(const Operands& o, const Tensor& input, at::ScalarType dtype) {
  return Backend::empty(input.sizes(), dtype, o.format);
}

template <class Backend>
typename Backend::ForwardArguments forward_arguments(const Operands& o, const Tensor& y) {
  typename Backend::ForwardArguments arguments;
  arguments.x = data(o.input);
  arguments.weight = data(o.weight);
  arguments.bias = data(o.bias);
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
    const Tensor y = output_like<Backend>(o, input, stored);
    const Tensor statistics =
        Backend::empty({3, o.problem.samples, o.problem.groups}, at::kFloat, at::MemoryFormat::Contiguous);
    const Tensor space = workspace<Backend>(Backend::forward_workspace(o.problem));
    auto arguments = forward_arguments<Backend>(o, y);
    arguments.statistics = static_cast<float*>(mutable_data(statistics));
    arguments.workspace = mutable_data(space);
    Backend::forward(o.problem, arguments);
    return {stored == wanted ? y : y.to(wanted), statistics};
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
    const Tensor dy = grad_output.to(stored).contiguous(o.format);
    const Tensor three = statistics.contiguous();
    const auto gradient = [](bool want, const Tensor& of, at::MemoryFormat format) {
      return want && of.defined() ? Backend::empty(of.sizes(), of.scalar_type(), format) : Tensor();
    };
    const Tensor dx = gradient(wanted[0], o.input, o.format);
    const Tensor dweight = gradient(wanted[1], o.weight, at::MemoryFormat::Contiguous);
    const Tensor dbias = gradient(wanted[2], o.bias, at::MemoryFormat::Contiguous);
    const Tensor space = workspace<Backend>(Backend::backward_workspace(o.problem));
    typename Backend::BackwardArguments arguments;
    arguments.x = data(o.input);
    arguments.dy = data(dy);
    arguments.weight = data(o.weight);
    arguments.bias = data(o.bias);
    arguments.statistics = static_cast<const float*>(data(three));
    arguments.dx = mutable_data(dx);
    arguments.dweight = mutable_data(dweight);
    arguments.dbias = mutable_data(dbias);
    arguments.workspace = mutable_data(space);
    Backend::backward(o.problem, arguments);
    return {dx, dweight, dbias};
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
    const Tensor space = workspace<Backend>(Backend::forward_workspace(o.problem));
    Backend::moments(o.problem, data(o.input), static_cast<double*>(mutable_data(moments)),
                     mutable_data(space));
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
    const Tensor space = workspace<Backend>(Backend::forward_workspace(o.problem));
    auto arguments = forward_arguments<Backend>(o, y);
    arguments.workspace = mutable_data(space);
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
