// SPDX-License-Identifier: Apache-2.0
// Moments of channels_last units, by columns. docs/numerics.md, "The tree" and "Statistics".
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
#include "cpu/column_tree.h"
#include "cpu/kernels_moments.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

// Consecutive micro-batches of each column of a panel, and whether the q of one of them is not reliable.
constexpr int kPanelBatches = 4;
struct PanelBatches {
  alignas(64) float m[kPanelBatches][kPanel];
  alignas(64) float d[kPanelBatches][kPanel];
  alignas(64) float q[kPanelBatches][kPanel];
  bool suspect;
};

// Micro-batch b of columns j, j + 1, ... `count` of them: 8 rows, or fewer of them.
template <bool kWhole, class T>
STEADYNORM_HD void column_batch(const T* x, std::int64_t stride, int rows, int count, int b, int j,
                                PanelBatches& to) {
  Floats value[kMicroBatchRows];
  for (int v = 0; v < kMicroBatchRows; ++v)
    value[v] = kWhole ? load(x + v * stride) : (v < rows ? load(x + v * stride, count) : Floats{});
  Floats m = pairwise<kMicroBatchRows>([&](int v) { return value[v]; });
  m = kWhole ? m * (1.0f / kMicroBatchRows) : m / static_cast<float>(rows);
  for (int v = 0; v < kMicroBatchRows; ++v)
    value[v] = kWhole || v < rows ? value[v] - m : Floats{};  // missing: +0
  const Floats q = pairwise<kMicroBatchRows>([&](int v) { return value[v] * value[v]; });
  store(to.m[b] + j, m);
  store(to.d[b] + j, pairwise<kMicroBatchRows>([&](int v) { return value[v]; }));
  store(to.q[b] + j, q);
  if (any(unreliable(q) & first_of(count))) {  // q = d = 0 are right when all values equal m
    Mask equal = value[0] == 0.0f;
    for (int v = 1; v < kMicroBatchRows; ++v) equal &= value[v] == 0.0f;
    to.suspect |= any(unreliable(q) & ~equal & first_of(count));
  }
}

template <class T>
STEADYNORM_HD void column_batches(const T* x, std::int64_t stride, int rows, int width, int b,
                                  PanelBatches& to) {
  int j = 0;
  if (rows == kMicroBatchRows)
    for (; j + kWidth <= width; j += kWidth) column_batch<true>(x + j, stride, rows, kWidth, b, j, to);
  for (; j < width; j += kWidth)
    column_batch<false>(x + j, stride, rows, smaller(width - j, kWidth), b, j, to);
}

// node(j) of each column into `to`.
template <class Node>
STEADYNORM_HD void for_columns(int width, ColumnNode& to, Node&& node) {
  double* __restrict sum = to.first;
  double* __restrict squares = to.second;
  for (int j = 0; j < width; j += kWidth) {
#pragma GCC unroll 1
    for (int i = j; i < j + kWidth; ++i) {
      const PivotSums both = node(i);
      sum[i] = both.sum;
      squares[i] = both.squares;
    }
  }
}

// add(before, b, j): micro-batch b of column j. Micro-batches that are leaves of their own, as a tree.
template <class Add>
STEADYNORM_HD void column_leaves(int width, ColumnNode& to, Add&& add) {
  static_assert(kPanelBatches == 4);
  for_columns(
      width, to, [&](int j) __attribute__((always_inline)) {
        return merge(merge(add(PivotSums{}, 0, j), add(PivotSums{}, 1, j)),
                     merge(add(PivotSums{}, 2, j), add(PivotSums{}, 3, j)));
      });
}

// Micro-batches [begin, begin + count) onto a leaf, or as its first.
template <int kCount, class Add>
STEADYNORM_HD void column_run(int begin, bool first, int width, ColumnNode& leaf, Add&& add) {
  const auto run = [&](auto from_zero) __attribute__((always_inline)) {
    for_columns(
        width, leaf, [&](int j) __attribute__((always_inline)) {
          PivotSums sums = from_zero ? PivotSums{} : PivotSums{leaf.first[j], leaf.second[j]};
          for (int b = 0; b < kCount; ++b) sums = add(sums, begin + b, j);
          return sums;
        });
  };
  first ? run(std::true_type{}) : run(std::false_type{});
}

template <class Add>
STEADYNORM_HD void column_run(int begin, int count, bool first, int width, ColumnNode& leaf, Add&& add) {
  static_assert(kPanelBatches == 4);
  if (count == 4) return column_run<4>(begin, first, width, leaf, add);
  if (count == 2) return column_run<2>(begin, first, width, leaf, add);
  for (int b = 0; b < count; ++b) column_run<1>(begin + b, first && b == 0, width, leaf, add);
}

// Each column's sums around its pivot, over the tree of the tile's rows. A few micro-batches of the whole
// panel at a time: the first pass is fp32 alone, the second reads them back as double and keeps its sums in
// registers.
template <class T>
const ColumnNode& column_pivot_sums(ColumnTree& tree, const T* x, const Tile& tile,
                                    std::int64_t leaf_positions, const float* __restrict pivot) {
  constexpr std::int64_t kStep = kPanelBatches * kMicroBatchRows;
  const int width = static_cast<int>(tile.width);
  PanelBatches batches;
  for (std::int64_t s = 0; s < tile.rows; s += kStep) {
    const std::int64_t left = tile.rows - s;
    const int count = smaller(divide_up(left, kMicroBatchRows), kPanelBatches);
    const T* from = x + s * tile.stride;
    batches.suspect = false;
    for (int b = 0; b < count; ++b)
      column_batches(from + b * kMicroBatchRows * tile.stride, tile.stride,
                     smaller(left - b * kMicroBatchRows, kMicroBatchRows), width, b, batches);
    const auto combine = [&](auto add) __attribute__((always_inline)) {
      if (leaf_positions == kMicroBatchRows && left >= kStep) {
        column_leaves(width, tree.leaf(), add);
        tree.push(width, 2);
        return;
      }
      const int run = smaller(leaf_positions / kMicroBatchRows, kPanelBatches);
      for (int b = 0; b < count; b += run) {
        const std::int64_t begin = s + b * kMicroBatchRows, end = begin + run * kMicroBatchRows;
        column_run(b, smaller(count - b, run), begin % leaf_positions == 0, width, tree.leaf(), add);
        if (end % leaf_positions == 0 || end >= tile.rows) tree.push(width);
      }
    };
    int rows[kPanelBatches];
    for (int b = 0; b < count; ++b) rows[b] = smaller(left - b * kMicroBatchRows, kMicroBatchRows);
    if (!batches.suspect) {
      combine([&](const PivotSums& before, int b, int j) __attribute__((always_inline)) {
        return add_micro_batch(before, rows[b], pivot[j], batches.m[b][j], batches.d[b][j], batches.q[b][j]);
      });
    } else {
      combine([&](const PivotSums& before, int b, int j) {
        const float m = batches.m[b][j], q = batches.q[b][j];
        if (j >= width) return before;
        if (is_reliable(q)) return add_micro_batch(before, rows[b], pivot[j], m, batches.d[b][j], q);
        return add_unreliable(before, rows[b], pivot[j], m, [&](int v) {
          return to_float(from[(b * kMicroBatchRows + v) * tile.stride + j]);
        });
      });
    }
  }
  return tree.root(width);
}

void column_moments(Array x, const Tile& tile, std::int64_t leaf_positions, Moments* moments) {
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    alignas(64) float pivot[kPanel] = {};
    const T* values = static_cast<const T*>(x.data) + tile.offset;
    const int width = static_cast<int>(tile.width);
    for (int j = 0; j < width; ++j) pivot[j] = to_float(values[j]);  // the unit's first values
    ColumnTree tree;
    const ColumnNode& root = column_pivot_sums(tree, values, tile, leaf_positions, pivot);
    const double count = static_cast<double>(tile.rows), share = 1.0 / count;
    for (int j = 0; j < width; ++j)
      moments[j] = moments_of({root.first[j], root.second[j]}, count, share, pivot[j]);
  });
}

}  // namespace
}  // namespace steadynorm::cpu
