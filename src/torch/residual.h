// SPDX-License-Identifier: Apache-2.0
// group_norm_residual_forward over one backend: y of input + residual, the sum, and its statistics.
#pragma once

#include <ATen/ATen.h>

#include "torch/kernels.h"

namespace steadynorm::binding {

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> residual_forward(const Tensor& input, const Tensor& residual,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    std::int64_t channels_per_group, double eps,
                                                    std::string_view activation, OptionalDType out_dtype) {
  return translated([&]() -> std::tuple<Tensor, Tensor, Tensor> {
    const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
    const at::ScalarType wanted = output_dtype(a), stored = storage_dtype(input.scalar_type(), wanted);
    Operands o = operands(a, wanted);
    check_residual(input, residual);
    const typename Backend::Guard guard(input.device());
    const Tensor addend = residual.contiguous(o.format);
    if (stored == at::kDouble) {
      o.input = c10::MaybeOwned<Tensor>::owned(*o.input + addend);
      const Arguments of_sum{*o.input, weight, bias, channels_per_group, eps, activation, out_dtype};
      const auto [y, statistics] = Backend::forward_double(of_sum, o);
      return {y.to(wanted).contiguous(o.format), *o.input, statistics};
    }
    const Tensor y = output_like<Backend>(o, input, stored);
    const Tensor sum = output_like<Backend>(o, input, input.scalar_type());
    auto arguments = forward_arguments<Backend>(o, y);
    arguments.residual = data(addend);
    arguments.sum = mutable_data(sum);
    const auto made =
        statistics_and_workspace<Backend>(o.problem, Backend::forward_workspace(o.problem, arguments));
    arguments.statistics = static_cast<float*>(mutable_data(made.statistics));
    arguments.workspace = made.workspace;
    Backend::forward(o.problem, arguments);
    return {stored == wanted ? y : y.to(wanted), sum, made.statistics};
  });
}

}  // namespace steadynorm::binding
