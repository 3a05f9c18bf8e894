// SPDX-License-Identifier: Apache-2.0
// The lower levels of the reduction tree, docs/numerics.md "The tree": the one function for a micro-batch and
// for runs of nodes. Every kernel that reduces calls these, so no kernel or plan can change a bit; the host
// can call them too.
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"

namespace steadynorm::cuda {

// A node of a statistics tree; its count is a function of its place.
struct alignas(16) Node {
  double mean;
  double m2;
};

STEADYNORM_HD Moments with_count(const Node& node, double count) { return {count, node.mean, node.m2}; }
STEADYNORM_HD Node without_count(const Moments& m) { return {m.mean, m.m2}; }

// How many of [begin, end) lie below `length`.
template <class Integer>
STEADYNORM_HD Integer present(Integer begin, Integer end, Integer length) {
  const Integer stop = end < length ? end : length;
  return stop > begin ? stop - begin : 0;
}

// Two fp32 sums that are added side by side, so that what they share is needed only once.
struct Pair {
  float first, second;
};

STEADYNORM_HD Pair operator+(const Pair& a, const Pair& b) {
  return {a.first + b.first, a.second + b.second};
}

// value(0) + ... + value(kCount - 1) as an aligned binary tree; kCount is a power of two.
template <int kCount, class Value>
STEADYNORM_HD auto tree_sum(const Value& value) {
  if constexpr (kCount == 1) {
    return value(0);
  } else {
    const auto right = [&](int i) { return value(i + kCount / 2); };
    const auto left_sum = tree_sum<kCount / 2>(value);
    return left_sum + tree_sum<kCount / 2>(right);
  }
}

STEADYNORM_HD float plus_missing(float column) { return column + 0.0f; }
STEADYNORM_HD Pair plus_missing(const Pair& column) { return column + Pair{0.0f, 0.0f}; }

// Over the kRows x kWidth values (v, j) of a micro-batch: v first, then j. With kRows = 1 rows 1..7 are
// missing, and adding their +0 is one addition (it matters for -0 alone). done(j, sum) follows column j.
template <int kRows, int kWidth, class Value, class Done>
STEADYNORM_HD auto micro_batch_sum(const Value& value, const Done& done) {
  return tree_sum<kWidth>([&](int j) {
    const auto column = tree_sum<kRows>([&](int v) { return value(v, j); });
    done(j, column);
    if constexpr (kRows == kMicroBatchRows)
      return column;
    else
      return plus_missing(column);
  });
}

template <int kRows, int kWidth, class Value>
STEADYNORM_HD auto micro_batch_sum(const Value& value) {
  return micro_batch_sum<kRows, kWidth>(value, [](int, const auto&) {});
}

// The micro-batch again, in double and in order, from the values where they lie: stored(v, j).
template <int kRows, int kWidth, class Stored, class Present>
STEADYNORM_HD Node micro_batch_in_double(const Stored& stored, const Present& present_at, int n) {
  double sum = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int i = 0; i < kRows * kWidth; ++i)
    if (present_at(i / kWidth, i % kWidth)) sum += static_cast<double>(stored(i / kWidth, i % kWidth));
  const double mean = sum / n;
  double m2 = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int i = 0; i < kRows * kWidth; ++i)
    if (present_at(i / kWidth, i % kWidth)) {
      const double e = static_cast<double>(stored(i / kWidth, i % kWidth)) - mean;
      m2 += e * e;
    }
  return {mean, m2};
}

// One more micro-batch of a lane. x(v, j) is +0 where present_at(v, j) is false; kFull promises that all are
// there. The rare second computation reads the values again by stored(v, j): kept in registers, they would
// cost every other one dearly. after(j, sum) follows each column j of the two sums.
template <int kRows, int kWidth, bool kFull, class Value, class Stored, class Present, class After>
STEADYNORM_HD PivotSums add_lane_values(const PivotSums& before, float pivot, const Value& x,
                                        const Stored& stored, const Present& present_at, int count,
                                        const After& after) {
  const int n = kFull ? kRows * kWidth : count;
  const float m = micro_batch_sum<kRows, kWidth>(x, after) / static_cast<float>(n);
  const auto [d, q] = micro_batch_sum<kRows, kWidth>(
      [&](int v, int j) {
        const float e = kFull || present_at(v, j) ? x(v, j) - m : 0.0f;
        return Pair{e, e * e};
      },
      [&](int j, const Pair& column) { after(j, column.first); });
  bool exact = is_reliable(q);
  if (!exact) {
    // Constant values are the common case here (the background of a volume), and need no double: their sum is
    // exact.
    exact = q == 0;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int i = 0; i < kRows * kWidth; ++i)
      exact = exact && (!(kFull || present_at(i / kWidth, i % kWidth)) || x(i / kWidth, i % kWidth) == m);
  }
  if (exact) return add_micro_batch(before, n, pivot, m, d, q);
  const Node node = micro_batch_in_double<kRows, kWidth>(stored, present_at, n);
  return add_micro_batch(before, n, pivot, node.mean, 0.0, node.m2);
}

// The fp32 part of a micro-batch of one channel: up to eight positions, +0 where present_at(v) is false.
struct Deviations {
  float m, d, q;
};

template <bool kFull, class Value, class Present>
STEADYNORM_HD Deviations deviations(const Value& x, const Present& present_at, int count) {
  const float m = tree_sum<kMicroBatchRows>(x) / static_cast<float>(kFull ? kMicroBatchRows : count);
  const Pair sums = tree_sum<kMicroBatchRows>([&](int v) {
    const float e = kFull || present_at(v) ? x(v) - m : 0.0f;
    return Pair{e, e * e};
  });
  return {m, sums.first, sums.second};
}

// merge() of two nodes of the same count, of which `half` is half.
STEADYNORM_HD Node merge_equal(const Node& a, const Node& b, double half) {
  const double delta = b.mean - a.mean;
  return {a.mean + delta * 0.5, (a.m2 + b.m2) + delta * delta * half};
}

// Values of lane `lane` in a contiguous leaf of `length` values: (v, j) is there when j < lane_rest(...) of
// its row.
STEADYNORM_HD int lane_rest(int length, int lane, int v) { return length - kLeafRow * v - kLaneWidth * lane; }

STEADYNORM_HD int lane_count(int length, int lane) {
  int count = 0;
  for (int v = 0; v < kMicroBatchRows; ++v) {
    const int rest = lane_rest(length, lane, v);
    count += rest < 0 ? 0 : (rest < kLaneWidth ? rest : kLaneWidth);
  }
  return count;
}

// The aligned binary tree over nodes that come one by one, as a binary counter: levels[l] holds the node of
// 2^l of them. push is called for index = 0, 1, ...; the root is then what a level that is not there leaves
// unchanged.
template <class Integer>
STEADYNORM_HD void push_node(ChannelSums* levels, Integer index, ChannelSums node) {
  for (; index & 1; index >>= 1, ++levels) node = merge(*levels, node);
  *levels = node;
}

template <class Integer>
STEADYNORM_HD ChannelSums root_of_nodes(const ChannelSums* levels, Integer count) {
  for (; !(count & 1); count >>= 1) ++levels;
  ChannelSums node = *levels;
  for (count >>= 1; count; count >>= 1) {
    ++levels;
    if (count & 1) node = merge(*levels, node);
  }
  return node;
}

}  // namespace steadynorm::cuda
