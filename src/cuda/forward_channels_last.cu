// SPDX-License-Identifier: Apache-2.0
// Forward, channels_last: a thread owns four channels and walks along the volume, in both sweeps.
#include "core/dispatch.h"
#include "cuda/channels_last.cuh"

namespace steadynorm::cuda {

namespace {

// The share of micro-batch i in a leaf's first i + 1, and what it weighs the squared distance of the means
// by: merge()'s own values. The first meets a node of zeros, which leaves it as it is.
struct Share {
  double share, weight;
};

constexpr Share share_of(int i) {
  const double share = 1.0 / (i + 1);
  return {share, i == 0 ? 0.0 : kMicroBatchRows * i * share};
}

__constant__ constexpr Share kShares[] = {share_of(0), share_of(1), share_of(2), share_of(3),
                                          share_of(4), share_of(5), share_of(6), share_of(7)};
static_assert(sizeof kShares / sizeof kShares[0] == kChannelsLastLeafPositions / kMicroBatchRows);

// Moments of a leaf of `rows` positions for each of a thread's channels: micro-batches merged in order.
template <class T>
__device__ __forceinline__ void channels_last_leaf(Node (&leaf)[kColumnWidth], const T* x, std::int64_t pitch,
                                                   int rows, int channels, bool aligned,
                                                   std::uint64_t policy) {
  constexpr int W = kColumnWidth;
  const int whole = aligned ? rows / kMicroBatchRows * kMicroBatchRows : 0;
  int first = 0;
#pragma unroll 1
  while (first < rows) {
#pragma unroll 1
    for (; first < whole; first += kMicroBatchRows, x += kMicroBatchRows * pitch) {
      Packed<T, W> raw[kMicroBatchRows];
      load_rows(raw, x, pitch, policy);
      Deviations s[W];
      bool reliable = true;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        s[j] = deviations<true>([&](int v) { return raw[v][j]; }, [](int) { return true; }, kMicroBatchRows);
        reliable = reliable && is_reliable(s[j].q);
      }
      if (!reliable) {
        // Constant values are common (the background of a volume): d and q are 0 and exact, and so is the
        // node they give.
        reliable = true;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          bool constant = s[j].q == 0;
#pragma unroll
          for (int v = 0; v < kMicroBatchRows; ++v) constant = constant && raw[v][j] == s[j].m;
          reliable = reliable && (constant || is_reliable(s[j].q));
        }
        if (!reliable) break;  // to what follows, and back
      }
      const Share share = kShares[first / kMicroBatchRows];
#pragma unroll
      for (int j = 0; j < W; ++j) {
        const Node node = without_count(micro_batch_moments(kMicroBatchRows, s[j].m, s[j].d, s[j].q));
        const double delta = node.mean - leaf[j].mean;
        leaf[j] = {leaf[j].mean + delta * share.share, (leaf[j].m2 + node.m2) + delta * delta * share.weight};
      }
    }
    if (first >= rows) return;
    // One that is ragged, misaligned or unreliable: a channel at a time.
    const int count = rows - first < kMicroBatchRows ? rows - first : kMicroBatchRows;
#pragma unroll 1
    for (int j = 0; j < W; ++j) {
      Node node = leaf[0];
      if (j < channels) {
        float values[kMicroBatchRows];
        load_column(values, x + j, pitch, count);
        const Node next = micro_batch<kMicroBatchRows, 1, false>(
            [&](int v, int) { return values[v]; }, [&](int v, int) { return to_fp32(x[v * pitch + j]); },
            [&](int v, int) { return v < count; }, count);
        node = without_count(merge(with_count(node, first), with_count(next, count)));
      }
      rotate(leaf, node);
    }
    first += kMicroBatchRows, x += kMicroBatchRows * pitch;
  }
}

// The tree over the channels of each channel unit, over roots[slab]: whole units in aligned runs of lanes, a
// power of two for each, and the runs of a warp's length that are left once more. `positions` of each
// channel.
template <class Done>
__device__ __forceinline__ void merge_channels(Node* roots, int units, int members, double positions,
                                               const Done& done) {
  int width = power_of_two_from(members), stride = 1;  // lanes of a unit; channels of a lane
  for (;;) {
    const int lanes = width < kLanes ? width : kLanes;
    const int shift = count_bits(static_cast<unsigned>(width) - 1u), work = units * width;
    for (int first = 0; first < work; first += static_cast<int>(blockDim.x)) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int unit = i >> shift, index = (i & (width - 1)) * stride;
      Node node{};
      if (unit < units && index < members) node = roots[unit * members + index];
      for (int step = 1; step < lanes; step *= 2) {
        const Node other = shuffle_down(node, step);
        const int rest = members - index - step * stride, full = step * stride;
        if (rest >= full)
          node = merge_equal(node, other, positions * full * 0.5);
        else if (rest > 0)
          node =
              without_count(merge(with_count(node, positions * full), with_count(other, positions * rest)));
      }
      if (unit < units && (i & (lanes - 1)) == 0 && index < members) {
        if (width <= kLanes)
          done(unit, node);
        else
          roots[unit * members + index] = node;
      }
    }
    if (width <= kLanes) return;
    width /= kLanes;
    stride *= kLanes;
    __syncthreads();
  }
}

// Shared memory: see reduce_leaves, then the roots of the channels.
template <class T>
__global__ void __launch_bounds__(kReductionBound)
    statistics_channels_last(const ForwardCall call, const Columns p, const Hint hint) {
  Node* const shared = shared_memory<Node>();
  release_next();
  wait_for_previous();
  const std::uint64_t policy = make_policy(hint);
  const Tree& tree = call.d.tree;
  const SlabUnit place = slab_unit(call.d, p, blockIdx.x);
  const ColumnPlace at = column_place(p);
  const int channels = static_cast<int>(place.channel_end - place.channel_begin);  // of the block
  const int own = channels - at.column * kColumnWidth;  // of this thread, if positive
  const std::int64_t C = call.d.C, begin = tree.unit_begin(place.unit);
  // Inside a unit positions fit an int: a unit is at most S / 256 positions.
  const int leaf_positions = static_cast<int>(tree.leaf_positions);
  const int length = static_cast<int>(tree.unit_end(place.unit) - begin);
  const bool aligned = p.vectors && own >= kColumnWidth && is_aligned(call.x, kAlignment<T, kColumnWidth>);
  const T* x = static_cast<const T*>(call.x) + (place.n * call.d.S + begin) * C + place.channel_begin +
               at.column * kColumnWidth;
  Node* const roots = shared + ((p.rounds > 1 ? 2 : 1) * p.lanes + p.levels) * p.columns * kColumnWidth;
  reduce_leaves(
      p, shared, leaf_positions, length, at, own > 0 && at.lane < p.lanes,
      [&](int leaf_begin, int rows, Node(&leaf)[kColumnWidth]) {
        channels_last_leaf<T>(leaf, x + leaf_begin * C, C, rows, own, aligned, policy);
      },
      [&](int channel, const Node& node) { roots[channel] = node; });
  __syncthreads();

  const std::int64_t first = quotient(place.channel_begin, call.d.D);
  const int members = p.by_channel_unit ? channels : static_cast<int>(call.d.D);
  const std::int64_t unit =
      p.by_channel_unit ? quotient(place.channel_begin - first * call.d.D, tree.unit_channels) : 0;
  Node* const out =
      call.roots + (place.n * call.d.G + first) * tree.roots() + place.unit * tree.channel_units + unit;
  merge_channels(roots, channels / members, members, static_cast<double>(length),
                 [&](int group, const Node& node) { out[group * tree.roots()] = node; });
}

template <Activation A, class T, class Y>
__device__ __forceinline__ void write_row(Y* y, const Packed<T, kColumnWidth>& raw,
                                          const Coefficients (&c)[kColumnWidth], int channels, bool aligned,
                                          std::uint64_t policy) {
  float values[kColumnWidth];
#pragma unroll
  for (int j = 0; j < kColumnWidth; ++j) values[j] = forward_value<A>(raw[j], c[j]);
  store(y, values, aligned, channels, policy);
}

template <class T, Activation A>
__global__ void __launch_bounds__(kColumnThreads, 4)
    apply_channels_last(const ForwardCall call, const Sweep sweep, const bool vectors,
                        const Hint store_hint) {
  constexpr int W = kColumnWidth;
  ForwardCoefficients* const shared = shared_memory<ForwardCoefficients>();
  const SweepPlace at = sweep_place(call.d, sweep);
  const bool aligned = vectors && at.channels >= W && is_aligned(call.x, kAlignment<T, W>) &&
                       is_aligned(call.y, call.y_type == DType::float32 ? 16 : 8);
  const std::uint64_t load_policy = make_policy(Hint::normal), store_policy = make_policy(store_hint);
  const std::int64_t pitch = call.d.C * sweep.lanes;  // between two rows of a thread
  const T* x = static_cast<const T*>(call.x) + at.offset;

  Packed<T, W> raw[kSweepRows];
  int batches = aligned ? at.rows / kSweepRows : 0;
  if (batches > 0) load_rows(raw, x, pitch, load_policy);
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
    for (; batches > 0; rest -= kSweepRows) {
#pragma unroll
      for (int v = 0; v < kSweepRows; ++v, y += pitch) write_row<A>(y, raw[v], c, W, true, store_policy);
      x += kSweepRows * pitch;
      if (--batches > 0) load_rows(raw, x, pitch, load_policy);
    }
#pragma unroll 1
    for (; rest > 0; --rest, x += pitch, y += pitch)
      write_row<A>(y, load_row(x, at.channels, aligned, load_policy), c, at.channels, aligned, store_policy);
  });
}

}  // namespace

cudaError_t launch_statistics_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const Hint hint = plan.sticky ? Hint::last : Hint::normal;
  return dispatch(call.x_type, [&](auto type) {
    using T = typename decltype(type)::type;
    return launch(statistics_channels_last<T>, plan.statistics, queue, call, plan.columns, hint);
  });
}

cudaError_t launch_apply_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      const bool vectors = call.d.C % kColumnWidth == 0;
      return launch(apply_channels_last<T, activation()>, plan.write, queue, call, plan.apply, vectors,
                    Hint::normal);
    });
  });
}

}  // namespace steadynorm::cuda
