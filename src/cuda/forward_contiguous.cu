// SPDX-License-Identifier: Apache-2.0
// Forward, contiguous: a warp per leaf for the statistics; a flat element-wise sweep to apply them.
#include "core/dispatch.h"
#include "cuda/contiguous.cuh"

namespace steadynorm::cuda {

namespace {

// Of an SM: 96 registers hold 64 values unpacked from 16 bits. A sum takes more.
template <class T, bool kSum>
constexpr int kLeafBlocks = kSum             ? 3
                            : sizeof(T) == 2 ? 5
                                             : 4;

// Every unit is a leaf of one full block.
template <class T, bool kSum>
__global__ void __launch_bounds__(kLeafWarps* kLanes, kLeafBlocks<T, kSum>)
    statistics_full_leaves(const ForwardCall call) {
  constexpr int kOfMicroBatch = kMicroBatchRows * kLaneWidth;
  release_next();
  wait_for_previous();
  const int lane = threadIdx.x % kLanes;
  const std::uint32_t unit = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  if (unit >= static_cast<std::uint32_t>(contiguous_units(call.d))) return;
  const auto x = source_of<T, kSum>(call) + std::int64_t{unit} * kLeafBlock;
  float pivot = 0;
  const PivotSums sums = add_block<T, kMicroBatchRows, true>(
      {}, pivot, true, x, kLeafBlock, lane, kOfMicroBatch, is_aligned(x, kAlignment<T, kLaneWidth>));
  const Node node =
      warp_tree(without_count(moments_of(sums, kOfMicroBatch, 1.0 / kOfMicroBatch, pivot)), kOfMicroBatch);
  if (lane == 0) call.roots[contiguous_unit(call.d, unit).root] = node;
}

// Shared memory: a node per warp.
template <class T, int kRows, bool kSum>
__global__ void __launch_bounds__(kLeafWarps* kLanes, kSum ? 3 : 4)
    statistics_contiguous(const ForwardCall call, const Runs runs) {
  Node* const nodes = shared_memory<Node>();
  release_next();
  wait_for_previous();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, leaf = warp % runs.leaves_per_unit;
  const std::int64_t index =
      std::int64_t{blockIdx.x} * (runs.warps / runs.leaves_per_unit) + warp / runs.leaves_per_unit;
  // Inside a unit positions fit an int: a unit is at most S / 64 positions.
  const int leaf_length = static_cast<int>(call.d.tree.leaf_positions * call.d.tree.unit_channels);
  const auto positions = [&](int first, int leaves, int length) {
    return present(first * leaf_length, (first + leaves) * leaf_length, length);
  };
  Node node{};
  int unit_length = 0;
  Node* root = nullptr;
  if (index < contiguous_units(call.d)) {
    const ContiguousUnit unit = contiguous_unit(call.d, index);
    unit_length = static_cast<int>(unit.length);
    root = call.roots + unit.root;
    const int length = positions(leaf, 1, unit_length);
    if (length > 0)
      node = contiguous_leaf<T, kRows>(source_of<T, kSum>(call) + (unit.begin + leaf * leaf_length), length,
                                       lane);
  }
  if (runs.leaves_per_unit > 1) {
    if (lane == 0) nodes[warp] = node;
    __syncthreads();
    if (leaf == 0 && lane == 0)
#pragma unroll 1
      for (int step = 1; step < runs.leaves_per_unit; step *= 2)
#pragma unroll 1
        for (int i = 0; i < runs.leaves_per_unit; i += 2 * step)
          nodes[warp + i] = without_count(
              merge(with_count(nodes[warp + i], positions(i, step, unit_length)),
                    with_count(nodes[warp + i + step], positions(i + step, step, unit_length))));
    if (leaf == 0 && lane == 0) node = nodes[warp];
  }
  if (root != nullptr && leaf == 0 && lane == 0) *root = node;
}

// Few roots a group, and few groups a tile: every block merges the roots of its groups itself, which saves a
// launch. A warp takes a group, a lane one of its items.
constexpr int kGroupsOfTile = 10;

struct Merging {
  int width;  // lanes that have items, a power of two
  int channel_shift;
};

__device__ __forceinline__ Statistics merged_roots(const ForwardCall& call, const Merging& merging,
                                                   std::int64_t group, int lane) {
  const Moments m = lane < merging.width ? load_root(call, group, lane, merging.channel_shift) : Moments{};
  return statistics_of(warp_tree(m, merging.width), call.eps);
}

// Shared memory: mean_hi, mean_lo, scale and bias of each row of the tile.
template <class T, Activation A, bool kMerges>
__global__ void __launch_bounds__(kTileThreads, kMerges ? 3 : 5)
    apply_tiles(const ForwardCall call, const Tiles tiles, const Sweep sweep, const Merging merging) {
  constexpr int W = 16 / sizeof(T);
  float4* const rows = shared_memory<float4>();
  const std::uint32_t thread = threadIdx.x;
  const Tile tile = tile_of(tiles, sweep);

  // x was complete before the statistics began: it need not wait.
  Packed<T, W> raw[kTileVectors];
  const T* x = static_cast<const T*>(call.x) + std::int64_t{tile.begin + thread} * W;
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v)
    if (v * kTileThreads + thread < tile.count) raw[v] = load<T, W>(x + v * kTileThreads * W);
  release_next();
  wait_for_previous();

  __shared__ Statistics groups[kMerges ? kGroupsOfTile : 1];
  const std::int64_t first_group = split(tile.first_row, call.d.by_D).quotient;
  if constexpr (kMerges) {
    const int count =
        static_cast<int>(split(tile.first_row + tile.rows - 1, call.d.by_D).quotient - first_group) + 1;
    const int lane = static_cast<int>(thread) % kLanes;
    for (int g = static_cast<int>(thread) / kLanes; g < count; g += kTileThreads / kLanes) {
      const Statistics s = merged_roots(call, merging, first_group + g, lane);
      if (lane != 0) continue;
      groups[g] = s;
      const std::int64_t row =
          (first_group + g) * call.d.D - tile.first_row;  // the block of its first value writes it
      if (row > 0 || (row == 0 && tile.skip == 0)) store_statistics(call, first_group + g, s);
    }
    __syncthreads();
  }
  for (std::uint32_t r = thread; r < tile.rows; r += kTileThreads) {
    const RowPlace place = row_place(call.d, tile.first_row + r);
    const Statistics s = kMerges ? groups[place.group - first_group] : load_statistics(call, place.group);
    const Coefficients c = load_coefficients(call, s, place.n, place.c);
    rows[r] = float4{c.statistics.mean_hi, c.statistics.mean_lo, c.scale, c.bias};
  }
  __syncthreads();
  with_type(call.y_type, [&](auto type) {
    using Y = typename decltype(type)::type;
    Y* y = static_cast<Y*>(call.y) + std::int64_t{tile.begin + thread} * W;
#pragma unroll
    for (int v = 0; v < kTileVectors; ++v) {
      const std::uint32_t vector = v * kTileThreads + thread;
      if (vector >= tile.count) break;
      const float4 row = rows[tile.row_of(tiles, vector)];
      const Coefficients c{{row.x, row.y, 0.0f}, 0.0f, row.z, row.w};
      float values[W];
#pragma unroll
      for (int j = 0; j < W; ++j) values[j] = forward_value<A>(raw[v][j], c);
      store(y + v * kTileThreads * W, values, true, W);
    }
  });
}

// The same for any S and any address.
template <class T, Activation A>
__global__ void __launch_bounds__(kTileThreads) apply_contiguous(const ForwardCall call, const Sweep sweep) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kTile = kTileThreads * kTileVectors * W;
  const std::int64_t total = call.d.N * call.d.C * call.d.S, S = call.d.S;
  const std::int64_t tile = sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const std::int64_t begin = tile * kTile;
  const T* x = static_cast<const T*>(call.x) + begin;
  const bool aligned = is_aligned(call.x, 16), aligned_y = is_aligned(call.y, 16);

  // x was complete before the statistics began: it need not wait.
  Packed<T, W> raw[kTileVectors];
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const int offset = (v * kTileThreads + static_cast<int>(threadIdx.x)) * W;
    const std::int64_t valid = total - begin - offset;
    raw[v] = aligned && valid >= W ? load<T, W>(x + offset) : load_some<T, W>(x + offset, valid);
  }
  release_next();
  const TilePlace first = tile_place(begin, S);
  wait_for_previous();

  const auto coefficients = [&](std::int64_t row) {
    const RowPlace place = row_place(call.d, row);
    return load_coefficients(call, place.n, place.c, place.group);
  };
  const bool one_channel = first.position + kTile <= S;
  Coefficients c{};
  if (one_channel) c = coefficients(first.row);
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const int offset = (v * kTileThreads + static_cast<int>(threadIdx.x)) * W;
    const std::int64_t valid = total - begin - offset;
    if (valid <= 0) continue;
    float y[W];
    if (one_channel) {
#pragma unroll
      for (int j = 0; j < W; ++j) y[j] = forward_value<A>(raw[v][j], c);
    } else {
      TilePlace place = advance(first, offset, S);
      c = coefficients(place.row);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        if (place.position == S && j < valid) {
          place = {place.row + 1, 0};
          c = coefficients(place.row);
        }
        ++place.position;
        y[j] = forward_value<A>(raw[v][j], c);
      }
    }
    store<W>(call.y, call.y_type, begin + offset, y, aligned_y && valid >= W, valid);
  }
}

int width_of(const ForwardCall& call) { return 16 / static_cast<int>(size_of(call.x_type)); }

bool has_tiles(const ForwardCall& call) {
  return tiles_serve(call.d, width_of(call)) && is_aligned(call.x, 16) && is_aligned(call.y, 16);
}

}  // namespace

// H200, 2026-11-30, bf16: 8.1 -> 7.2 us for 4 MiB (liger-e), 9.6 -> 8.4 for 1.7 MiB (monai-256), but 51 -> 64
// for 64 MiB (liger-c), where every block of many waits for its merges. In between not measured.
constexpr std::int64_t kMergingBytes = std::int64_t{16} << 20;

bool apply_merges_contiguous(const ForwardCall& call) {
  const auto bytes = call.d.N * call.d.C * call.d.S * static_cast<std::int64_t>(size_of(call.x_type));
  return bytes <= kMergingBytes && has_tiles(call) && padded_roots(call.d.tree) <= kLanes &&
         call.d.D * call.d.S * (kGroupsOfTile - 2) >= std::int64_t{kVectorsOfTile} * width_of(call);
}

cudaError_t launch_statistics_contiguous(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const bool short_leaves = call.d.tree.unit_channels * call.d.tree.unit_positions <= kLeafRow;
  return dispatch(call.x_type, [&](auto type) {
    return with_source(call, [&](auto sum) {
      using T = typename decltype(type)::type;
      constexpr bool kSum = decltype(sum)::value;
      if (plan.runs.full_leaves) return launch(statistics_full_leaves<T, kSum>, plan.statistics, queue, call);
      return short_leaves ? launch(statistics_contiguous<T, 1, kSum>, plan.statistics, queue, call, plan.runs)
                          : launch(statistics_contiguous<T, kMicroBatchRows, kSum>, plan.statistics, queue,
                                   call, plan.runs);
    });
  });
}

cudaError_t launch_apply_contiguous(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      if (has_tiles(call)) {
        const Tiles tiles = make_tiles(call.d, 16 / sizeof(T));
        const int lanes = power_of_two_from(padded_roots(call.d.tree));
        const Merging merging{lanes, channel_shift(call.d.tree)};
        return call.merge_roots ? launch(apply_tiles<T, activation(), true>, plan.write, queue, call, tiles,
                                         plan.apply, merging)
                                : launch(apply_tiles<T, activation(), false>, plan.write, queue, call, tiles,
                                         plan.apply, merging);
      }
      return launch(apply_contiguous<T, activation()>, plan.write, queue, call, plan.apply);
    });
  });
}

}  // namespace steadynorm::cuda
