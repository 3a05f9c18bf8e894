// SPDX-License-Identifier: Apache-2.0
// Forward, contiguous: a warp per leaf for the statistics; a flat element-wise sweep to apply them.
#include "core/dispatch.h"
#include "cuda/contiguous.cuh"

namespace steadynorm::cuda {

namespace {

// Shared memory: a node per warp, then each warp's binary counter.
template <class T, int kRows>
__global__ void __launch_bounds__(kLeafWarps* kLanes, 2)
    statistics_contiguous(const ForwardCall call, const Runs runs, const Hint hint) {
  Node* const nodes = shared_memory<Node>();
  release_next();
  wait_for_previous();
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const std::int64_t units = contiguous_units(call.d);
  const std::int64_t first_unit = std::int64_t{blockIdx.x} * (runs.warps / runs.runs_per_unit);
  const std::int64_t index = first_unit + warp / runs.runs_per_unit;
  // Inside a unit positions fit an int: a unit is at most S / 64 positions.
  const int run_length = static_cast<int>(runs.leaves_per_run) * kContiguousLeaf;
  const int run_begin = warp % runs.runs_per_unit * run_length;

  Node node{};
  int unit_length = 0;
  if (index < units) {
    const ContiguousUnit unit = contiguous_unit(call.d, index);
    unit_length = static_cast<int>(unit.length);
    const T* x = static_cast<const T*>(call.x) + unit.begin;
    Node* levels = nodes + runs.warps + warp * runs.levels;
    int leaf = 0;
#pragma unroll 1
    for (; leaf < runs.leaves_per_run; ++leaf) {
      const int begin = run_begin + leaf * kContiguousLeaf;
      const int length = present(begin, begin + kContiguousLeaf, unit_length);
      if (length == 0) break;
      node = contiguous_leaf<T, kRows>(x + begin, length, lane, make_policy(hint));
      if (runs.leaves_per_run > 1 && lane == 0)
        push_node(levels, 1, leaf, with_count(node, length), kContiguousLeaf);
    }
    if (runs.leaves_per_run > 1 && lane == 0 && leaf > 0)
      node = without_count(root_of_nodes(levels, 1, leaf, kContiguousLeaf,
                                         present(run_begin, run_begin + run_length, unit_length)));
  }
  if (runs.runs_per_unit == 1) {
    if (index < units && lane == 0) call.roots[contiguous_unit(call.d, index).root] = node;
    return;
  }

  if (lane == 0) nodes[warp] = node;
  __syncthreads();
  if (lane == 0 && warp % runs.runs_per_unit == 0 && index < units) {
    Moments run[kLeafWarps];
#pragma unroll
    for (int r = 0; r < kLeafWarps; ++r) {
      run[r] = Moments{};
      if (r < runs.runs_per_unit)
        run[r] = with_count(nodes[warp + r], present(r * run_length, (r + 1) * run_length, unit_length));
    }
#pragma unroll
    for (int step = 1; step < kLeafWarps; step *= 2)
#pragma unroll
      for (int r = 0; r < kLeafWarps; r += 2 * step) run[r] = merge(run[r], run[r + step]);
    call.roots[contiguous_unit(call.d, index).root] = without_count(run[0]);
  }
}

template <class T, Activation A>
__global__ void __launch_bounds__(kTileThreads)
    apply_contiguous(const ForwardCall call, const Sweep sweep, const Hint store_hint) {
  constexpr int W = 16 / sizeof(T);
  constexpr int kTile = kTileThreads * kTileVectors * W;
  const std::int64_t total = call.d.N * call.d.C * call.d.S, S = call.d.S;
  const std::int64_t tile = sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const std::int64_t begin = tile * kTile;
  const T* x = static_cast<const T*>(call.x) + begin;
  const bool aligned = is_aligned(call.x, 16), aligned_y = is_aligned(call.y, kTileVectors * 8);
  const std::uint64_t load_policy = make_policy(Hint::normal), store_policy = make_policy(store_hint);

  // x was complete before the statistics began: it need not wait.
  Packed<T, W> raw[kTileVectors];
#pragma unroll
  for (int v = 0; v < kTileVectors; ++v) {
    const int offset = (v * kTileThreads + static_cast<int>(threadIdx.x)) * W;
    const std::int64_t valid = total - begin - offset;
    raw[v] = aligned && valid >= W ? load<T, W>(x + offset, load_policy) : load_some<T, W>(x + offset, valid);
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
    store<W>(call.y, call.y_type, begin + offset, y, aligned_y && valid >= W, valid, store_policy);
  }
}

}  // namespace

cudaError_t launch_statistics_contiguous(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const Hint hint = plan.sticky ? Hint::last : Hint::normal;
  const bool short_leaves = call.d.tree.unit_channels * call.d.tree.unit_positions <= kLeafRow;
  return dispatch(call.x_type, [&](auto type) {
    using T = typename decltype(type)::type;
    return short_leaves ? launch(statistics_contiguous<T, 1>, plan.statistics, queue, call, plan.runs, hint)
                        : launch(statistics_contiguous<T, kMicroBatchRows>, plan.statistics, queue, call,
                                 plan.runs, hint);
  });
}

cudaError_t launch_apply_contiguous(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      return launch(apply_contiguous<T, activation()>, plan.write, queue, call, plan.apply, Hint::normal);
    });
  });
}

}  // namespace steadynorm::cuda
