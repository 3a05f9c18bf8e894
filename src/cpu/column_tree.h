// SPDX-License-Identifier: Apache-2.0
// RunningTree over the leaves of a channels_last unit, for all columns of a panel at once.
#pragma once

#include <cstdint>
#include <utility>

#include "core/tree.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

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

class ColumnTree {
 public:
  ColumnTree() {
    for (int level = 0; level < kLevels; ++level) waiting_[level] = &nodes_[level];
  }

  // Where the next leaf, or the tree over the next 2^level leaves, is added up before push().
  ColumnNode& leaf() { return *leaf_; }

  void push(int width, int level = 0) {
    const int leaves = 1 << level;
    for (; items_ >> level & 1; ++level) {
      merge_columns(*waiting_[level], *leaf_, width);
      std::swap(waiting_[level], leaf_);
    }
    std::swap(waiting_[level], leaf_);
    items_ += leaves;
  }

  const ColumnNode& root(int width) {
    ColumnNode* node = nullptr;
    for (int level = 0; items_ >> level; ++level) {
      if (!(items_ >> level & 1)) continue;
      if (node != nullptr) merge_columns(*waiting_[level], *node, width);
      node = waiting_[level];
    }
    return *node;
  }

 private:
  static constexpr int kLevels = 5;
  static_assert(1 << (kLevels - 1) == kUnitLeaves);

  int items_ = 0;
  ColumnNode* waiting_[kLevels];
  ColumnNode* leaf_ = &nodes_[kLevels];
  ColumnNode nodes_[kLevels + 1];
};

// The tree over the tile's rows. batch(s, rows, first, leaf) adds the micro-batch of `rows` positions from s
// on to `leaf`, or starts it.
template <class Batch>
STEADYNORM_HD const ColumnNode& add_column_leaves(ColumnTree& tree, const Tile& tile,
                                                  std::int64_t leaf_positions, Batch&& batch) {
  for (std::int64_t begin = 0; begin < tile.rows; begin += leaf_positions) {
    const std::int64_t end = begin + leaf_positions < tile.rows ? begin + leaf_positions : tile.rows;
    for (std::int64_t s = begin; s < end; s += kMicroBatchRows)
      batch(s, smaller(end - s, kMicroBatchRows), s == begin, tree.leaf());
    tree.push(static_cast<int>(tile.width));
  }
  return tree.root(static_cast<int>(tile.width));
}

}  // namespace
}  // namespace steadynorm::cpu
