// SPDX-License-Identifier: Apache-2.0
// GroupNorm as a composition of ATen's operators: differentiable to any order and open to every functorch transform.
// It serves those, and float64 where no backend does. Slower than the kernels, and within rounding of them.
#pragma once

#include <array>
#include <tuple>

#include "torch/tensor_args.h"

namespace steadynorm::binding {

using OutputMask = std::array<bool, 3>;  // of dx, dweight, dbias
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// y, with the strides that ATen's pointwise operators give.
Tensor compose(const Arguments&);

// The gradients of compose(), themselves differentiable. An undefined `statistics` means: from input and eps.
Gradients compose_backward(const Arguments&, const Tensor& grad_output, const Tensor& statistics,
                           const OutputMask& wanted);

// group_norm_stats and group_norm_apply. `statistics`, where asked for, receives [3, N, G].
Tensor compose_moments(const Arguments&);
Tensor compose_apply(const Arguments&, const Tensor& moments, Tensor* statistics = nullptr);

}  // namespace steadynorm::binding
