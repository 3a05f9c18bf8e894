// SPDX-License-Identifier: Apache-2.0
// Forward, channels_last: a thread owns four channels and walks along the volume, in both sweeps.
#include "core/dispatch.h"
#include "cuda/channels_last.cuh"

namespace steadynorm::cuda {

namespace {

// One more full micro-batch: add_micro_batch's own bits, as 8 t is exact.
__device__ __forceinline__ PivotSums add_full(const PivotSums& before, double pivot, const Deviations& s) {
  const double t = static_cast<double>(s.m) - pivot, d = s.d;
  const double sum = fma(t, static_cast<double>(kMicroBatchRows), d);
  return {before.sum + sum, before.squares + (static_cast<double>(s.q) + t * (sum + d))};
}

// Whether a micro-batch's q is right: reliable, or 0 since all its values are the same (the background of a
// volume).
__device__ __forceinline__ bool is_exact(float q, bool constant) {
  return is_reliable(q) || (constant && q == 0);
}

// The sums of a leaf of `rows` positions for each of a thread's channels, around the unit's pivots.
template <class T, int W, class Source>
__device__ __forceinline__ void channels_last_leaf(PivotSums (&sums)[W], float (&pivot)[W], Source x,
                                                   std::int64_t pitch, int rows, int channels, bool aligned) {
  int first = aligned ? rows / kMicroBatchRows * kMicroBatchRows : 0;  // of what the vectors leave
  bool exact = true;
#pragma unroll 1
  for (int i = 0; i < first; i += kMicroBatchRows, x += kMicroBatchRows * pitch) {
    Packed<T, W> raw[kMicroBatchRows];
    load_rows(raw, x, pitch);
    Deviations s[W];
    bool reliable = true;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      s[j] = deviations<true>([&](int v) { return raw[v][j]; }, [](int) { return true; }, kMicroBatchRows);
      reliable = reliable & (s[j].q >= kLeastReliable);  // what overflows shows in the squares
      sums[j] = add_full(sums[j], pivot[j], s[j]);
    }
    if (!reliable) {
      const Packed<T, W> differences = different_bits(raw);
#pragma unroll
      for (int j = 0; j < W; ++j) exact = exact && is_exact(s[j].q, differences.is_zero(j));
    }
  }
#pragma unroll
  for (int j = 0; j < W; ++j) exact = exact && sums[j].squares <= kLargestFinite;
  if (!exact) {  // huge or tiny values: all again
    x -= first * pitch;
    first = 0;
#pragma unroll
    for (int j = 0; j < W; ++j) sums[j] = {};
  }
  // What is ragged or misaligned, a channel at a time; here an inexact micro-batch is summed in double.
#pragma unroll 1
  for (; first < rows; first += kMicroBatchRows, x += kMicroBatchRows * pitch) {
    const int count = rows - first < kMicroBatchRows ? rows - first : kMicroBatchRows;
#pragma unroll 1
    for (int j = 0; j < W; ++j) {
      PivotSums own = sums[0];
      const float own_pivot = pivot[0];
      if (j < channels) {
        float values[kMicroBatchRows];
        load_column(values, x + j, pitch, count);
        const auto value = [&](int v) { return values[v]; };
        const Deviations s = deviations<false>(
            value, [&](int v) { return v < count; }, count);
        bool constant = true;
        for (int v = 1; v < kMicroBatchRows; ++v)
          constant = constant && (v >= count || values[v] == values[0]);
        if (is_exact(s.q, constant)) {
          own = add_micro_batch(own, count, own_pivot, s.m, s.d, s.q);
        } else {
          const Node node =
              micro_batch_in_double<kMicroBatchRows, 1>([&](int v, int) { return to_fp32(x[v * pitch + j]); },
                                                        [&](int v, int) { return v < count; }, count);
          own = add_micro_batch(own, count, own_pivot, node.mean, 0.0, node.m2);
        }
      }
      rotate(sums, own);
      rotate(pivot, own_pivot);
    }
  }
}

// Threads of an SM that registers are for; a sum takes more of them.
template <int W, bool kSum>
constexpr int kStatisticsBound = !kSum    ? statistics_threads(W)
                                 : W == 8 ? threads_of_sm(384, 256)
                                 : W == 4 ? threads_of_sm(512, 448)
                                          : 640;

// Shared memory: the sums of the leaves, then the roots of the channels and their pivots, and the shares.
template <class T, int W, bool kSum>
__global__ void __launch_bounds__(kStatisticsBound<W, kSum>, 1)
    statistics_channels_last(const ForwardCall call, const Columns p) {
  PivotSums* const sums = shared_memory<PivotSums>();
  Node* const roots = reinterpret_cast<Node*>(sums + kUnitLeaves * leaf_pitch(p));
  release_next();
  wait_for_previous();
  const Tree& tree = call.d.tree;
  const SlabUnit place = slab_unit(call.d, p, blockIdx.x);
  const ColumnPlace at = column_place(p);
  const int own = static_cast<int>(place.channel_end - place.channel_begin) -
                  at.column * W;  // channels of this thread, if positive
  const std::int64_t C = call.d.C, begin = tree.unit_begin(place.unit);
  // Inside a unit positions fit an int: a unit is at most S / 256 positions.
  const int leaf_positions = static_cast<int>(tree.leaf_positions);
  const int length = static_cast<int>(tree.unit_end(place.unit) - begin);
  const auto all = source_of<T, kSum>(call);
  const bool aligned = p.vectors && own >= W && is_aligned(all, kAlignment<T, W>);
  const auto x = all + ((place.n * call.d.S + begin) * C + place.channel_begin + at.column * W);
  // The pivots are the unit's first values.
  float* const pivots = reinterpret_cast<float*>(roots + p.columns * W);
  double* const shares = reinterpret_cast<double*>(roots + p.columns * W) + (p.columns * W + 1) / 2;
  float pivot[W];
  {
    const Packed<T, W> row = load_row<W>(x, own, aligned);
    make_shares(shares, p.by_channel_unit ? static_cast<int>(place.channel_end - place.channel_begin)
                                          : static_cast<int>(call.d.D));
#pragma unroll
    for (int j = 0; j < W; ++j) {
      pivot[j] = row[j];
      if (at.lane == 0) pivots[at.column * W + j] = pivot[j];
    }
  }
  sum_leaves<W>(
      p, sums, leaf_positions, length, at, own > 0 && at.lane < p.lanes,
      [&](int leaf_begin, int rows, PivotSums(&leaf)[W]) {
        channels_last_leaf<T>(leaf, pivot, x + leaf_begin * C, C, rows, own, aligned);
      },
      [&](int channel, const PivotSums& of_channel) {
        roots[channel] = without_count(moments_of(of_channel, length, 1.0 / length, pivots[channel]));
      });
  __syncthreads();

  // Again, so that no register kept it through the sweep.
  const SlabUnit block = slab_unit(call.d, p, block_index());
  const std::int64_t first = quotient(block.channel_begin, call.d.D);
  const int channels = static_cast<int>(block.channel_end - block.channel_begin);
  const int members = p.by_channel_unit ? channels : static_cast<int>(call.d.D);
  const std::int64_t unit =
      p.by_channel_unit ? quotient(block.channel_begin - first * call.d.D, tree.unit_channels) : 0;
  Node* const out =
      call.roots + (block.n * call.d.G + first) * tree.roots() + block.unit * tree.channel_units + unit;
  merge_channels(
      roots, shares, channels / members, members, [&](int) { return length; },
      [&](int group, const Node& node) { out[group * tree.roots()] = node; });
}

template <Activation A, class T, class Y>
__device__ __forceinline__ void write_row(Y* y, const Packed<T, kColumnWidth>& raw,
                                          const Coefficients (&c)[kColumnWidth], int channels, bool aligned) {
  float values[kColumnWidth];
#pragma unroll
  for (int j = 0; j < kColumnWidth; ++j) values[j] = forward_value<A>(raw[j], c[j]);
  store(y, values, aligned, channels);
}

// kRows: that a thread loads before it uses the first.
template <class T, Activation A, int kRows>
__global__ void __launch_bounds__(kColumnThreads, 4)
    apply_channels_last(const ForwardCall call, const Sweep sweep, const bool vectors) {
  constexpr int W = kColumnWidth;
  ForwardCoefficients* const shared = shared_memory<ForwardCoefficients>();
  const SweepPlace at = sweep_place(call.d, sweep);
  const bool aligned = vectors && at.channels >= W && is_aligned(call.x, kAlignment<T, W>) &&
                       is_aligned(call.y, call.y_type == DType::float32 ? 16 : 8);
  const std::int64_t pitch = call.d.C * sweep.lanes;  // between two rows of a thread
  const T* x = static_cast<const T*>(call.x) + at.offset;

  Packed<T, W> raw[kRows];
  int batches = aligned ? at.rows / kRows : 0;
  if (batches > 0) load_rows(raw, x, pitch);
  release_next();
  wait_for_previous();
  const auto make = [&](int place, std::int64_t channel, std::int64_t group) {
    const Coefficients c = load_coefficients(call, at.n, channel, group);
    shared[place] = {c.statistics.mean_hi, c.statistics.mean_lo, c.scale, c.bias};
  };
  for_channels_of_block(call.d, at.n, at.block_channel, sweep.columns, make);
  __syncthreads();
  if (at.channels <= 0) return;
  Coefficients c[W];
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const ForwardCoefficients f = shared[j * sweep.columns + static_cast<int>(threadIdx.x)];
    c[j] = {{f.mean_hi, f.mean_lo, 0.0f}, 0.0f, f.scale, f.bias};
  }

  with_type(call.y, call.y_type, [&](auto* y) {
    y += at.offset;
    int rest = at.rows;
#pragma unroll 1
    for (; batches > 0; rest -= kRows) {
#pragma unroll
      for (int v = 0; v < kRows; ++v, y += pitch) write_row<A>(y, raw[v], c, W, true);
      x += kRows * pitch;
      if (--batches > 0) load_rows(raw, x, pitch);
    }
#pragma unroll 1
    for (; rest > 0; --rest, x += pitch, y += pitch)
      write_row<A>(y, load_row(x, at.channels, aligned), c, at.channels, aligned);
  });
}

}  // namespace

cudaError_t launch_statistics_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return with_source(call, [&](auto sum) {
      using T = typename decltype(type)::type;
      constexpr bool kSum = decltype(sum)::value;
      if constexpr (sizeof(T) == 2)
        if (plan.columns.width == 8)
          return launch(statistics_channels_last<T, 8, kSum>, plan.statistics, queue, call, plan.columns);
      return plan.columns.width == 4
                 ? launch(statistics_channels_last<T, 4, kSum>, plan.statistics, queue, call, plan.columns)
                 : launch(statistics_channels_last<T, 2, kSum>, plan.statistics, queue, call, plan.columns);
    });
  });
}

cudaError_t launch_apply_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      const bool vectors = call.d.C % kColumnWidth == 0;
      // H200, 2026-11-30: eight rows of 16-bit values fill memory better, where a thread has them; of fp32
      // they spill.
      if constexpr (sizeof(T) == 2)
        if (plan.apply.rows % (2 * kSweepRows) == 0)
          return launch(apply_channels_last<T, activation(), 2 * kSweepRows>, plan.write, queue, call,
                        plan.apply, vectors);
      return launch(apply_channels_last<T, activation(), kSweepRows>, plan.write, queue, call, plan.apply,
                    vectors);
    });
  });
}

}  // namespace steadynorm::cuda
