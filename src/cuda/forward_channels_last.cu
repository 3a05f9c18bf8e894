// SPDX-License-Identifier: Apache-2.0
// Forward, channels_last: a thread owns 16 bytes of channels and walks along the volume, in both sweeps.
#include "core/dispatch.h"
#include "cuda/channels_last.cuh"

namespace steadynorm::cuda {

namespace {

// Moments of a leaf of `rows` positions for each of a thread's channels: micro-batches merged in order.
template <class T, int W>
__device__ __forceinline__ void channels_last_leaf(Node (&leaf)[W], const T* x, std::int64_t pitch, int rows,
                                                   int channels, bool aligned, std::uint64_t policy) {
  Packed<T, W> raw[kMicroBatchRows];
  int first = 0;
  for (; first + kMicroBatchRows <= rows; first += kMicroBatchRows) {
    load_rows<T, W, kMicroBatchRows>(raw, x + first * pitch, pitch, kMicroBatchRows, channels, aligned,
                                     policy);
    const double before = first;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Node node = micro_batch<kMicroBatchRows, 1, true>(
          [&](int v, int) { return raw[v][j]; },
          [&](int v, int) { return to_fp32(x[(first + v) * pitch + j]); }, [](int, int) { return true; },
          kMicroBatchRows);
      leaf[j] = without_count(merge(with_count(leaf[j], before), with_count(node, kMicroBatchRows)));
    }
  }
  if (first >= rows) return;
  const int count = rows - first;
  load_rows<T, W, kMicroBatchRows>(raw, x + first * pitch, pitch, count, channels, aligned, policy);
  const double before = first;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    const Node node = micro_batch<kMicroBatchRows, 1, false>(
        [&](int v, int) { return raw[v][j]; },
        [&](int v, int) { return to_fp32(x[(first + v) * pitch + j]); },
        [&](int v, int) { return v < count; }, count);
    leaf[j] = without_count(merge(with_count(leaf[j], before), with_count(node, count)));
  }
}

// Shared memory: nodes[lanes][slab], then the binary counter over rounds, levels[][slab].
template <class T, int W>
__global__ void __launch_bounds__(kColumnThreads, 2)
    statistics_channels_last(const ForwardCall call, const Columns p, const Hint hint) {
  Node* const nodes = shared_memory<Node>();
  release_next();
  wait_for_previous();
  const std::uint64_t policy = make_policy(hint);
  const Tree& tree = call.d.tree;
  const SlabUnit place = slab_unit(call.d, p, blockIdx.x);
  const int slab = p.columns * W;                                                  // places in shared memory
  const int channels = static_cast<int>(place.channel_end - place.channel_begin);  // of which these are used
  const std::int64_t C = call.d.C, begin = tree.unit_begin(place.unit);
  // Inside a unit positions fit an int: a unit is at most S / 256 positions.
  const int leaf_positions = static_cast<int>(tree.leaf_positions),
            round_positions = p.lanes * leaf_positions;
  const int length = static_cast<int>(tree.unit_end(place.unit) - begin);
  const int threads = p.columns * p.lanes;
  const int thread = static_cast<int>(threadIdx.y) * p.columns + static_cast<int>(threadIdx.x);
  const int own = channels - static_cast<int>(threadIdx.x) * W;  // channels of this thread, if positive
  const bool aligned = p.vectors && own >= W && is_aligned(call.x, kAlignment<T, W>);
  const T* x = static_cast<const T*>(call.x) + (place.n * call.d.S + begin) * C + place.channel_begin +
               threadIdx.x * W;
  Node* levels = nodes + p.lanes * slab;

  int round = 0;
  for (; round * round_positions < length; ++round) {
    const int round_begin = round * round_positions;
    const int leaf_begin = round_begin + static_cast<int>(threadIdx.y) * leaf_positions;
    Node leaf[W]{};
    if (own > 0)
      channels_last_leaf<T, W>(leaf, x + leaf_begin * C, C,
                               present(leaf_begin, leaf_begin + leaf_positions, length), own, aligned,
                               policy);
    if (round > 0) __syncthreads();  // the counter has read nodes[0]
#pragma unroll
    for (int j = 0; j < W; ++j) nodes[threadIdx.y * slab + j * p.columns + threadIdx.x] = leaf[j];

    for (int step = 1; step < p.lanes; step *= 2) {
      __syncthreads();
      const int work = p.lanes / (2 * step) * slab;
      for (int i = thread; i < work; i += threads) {
        const int pair = i / slab, column = i - pair * slab, left = pair * 2 * step, right = left + step;
        const int from = round_begin + left * leaf_positions, middle = from + step * leaf_positions;
        const double there = present(middle, middle + step * leaf_positions, length);
        const Moments a = with_count(nodes[left * slab + column], present(from, middle, length));
        nodes[left * slab + column] =
            without_count(merge(a, with_count(nodes[right * slab + column], there)));
      }
    }
    __syncthreads();
    if (p.levels > 0) {
      const double there = present(round_begin, round_begin + round_positions, length);
      for (int column = thread; column < slab; column += threads)
        push_node(levels + column, slab, round, with_count(nodes[column], there), round_positions);
    }
  }
  if (p.levels > 0) {  // each thread reads the columns that it has pushed, and no one else's
    for (int column = thread; column < slab; column += threads)
      nodes[column] = without_count(root_of_nodes(levels + column, slab, round, round_positions, length));
    __syncthreads();
  }

  // The channels of each channel unit, as an aligned binary tree.
  const double rows = length;
  for (int step = 1; step < tree.unit_channels; step *= 2) {
    for (int c = thread; c < channels; c += threads) {
      const ChannelPlace at = channel_place(call.d, place.channel_begin + c);
      if (at.index % (2 * step) != 0 || at.index + step >= at.unit_channels) continue;
      const int rest = at.unit_channels - at.index - step;
      Node& left = nodes[column_of(p, c)];
      left =
          without_count(merge(with_count(left, rows * step),
                              with_count(nodes[column_of(p, c + step)], rows * (rest < step ? rest : step))));
    }
    __syncthreads();
  }
  for (int c = thread; c < channels; c += threads) {
    const ChannelPlace at = channel_place(call.d, place.channel_begin + c);
    if (at.index == 0)
      call.roots[(place.n * call.d.G + at.group) * tree.roots() + place.unit * tree.channel_units + at.unit] =
          nodes[column_of(p, c)];
  }
}

template <class T, Activation A>
__global__ void __launch_bounds__(kColumnThreads, 2)
    apply_channels_last(const ForwardCall call, const Sweep sweep, const bool vectors,
                        const Hint store_hint) {
  constexpr int W = 16 / sizeof(T);
  const SweepPlace at = sweep_place(call.d, sweep, W);
  if (at.channels <= 0) {
    release_next();
    wait_for_previous();
    return;
  }
  const bool aligned = vectors && at.channels >= W && is_aligned(call.x, 16);
  const bool aligned_y = vectors && at.channels >= W && is_aligned(call.y, 16);
  const std::uint64_t load_policy = make_policy(Hint::normal), store_policy = make_policy(store_hint);
  const std::int64_t pitch = call.d.C * sweep.lanes;  // between two rows of a thread
  const T* x = static_cast<const T*>(call.x) + at.offset;

  Packed<T, W> raw[kSweepRows];
  load_rows<T, W, kSweepRows>(raw, x, pitch, at.rows, at.channels, aligned, load_policy);
  release_next();
  wait_for_previous();
  Coefficients c[W];
  load_coefficients<W>(call, at.n, at.channel, at.channel + at.channels, c, [](int, std::int64_t) {});

  for (int first = 0; first < at.rows; first += kSweepRows) {
    if (first > 0)
      load_rows<T, W, kSweepRows>(raw, x + first * pitch, pitch, at.rows - first, at.channels, aligned,
                                  load_policy);
#pragma unroll
    for (int v = 0; v < kSweepRows; ++v) {
      if (first + v >= at.rows) break;
      float y[W];
#pragma unroll
      for (int j = 0; j < W; ++j) y[j] = forward_value<A>(raw[v][j], c[j]);
      store<W>(call.y, call.y_type, at.offset + (first + v) * pitch, y, aligned_y, at.channels, store_policy);
    }
  }
}

}  // namespace

cudaError_t launch_statistics_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const Hint hint = plan.sticky ? Hint::last : Hint::normal;
  return dispatch(call.x_type, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kWidest = 16 / sizeof(T);
    return plan.columns.width == 4
               ? launch(statistics_channels_last<T, 4>, plan.statistics, queue, call, plan.columns, hint)
               : launch(statistics_channels_last<T, kWidest>, plan.statistics, queue, call, plan.columns,
                        hint);
  });
}

cudaError_t launch_apply_channels_last(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      const bool vectors = call.d.C % (16 / sizeof(T)) == 0;
      return launch(apply_channels_last<T, activation()>, plan.write, queue, call, plan.apply, vectors,
                    Hint::normal);
    });
  });
}

}  // namespace steadynorm::cuda
