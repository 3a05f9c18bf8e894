// SPDX-License-Identifier: Apache-2.0
// Moments of contiguous units. docs/numerics.md, "The tree" and "Statistics".
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
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
    for (int v = 0; v < R - kRagged; ++v) {
      if constexpr (R == kMicroBatchRows) prefetch(x + (kMicroBatchRows + v) * kLeafRow + p * kWidth);
      value[p][v] = load(x + v * kLeafRow + p * kWidth);
    }
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

// A level of the tree over nodes, all pairs at once. kEqual: all have `count`.
template <bool kEqual, int kNodes>
STEADYNORM_HD Nodes<kNodes / 2> merge_pairs(const Nodes<kNodes>& from, double count) {
  Nodes<kNodes / 2> to;
  for (int i = 0; i < kNodes / 2; ++i) {
    const int a = 2 * i, b = a + 1;
    const Moments both = merge(Moments{kEqual ? count : from.count[a], from.mean[a], from.m2[a]},
                               Moments{kEqual ? count : from.count[b], from.mean[b], from.m2[b]});
    to.count[i] = both.count;
    to.mean[i] = both.mean;
    to.m2[i] = both.m2;
  }
  return to;
}

// The tree over nodes.
template <bool kEqual, int kNodes>
STEADYNORM_HD Moments merge_nodes(const Nodes<kNodes>& from, double count) {
  if constexpr (kNodes == 1)
    return {kEqual ? count : from.count[0], from.mean[0], from.m2[0]};
  else
    return merge_nodes<kEqual>(merge_pairs<kEqual>(from, count), 2 * count);
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

// The units of `length` values each that nodes of `count` values make up.
template <int kNodes>
STEADYNORM_HD void unit_nodes(const Nodes<kNodes>& nodes, double count, double length, Moments* units) {
  if constexpr (kNodes > 1) {
    if (count < length) return unit_nodes(merge_pairs<true>(nodes, count), 2 * count, length, units);
  }
  for (int i = 0; i < kNodes; ++i) units[i] = {count, nodes.mean[i], nodes.m2[i]};
}

// Adjacent units of 8, 16, ... or 128 values each that make up a row of 256: whole lanes, micro-batches of
// one row. False when a q is not reliable.
template <class T>
bool row_of_units(const T* x, int length, Moments* units) {
  BlockBatches block;
  block_batches<1>(x, 0, block);
  Mask suspect{};
  for (int l = 0; l < kLanes; l += kWidth) suspect |= unreliable(load(block.q + l));
  if (any(suspect)) return false;
  alignas(64) float pivot[kLanes];
  for (int l = 0; l < kLanes; ++l) pivot[l] = to_float(x[l * kLaneWidth]);
  Nodes<kLanes> nodes;
  for (int l = 0; l < kLanes; ++l) {
    const PivotSums sums =
        add_micro_batch(PivotSums{}, kLaneWidth, pivot[l], block.m[l], block.d[l], block.q[l]);
    const Moments lane = moments_of(sums, kLaneWidth, 1.0 / kLaneWidth, pivot[l]);
    nodes.mean[l] = lane.mean;
    nodes.m2[l] = lane.m2;
  }
  unit_nodes(nodes, kLaneWidth, length, units);
  return true;
}

template <class T>
Moments unit_moments(const T* x, std::int64_t length, std::int64_t leaf_length) {
  RunningTree<Moments> tree;
  for (std::int64_t leaf = 0; leaf < length; leaf += leaf_length) {
    const std::int64_t end = leaf + leaf_length < length ? leaf + leaf_length : length;
    LaneRun run;
    for (std::int64_t i = leaf; i < end; i += kLeafBlock)
      add_block(run, i == leaf, x + i, smaller(end - i, kLeafBlock));
    tree.push(merge_lanes(run, end - leaf));
  }
  return tree.root();
}

void row_moments(Array x, std::int64_t offset, std::int64_t length, std::int64_t leaf_length,
                 std::int64_t count, Moments* moments) {
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* values = static_cast<const T*>(x.data) + offset;
    const bool short_units = length < kLeafRow && length % kLaneWidth == 0 && kLeafRow % length == 0;
    const std::int64_t per_row = short_units && length <= leaf_length ? kLeafRow / length : 1;
    for (std::int64_t unit = 0; unit < count;) {
      const std::int64_t here = unit + per_row <= count ? per_row : 1, end = unit + here;
      if (here > 1 && row_of_units(values, static_cast<int>(length), moments + unit)) {
        unit = end;
        values += kLeafRow;
      }
      for (; unit < end; ++unit, values += length) moments[unit] = unit_moments(values, length, leaf_length);
    }
  });
}

}  // namespace
}  // namespace steadynorm::cpu
