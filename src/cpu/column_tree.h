// SPDX-License-Identifier: Apache-2.0
// RunningTree for all columns of a panel at once.
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "cpu/kernels.h"
#include "cpu/running_tree.h"

namespace steadynorm::cpu {
namespace {

// A node of every column: Moments as (mean, m2) with one count for all, or ChannelSums as (dz,
// dz_normalized).
struct ColumnNode {
  double count;
  alignas(64) double first[kPanel];
  alignas(64) double second[kPanel];
};

inline void merge_column_moments(ColumnNode& a, const ColumnNode& b, int width) {
  double* __restrict mean = a.first;
  double* __restrict m2 = a.second;
  const double* __restrict mean_b = b.first;
  const double* __restrict m2_b = b.second;
  const double count = a.count, count_b = b.count;
  for (int j = 0; j < width; ++j) {
    const Moments both = merge(Moments{count, mean[j], m2[j]}, Moments{count_b, mean_b[j], m2_b[j]});
    mean[j] = both.mean;
    m2[j] = both.m2;
  }
  a.count = count + count_b;
}

inline void merge_column_sums(ColumnNode& a, const ColumnNode& b, int width) {
  double* __restrict dz = a.first;
  double* __restrict dz_normalized = a.second;
  const double* __restrict dz_b = b.first;
  const double* __restrict dz_normalized_b = b.second;
  for (int j = 0; j < width; ++j) {
    dz[j] += dz_b[j];
    dz_normalized[j] += dz_normalized_b[j];
  }
}

// 160 KiB of stack, of which a unit touches as many levels as it has.
template <void (*kMerge)(ColumnNode&, const ColumnNode&, int)>
class ColumnTree {
 public:
  // Consumes `node`.
  void push(ColumnNode& node, int width) {
    ColumnNode* carry = &node;
    int level = 0;
    for (; items_ >> level & 1; ++level) {
      kMerge(waiting_[level], *carry, width);
      carry = &waiting_[level];
    }
    copy(*carry, waiting_[level], width);
    ++items_;
  }

  const ColumnNode& root(int width) {
    ColumnNode* node = nullptr;
    for (int level = 0; items_ >> level; ++level) {
      if (!(items_ >> level & 1)) continue;
      if (node != nullptr) kMerge(waiting_[level], *node, width);
      node = &waiting_[level];
    }
    return *node;
  }

 private:
  static void copy(const ColumnNode& from, ColumnNode& to, int width) {
    to.count = from.count;
    for (int j = 0; j < width; ++j) to.first[j] = from.first[j];
    for (int j = 0; j < width; ++j) to.second[j] = from.second[j];
  }

  std::int64_t items_ = 0;
  ColumnNode waiting_[kTreeLevels];
};

}  // namespace
}  // namespace steadynorm::cpu
