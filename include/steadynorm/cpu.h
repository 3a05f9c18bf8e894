// SPDX-License-Identifier: Apache-2.0
// GroupNorm on the CPU. Allocates nothing and starts no thread: workspace and threads are the caller's.
//
// Every call validates its Problem (InvalidArgument). Bits: y and dx of a sample depend on that sample's
// values and on (C, G, S, layout, eps, activation) alone, not on N, threads, storage dtypes or which outputs
// are asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "steadynorm/problem.h"

namespace steadynorm::cpu {

// Calls body(begin, end) over disjoint ranges that cover [0, count), on any threads, and returns when all are
// done.
using ParallelBody = std::function<void(std::int64_t begin, std::int64_t end)>;
using ParallelFor = std::function<void(std::int64_t count, const ParallelBody& body)>;

// One thread: the caller's.
void serial(std::int64_t count, const ParallelBody& body);

struct ForwardArguments {
  const void* x = nullptr;       // [N, C, S] or [N, S, C] by layout
  const void* weight = nullptr;  // [C] or [N, C]; null when problem.weight is missing
  const void* bias = nullptr;
  void* y = nullptr;               // x's layout, dtype problem.y
  float* statistics = nullptr;     // [3, N, G]: mean hi, mean lo, rstd
  void* workspace = nullptr;       // forward_workspace(problem) bytes, 64-byte aligned
  const void* residual = nullptr;  // x's layout and dtype; null: none. With one the statistics and y are of
  void* sum = nullptr;             // x + residual, rounded once to x's dtype, which is written here
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
  void* workspace = nullptr;  // backward_workspace(problem) bytes, 64-byte aligned
};

std::size_t forward_workspace(const Problem&);
std::size_t backward_workspace(const Problem&);

void forward(const Problem&, const ForwardArguments&, const ParallelFor& = serial);
void backward(const Problem&, const BackwardArguments&, const ParallelFor& = serial);

// Moments of each group as double [N, G, 3]: count, mean, M2 (the sum of squared deviations).
void moments(const Problem&, const void* x, double* moments, void* workspace, const ParallelFor& = serial);

// y from given moments [N, G, 3]; forward is moments followed by apply, bit for bit. statistics may be null,
// and a residual is not looked at.
void apply(const Problem&, const ForwardArguments&, const double* moments, const ParallelFor& = serial);

}  // namespace steadynorm::cpu
