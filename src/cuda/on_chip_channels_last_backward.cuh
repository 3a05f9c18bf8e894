// SPDX-License-Identifier: Apache-2.0
// Backward, channels_last, for slabs whose x and dy stay on chip: both are read once. The sums are those of
// the sweeps, in the same tree: leaves, units, rows of channels, groups. Every block of a cluster gets the
// sums of all channels of the slab, and makes all of its rows.
#pragma once

#include "cuda/on_chip_backward.cuh"
#include "cuda/on_chip_channels_last.cuh"

namespace steadynorm::cuda {

namespace {

template <class T, class U>
constexpr int kGradientWidth = 16 / static_cast<int>(sizeof(T) > sizeof(U) ? sizeof(T) : sizeof(U));

__device__ __forceinline__ void load_slab_coefficients(const BackwardCall& call, const Slabs& slabs,
                                                       const SlabMemory& memory, int width) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  const std::int64_t group = at.n * call.d.G + split(at.channel, call.d.by_D).quotient;
  for_block(slabs.channels, [&](int channel) {
    const Coefficients c =
        load_coefficients(call, at.n, at.channel + channel, group + group_of(slabs, channel));
    in_shared<BackwardCoefficients>(memory.coefficients)[place_of(slabs, channel, width)] = {
        c.statistics.mean_hi, c.statistics.mean_lo, c.statistics.rstd, c.bias, c.weight, {0.0f, 0.0f}};
  });
}

// dy of a thread's leaf, held in shared memory: word by word, so that the threads of a warp meet in no bank.
template <class U, int W>
struct HeldLeaf {
  static constexpr int kWords = Packed<U, W>::kWords;
  std::uint32_t* words;  // of the thread's first row
  int pitch;             // between two words of a thread

  __device__ __forceinline__ HeldLeaf(const SlabMemory& memory)
      : words(in_shared<std::uint32_t>(memory.dy) + threadIdx.x), pitch(static_cast<int>(blockDim.x)) {}

  __device__ __forceinline__ void put(const Packed<U, W> (&raw)[kMicroBatchRows]) const {
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v)
#pragma unroll
      for (int k = 0; k < kWords; ++k) words[(v * kWords + k) * pitch] = raw[v].words[k];
  }

  // Channel j of row v.
  __device__ __forceinline__ float operator()(int v, int j) const {
    Packed<U, 2> pair{};
    if constexpr (kIsFloat<U>) {
      return float_of(words[(v * kWords + j) * pitch]);
    } else {
      pair.words[0] = words[(v * kWords + j / 2) * pitch];
      return pair[j % 2];
    }
  }
};

// The sums of a leaf for each of a thread's channels. What is ragged is read from memory again, a channel at
// a time.
template <Activation A, class T, class U, int W>
__device__ __forceinline__ void leaf_gradient_sums(const BackwardCall& call, const Slabs& slabs,
                                                   const SlabMemory& memory,
                                                   Packed<T, W> (&raw_x)[kMicroBatchRows],
                                                   const HeldLeaf<U, W>& held_dy, std::uint32_t nothing) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  if (at.rows == 0) return;
  float2* const out = in_shared<float2>(memory.leaves) + at.leaf * slabs.channels + at.column;
  const BackwardCoefficients* const coefficients =
      in_shared<BackwardCoefficients>(memory.coefficients) + at.column;
  if (at.rows == kMicroBatchRows) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Coefficients c = coefficients_of(coefficients[j * slabs.columns]);
      const Pair sums = tree_sum<kMicroBatchRows>([&](int v) {
        const Gradient g = backward_value<A>(raw_x[v][j], held_dy(v, j), c);
        return Pair{g.dz, g.dz * g.normalized};
      });
      out[j * slabs.columns] = {sums.first, sums.second};
      unpack_after(raw_x, j + 1 < W ? (j + 1) / 2 : 0, sums.first, nothing);
    }
    return;
  }
  const std::int64_t offset = offset_of(call.d, at, W);
#pragma unroll 1
  for (int j = 0; j < W; ++j) {
    const Coefficients c = coefficients_of(coefficients[j * slabs.columns]);
    const T* const x = static_cast<const T*>(call.x) + offset + j;
    const U* const dy = static_cast<const U*>(call.dy) + offset + j;
    const Pair sums = tree_sum<kMicroBatchRows>([&](int v) {
      if (v >= at.rows) return Pair{0.0f, 0.0f};
      const Gradient g = backward_value<A>(to_fp32(x[v * call.d.C]), to_fp32(dy[v * call.d.C]), c);
      return Pair{g.dz, g.dz * g.normalized};
    });
    out[j * slabs.columns] = {sums.first, sums.second};
  }
}

// From the leaves' sums to those of each unit and channel, rounded as a sweep stores them.
__device__ __forceinline__ void merge_gradient_leaves(const Dimensions& d, const Slabs& slabs,
                                                      const SlabMemory& memory, int position, int width) {
  for_block(slabs.units * slabs.channels, [&](int i) {
    const int unit = static_cast<int>(slabs.by_channels.quotient(static_cast<unsigned>(i)));
    const int length = unit_length(d, position, unit), place = i - unit * slabs.channels;
    if (length == 0) return;
    const float2* const leaves =
        in_shared<float2>(memory.leaves) + unit * kUnitLeaves * slabs.channels + place;
    const ChannelSums sums =
        merge_items<kUnitLeaves>((length + kMicroBatchRows - 1) / kMicroBatchRows, [&](int leaf) {
          const float2 s = leaves[leaf * slabs.channels];
          return ChannelSums{s.x, s.y};
        });
    in_shared<float2>(memory.roots)[unit * slabs.channels + channel_of(slabs, place, width)] = {
        static_cast<float>(sums.dz), static_cast<float>(sums.dz_normalized)};
  });
}

// How the units' sums of a channel become a row after the blocks have met: by 2^shift neighbouring lanes,
// each of which adds a run of units.
struct MetUnits {
  static constexpr int kRun = 4;
  int all, shift;

  __device__ __forceinline__ explicit MetUnits(const Dimensions& d)
      : all(static_cast<int>(d.tree.spatial_units)) {
    const int lanes = power_of_two_from((all + kRun - 1) / kRun);
    shift = count_bits(static_cast<unsigned>(lanes) - 1u);
  }

  // Of channel c, the first lane gets it; by whole warps, of which some lanes may have no channel.
  __device__ __forceinline__ ChannelSums add(const BackwardCall& call, std::int64_t n, std::int64_t c,
                                             int lane, bool active) const {
    const int there = active ? all - lane * kRun : 0;
    const float2* const run = call.partials + (n * all + lane * kRun) * call.d.C + c;
    float2 units[kRun]{};
#pragma unroll
    for (int unit = 0; unit < kRun; ++unit)
      if (unit < there) units[unit] = load_met(run + unit * call.d.C);
    const ChannelSums sums = merge_items<kRun>(there, [&](int unit) {
      return ChannelSums{units[unit].x, units[unit].y};
    });
    return warp_tree(sums, 1 << shift, (all + kRun - 1) / kRun);
  }
};

// The sums of the slab's channels, from the units of all blocks, which meet: finish(channel, sums) by one
// thread for each.
template <class Finish>
__device__ __forceinline__ void make_met_rows(const BackwardCall& call, const Slabs& slabs,
                                              const SlabMemory& memory, const Finish& finish) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  const MetUnits met(call.d);
  const int first = at.rank * slabs.units;
  float2* const out = call.partials + (at.n * met.all + first) * call.d.C + at.channel;
  const float2* const roots = in_shared<float2>(memory.roots);
  for_block(present(first, first + slabs.units, met.all) * slabs.channels, [&](int i) {
    const int unit = static_cast<int>(slabs.by_channels.quotient(static_cast<unsigned>(i)));
    out[unit * call.d.C + (i - unit * slabs.channels)] = roots[i];
  });
  meet_all_blocks();
  for_warps(slabs.channels << met.shift, [&](int i) {
    const int channel = i >> met.shift, lane = i & ((1 << met.shift) - 1);
    const bool active = channel < slabs.channels;
    const ChannelSums sums = met.add(call, at.n, at.channel + channel, lane, active);
    if (active && lane == 0) finish(channel, sums);
  });
}

// Parameter gradients that are sums over a few samples, after the blocks have met: those that have the slab,
// of all samples, share its channels.
__device__ __forceinline__ void sum_met_samples(const BackwardCall& call, const Slabs& slabs,
                                                const Wanted& wanted) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  const MetUnits met(call.d);
  const int N = static_cast<int>(call.d.N), blocks = N * slabs.blocks;
  const int share = (slabs.channels + blocks - 1) / blocks;
  const int first = (static_cast<int>(at.n) * slabs.blocks + at.rank) * share;
  const int channels = present(first, first + share, slabs.channels);
  for_warps(channels << met.shift, [&](int i) {
    const int channel = i >> met.shift, lane = i & ((1 << met.shift) - 1);
    const std::int64_t c = at.channel + first + channel;
    ChannelSums total{};
#pragma unroll 1
    for (int n = 0; n < N; ++n) {
      const ChannelSums row = met.add(call, n, c, lane, channel < channels);
      total = merge(total, ChannelSums{static_cast<float>(row.dz), static_cast<float>(row.dz_normalized)});
    }
    if (channel >= channels || lane != 0) return;
    if (wanted.weight_sums)
      store_parameter(call.dweight, call.weight.dtype, c, static_cast<float>(total.dz_normalized));
    if (wanted.bias_sums) store_parameter(call.dbias, call.bias.dtype, c, static_cast<float>(total.dz));
  });
}

// The rows of the slab's channels, from the units of all blocks; and what the groups add of them.
__device__ __forceinline__ void make_rows(const BackwardCall& call, const Slabs& slabs,
                                          const SlabMemory& memory, const Wanted& wanted) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  const int units = static_cast<int>(call.d.tree.spatial_units) - at.rank * slabs.units;  // from here on
  const auto of_block = [&](int channel) {
    const float2* const roots = in_shared<float2>(memory.roots) + channel;
    return merge_items<kMaxOnChipUnits>(units < slabs.units ? units : slabs.units, [&](int unit) {
      const float2 s = roots[unit * slabs.channels];
      return ChannelSums{s.x, s.y};
    });
  };
  const auto finish = [&](int channel, const ChannelSums& sums) {
    in_shared<ChannelSums>(memory.sums)[channel] =
        finish_row(call, wanted, at.n, at.channel + channel, sums, at.rank == 0);
  };
  if (slabs.blocks == 1) {
    for_block(slabs.channels, [&](int channel) { finish(channel, of_block(channel)); });
    return;
  }
  if (slabs.together) return make_met_rows(call, slabs, memory, finish);
  await_mailboxes();
  ChannelSums* const slots = in_shared<ChannelSums>(memory.slots);
  for_block(slabs.channels * slabs.blocks, [&](int i) {
    const int channel = static_cast<int>(slabs.by_blocks.quotient(static_cast<unsigned>(i)));
    const ChannelSums sums = of_block(channel);
    send_pair(arrived_bytes(), &slots[at.rank * slabs.channels + channel].dz, i - channel * slabs.blocks,
              sums.dz, sums.dz_normalized);
  });
  await_messages(arrived_bytes(), 16 * slabs.channels * slabs.blocks);
  for_block(slabs.channels, [&](int channel) {
    finish(channel, merge_items<kMaxCluster>(
                        slabs.blocks, [&](int block) { return slots[block * slabs.channels + channel]; }));
  });
}

// The tree over the channels of each group, and its means.
__device__ __forceinline__ void make_means(const Dimensions& d, const Slabs& slabs,
                                           const SlabMemory& memory) {
  ChannelSums* const nodes = in_shared<ChannelSums>(memory.nodes);
  const int shift = slabs.channel_shift, D = static_cast<int>(d.D), items = slabs.groups << shift;
  const int lanes = 1 << shift < kLanes ? 1 << shift : kLanes, runs = (1 << shift) / lanes;
  const auto done = [&](int group, const ChannelSums& sums) {
    in_shared<GroupMeans>(memory.groups)[group] =
        group_means(sums, static_cast<double>(d.D) * static_cast<double>(d.S));
  };
  for_warps(items, [&](int i) {
    const int group = i >> shift, channel = i & ((1 << shift) - 1), run = channel / lanes;
    ChannelSums sums{};
    if (i < items && channel < D) sums = in_shared<ChannelSums>(memory.sums)[group * D + channel];
    sums = warp_tree(sums, lanes, present(run * lanes, run * lanes + lanes, D));
    if (i >= items || channel % lanes != 0) return;
    if (runs == 1)
      done(group, sums);
    else
      nodes[group * runs + run] = sums;
  });
  if (runs == 1) return;
  __syncthreads();
  for_warps(slabs.groups * runs, [&](int i) {
    const bool there = i < slabs.groups * runs;
    const ChannelSums sums = warp_tree(there ? nodes[i] : ChannelSums{}, runs, (D + kLanes - 1) / kLanes);
    if (there && i % runs == 0) done(i / runs, sums);
  });
}

// dx of a leaf, two channels at a time, in the place of x.
template <Activation A, class T, class U, int W>
__device__ __forceinline__ void write_gradient_leaf(const BackwardCall& call, const Slabs& slabs,
                                                    const SlabMemory& memory,
                                                    Packed<T, W> (&raw_x)[kMicroBatchRows],
                                                    const HeldLeaf<U, W>& held_dy, std::uint32_t nothing) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  float before = 0;
#pragma unroll
  for (int j = 0; j < W; j += 2) {
    std::uint32_t column = static_cast<std::uint32_t>(at.column);
    wait_for(column, before, nothing);  // not to load the coefficients of all channels at once
    BackwardCoefficients own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      own[i] = in_shared<BackwardCoefficients>(
          memory.coefficients)[(j + i) * slabs.columns + static_cast<int>(column)];
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v) {
      if constexpr (!kIsFloat<T>) wait_for(raw_x[v].words[j / 2], before, nothing);
      float values[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Coefficients c = coefficients_of(own[i]);
        const Gradient g = backward_value<A>(raw_x[v][j + i], held_dy(v, j + i), c);
        values[i] = input_gradient(c.weight, g.dz, g.normalized, own[i].means, c.statistics.rstd);
      }
      if constexpr (kIsFloat<T>) {
        raw_x[v].words[j] = bits_of(values[0]);
        raw_x[v].words[j + 1] = bits_of(values[1]);
        before = values[1];
      } else {
        raw_x[v].words[j / 2] = pack_pair<T>(values[0], values[1]);
        before = float_of(raw_x[v].words[j / 2]);
      }
    }
  }
  T* dx = static_cast<T*>(call.dx) + offset_of(call.d, at, W);
#pragma unroll
  for (int v = 0; v < kMicroBatchRows; ++v, dx += call.d.C)
    if (v < at.rows) store_words(dx, raw_x[v].words);
}

template <class T, class U, Activation A>
__global__ void __launch_bounds__(slab_gradient_threads(kFitted), 1)
    backward_slabs(const BackwardCall call, const OnChip chip, const Slabs slabs, const SlabMemory memory,
                   const Wanted wanted) {
  constexpr int W = kGradientWidth<T, U>;
  release_next();
  wait_for_previous();
  Packed<T, W> raw_x[kMicroBatchRows];
  const HeldLeaf<U, W> held_dy(memory);
  {
    const SlabLeaf at = own_leaf(call.d, slabs);
    const std::int64_t offset = offset_of(call.d, at, W);
    Packed<U, W> raw_dy[kMicroBatchRows];
    load_leaf(raw_x, static_cast<const T*>(call.x) + offset, call.d.C, at.rows);
    load_leaf(raw_dy, static_cast<const U*>(call.dy) + offset, call.d.C, at.rows);
    held_dy.put(raw_dy);
  }
  if (slabs.blocks > 1 && !slabs.together) open_mailbox(arrived_bytes(), 16 * slabs.channels * slabs.blocks);
  load_slab_coefficients(call, slabs, memory, W);
  __syncthreads();
  leaf_gradient_sums<A>(call, slabs, memory, raw_x, held_dy, nothing_of(chip.warps));
  __syncthreads();
  merge_gradient_leaves(call.d, slabs, memory, block_position(slabs, own_leaf(call.d, slabs).rank), W);
  __syncthreads();
  make_rows(call, slabs, memory, wanted);
  __syncthreads();
  make_means(call.d, slabs, memory);
  __syncthreads();
  for_block(slabs.channels, [&](int channel) {
    in_shared<BackwardCoefficients>(memory.coefficients)[place_of(slabs, channel, W)].means =
        in_shared<GroupMeans>(memory.groups)[group_of(slabs, channel)];
  });
  __syncthreads();
  write_gradient_leaf<A>(call, slabs, memory, raw_x, held_dy, nothing_of(chip.warps));
  if (slabs.sums_samples && (wanted.weight_sums || wanted.bias_sums)) sum_met_samples(call, slabs, wanted);
}

}  // namespace

template <Activation A>
cudaError_t backward_slabs_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      const Slabs slabs = make_slabs(call.d, plan.backward_on_chip);
      return launch(backward_slabs<T, U, A>, plan.group_gradient, queue, call, plan.backward_on_chip, slabs,
                    slab_memory(slabs, kGradientWidth<T, U> * static_cast<int>(sizeof(U))), call.wanted());
    });
  });
}

}  // namespace steadynorm::cuda
