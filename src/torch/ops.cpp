// SPDX-License-Identifier: Apache-2.0
// placeholder
#include <ATen/ATen.h>
#include <torch/library.h>

#include "steadynorm/types.h"
#if defined(STEADYNORM_WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace {
at::Tensor placeholder(const at::Tensor& x) {
#if defined(STEADYNORM_WITH_CUDA)
  if (x.is_cuda()) c10::cuda::getCurrentCUDAStream();
#endif
  TORCH_CHECK_VALUE(x.dim() > 0, steadynorm::to_string(steadynorm::Layout::contiguous));
  return x;
}
}  // namespace

TORCH_LIBRARY(steadynorm, library) { library.def("placeholder(Tensor(a) x) -> Tensor(a)", placeholder); }
