// SPDX-License-Identifier: Apache-2.0
// Backward, channels_last: a thread owns four channels and walks along the volume, in both sweeps. One source
// file per activation instantiates these, so that they compile side by side.
#pragma once

#include "core/dispatch.h"
#include "cuda/channels_last.cuh"

namespace steadynorm::cuda {

namespace {

// A micro-batch of each of a thread's channels.
template <class T, class U>
struct GradientBatch {
  Packed<T, kColumnWidth> x[kMicroBatchRows];
  Packed<U, kColumnWidth> dy[kMicroBatchRows];
  bool loaded = false;

  __device__ __forceinline__ void load(const T* from_x, const U* from_dy, std::int64_t pitch) {
    load_rows(x, from_x, pitch);
    load_rows(dy, from_dy, pitch);
  }
};

// The sums of a leaf of `rows` positions for each of a thread's channels: micro-batches merged in order, of
// which the first may be loaded.
template <class T, class U, Activation A>
__device__ __forceinline__ void channels_last_leaf_sums(ChannelSums (&leaf)[kColumnWidth],
                                                        GradientBatch<T, U>& batch, const T* x, const U* dy,
                                                        std::int64_t pitch, int rows, int channels,
                                                        Coefficients (&c)[kColumnWidth], bool aligned) {
  constexpr int W = kColumnWidth;
  // The first is not added to zeros: it may be -0.
  const auto sum = [](const ChannelSums& before, int first, const Pair& sums) {
    const ChannelSums node{sums.first, sums.second};
    return first == 0 ? node : merge(before, node);
  };
  int first = 0;
  if (aligned) {
#pragma unroll 1
    for (; first + kMicroBatchRows <= rows; first += kMicroBatchRows) {
      if (!batch.loaded) batch.load(x, dy, pitch);
      batch.loaded = false;
      x += kMicroBatchRows * pitch, dy += kMicroBatchRows * pitch;
#pragma unroll
      for (int j = 0; j < W; ++j)
        leaf[j] = sum(leaf[j], first, tree_sum<kMicroBatchRows>([&](int v) {
                        const Gradient g = backward_value<A>(batch.x[v][j], batch.dy[v][j], c[j]);
                        return Pair{g.dz, g.dz * g.normalized};
                      }));
    }
  }
  // What is ragged or misaligned: a channel at a time.
#pragma unroll 1
  for (; first < rows;
       first += kMicroBatchRows, x += kMicroBatchRows * pitch, dy += kMicroBatchRows * pitch) {
    const int count = rows - first;
#pragma unroll 1
    for (int j = 0; j < W; ++j) {
      const Coefficients own = c[0];
      ChannelSums node = leaf[0];
      if (j < channels) {
        node = sum(node, first, tree_sum<kMicroBatchRows>([&](int v) {
                     if (v >= count) return Pair{0.0f, 0.0f};
                     const Gradient g =
                         backward_value<A>(to_fp32(x[v * pitch + j]), to_fp32(dy[v * pitch + j]), own);
                     return Pair{g.dz, g.dz * g.normalized};
                   }));
      }
      rotate(leaf, node);
      rotate(c, own);
    }
  }
}

// Shared memory: the nodes of the leaves; before that, the coefficients.
template <class T, class U, Activation A>
__global__ void __launch_bounds__(sums_threads(sizeof(T) + sizeof(U)))
    sums_channels_last(const BackwardCall call, const Columns p) {
  constexpr int W = kColumnWidth;
  BackwardCoefficients* const coefficients = shared_memory<BackwardCoefficients>();
  release_next();
  wait_for_previous();
  const Tree& tree = call.d.tree;
  const SlabUnit place = slab_unit(call.d, p, blockIdx.x);
  const ColumnPlace at = column_place(p);
  const int channels = static_cast<int>(place.channel_end - place.channel_begin);
  const int own = channels - at.column * W;
  const std::int64_t C = call.d.C, begin = tree.unit_begin(place.unit);
  // Inside a unit positions fit an int: a unit is at most S / 256 positions.
  const int leaf_positions = static_cast<int>(tree.leaf_positions);
  const int length = static_cast<int>(tree.unit_end(place.unit) - begin);
  const bool aligned =
      p.vectors && own >= W && is_aligned(call.x, kAlignment<T, W>) && is_aligned(call.dy, kAlignment<U, W>);
  const std::int64_t offset = (place.n * call.d.S + begin) * C + place.channel_begin + at.column * W;
  const T* const x = static_cast<const T*>(call.x) + offset;
  const U* const dy = static_cast<const U*>(call.dy) + offset;

  // The first values come while the coefficients are made.
  GradientBatch<T, U> batch;
  const int first = at.lane * leaf_positions;
  batch.loaded = aligned && at.lane < p.lanes && first + kMicroBatchRows <= length;
  if (batch.loaded) batch.load(x + first * C, dy + first * C, C);
  load_backward(call, place.n, place.channel_begin, p.columns, coefficients, false);
  __syncthreads();
  Coefficients c[W];
#pragma unroll
  for (int j = 0; j < W; ++j) c[j] = coefficients_of(coefficients[j * p.columns + at.column]);
  __syncthreads();

  float2* const out = call.partials + (place.n * tree.spatial_units + place.unit) * C + place.channel_begin;
  sum_leaves<W>(
      p, shared_memory<ChannelSums>(), leaf_positions, length, at, own > 0 && at.lane < p.lanes,
      [&](int leaf_begin, int rows, ChannelSums(&leaf)[W]) {
        channels_last_leaf_sums<T, U, A>(leaf, batch, x + leaf_begin * C, dy + leaf_begin * C, C, rows, own,
                                         c, aligned);
      },
      [&](int channel, const ChannelSums& sums) {
        if (channel < channels)
          out[channel] = float2{static_cast<float>(sums.dz), static_cast<float>(sums.dz_normalized)};
      });
}

template <Activation A, class T, class U>
__device__ __forceinline__ void write_gradient_row(T* dx, const Packed<T, kColumnWidth>& x,
                                                   const Packed<U, kColumnWidth>& dy,
                                                   const Coefficients (&c)[kColumnWidth],
                                                   const GroupMeans (&means)[kColumnWidth], int channels,
                                                   bool aligned) {
  float values[kColumnWidth];
#pragma unroll
  for (int j = 0; j < kColumnWidth; ++j) {
    const Gradient g = backward_value<A>(x[j], dy[j], c[j]);
    values[j] = input_gradient(c[j].weight, g.dz, g.normalized, means[j], c[j].statistics.rstd);
  }
  store(dx, values, aligned, channels);
}

template <class T, class U, Activation A>
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) + sizeof(U) == 4 ? 3 : 2)
    input_gradient_channels_last(const BackwardCall call, const Sweep sweep, const bool vectors) {
  constexpr int W = kColumnWidth;
  BackwardCoefficients* const shared = shared_memory<BackwardCoefficients>();
  const SweepPlace at = sweep_place(call.d, sweep);
  const bool aligned = vectors && at.channels >= W && is_aligned(call.x, kAlignment<T, W>) &&
                       is_aligned(call.dx, kAlignment<T, W>) && is_aligned(call.dy, kAlignment<U, W>);
  const std::int64_t pitch = call.d.C * sweep.lanes;
  const T* x = static_cast<const T*>(call.x) + at.offset;
  const U* dy = static_cast<const U*>(call.dy) + at.offset;
  T* dx = static_cast<T*>(call.dx) + at.offset;

  Packed<T, W> raw_x[kSweepRows];
  Packed<U, W> raw_dy[kSweepRows];
  int batches = aligned ? at.rows / kSweepRows : 0, rest = at.rows;
  const auto load_batch = [&] {
    load_rows(raw_x, x, pitch);
    load_rows(raw_dy, dy, pitch);
  };
  if (batches > 0) load_batch();
  release_next();
  wait_for_previous();
  load_backward(call, at.n, at.block_channel, sweep.columns, shared, true);
  __syncthreads();
  if (at.channels <= 0) return;
  Coefficients c[W];
  GroupMeans means[W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const BackwardCoefficients b = shared[j * sweep.columns + static_cast<int>(threadIdx.x)];
    c[j] = coefficients_of(b);
    means[j] = b.means;
  }

#pragma unroll 1
  for (; batches > 0; rest -= kSweepRows) {
#pragma unroll
    for (int v = 0; v < kSweepRows; ++v, dx += pitch)
      write_gradient_row<A>(dx, raw_x[v], raw_dy[v], c, means, W, true);
    x += kSweepRows * pitch, dy += kSweepRows * pitch;
    if (--batches > 0) load_batch();
  }
#pragma unroll 1
  for (; rest > 0; --rest, x += pitch, dy += pitch, dx += pitch)
    write_gradient_row<A>(dx, load_row(x, at.channels, aligned), load_row(dy, at.channels, aligned), c, means,
                          at.channels, aligned);
}

}  // namespace

template <Activation A>
cudaError_t sums_channels_last_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      return launch(sums_channels_last<T, U, A>, plan.sums, queue, call, plan.sum_columns);
    });
  });
}

template <Activation A>
cudaError_t input_gradient_channels_last_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      const bool vectors = call.d.C % kColumnWidth == 0;
      return launch(input_gradient_channels_last<T, U, A>, plan.input, queue, call, plan.gradient, vectors);
    });
  });
}

}  // namespace steadynorm::cuda
