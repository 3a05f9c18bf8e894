// SPDX-License-Identifier: Apache-2.0
// placeholder
#include "steadynorm/cuda.h"

namespace steadynorm::cuda {

namespace {
[[noreturn]] void absent() { throw Unsupported("group_norm: this build has no CUDA kernels"); }
}  // namespace

std::size_t forward_workspace(const Problem&) { absent(); }
std::size_t backward_workspace(const Problem&) { absent(); }
void forward(const Problem&, const ForwardArguments&, Stream) { absent(); }
void backward(const Problem&, const BackwardArguments&, Stream) { absent(); }
void moments(const Problem&, const void*, double*, void*, Stream) { absent(); }
void apply(const Problem&, const ForwardArguments&, const double*, Stream) { absent(); }

}  // namespace steadynorm::cuda
