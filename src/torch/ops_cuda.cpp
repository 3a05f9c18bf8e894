// SPDX-License-Identifier: Apache-2.0
// The operators' CUDA kernels. Part of the library where the CUDA backend is built.
#include <ATen/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <atomic>

#include "steadynorm/cuda.h"
#include "torch/residual.h"

namespace steadynorm::binding {

namespace {

// A choice of the process, as PyTorch's own about algorithms are. A call takes it once.
std::atomic<bool> cooperative{false};

template <class Arguments>
struct Chosen : Arguments {
  Chosen() { this->cooperative = binding::cooperative.load(std::memory_order_relaxed); }
};

struct Cuda {
  using Guard = c10::cuda::CUDAGuard;
  using ForwardArguments = Chosen<cuda::ForwardArguments>;
  using BackwardArguments = Chosen<cuda::BackwardArguments>;

  // Straight from the allocator: half the host time of at::empty, three of which were a third of a forward
  // call (H200 host, 2 x 1280 x 8 x 8).
  static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format) {
    return Tensor(at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                            dtype, format));
  }

  static c10::Allocator* allocator() { return c10::cuda::CUDACachingAllocator::get(); }

  static cuda::Stream stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

  static std::size_t forward_workspace(const Problem& problem) { return cuda::forward_workspace(problem); }
  static std::size_t forward_workspace(const Problem& problem, const ForwardArguments& arguments) {
    return cuda::forward_workspace(problem, arguments);
  }
  static std::size_t backward_workspace(const Problem& problem, const BackwardArguments& arguments) {
    return cuda::backward_workspace(problem, arguments);
  }
  static void forward(const Problem& problem, const ForwardArguments& arguments) {
    cuda::forward(problem, arguments, stream());
  }
  static void backward(const Problem& problem, const BackwardArguments& arguments) {
    cuda::backward(problem, arguments, stream());
  }
  static void moments(const Problem& problem, const void* x, double* moments, void* workspace) {
    cuda::moments(problem, x, moments, workspace, stream());
  }
  static void apply(const Problem& problem, const ForwardArguments& arguments, const double* moments) {
    cuda::apply(problem, arguments, moments, stream());
  }

  static std::tuple<Tensor, Tensor> forward_double(const Arguments& a, const Operands&) {
    Tensor statistics;
    const Tensor y = compose_apply(a, compose_moments(a), &statistics);
    return {y, statistics};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(steadynorm, library) {
  library.def("set_cooperative(bool on) -> ()",
              [](bool on) { cooperative.store(on, std::memory_order_relaxed); });
}

TORCH_LIBRARY_IMPL(steadynorm, CUDA, library) {
  register_kernels<Cuda>(library);
  library.impl("group_norm_residual_forward", residual_forward<Cuda>);
}

}  // namespace steadynorm::binding
