// SPDX-License-Identifier: Apache-2.0
// The contiguous layout: how a lane reads its values of a leaf, and how a flat tile meets the channels it
// crosses.
#pragma once

#include "cuda/coefficients.cuh"
#include "cuda/reduce.cuh"

namespace steadynorm::cuda {

// The values (v, 0..7) of this lane in rows first..first + kCount - 1 of a leaf; +0 beyond its length.
template <class T, int kCount>
__device__ __forceinline__ void load_leaf_rows(Packed<T, kLaneWidth> (&raw)[kCount], const T* leaf, int first,
                                               int length, int lane, bool aligned, std::uint64_t policy) {
  const T* p = leaf + kLeafRow * first + kLaneWidth * lane;
  if (aligned && length >= kLeafRow * (first + kCount)) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) raw[v] = load<T, kLaneWidth>(p + kLeafRow * v, policy);
  } else {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int rest = lane_rest(length, lane, first + v);
      if (aligned && rest >= kLaneWidth)
        raw[v] = load<T, kLaneWidth>(p + kLeafRow * v, policy);
      else
        raw[v] = load_some<T, kLaneWidth>(p + kLeafRow * v, rest);
    }
  }
}

// Moments of a leaf of `length` values by one warp; lane 0 gets them. The count is the length.
template <class T, int kRows>
__device__ __forceinline__ Node contiguous_leaf(const T* leaf, int length, int lane, std::uint64_t policy) {
  const bool aligned = is_aligned(leaf, kAlignment<T, kLaneWidth>);
  Packed<T, kLaneWidth> raw[kRows];
  load_leaf_rows<T, kRows>(raw, leaf, 0, length, lane, aligned, policy);
  const auto x = [&](int v, int j) { return raw[v][j]; };
  const auto stored = [&](int v, int j) { return to_fp32(leaf[kLeafRow * v + kLaneWidth * lane + j]); };
  if (length == kRows * kLeafRow) {
    const Node node = micro_batch<kRows, kLaneWidth, true>(
        x, stored, [](int, int) { return true; }, kRows * kLaneWidth);
    return warp_tree(node, kRows * kLaneWidth);
  }
  const int count = lane_count(length, lane);
  const int rest =
      length - kLaneWidth * lane;  // an element is there when its offset in the lane's rows is below this
  const auto there = [&](int v, int j) { return kLeafRow * v + j < rest; };
  Moments moments{};
  if (count != 0) moments = with_count(micro_batch<kRows, kLaneWidth, false>(x, stored, there, count), count);
  return without_count(warp_tree(moments, kLanes));
}

// A flat tile's first element as channel row and position, rows counted over all samples.
struct TilePlace {
  std::int64_t row, position;
};

__device__ __forceinline__ TilePlace tile_place(std::int64_t element, std::int64_t S) {
  const Split s = split(element, S);
  return {s.quotient, s.remainder};
}

__device__ __forceinline__ TilePlace advance(const TilePlace& place, int elements, std::int64_t S) {
  const std::int64_t position = place.position + elements;
  if (position < S) return {place.row, position};
  const Split s = split(position, S);
  return {place.row + s.quotient, s.remainder};
}

// The sample, channel and group of a channel row.
struct RowPlace {
  std::int64_t n, c, group;
};

__device__ __forceinline__ RowPlace row_place(const Dimensions& d, std::int64_t row) {
  const Split sample = split(row, d.C);
  return {sample.quotient, sample.remainder, sample.quotient * d.G + quotient(sample.remainder, d.D)};
}

}  // namespace steadynorm::cuda
