// SPDX-License-Identifier: Apache-2.0
// The operators of a fused residual: their schemas, and the kernels that compute nothing by themselves.
#include "torch/residual.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace steadynorm::binding {

namespace {

std::tuple<Tensor, Tensor, Tensor> residual_meta(const Tensor& input, const Tensor& residual,
                                                 const OptionalTensor& weight, const OptionalTensor& bias,
                                                 SymInt channels_per_group, double eps,
                                                 std::string_view activation, OptionalDType out_dtype) {
  const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
  check(a);
  check_residual(input, residual);
  return {dense_like(input, output_dtype(a)), dense_like(input, input.scalar_type()), statistics_like(a)};
}

// Under vmap, as those of the other inner operators.
std::tuple<Tensor, Tensor, Tensor> residual_batched(const Tensor& input, const Tensor& residual,
                                                    const OptionalTensor& weight, const OptionalTensor& bias,
                                                    SymInt channels_per_group, double eps,
                                                    std::string_view activation, OptionalDType out_dtype) {
  check({input, weight, bias, channels_per_group, eps, activation, out_dtype});
  check_residual(input, residual);
  const Tensor sum = input + residual;
  const Arguments a{sum, weight, bias, channels_per_group, eps, activation, out_dtype};
  Tensor statistics;
  const Tensor y = compose_apply(a, compose_moments(a), &statistics);
  return {y, sum, statistics};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(steadynorm, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  library.def(
      "group_norm_residual(Tensor input, Tensor residual, int num_groups, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, str activation=\"none\", ScalarType? out_dtype=None) "
      "-> (Tensor output, Tensor sum)",
      tags);
  library.def(
      "group_norm_residual_forward(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, "
      "SymInt channels_per_group, float eps=1e-05, str activation=\"none\", ScalarType? out_dtype=None) "
      "-> (Tensor output, Tensor sum, Tensor statistics)",
      tags);
}

TORCH_LIBRARY_IMPL(steadynorm, Meta, library) { library.impl("group_norm_residual_forward", residual_meta); }

TORCH_LIBRARY_IMPL(steadynorm, FuncTorchBatched, library) {
  library.impl("group_norm_residual_forward", residual_batched);
}

}  // namespace steadynorm::binding
