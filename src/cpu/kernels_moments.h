// SPDX-License-Identifier: Apache-2.0
// Moments of units, by rows and by columns. docs/numerics.md, "The tree" and "Statistics".
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
#include "cpu/column_tree.h"
#include "cpu/running_tree.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

// A micro-batch again, in double, from its values in order. value(i) for i in [0, count).
template <class F>
Moments exact_moments(int count, F&& value) {
  double sum = 0, m2 = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(value(i));
  const double mean = sum / count;
  for (int i = 0; i < count; ++i) {
    const double e = static_cast<double>(value(i)) - mean;
    m2 += e * e;
  }
  return {static_cast<double>(count), mean, m2};
}

// ---- rows ----

// Values of lane l among the first `length` of a leaf.
inline int lane_count(int length, int lane) {
  const int rest = length % kLeafRow - lane * kLaneWidth;
  return length / kLeafRow * kLaneWidth + (rest < 0 ? 0 : (rest > kLaneWidth ? kLaneWidth : rest));
}

inline Moments exact_lane(const float* x, int length, int lane) {
  const int count = lane_count(length, lane);
  return exact_moments(
      count, [&](int i) { return x[i / kLaneWidth * kLeafRow + lane * kLaneWidth + i % kLaneWidth]; });
}

// Lanes of equal counts, a power of two of them: the tree of merge(), all pairs of a level at once.
inline Moments merge_equal_lanes(double count, int lanes, const double* mean, const double* m2) {
  double buffer[2][2][kLanes / 2];
  for (int level = 0; lanes > 1; ++level) {
    lanes /= 2;
    double* __restrict mean_out = buffer[level % 2][0];
    double* __restrict m2_out = buffer[level % 2][1];
    for (int i = 0; i < lanes; ++i) {
      const Moments both =
          merge(Moments{count, mean[2 * i], m2[2 * i]}, Moments{count, mean[2 * i + 1], m2[2 * i + 1]});
      mean_out[i] = both.mean;
      m2_out[i] = both.m2;
    }
    mean = mean_out;
    m2 = m2_out;
    count *= 2;
  }
  return {count, mean[0], m2[0]};
}

// Whether lane l's q is trustworthy, or all of its values equal: then m is exact and q = d = 0 are right.
inline bool lane_is_exact(const Rows& rows, const float* centre, float q, int lane) {
  if (is_reliable(q)) return true;
  bool equal = q == 0;
  for (int v = 0; v < rows.rounded; ++v)
    for (int j = lane * kLaneWidth; j < (lane + 1) * kLaneWidth; ++j) equal &= rows.row[v][j] == centre[j];
  return equal;
}

// What the lanes of a leaf have added up: PivotSums and their counts.
struct LaneRun {
  alignas(64) float pivot[kLanes];
  alignas(64) double sum[kLanes];
  alignas(64) double squares[kLanes];
  int count[kLanes];
};

inline void add_lanes(LaneRun& run, int lanes, int n, const float* __restrict m, const float* __restrict d,
                      const float* __restrict q) {
  const float* __restrict pivot = run.pivot;
  double* __restrict sum = run.sum;
  double* __restrict squares = run.squares;
  for (int l = 0; l < lanes; ++l) {
    const PivotSums both = add_micro_batch({sum[l], squares[l]}, n, pivot[l], m[l], d[l], q[l]);
    sum[l] = both.sum;
    squares[l] = both.squares;
  }
  for (int l = 0; l < lanes; ++l) run.count[l] += n;
}

// Adds a block of up to 2048 consecutive values: fp32 by columns (v), then within lanes (j).
inline void add_block(LaneRun& run, bool first, const float* x, int length) {
  alignas(64) float tail[kLeafRow], centre[kLeafRow], d_columns[kLeafRow], q_columns[kLeafRow];
  alignas(64) float d[kLanes], q[kLanes], m[kLanes];
  Rows rows{};
  rows.present = (length + kLeafRow - 1) / kLeafRow;
  rows.rounded = round_rows(rows.present);
  rows.width = length >= kLeafRow ? kLeafRow : (length + kLaneWidth - 1) / kLaneWidth * kLaneWidth;
  const int ragged = length % rows.width == 0 ? 0 : length % kLeafRow;
  for (int v = 0; v < rows.present; ++v) rows.row[v] = x + v * kLeafRow;
  if (ragged != 0) {
    const float* last = rows.row[rows.present - 1];
    for (int j = 0; j < ragged; ++j) tail[j] = last[j];
    for (int j = ragged; j < rows.width; ++j) tail[j] = 0;
    rows.row[rows.present - 1] = tail;
  }
  alignas(64) static constexpr float kZeros[kLeafRow] = {};
  for (int v = rows.present; v < rows.rounded; ++v) rows.row[v] = kZeros;

  const int lanes = rows.width / kLaneWidth;
  const bool equal_lanes = length % kLeafRow == 0 || (length < kLeafRow && length % kLaneWidth == 0);
  if (first)
    for (int l = 0; l < lanes; ++l) run.pivot[l] = x[l * kLaneWidth];
  dispatch_rows(rows.rounded, [&](auto r) { sum_columns<r.value>(rows, d_columns); });
  sum_lanes(d_columns, lanes, m);
  for (int l = 0; l < lanes; ++l)
    m[l] /= static_cast<float>(equal_lanes ? lane_count(length, 0) : lane_count(length, l));
  for (int j = 0; j < rows.width; ++j) centre[j] = m[j / kLaneWidth];

  // A missing value deviates by +0: it takes its lane's centre.
  if (ragged != 0)
    for (int j = ragged; j < rows.width; ++j) tail[j] = centre[j];
  for (int v = rows.present; v < rows.rounded; ++v) rows.row[v] = centre;
  dispatch_rows(rows.rounded, [&](auto r) { sum_deviations<r.value>(rows, centre, d_columns, q_columns); });
  sum_lanes(d_columns, lanes, d);
  sum_lanes(q_columns, lanes, q);

  bool reliable = true;
  for (int l = 0; l < lanes; ++l) reliable &= is_reliable(q[l]);
  if (reliable && equal_lanes) return add_lanes(run, lanes, lane_count(length, 0), m, d, q);
  for (int l = 0; l < lanes; ++l) {
    const int n = lane_count(length, l);
    if (n == 0) continue;
    PivotSums sums{run.sum[l], run.squares[l]};
    if (reliable || lane_is_exact(rows, centre, q[l], l)) {
      sums = add_micro_batch(sums, n, run.pivot[l], m[l], d[l], q[l]);
    } else {
      const Moments lane = exact_lane(x, length, l);
      sums = add_micro_batch(sums, n, run.pivot[l], lane.mean, 0.0, lane.m2);
    }
    run.sum[l] = sums.sum;
    run.squares[l] = sums.squares;
    run.count[l] += n;
  }
}

// The lanes' nodes, merged.
inline Moments merge_lanes(const LaneRun& run) {
  int lanes = kLanes;
  while (lanes > 0 && run.count[lanes - 1] == 0) --lanes;
  bool equal = (lanes & (lanes - 1)) == 0;
  for (int l = 1; l < lanes; ++l) equal &= run.count[l] == run.count[0];
  if (equal) {
    double mean[kLanes], m2[kLanes];
    const double count = run.count[0], share = 1.0 / count;
    for (int l = 0; l < lanes; ++l) {
      const Moments lane = moments_of({run.sum[l], run.squares[l]}, count, share, run.pivot[l]);
      mean[l] = lane.mean;
      m2[l] = lane.m2;
    }
    return merge_equal_lanes(count, lanes, mean, m2);
  }
  Moments nodes[kLanes];
  for (int l = 0; l < lanes; ++l)
    nodes[l] = run.count[l] == 0
                   ? Moments{}
                   : moments_of({run.sum[l], run.squares[l]}, run.count[l], 1.0 / run.count[l], run.pivot[l]);
  reduce_tree(nodes, lanes);
  return nodes[0];
}

void row_moments(Array x, std::int64_t offset, std::int64_t length, std::int64_t leaf_length,
                 std::int64_t count, Moments* moments) {
  alignas(64) float buffer[kLeafBlock];
  for (std::int64_t unit = 0; unit < count; ++unit, offset += length) {
    RunningTree<Moments> tree;
    for (std::int64_t leaf = 0; leaf < length; leaf += leaf_length) {
      const std::int64_t end = leaf + leaf_length < length ? leaf + leaf_length : length;
      LaneRun run{};
      for (std::int64_t i = leaf; i < end; i += kLeafBlock) {
        const int n = smaller(end - i, kLeafBlock);
        add_block(run, i == leaf, load(x, offset + i, n, buffer), n);
      }
      tree.push(merge_lanes(run));
    }
    moments[unit] = tree.root();
  }
}

// ---- columns ----

// The sums of a leaf's micro-batches around the unit's pivots, of every column.
struct ColumnLeaf {
  alignas(64) float pivot[kPanel];
  ColumnNode sums;  // PivotSums
};

inline void add_columns(ColumnLeaf& leaf, int width, int n, const float* __restrict m,
                        const float* __restrict d, const float* __restrict q) {
  const float* __restrict pivot = leaf.pivot;
  double* __restrict sum = leaf.sums.first;
  double* __restrict squares = leaf.sums.second;
  for (int j = 0; j < width; ++j) {
    const PivotSums both = add_micro_batch({sum[j], squares[j]}, n, pivot[j], m[j], d[j], q[j]);
    sum[j] = both.sum;
    squares[j] = both.squares;
  }
}

// One micro-batch of each column: rows.present positions, of which rows.rounded - rows.present are missing.
inline void column_micro_batch(Rows& rows, ColumnLeaf& leaf) {
  alignas(64) static constexpr float kZeros[kPanel] = {};
  alignas(64) float m[kPanel], d[kPanel], q[kPanel];
  for (int v = rows.present; v < rows.rounded; ++v) rows.row[v] = kZeros;
  dispatch_rows(rows.rounded, [&](auto r) { sum_columns<r.value>(rows, m); });
  const float count = static_cast<float>(rows.present);
  if (rows.present == kMicroBatchRows)
    for (int j = 0; j < rows.width; ++j) m[j] *= 0.125f;
  else
    for (int j = 0; j < rows.width; ++j) m[j] /= count;
  for (int v = rows.present; v < rows.rounded; ++v) rows.row[v] = m;
  dispatch_rows(rows.rounded, [&](auto r) { sum_deviations<r.value>(rows, m, d, q); });

  int unreliable = 0;
  for (int j = 0; j < rows.width; ++j) unreliable += !is_reliable(q[j]);
  if (unreliable == 0) return add_columns(leaf, rows.width, rows.present, m, d, q);
  for (int j = 0; j < rows.width; ++j) {
    bool exact = is_reliable(q[j]);
    if (!exact) {
      exact = q[j] == 0;  // when all values equal m, q = d = 0 are right
      for (int v = 0; v < rows.present; ++v) exact &= rows.row[v][j] == m[j];
    }
    const Moments column =
        exact ? Moments{0, m[j], q[j]} : exact_moments(rows.present, [&](int v) { return rows.row[v][j]; });
    const PivotSums both = add_micro_batch({leaf.sums.first[j], leaf.sums.second[j]}, rows.present,
                                           leaf.pivot[j], column.mean, exact ? d[j] : 0.0, column.m2);
    leaf.sums.first[j] = both.sum;
    leaf.sums.second[j] = both.squares;
  }
}

void column_moments(Array x, const Tile& tile, std::int64_t leaf_positions, Moments* moments) {
  alignas(64) float buffer[kMicroBatchRows][kPanel];
  ColumnTree tree;
  const int width = static_cast<int>(tile.width);
  ColumnLeaf leaf;
  const float* pivot = load(x, tile.offset, width, buffer[0]);  // the unit's first values
  for (int j = 0; j < width; ++j) leaf.pivot[j] = pivot[j];
  for (std::int64_t begin = 0; begin < tile.rows; begin += leaf_positions) {
    const std::int64_t end = begin + leaf_positions < tile.rows ? begin + leaf_positions : tile.rows;
    for (int j = 0; j < width; ++j) leaf.sums.first[j] = leaf.sums.second[j] = 0;
    for (std::int64_t s = begin; s < end; s += kMicroBatchRows) {
      Rows rows{};
      rows.present = smaller(end - s, kMicroBatchRows);
      rows.rounded = round_rows(rows.present);
      rows.width = width;
      for (int v = 0; v < rows.present; ++v)
        rows.row[v] = load(x, tile.offset + (s + v) * tile.stride, width, buffer[v]);
      column_micro_batch(rows, leaf);
    }
    tree.push(leaf.sums, width);
  }
  const ColumnNode& root = tree.root(width);
  const double count = static_cast<double>(tile.rows), share = 1.0 / count;
  for (int j = 0; j < width; ++j)
    moments[j] = moments_of({root.first[j], root.second[j]}, count, share, leaf.pivot[j]);
}

}  // namespace
}  // namespace steadynorm::cpu
