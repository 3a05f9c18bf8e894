// SPDX-License-Identifier: Apache-2.0
// GroupNorm on a CUDA device. No CUDA header is needed to include this one. Allocates nothing and never
// synchronises: workspace and stream are the caller's, the current device is the one that holds the data.
// Safe to capture in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "steadynorm/problem.h"

namespace steadynorm::cuda {

using Stream = void*;  // a cudaStream_t

struct ForwardArguments {
  const void* x = nullptr;       // [N, C, S] or [N, S, C] by layout
  const void* weight = nullptr;  // [C] or [N, C]; null when problem.weight is missing
  const void* bias = nullptr;
  void* y = nullptr;               // x's layout, dtype problem.y
  float* statistics = nullptr;     // [3, N, G]: mean hi, mean lo, rstd
  void* workspace = nullptr;       // forward_workspace(problem) bytes, 256-byte aligned, any contents
  const void* residual = nullptr;  // x's layout and dtype; null: none. With one the statistics and y are of
  void* sum = nullptr;             // x + residual, rounded once to x's dtype, which is written here
  // Whether a launch may be cooperative: one that needs all of its places on the device at once, and waits
  // for whatever holds them. Faster for some tensors, where nothing else stays on the device for long.
  bool cooperative = false;
};

struct BackwardArguments {
  const void* x = nullptr;
  const void* dy = nullptr;  // x's layout, dtype problem.y
  const void* weight = nullptr;
  const void* bias = nullptr;
  const float* statistics = nullptr;  // as written by forward
  void* dx = nullptr;                 // null: not wanted; likewise dweight and dbias
  void* dweight = nullptr;
  void* dbias = nullptr;
  void* workspace = nullptr;  // backward_workspace(problem) bytes, 256-byte aligned, any contents
  bool cooperative = false;   // as in forward
};

std::size_t forward_workspace(const Problem&);
std::size_t backward_workspace(const Problem&);

// The bytes that these very arguments need on the current device, at most the above. 0, so that `workspace`
// may be null, where groups stay on chip. Of the arguments all but `workspace` and `statistics` are set.
std::size_t forward_workspace(const Problem&, const ForwardArguments&);
std::size_t backward_workspace(const Problem&, const BackwardArguments&);

// InvalidArgument by validate(); Unsupported when the build has no code for the device; DeviceError when a
// launch fails.
void forward(const Problem&, const ForwardArguments&, Stream);
void backward(const Problem&, const BackwardArguments&, Stream);

// Moments of each group as double [N, G, 3]: count, mean, M2 (the sum of squared deviations).
void moments(const Problem&, const void* x, double* moments, void* workspace, Stream);

// y from given moments [N, G, 3]; forward is moments followed by apply, bit for bit. statistics may be null,
// and a residual is not looked at.
void apply(const Problem&, const ForwardArguments&, const double* moments, Stream);

}  // namespace steadynorm::cuda
