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
                                               int length, int lane, bool aligned) {
  const T* p = leaf + kLeafRow * first + kLaneWidth * lane;
  if (aligned && length >= kLeafRow * (first + kCount)) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) raw[v] = load<T, kLaneWidth>(p + kLeafRow * v);
  } else {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int rest = lane_rest(length, lane, first + v);
      if (aligned && rest >= kLaneWidth)
        raw[v] = load<T, kLaneWidth>(p + kLeafRow * v);
      else
        raw[v] = load_some<T, kLaneWidth>(p + kLeafRow * v, rest);
    }
  }
}

template <class T, int kCount>
__device__ __forceinline__ void load_leaf_rows(Packed<T, kLaneWidth> (&raw)[kCount], const Summed<T>& leaf,
                                               int first, int length, int lane, bool aligned) {
  constexpr int kRows = kSummedRows<Packed<T, kLaneWidth>, kCount>;
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kRows) {
    Packed<T, kLaneWidth> x[kRows], residual[kRows];
    load_leaf_rows(x, leaf.x, first + begin, length, lane, aligned);
    load_leaf_rows(residual, leaf.residual, first + begin, length, lane, aligned);
#pragma unroll
    for (int v = 0; v < kRows; ++v) {
      const int row = first + begin + v, rest = lane_rest(length, lane, row);
      raw[begin + v] = add(x[v], residual[v]);
      store(leaf.sum + kLeafRow * row + kLaneWidth * lane, raw[begin + v], aligned && rest >= kLaneWidth,
            rest);
    }
  }
}

// What a lane adds of its rows of one block of a leaf, of `length` values, which lie at `block`. after(j,
// sum) follows each column j of the sums.
template <class T, int kRows, bool kFull, class Source, class After>
__device__ __forceinline__ PivotSums add_rows(const PivotSums& before, float pivot,
                                              const Packed<T, kLaneWidth> (&raw)[kRows], const Source& block,
                                              int length, int lane, int count, const After& after) {
  const int rest =
      length - kLaneWidth * lane;  // a value is there when its offset in the lane's rows is below this
  return add_lane_values<kRows, kLaneWidth, kFull>(
      before, pivot, [&](int v, int j) { return raw[v][j]; },
      [&](int v, int j) { return to_fp32(block[kLeafRow * v + kLaneWidth * lane + j]); },
      [&](int v, int j) { return kFull || kLeafRow * v + j < rest; }, count, after);
}

template <class T, int kRows, bool kFull, class Source>
__device__ __forceinline__ PivotSums add_block(const PivotSums& before, float& pivot, bool first,
                                               const Source& block, int length, int lane, int count,
                                               bool aligned) {
  Packed<T, kLaneWidth> raw[kRows];
  load_leaf_rows(raw, block, 0, length, lane, aligned);
  if (first) pivot = raw[0][0];
  // H200, 2026-11-30: unpack_next() here, 64 registers instead of 96, read 1 GiB 5 % slower.
  return add_rows<T, kRows, kFull>(before, pivot, raw, block, length, lane, count, [&](int j, float) {
    if (j == kLaneWidth - 1) unpack_again(raw);
  });
}

// Moments of a leaf of `length` values by one warp; lane 0 gets them. The count is the length.
template <class T, int kRows, class Source>
__device__ __forceinline__ Node contiguous_leaf(const Source& leaf, int length, int lane) {
  constexpr int kBlock = kRows * kLeafRow;
  const bool aligned = is_aligned(leaf, kAlignment<T, kLaneWidth>);
  PivotSums sums{};
  float pivot = 0;
  int begin = 0;
#pragma unroll 1
  for (; begin + kBlock <= length; begin += kBlock)
    sums = add_block<T, kRows, true>(sums, pivot, begin == 0, leaf + begin, kBlock, lane, kRows * kLaneWidth,
                                     aligned);
  int count = begin / kLanes;
  if (begin == length) return warp_tree(without_count(moments_of(sums, count, 1.0 / count, pivot)), count);
  const int more = lane_count(length - begin, lane);
  if (more > 0)
    sums = add_block<T, kRows, false>(sums, pivot, begin == 0, leaf + begin, length - begin, lane, more,
                                      aligned);
  count += more;
  Moments moments{};
  if (count > 0) moments = moments_of(sums, count, 1.0 / count, pivot);
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
  const Split sample = split(row, d.by_C);
  return {sample.quotient, sample.remainder, split(row, d.by_D).quotient};  // C = G D
}

// Flat tiles of vectors none of which crosses a channel, as S is a multiple of their width. What a block
// needs of the rows in its tile it puts into shared memory once.
struct Tiles {
  std::uint32_t vectors;  // of the tensor
  Divisor row;            // the vectors of one
};

constexpr int kVectorsOfTile = kTileThreads * kTileVectors;

// Whether tiles serve a tensor whose vectors of `width` begin at aligned addresses.
inline bool tiles_serve(const Dimensions& d, int width) {
  return d.S % width == 0 && d.N * d.C * (d.S / width) < (std::int64_t{1} << 31) - kVectorsOfTile;
}

inline Tiles make_tiles(const Dimensions& d, int width) {
  return {static_cast<std::uint32_t>(d.N * d.C * (d.S / width)), Divisor(d.S / width)};
}

struct Tile {
  std::uint32_t begin, count;     // vectors
  std::uint32_t first_row, skip;  // skip: vectors of the first row in front of the tile
  std::uint32_t rows;

  // The row, from the first, of a vector of the tile.
  __device__ __forceinline__ std::uint32_t row_of(const Tiles& tiles, std::uint32_t vector) const {
    return rows == 1 ? 0 : tiles.row.quotient(skip + vector);
  }
};

__device__ __forceinline__ Tile tile_of(const Tiles& tiles, const Sweep& sweep) {
  Tile t;
  t.begin = (sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kVectorsOfTile;
  t.count = tiles.vectors - t.begin < kVectorsOfTile ? tiles.vectors - t.begin : kVectorsOfTile;
  t.first_row = tiles.row.quotient(t.begin);
  t.skip = t.begin - t.first_row * static_cast<std::uint32_t>(tiles.row.divisor);
  t.rows = tiles.row.quotient(t.skip + t.count - 1) + 1;
  return t;
}

}  // namespace steadynorm::cuda
