// SPDX-License-Identifier: Apache-2.0
// What the kernels take, and the functions that launch them. No CUDA syntax: cuda.cpp is host code.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/formulas.h"
#include "cuda/plan.h"
#include "cuda/work.h"

namespace steadynorm::cuda {

struct Node;

// A weight or a bias, read as its run-time dtype: it becomes per-channel coefficients before any inner loop.
struct ParameterView {
  const void* data = nullptr;  // null when missing
  DType dtype = DType::float32;
  std::int64_t sample_stride = 0;  // 0 for [C]
};

struct Call {
  Dimensions d;
  ParameterView weight, bias;
  DType x_type, y_type;
  Activation activation;
  double eps;
  const void* x = nullptr;
  const float* statistics = nullptr;  // [3, N, G]
};

struct ForwardCall : Call {
  void* y = nullptr;
  float* statistics_out = nullptr;  // [3, N, G], may be null
  double* moments_out = nullptr;    // [N, G, 3], may be null
  Node* roots = nullptr;            // [N, G, roots]
  Moments* folded = nullptr;
  bool merge_roots = false;  // by the apply kernel, without launch_finalize
  // With a residual: the statistics kernel writes x, which is the sum of the two, to `sum`.
  const void* addends[2] = {};
  void* sum = nullptr;  // null: no residual
};

// Parameter gradients that are asked for.
struct Wanted {
  bool weight_rows, bias_rows;  // [N, C]: the rows are the gradient
  bool weight_sums, bias_sums;  // [C]
};

struct BackwardCall : Call {
  const void* dy = nullptr;
  void* dx = nullptr;
  void* dweight = nullptr;
  void* dbias = nullptr;
  float2* partials = nullptr;  // sums of the units; contiguous [N, C, units], channels_last [N, units, C]
  float2* rows = nullptr;      // [N, C]: sum dz, sum dz * normalized
  float2* means = nullptr;     // [N, G]

  Wanted wanted() const {
    const bool weight_rows = weight.sample_stride != 0, bias_rows = bias.sample_stride != 0;
    return {dweight != nullptr && weight_rows, dbias != nullptr && bias_rows,
            dweight != nullptr && !weight_rows, dbias != nullptr && !bias_rows};
  }
};

// One kernel launch on a stream.
struct Queue {
  cudaStream_t stream;
  bool overlap;  // start before the kernel in front has ended
};

cudaError_t launch_statistics_contiguous(const ForwardCall&, const Plan&, const Queue&);
cudaError_t launch_statistics_channels_last(const ForwardCall&, const Plan&, const Queue&);
cudaError_t launch_finalize(const ForwardCall&, const Plan&, const Queue&);
cudaError_t launch_statistics_of_moments(const Call&, const double* moments, float* statistics, const Queue&);
bool apply_merges_contiguous(const ForwardCall&);
cudaError_t launch_apply_contiguous(const ForwardCall&, const Plan&, const Queue&);
cudaError_t launch_apply_channels_last(const ForwardCall&, const Plan&, const Queue&);

// One launch for groups that stay on chip. Of [C] parameters backward writes the gradients of one sample; of
// more it makes the rows, which launch_parameters sums.
int largest_cluster_on_chip();                                                      // of the current device
cudaError_t launch_forward_on_chip(const ForwardCall&, const Plan&, const Queue&);  // contiguous
cudaError_t launch_forward_slabs(const ForwardCall&, const Plan&, const Queue&);    // channels_last
template <Activation>
cudaError_t backward_on_chip_of(const BackwardCall&, const Plan&, const Queue&);
template <Activation>
cudaError_t backward_slabs_of(const BackwardCall&, const Plan&, const Queue&);
cudaError_t launch_parameters(const BackwardCall&, const Queue&);

// Rows, group means and parameter gradients, of the units' sums.
cudaError_t launch_channels(const BackwardCall&, const Plan&, Layout, const Queue&);

// The sweeps over x and dy of one activation, each instantiated in a source file of its own.
template <Activation>
cudaError_t sums_contiguous_of(const BackwardCall&, const Plan&, const Queue&);
template <Activation>
cudaError_t sums_channels_last_of(const BackwardCall&, const Plan&, const Queue&);
template <Activation>
cudaError_t input_gradient_contiguous_of(const BackwardCall&, const Plan&, const Queue&);
template <Activation>
cudaError_t input_gradient_channels_last_of(const BackwardCall&, const Plan&, const Queue&);

// "8.0, 9.0": the compute capabilities that this library has code for.
std::string built_architectures();

}  // namespace steadynorm::cuda
