// SPDX-License-Identifier: Apache-2.0
// RunningTree for all columns of a panel at once.
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "cpu/kernels.h"
#include "cpu/running_tree.h"

namespace steadynorm::cpu {
namespace {

// Two sums of every column: ChannelSums, or PivotSums around one pivot.
struct ColumnNode {
  alignas(64) double first[kPanel];
  alignas(64) double second[kPanel];
};

inline void merge_columns(ColumnNode& a, const ColumnNode& b, int width) {
  double* __restrict first = a.first;
  double* __restrict second = a.second;
  const double* __restrict first_b = b.first;
  const double* __restrict second_b = b.second;
  for (int j = 0; j < width; ++j) {
    first[j] += first_b[j];
    second[j] += second_b[j];
  }
}

// 160 KiB of stack, of which a unit touches as many levels as it has.
class ColumnTree {
 public:
  // Consumes `node`.
  void push(ColumnNode& node, int width) {
    ColumnNode* carry = &node;
    int level = 0;
    for (; items_ >> level & 1; ++level) {
      merge_columns(waiting_[level], *carry, width);
      carry = &waiting_[level];
    }
    copy(*carry, waiting_[level], width);
    ++items_;
  }

  const ColumnNode& root(int width) {
    ColumnNode* node = nullptr;
    for (int level = 0; items_ >> level; ++level) {
      if (!(items_ >> level & 1)) continue;
      if (node != nullptr) merge_columns(waiting_[level], *node, width);
      node = &waiting_[level];
    }
    return *node;
  }

 private:
  static void copy(const ColumnNode& from, ColumnNode& to, int width) {
    for (int j = 0; j < width; ++j) to.first[j] = from.first[j];
    for (int j = 0; j < width; ++j) to.second[j] = from.second[j];
  }

  std::int64_t items_ = 0;
  ColumnNode waiting_[kTreeLevels];
};

}  // namespace
}  // namespace steadynorm::cpu
