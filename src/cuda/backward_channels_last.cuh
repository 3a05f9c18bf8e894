// SPDX-License-Identifier: Apache-2.0
// Backward, channels_last: a thread owns four channels and walks along the volume, in both sweeps. One source
// file per activation instantiates these, so that they compile side by side.
#pragma once

#include "core/dispatch.h"
#include "cuda/channels_last.cuh"

namespace steadynorm::cuda {

namespace {

constexpr int kGradientRows = 4;  // rows of x and dy that a thread of the dx sweep holds at a time

// Blocks on an SM that the sums kernel is compiled for: two, of 128 registers a thread, where that does not
// spill. One block has 32 KB of x and dy in flight, 48 KB or more where one of them is fp32. Not yet
// measured.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // fp32 operations in pairs take more registers
template <class T, class U>
constexpr int kSumBlocks = 1;
#else
template <class T, class U>
constexpr int kSumBlocks = sizeof(T) + sizeof(U) == 4 ? 2 : 1;
#endif

// The sums of a leaf of `rows` positions for each of a thread's channels: micro-batches merged in order.
template <class T, class U, Activation A>
__device__ __forceinline__ void channels_last_leaf_sums(ChannelSums (&leaf)[kBackwardWidth], const T* x,
                                                        const U* dy, std::int64_t pitch, int rows,
                                                        int channels, const Coefficients (&c)[kBackwardWidth],
                                                        bool aligned_x, bool aligned_dy,
                                                        std::uint64_t policy) {
  constexpr int W = kBackwardWidth;
#pragma unroll 1
  for (int first = 0; first < rows; first += kMicroBatchRows) {
    const int count = rows - first;
    Packed<T, W> raw_x[kMicroBatchRows];
    Packed<U, W> raw_dy[kMicroBatchRows];
    load_rows<T, W, kMicroBatchRows>(raw_x, x + first * pitch, pitch, count, channels, aligned_x, policy);
    load_rows<U, W, kMicroBatchRows>(raw_dy, dy + first * pitch, pitch, count, channels, aligned_dy, policy);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Pair sums = tree_sum<kMicroBatchRows>([&](int v) {
        const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c[j]);
        return v < count ? Pair{g.dz, g.dz * g.normalized} : Pair{0.0f, 0.0f};
      });
      const ChannelSums node{sums.first, sums.second};
      leaf[j] = first == 0 ? node : merge(leaf[j], node);
    }
  }
}

// Shared memory: nodes[lanes][slab], then the binary counter over rounds, levels[][slab].
template <class T, class U, Activation A>
__global__ void __launch_bounds__(kColumnThreads, kSumBlocks<T, U>)
    sums_channels_last(const BackwardCall call, const Columns p, const Hint hint) {
  constexpr int W = kBackwardWidth;
  ChannelSums* const nodes = shared_memory<ChannelSums>();
  release_next();
  wait_for_previous();
  const std::uint64_t policy = make_policy(hint);
  const Tree& tree = call.d.tree;
  const SlabUnit place = slab_unit(call.d, p, blockIdx.x);
  const int slab = p.columns * W;
  const int channels = static_cast<int>(place.channel_end - place.channel_begin);
  const std::int64_t C = call.d.C, begin = tree.unit_begin(place.unit);
  // Inside a unit positions fit an int: a unit is at most S / 256 positions.
  const int leaf_positions = static_cast<int>(tree.leaf_positions),
            round_positions = p.lanes * leaf_positions;
  const int length = static_cast<int>(tree.unit_end(place.unit) - begin);
  const int threads = p.columns * p.lanes;
  const int thread = static_cast<int>(threadIdx.y) * p.columns + static_cast<int>(threadIdx.x);
  const int own = channels - static_cast<int>(threadIdx.x) * W;
  const bool aligned_x = p.vectors && own >= W && is_aligned(call.x, kAlignment<T, W>);
  const bool aligned_dy = p.vectors && own >= W && is_aligned(call.dy, kAlignment<U, W>);
  const std::int64_t channel = place.channel_begin + threadIdx.x * W;
  const std::int64_t offset = (place.n * call.d.S + begin) * C + channel;
  ChannelSums* levels = nodes + p.lanes * slab;

  Coefficients c[W];
  load_coefficients<W>(call, place.n, channel, place.channel_end, c, [](int, std::int64_t) {});
  int round = 0;
  for (; round * round_positions < length; ++round) {
    const int round_begin = round * round_positions;
    const int leaf_begin = round_begin + static_cast<int>(threadIdx.y) * leaf_positions;
    ChannelSums leaf[W]{};
    if (own > 0)
      channels_last_leaf_sums<T, U, A>(leaf, static_cast<const T*>(call.x) + offset + leaf_begin * C,
                                       static_cast<const U*>(call.dy) + offset + leaf_begin * C, C,
                                       present(leaf_begin, leaf_begin + leaf_positions, length), own, c,
                                       aligned_x, aligned_dy, policy);
    if (round > 0) __syncthreads();  // the counter has read nodes[0]
#pragma unroll
    for (int j = 0; j < W; ++j) nodes[threadIdx.y * slab + j * p.columns + threadIdx.x] = leaf[j];

    const int there =
        (present(round_begin, round_begin + round_positions, length) + leaf_positions - 1) / leaf_positions;
    for (int step = 1; step < p.lanes; step *= 2) {
      __syncthreads();
      const int work = p.lanes / (2 * step) * slab;
      for (int i = thread; i < work; i += threads) {
        const int pair = i / slab, column = i - pair * slab, left = pair * 2 * step;
        ChannelSums& node = nodes[left * slab + column];
        if (left + step < there) node = merge(node, nodes[(left + step) * slab + column]);
      }
    }
    __syncthreads();
    if (p.levels > 0)
      for (int column = thread; column < slab; column += threads)
        push_node(levels + column, slab, round, nodes[column]);
  }

  if (p.levels > 0) {  // each thread reads the columns that it has pushed, and no one else's
    for (int column = thread; column < slab; column += threads)
      nodes[column] = root_of_nodes(levels + column, slab, round);
    __syncthreads();
  }
  for (int i = thread; i < channels; i += threads) {
    const ChannelSums sums = nodes[column_of(p, i)];
    call.partials[(place.n * tree.spatial_units + place.unit) * C + place.channel_begin + i] =
        float2{static_cast<float>(sums.dz), static_cast<float>(sums.dz_normalized)};
  }
}

template <class T, class U, Activation A>
__global__ void __launch_bounds__(kColumnThreads, 2)
    input_gradient_channels_last(const BackwardCall call, const Sweep sweep, const bool vectors,
                                 const Hint store_hint) {
  constexpr int W = kBackwardWidth;
  const SweepPlace at = sweep_place(call.d, sweep, W);
  if (at.channels <= 0) {
    release_next();
    wait_for_previous();
    return;
  }
  const bool whole = vectors && at.channels >= W;
  const bool aligned_x = whole && is_aligned(call.x, kAlignment<T, W>),
             aligned_dx = whole && is_aligned(call.dx, kAlignment<T, W>);
  const bool aligned_dy = whole && is_aligned(call.dy, kAlignment<U, W>);
  const std::uint64_t load_policy = make_policy(Hint::normal), store_policy = make_policy(store_hint);
  const std::int64_t pitch = call.d.C * sweep.lanes;
  const T* x = static_cast<const T*>(call.x) + at.offset;
  const U* dy = static_cast<const U*>(call.dy) + at.offset;

  release_next();
  wait_for_previous();
  Coefficients c[W];
  GroupMeans means[W];
  load_coefficients<W>(call, at.n, at.channel, at.channel + at.channels, c,
                       [&](int j, std::int64_t group) { means[j] = load_means(call, group); });
#pragma unroll 1
  for (int first = 0; first < at.rows; first += kGradientRows) {
    Packed<T, W> raw_x[kGradientRows];
    Packed<U, W> raw_dy[kGradientRows];
    load_rows<T, W, kGradientRows>(raw_x, x + first * pitch, pitch, at.rows - first, at.channels, aligned_x,
                                   load_policy);
    load_rows<U, W, kGradientRows>(raw_dy, dy + first * pitch, pitch, at.rows - first, at.channels,
                                   aligned_dy, load_policy);
#pragma unroll
    for (int v = 0; v < kGradientRows; ++v) {
      if (first + v >= at.rows) break;
      float dx[W];
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c[j]);
        dx[j] = input_gradient(c[j].weight, g.dz, g.normalized, means[j], c[j].statistics.rstd);
      }
      store(static_cast<T*>(call.dx) + at.offset + (first + v) * pitch, dx, aligned_dx, at.channels,
            store_policy);
    }
  }
}

}  // namespace

template <Activation A>
cudaError_t sums_channels_last_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  const Hint hint = plan.sticky ? Hint::last : Hint::normal;
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      return launch(sums_channels_last<T, U, A>, plan.sums, queue, call, plan.sum_columns, hint);
    });
  });
}

template <Activation A>
cudaError_t input_gradient_channels_last_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      const bool vectors = call.d.C % kBackwardWidth == 0;
      return launch(input_gradient_channels_last<T, U, A>, plan.input, queue, call, plan.gradient, vectors,
                    Hint::normal);
    });
  });
}

}  // namespace steadynorm::cuda
