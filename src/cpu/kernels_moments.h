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

// A micro-batch whose q is not reliable: q = d = 0 are right when all values equal m, else it is computed
// again.
template <class F>
PivotSums add_unreliable(const PivotSums& before, int count, float pivot, float m, F&& value) {
  bool equal = true;
  for (int i = 0; i < count; ++i) equal &= value(i) == m;
  if (equal) return add_micro_batch(before, count, pivot, m, 0.0, 0.0);
  const Moments exact = exact_moments(count, value);
  return add_micro_batch(before, count, pivot, exact.mean, 0.0, exact.m2);
}

STEADYNORM_HD Mask unreliable(Floats q) { return ~((q >= kLeastReliable) & (q <= kLargestFinite)); }

// sum / count, for a count that is known: a product is as exact for a power of two.
template <int kCount>
STEADYNORM_HD Floats divided(Floats sum) {
  if constexpr ((kCount & (kCount - 1)) == 0)
    return sum * (1.0f / kCount);
  else
    return sum / static_cast<float>(kCount);
}

// ---- rows ----

// Values of lane l in a block of `length` values.
STEADYNORM_HD int lane_count(int length, int lane) {
  const int rest = length % kLeafRow - lane * kLaneWidth;
  return length / kLeafRow * kLaneWidth + (rest < 0 ? 0 : (rest > kLaneWidth ? kLaneWidth : rest));
}

// Micro-batches of whole lanes by columns: m, the same in all columns of a lane, and the columns' parts of d
// and q.
struct BatchColumns {
  LaneColumns m, d, q;
};

// Lanes of R rows, or of R - 1 rows and a last one of `ragged` columns.
template <int R, bool kRagged, class T>
[[gnu::noinline]] void chunk_batches(const T* x, int ragged, int i, BatchColumns& to) {
  Floats value[kLaneVectors][R], sum[kLaneVectors];
  Mask present[kLaneVectors];
  for (int p = 0; p < kLaneVectors; ++p) {
    for (int v = 0; v < R - kRagged; ++v) value[p][v] = load(x + v * kLeafRow + p * kWidth);
    if constexpr (kRagged) {
      const int left = ragged - p * kWidth, count = left < 0 ? 0 : smaller(left, kWidth);
      value[p][R - 1] = count > 0 ? load(x + (R - 1) * kLeafRow + p * kWidth, count) : Floats{};
      present[p] = first_of(count);
    }
    sum[p] = pairwise<R>([&](int v) { return value[p][v]; });
  }
  Floats m = spread_lane_sums(sum);
  if constexpr (kRagged) {
    alignas(64) float count[kChunk];
    for (int j = 0; j < kChunk; ++j) {
      const int n = lane_count((R - 1) * kLeafRow + ragged, j / kLaneWidth);
      count[j] = static_cast<float>(n > 0 ? n : 1);
    }
    m /= load(count);
  } else {
    m = divided<kLaneWidth * R>(m);
  }
  for (int p = 0; p < kLaneVectors; ++p) {
    for (int v = 0; v < R; ++v) value[p][v] -= m;
    if constexpr (kRagged) value[p][R - 1] = present[p] ? value[p][R - 1] : Floats{};  // missing: +0
    to.m[i + p] = m;
    to.d[i + p] = pairwise<R>([&](int v) { return value[p][v]; });
    to.q[i + p] = pairwise<R>([&](int v) { return value[p][v] * value[p][v]; });
  }
}

// The micro-batches of a block's lanes. Lanes without any value are reliable.
struct BlockBatches {
  alignas(64) float m[kLanes];
  alignas(64) float d[kLanes];
  alignas(64) float q[kLanes];
};

// R whole rows and `ragged` values more.
template <int R, class T>
void block_batches(const T* x, int ragged, BlockBatches& to) {
  BatchColumns columns;
  for (int lane = 0; lane < kLanes && (R > 0 || lane * kLaneWidth < ragged); lane += kWidth) {
    for (int i = 0; i < kLaneWidth; i += kLaneVectors) {
      const int c = lane * kLaneWidth + i * kWidth;
      if constexpr (R < kMicroBatchRows) {
        if (c + kChunk <= ragged) {
          chunk_batches<R + 1, false>(x + c, 0, i, columns);
          continue;
        }
        if (c < ragged) {
          chunk_batches<R + 1, true>(x + c, ragged - c, i, columns);
          continue;
        }
      }
      if constexpr (R > 0)
        chunk_batches<R, false>(x + c, 0, i, columns);
      else
        for (int p = i; p < i + kLaneVectors; ++p) columns.m[p] = columns.d[p] = columns.q[p] = Floats{};
    }
    store(to.m + lane, lane_firsts(columns.m));
    store(to.d + lane, lane_sums(columns.d));
    store(to.q + lane, lane_sums(columns.q));
  }
}

// What the lanes of a leaf have added up: PivotSums and their counts.
struct LaneRun {
  alignas(64) float pivot[kLanes];
  alignas(64) double sum[kLanes];
  alignas(64) double squares[kLanes];
  alignas(64) double count[kLanes];
};

// count(l) is 0 for a lane that has no value in the block: it stays as it is.
template <class Count>
STEADYNORM_HD void add_lanes(LaneRun& run, const BlockBatches& block, Count&& count) {
  for (int l = 0; l < kLanes; ++l) {
    const double n = count(l);
    const PivotSums both =
        add_micro_batch({run.sum[l], run.squares[l]}, n, run.pivot[l], block.m[l], block.d[l], block.q[l]);
    run.sum[l] = n == 0 ? run.sum[l] : both.sum;
    run.squares[l] = n == 0 ? run.squares[l] : both.squares;
    run.count[l] += n;
  }
}

// Adds a block of up to 2048 consecutive values: fp32 by columns (v), then within lanes (j).
template <class T>
void add_block(LaneRun& run, bool first, const T* x, int length) {
  BlockBatches block;
  dispatch_rows(length / kLeafRow,
                [&](auto rows) { block_batches<rows.value>(x, length % kLeafRow, block); });
  const int lanes = smaller(divide_up(length, kLaneWidth), kLanes);
  if (first) {
    for (int l = 0; l < kLanes; ++l) run.sum[l] = run.squares[l] = run.count[l] = 0;
    for (int l = 0; l < lanes; ++l) run.pivot[l] = to_float(x[l * kLaneWidth]);
  }
  Mask suspect{};
  for (int l = 0; l < lanes; l += kWidth) suspect |= unreliable(load(block.q + l)) & first_of(lanes - l);
  if (any(suspect)) {
    for (int l = 0; l < lanes; ++l) {
      const int n = lane_count(length, l);
      const PivotSums before{run.sum[l], run.squares[l]};
      const PivotSums both =
          is_reliable(block.q[l])
              ? add_micro_batch(before, n, run.pivot[l], block.m[l], block.d[l], block.q[l])
              : add_unreliable(before, n, run.pivot[l], block.m[l], [&](int i) {
                  return to_float(x[i / kLaneWidth * kLeafRow + l * kLaneWidth + i % kLaneWidth]);
                });
      run.sum[l] = both.sum;
      run.squares[l] = both.squares;
      run.count[l] += n;
    }
  } else if (length == kLeafBlock) {
    add_lanes(run, block, [](int) { return static_cast<double>(kMicroBatchRows * kLaneWidth); });
  } else {
    add_lanes(run, block, [&](int l) { return static_cast<double>(lane_count(length, l)); });
  }
}

// Nodes side by side.
template <int kNodes>
struct Nodes {
  alignas(64) double count[kNodes];
  alignas(64) double mean[kNodes];
  alignas(64) double m2[kNodes];
};

// The tree over nodes, all pairs of a level at once. kEqual: all have `count`.
template <bool kEqual, int kNodes>
STEADYNORM_HD Moments merge_nodes(const Nodes<kNodes>& from, double count) {
  if constexpr (kNodes == 1) {
    return {kEqual ? count : from.count[0], from.mean[0], from.m2[0]};
  } else {
    Nodes<kNodes / 2> to;
    for (int i = 0; i < kNodes / 2; ++i) {
      const int a = 2 * i, b = a + 1;
      const Moments both = merge(Moments{kEqual ? count : from.count[a], from.mean[a], from.m2[a]},
                                 Moments{kEqual ? count : from.count[b], from.mean[b], from.m2[b]});
      to.count[i] = both.count;
      to.mean[i] = both.mean;
      to.m2[i] = both.m2;
    }
    return merge_nodes<kEqual>(to, 2 * count);
  }
}

// The first kNodes lanes' nodes, merged. Those without a value are absent.
template <bool kEqual, int kNodes>
[[gnu::noinline]] Moments merge_lanes(const LaneRun& run) {
  Nodes<kNodes> nodes;
  const double equal = run.count[0], share = 1.0 / equal;
  for (int l = 0; l < kNodes; ++l) {
    const double count = kEqual ? equal : run.count[l];
    const Moments lane =
        moments_of({run.sum[l], run.squares[l]}, count, kEqual ? share : 1.0 / count, run.pivot[l]);
    nodes.count[l] = lane.count;
    nodes.mean[l] = lane.mean;
    nodes.m2[l] = lane.m2;
  }
  return merge_nodes<kEqual>(nodes, equal);
}

// Of a leaf of `length` values.
inline Moments merge_lanes(const LaneRun& run, std::int64_t length) {
  const std::int64_t ragged = length % kLeafRow;
  if (length >= kLeafRow)
    return ragged == 0 ? merge_lanes<true, kLanes>(run) : merge_lanes<false, kLanes>(run);
  if (ragged % kLaneWidth == 0) {
    const std::int64_t lanes = ragged / kLaneWidth;
    if (lanes == 1) return merge_lanes<true, 1>(run);
    if (lanes == 2) return merge_lanes<true, 2>(run);
    if (lanes == 4) return merge_lanes<true, 4>(run);
    if (lanes == 8) return merge_lanes<true, 8>(run);
    if (lanes == 16) return merge_lanes<true, 16>(run);
  }
  return merge_lanes<false, kLanes>(run);
}

void row_moments(Array x, std::int64_t offset, std::int64_t length, std::int64_t leaf_length,
                 std::int64_t count, Moments* moments) {
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* values = static_cast<const T*>(x.data) + offset;
    for (std::int64_t unit = 0; unit < count; ++unit, values += length) {
      RunningTree<Moments> tree;
      for (std::int64_t leaf = 0; leaf < length; leaf += leaf_length) {
        const std::int64_t end = leaf + leaf_length < length ? leaf + leaf_length : length;
        LaneRun run;
        for (std::int64_t i = leaf; i < end; i += kLeafBlock)
          add_block(run, i == leaf, values + i, smaller(end - i, kLeafBlock));
        tree.push(merge_lanes(run, end - leaf));
      }
      moments[unit] = tree.root();
    }
  });
}

// ---- columns ----

// One micro-batch of `count` columns: 8 rows, or fewer of them.
struct ColumnBatch {
  Floats m, d, q;
};

template <bool kWhole, class T>
STEADYNORM_HD ColumnBatch column_batch(const T* x, std::int64_t stride, int rows, int count) {
  Floats value[kMicroBatchRows];
  for (int v = 0; v < kMicroBatchRows; ++v)
    value[v] = kWhole ? load(x + v * stride) : (v < rows ? load(x + v * stride, count) : Floats{});
  Floats m = pairwise<kMicroBatchRows>([&](int v) { return value[v]; });
  m = kWhole ? m * (1.0f / kMicroBatchRows) : m / static_cast<float>(rows);
  for (int v = 0; v < kMicroBatchRows; ++v)
    value[v] = kWhole || v < rows ? value[v] - m : Floats{};  // missing: +0
  const Floats d = pairwise<kMicroBatchRows>([&](int v) { return value[v]; });
  return {m, d, pairwise<kMicroBatchRows>([&](int v) { return value[v] * value[v]; })};
}

// Adds one micro-batch of each column to the PivotSums in `leaf`, or starts them with it.
template <class T>
void add_column_batches(const T* x, std::int64_t stride, int rows, int width, const float* __restrict pivot,
                        bool first, ColumnNode& leaf) {
  for (int j = 0; j < width; j += kWidth) {
    const int count = smaller(width - j, kWidth);
    const ColumnBatch batch = rows == kMicroBatchRows && count == kWidth
                                  ? column_batch<true>(x + j, stride, rows, count)
                                  : column_batch<false>(x + j, stride, rows, count);
    double* __restrict sum = leaf.first + j;
    double* __restrict squares = leaf.second + j;
    const float* __restrict p = pivot + j;
    if (!any(unreliable(batch.q) & first_of(count))) {
      const auto add = [&](auto from_zero) __attribute__((always_inline)) {
#pragma GCC unroll 1
        for (int i = 0; i < kWidth; ++i) {
          const PivotSums before = from_zero ? PivotSums{} : PivotSums{sum[i], squares[i]};
          const PivotSums both = add_micro_batch(before, rows, p[i], batch.m[i], batch.d[i], batch.q[i]);
          sum[i] = both.sum;
          squares[i] = both.squares;
        }
      };
      first ? add(std::true_type{}) : add(std::false_type{});
      continue;
    }
    for (int i = 0; i < count; ++i) {
      const PivotSums before = first ? PivotSums{} : PivotSums{sum[i], squares[i]};
      const PivotSums both = is_reliable(batch.q[i])
                                 ? add_micro_batch(before, rows, p[i], batch.m[i], batch.d[i], batch.q[i])
                                 : add_unreliable(before, rows, p[i], batch.m[i],
                                                  [&](int v) { return to_float(x[v * stride + j + i]); });
      sum[i] = both.sum;
      squares[i] = both.squares;
    }
  }
}

void column_moments(Array x, const Tile& tile, std::int64_t leaf_positions, Moments* moments) {
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    alignas(64) float pivot[kPanel] = {};
    const T* values = static_cast<const T*>(x.data) + tile.offset;
    const int width = static_cast<int>(tile.width);
    for (int j = 0; j < width; ++j) pivot[j] = to_float(values[j]);  // the unit's first values
    ColumnTree tree;
    const ColumnNode& root = add_column_leaves(
        tree, tile, leaf_positions, [&](std::int64_t s, int rows, bool first, ColumnNode& leaf) {
          add_column_batches(values + s * tile.stride, tile.stride, rows, width, pivot, first, leaf);
        });
    const double count = static_cast<double>(tile.rows), share = 1.0 / count;
    for (int j = 0; j < width; ++j)
      moments[j] = moments_of({root.first[j], root.second[j]}, count, share, pivot[j]);
  });
}

}  // namespace
}  // namespace steadynorm::cpu
