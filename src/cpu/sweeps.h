// SPDX-License-Identifier: Apache-2.0
// What an entry is made of: sweeps of independent items over the whole problem.
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
#include "cpu/kernels.h"
#include "steadynorm/cpu.h"

namespace steadynorm::cpu {

// Two planes of fp32: sum(dz) and sum(dz * normalized).
struct ChannelPlanes {
  float* dz = nullptr;
  float* dz_normalized = nullptr;
};

// Groups [first, end) of all samples' groups in a row.
struct GroupRange {
  std::int64_t first, end;
};

// What statistics are of: x, or with a residual x + residual, which is written to `sum` piece by piece, each
// just before its statistics read it.
struct Input {
  const void* x;
  const void* residual = nullptr;
  void* sum = nullptr;

  const void* data() const { return residual == nullptr ? x : sum; }
};

// Where coefficients come from.
class ChannelSource {
 public:
  ChannelSource(const Problem&, const void* weight, const void* bias);

  const float* statistics = nullptr;  // [3, N, G], or
  const double* moments = nullptr;    // [N, G, 3]
  const GroupMeans* means = nullptr;  // [N, G]; null in forward

  // Entries [0, count) for channels first, first + 1, ... of all samples' channels in a row: first = n * C +
  // c.
  void forward_coefficients(std::int64_t first, std::int64_t count, Coefficients&) const;
  void backward_coefficients(std::int64_t first, std::int64_t count, Coefficients&) const;
  // The weights of the same channels, in fp32.
  void weights(std::int64_t first, std::int64_t count, float* to) const;
  void write_statistics(std::int64_t group, float* to) const;

 private:
  template <bool kBackward>
  void fill(std::int64_t first, std::int64_t count, Coefficients&) const;
  void parameter(const Parameter&, const void* data, float missing, std::int64_t n, std::int64_t c,
                 std::int64_t count, float* to) const;
  Statistics group_statistics(std::int64_t group) const;

  const Problem& problem_;
  const void* weight_;
  const void* bias_;
};

// ---- statistics ----

// Each unit's moments into roots [N, G, tree.roots()].
void unit_moments(const Problem&, const Tree&, const Input&, Moments* roots, const ParallelFor&);
// A group's moments from its roots, which it consumes.
Moments merge_roots(const Tree&, Moments* roots);
// The groups' entries of statistics [3, N, G], from their roots.
void finish_statistics(const Problem&, const Tree&, Moments* roots, const GroupRange&, float* statistics);

// ---- elementwise ----

void apply_sweep(const Problem&, const ChannelSource&, const void* x, void* y, const ParallelFor&);
void gradient_sweep(const Problem&, const ChannelSource&, const void* x, const void* dy, void* dx,
                    const ParallelFor&);

// ---- sums ----

// Each unit's sums into [N, spatial unit, C].
void unit_sums(const Problem&, const Tree&, const ChannelSource&, const void* x, const void* dy,
               ChannelPlanes units, const ParallelFor&);
// Units to rows [N, C], for channels [begin, end) of N * C.
void merge_unit_sums(const Problem&, const Tree&, ChannelPlanes units, ChannelPlanes rows, std::int64_t begin,
                     std::int64_t end);
// Rows to dweight and dbias; either may be null.
void parameter_gradients(const Problem&, ChannelPlanes rows, void* dweight, void* dbias, const ParallelFor&);
// Rows to the two means that dx subtracts.
void find_group_means(const Problem&, const ChannelSource&, ChannelPlanes rows, const GroupRange&,
                      GroupMeans* means);

}  // namespace steadynorm::cpu
