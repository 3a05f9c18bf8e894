// SPDX-License-Identifier: Apache-2.0
// Backward, contiguous: a warp per leaf for the channels' sums; a flat element-wise sweep for dx. One source
// file per activation instantiates these, so that they compile side by side.
#pragma once

#include "core/dispatch.h"
#include "cuda/contiguous.cuh"

namespace steadynorm::cuda {

namespace {

constexpr int kHalf = 4;  // rows of x and dy that a lane holds at a time

// The sums of one lane's micro-batch in a leaf of `length` values of one channel.
template <class T, class U, Activation A, int kRows, bool kFull>
__device__ __forceinline__ Pair lane_sums(const T* x, const U* dy, int length, int lane,
                                          const Coefficients& c) {
  constexpr int kCount = kRows < kHalf ? kRows : kHalf;
  const bool aligned_x = is_aligned(x, kAlignment<T, kLaneWidth>),
             aligned_dy = is_aligned(dy, kAlignment<U, kLaneWidth>);
  Pair columns[kLaneWidth];
#pragma unroll
  for (int first = 0; first < kRows; first += kCount) {
    Packed<T, kLaneWidth> raw_x[kCount];
    Packed<U, kLaneWidth> raw_dy[kCount];
    load_leaf_rows<T, kCount>(raw_x, x, first, length, lane, aligned_x);
    load_leaf_rows<U, kCount>(raw_dy, dy, first, length, lane, aligned_dy);
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      const Pair part = tree_sum<kCount>([&](int v) {
        const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
        const bool there = kFull || j < lane_rest(length, lane, first + v);
        return there ? Pair{g.dz, g.dz * g.normalized} : Pair{0.0f, 0.0f};
      });
      columns[j] = first == 0 ? part : columns[j] + part;
    }
  }
  return tree_sum<kLaneWidth>(
      [&](int j) { return kRows == kMicroBatchRows ? columns[j] : plus_missing(columns[j]); });
}

// The sums of a leaf of `length` values of one channel by one warp; lane 0 gets them.
template <class T, class U, Activation A, int kRows>
__device__ __forceinline__ ChannelSums contiguous_leaf_sums(const T* x, const U* dy, int length, int lane,
                                                            const Coefficients& c) {
  constexpr int kBlock = kRows * kLeafRow;
  ChannelSums sums{};
  int begin = 0;
  const auto add = [&](const Pair& block) {  // the first is not added to zeros: it may be -0
    const ChannelSums node{block.first, block.second};
    sums = begin == 0 ? node : merge(sums, node);
  };
#pragma unroll 1
  for (; begin + kBlock <= length; begin += kBlock)
    add(lane_sums<T, U, A, kRows, true>(x + begin, dy + begin, kBlock, lane, c));
  if (begin < length) add(lane_sums<T, U, A, kRows, false>(x + begin, dy + begin, length - begin, lane, c));
  const int lanes = length >= kLeafRow ? kLanes : (length + kLaneWidth - 1) / kLaneWidth;
  return warp_tree(sums, kLanes, lanes);
}

// Blocks on an SM that registers are for: 128 of them for a thread, or 96 where rows are narrow and curves
// simple.
template <class T, class U, Activation A>
constexpr int kSumBlocks = A == Activation::gelu_tanh                           ? 3
                           : A == Activation::gelu || sizeof(T) + sizeof(U) > 4 ? 4
                                                                                : 5;

// Shared memory: the sums of each warp.
template <class T, class U, Activation A, int kRows>
__global__ void __launch_bounds__(kLeafWarps* kLanes, kSumBlocks<T, U, A>)
    sums_contiguous(const BackwardCall call, const Runs runs) {
  ChannelSums* const nodes = shared_memory<ChannelSums>();
  release_next();
  wait_for_previous();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, leaf = warp % runs.leaves_per_unit;
  const std::int64_t index =
      std::int64_t{blockIdx.x} * (runs.warps / runs.leaves_per_unit) + warp / runs.leaves_per_unit;
  // Inside a unit positions fit an int: a unit is at most S / 64 positions.
  const int leaf_length = static_cast<int>(call.d.tree.leaf_positions);
  const bool active = index < contiguous_sum_units(call.d);

  ChannelSums node{};
  int unit_length = 0;
  if (active) {
    const ChannelUnit unit = contiguous_sum_unit(call.d, index);
    unit_length = static_cast<int>(unit.length);
    const RowPlace place = row_place(call.d, unit.row);
    const Coefficients c = load_coefficients(call, place.n, place.c, place.group);
    const int begin = leaf * leaf_length, length = present(begin, begin + leaf_length, unit_length);
    const std::int64_t from = unit.begin + begin;
    if (length > 0)
      node = contiguous_leaf_sums<T, U, A, kRows>(static_cast<const T*>(call.x) + from,
                                                  static_cast<const U*>(call.dy) + from, length, lane, c);
  }
  if (runs.leaves_per_unit > 1) {
    if (lane == 0) nodes[warp] = node;
    __syncthreads();
    if (leaf == 0 && lane == 0) {
      const int there = (unit_length + leaf_length - 1) / leaf_length;
#pragma unroll 1
      for (int step = 1; step < there; step *= 2)
#pragma unroll 1
        for (int i = 0; i + step < there; i += 2 * step)
          nodes[warp + i] = merge(nodes[warp + i], nodes[warp + i + step]);
      node = nodes[warp];
    }
  }
  if (active && leaf == 0 && lane == 0)
    call.partials[index] = float2{static_cast<float>(node.dz), static_cast<float>(node.dz_normalized)};
}

// Shared memory: mean_hi, mean_lo, scale, bias, then rstd, weight and the group's two means of each row of
// the tile.
template <class T, class U, Activation A>
__global__ void __launch_bounds__(kTileThreads, 3)
    input_gradient_tiles(const BackwardCall call, const Tiles tiles, const Sweep sweep) {
  constexpr int W = 16 / sizeof(T);
  float4* const rows = shared_memory<float4>();
  const std::uint32_t thread = threadIdx.x;
  const Tile tile = tile_of(tiles, sweep);

  const std::int64_t first = std::int64_t{tile.begin + thread} * W;
  const T* x = static_cast<const T*>(call.x) + first;
  const U* dy = static_cast<const U*>(call.dy) + first;
  T* dx = static_cast<T*>(call.dx) + first;
  Packed<T, W> raw_x[kTileVectors];
  Packed<U, W> raw_dy[kTileVectors];
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v)
    if (v * kTileThreads + thread < tile.count) {
      raw_x[v] = load<T, W>(x + v * kTileThreads * W);
      raw_dy[v] = load<U, W>(dy + v * kTileThreads * W);
    }
  release_next();
  wait_for_previous();

  for (std::uint32_t r = thread; r < tile.rows; r += kTileThreads) {
    const RowPlace place = row_place(call.d, tile.first_row + r);
    const Coefficients c = load_coefficients(call, place.n, place.c, place.group);
    const GroupMeans means = load_means(call, place.group);
    rows[2 * r] = float4{c.statistics.mean_hi, c.statistics.mean_lo, c.scale, c.bias};
    rows[2 * r + 1] = float4{c.statistics.rstd, c.weight, means.dz, means.dz_normalized};
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const std::uint32_t vector = v * kTileThreads + thread;
    if (vector >= tile.count) break;
    const float4* row = rows + 2 * tile.row_of(tiles, vector);
    const float4 a = row[0], b = row[1];
    const Coefficients c{{a.x, a.y, b.x}, b.y, a.z, a.w};
    float values[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
      values[j] = input_gradient(c.weight, g.dz, g.normalized, {b.z, b.w}, c.statistics.rstd);
    }
    store(dx + v * kTileThreads * W, values, true, W);
  }
}

// The same for any S and any address.
template <class T, class U, Activation A>
__global__ void __launch_bounds__(kTileThreads, 2)
    input_gradient_contiguous(const BackwardCall call, const Sweep sweep) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kTile = kTileThreads * kTileVectors * W;
  const std::int64_t total = call.d.N * call.d.C * call.d.S, S = call.d.S;
  const std::int64_t tile = sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const std::int64_t begin = tile * kTile;
  const bool aligned = is_aligned(call.x, 16), aligned_dy = is_aligned(call.dy, 16),
             aligned_dx = is_aligned(call.dx, 16);

  Packed<T, W> raw_x[kTileVectors];
  Packed<U, W> raw_dy[kTileVectors];
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const int offset = (v * kTileThreads + static_cast<int>(threadIdx.x)) * W;
    const std::int64_t valid = total - begin - offset;
    const T* x = static_cast<const T*>(call.x) + begin + offset;
    const U* dy = static_cast<const U*>(call.dy) + begin + offset;
    raw_x[v] = aligned && valid >= W ? load<T, W>(x) : load_some<T, W>(x, valid);
    raw_dy[v] = aligned_dy && valid >= W ? load<U, W>(dy) : load_some<U, W>(dy, valid);
  }
  release_next();
  const TilePlace first = tile_place(begin, S);
  wait_for_previous();

  Coefficients c{};
  GroupMeans means{};
  const auto enter = [&](std::int64_t row) {
    const RowPlace place = row_place(call.d, row);
    c = load_coefficients(call, place.n, place.c, place.group);
    means = load_means(call, place.group);
  };
  const auto gradient = [&](float x, float dy) {
    const Gradient g = backward_value<A>(x, dy, c);
    return input_gradient(c.weight, g.dz, g.normalized, means, c.statistics.rstd);
  };
  const bool one_channel = first.position + kTile <= S;
  if (one_channel) enter(first.row);
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const int offset = (v * kTileThreads + static_cast<int>(threadIdx.x)) * W;
    const std::int64_t valid = total - begin - offset;
    if (valid <= 0) continue;
    float dx[W];
    if (one_channel) {
#pragma unroll
      for (int j = 0; j < W; ++j) dx[j] = gradient(raw_x[v][j], raw_dy[v][j]);
    } else {
      TilePlace place = advance(first, offset, S);
      enter(place.row);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (place.position == S && j < valid) {
          place = {place.row + 1, 0};
          enter(place.row);
        }
        ++place.position;
        dx[j] = gradient(raw_x[v][j], raw_dy[v][j]);
      }
    }
    store(static_cast<T*>(call.dx) + begin + offset, dx, aligned_dx && valid >= W, valid);
  }
}

}  // namespace

template <Activation A>
cudaError_t sums_contiguous_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      return call.d.S <= kLeafRow
                 ? launch(sums_contiguous<T, U, A, 1>, plan.sums, queue, call, plan.sum_runs)
                 : launch(sums_contiguous<T, U, A, kMicroBatchRows>, plan.sums, queue, call, plan.sum_runs);
    });
  });
}

template <Activation A>
cudaError_t input_gradient_contiguous_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      constexpr int W = 16 / sizeof(T);
      if (tiles_serve(call.d, W) && is_aligned(call.x, 16) && is_aligned(call.dy, 16) &&
          is_aligned(call.dx, 16))
        return launch(input_gradient_tiles<T, U, A>, plan.input, queue, call, make_tiles(call.d, W),
                      plan.gradient);
      return launch(input_gradient_contiguous<T, U, A>, plan.input, queue, call, plan.gradient);
    });
  });
}

}  // namespace steadynorm::cuda
