// SPDX-License-Identifier: Apache-2.0
#include "cuda/backward_channels_last.cuh"

namespace steadynorm::cuda {

template cudaError_t sums_channels_last_of<Activation::silu>(const BackwardCall&, const Plan&, const Queue&);
template cudaError_t input_gradient_channels_last_of<Activation::silu>(const BackwardCall&, const Plan&,
                                                                       const Queue&);

}  // namespace steadynorm::cuda
