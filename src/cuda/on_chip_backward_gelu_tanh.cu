// SPDX-License-Identifier: Apache-2.0
#include "cuda/on_chip_backward.cuh"

namespace steadynorm::cuda {

template cudaError_t backward_on_chip_of<Activation::gelu_tanh>(const BackwardCall&, const Plan&,
                                                                const Queue&);

}  // namespace steadynorm::cuda
