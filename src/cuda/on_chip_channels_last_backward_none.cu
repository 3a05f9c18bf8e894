// SPDX-License-Identifier: Apache-2.0
#include "cuda/on_chip_channels_last_backward.cuh"

namespace steadynorm::cuda {

template cudaError_t backward_slabs_of<Activation::none>(const BackwardCall&, const Plan&, const Queue&);

}  // namespace steadynorm::cuda
