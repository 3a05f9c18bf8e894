// SPDX-License-Identifier: Apache-2.0
// Forward, channels_last, for slabs that stay on chip: x is read once. The tree is the one that the
// statistics' sweep and the finalizing kernel evaluate, and so are the bits.
#include "core/dispatch.h"
#include "cuda/on_chip_channels_last.cuh"

namespace steadynorm::cuda {

namespace {

// The sums of a leaf around the unit's pivots, for each of a thread's channels. What is ragged, and what fp32
// cannot sum, is read from memory again, a channel at a time.
template <class T, int W>
__device__ __forceinline__ void leaf_sums(const ForwardCall& call, const Slabs& slabs,
                                          const SlabMemory& memory, Packed<T, W> (&raw)[kMicroBatchRows],
                                          std::uint32_t nothing) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  double2* const out = in_shared<double2>(memory.leaves) + at.leaf * slabs.channels + at.column;
  const float* const pivots =
      in_shared<float>(memory.pivots) + at.leaf / kUnitLeaves * slabs.channels + at.column;
  const auto put = [&](int j, const PivotSums& sums) { out[j * slabs.columns] = {sums.sum, sums.squares}; };
  unsigned again = at.rows == 0 ? 0 : (1u << W) - 1;
  if (at.rows == kMicroBatchRows) {
    unsigned zero = again = 0;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      const Deviations s =
          deviations<true>([&](int v) { return raw[v][j]; }, [](int) { return true; }, kMicroBatchRows);
      put(j, add_micro_batch({}, kMicroBatchRows, pivots[j * slabs.columns], s.m, s.d, s.q));
      again |= is_reliable(s.q) ? 0 : 1u << j;
      zero |= s.q == 0 ? 1u << j : 0;
      if (j + 1 < W) unpack_after(raw, (j + 1) / 2, s.q, nothing);
      if (j + 1 == W)
#pragma unroll
        for (int v = 0; v < kMicroBatchRows; ++v) unpack_after(raw[v], s.q, nothing);
    }
    if (again != 0) {  // 0 is right where all values are the same
      const Packed<T, W> differences = different_bits(raw);
#pragma unroll
      for (int j = 0; j < W; ++j)
        if ((zero >> j & 1) != 0 && differences.is_zero(j)) again &= ~(1u << j);
    }
  }
  if (again == 0) return;
  const T* const x = static_cast<const T*>(call.x) + offset_of(call.d, at, W);
#pragma unroll 1
  for (int j = 0; j < W; ++j) {
    if ((again >> j & 1) == 0) continue;
    float values[kMicroBatchRows];
    load_column(values, x + j, call.d.C, at.rows);
    const auto there = [&](int v) { return v < at.rows; };
    const Deviations s = deviations<false>([&](int v) { return values[v]; }, there, at.rows);
    bool exact = is_reliable(s.q);
    if (!exact) {
      exact = s.q == 0;
#pragma unroll
      for (int v = 1; v < kMicroBatchRows; ++v) exact = exact && (!there(v) || values[v] == values[0]);
    }
    const double pivot = pivots[j * slabs.columns];
    if (exact) {
      put(j, add_micro_batch({}, at.rows, pivot, s.m, s.d, s.q));
    } else {
      const Node node =
          micro_batch_in_double<kMicroBatchRows, 1>([&](int v, int) { return to_fp32(x[v * call.d.C + j]); },
                                                    [&](int v, int) { return there(v); }, at.rows);
      put(j, add_micro_batch({}, at.rows, pivot, node.mean, 0.0, node.m2));
    }
  }
}

// From the leaves' sums to the roots of the channels of each unit of the block.
__device__ __forceinline__ void merge_leaves(const Dimensions& d, const Slabs& slabs,
                                             const SlabMemory& memory, int position, int width) {
  for_block(slabs.units * slabs.channels, [&](int i) {
    const int unit = static_cast<int>(slabs.by_channels.quotient(static_cast<unsigned>(i)));
    const int length = unit_length(d, position, unit), place = i - unit * slabs.channels;
    if (length == 0) return;
    const double2* const leaves =
        in_shared<double2>(memory.leaves) + unit * kUnitLeaves * slabs.channels + place;
    const PivotSums sums =
        merge_items<kUnitLeaves>((length + kMicroBatchRows - 1) / kMicroBatchRows, [&](int leaf) {
          const double2 s = leaves[leaf * slabs.channels];
          return PivotSums{s.x, s.y};
        });
    in_shared<Node>(memory.roots)[unit * slabs.channels + channel_of(slabs, place, width)] =
        without_count(moments_of(sums, length, length == kUnitPositions ? 1.0 / kUnitPositions : 1.0 / length,
                                 in_shared<float>(memory.pivots)[i]));
  });
}

// The groups' nodes of the block: the channels of each unit, then the units.
__device__ __forceinline__ void merge_units(const Dimensions& d, const Slabs& slabs, const SlabMemory& memory,
                                            int position) {
  Node* const nodes = in_shared<Node>(memory.nodes);  // of each unit and group
  const auto positions = [&](int i) {
    return unit_length(d, position, slabs.units == 1 ? 0 : i / slabs.groups);
  };
  merge_channels(in_shared<Node>(memory.roots), in_shared<double>(memory.shares), slabs.units * slabs.groups,
                 static_cast<int>(d.D), positions, [&](int i, const Node& node) { nodes[i] = node; });
  __syncthreads();
  if (slabs.units == 1) return;
  for_block(slabs.groups, [&](int group) {
#pragma unroll 1
    for (int step = 1; step < slabs.units; step *= 2)
#pragma unroll 1
      for (int unit = 0; unit < slabs.units; unit += 2 * step) {
        const int middle = position + (unit + step) * kUnitPositions, S = static_cast<int>(d.S);
        const auto count = [&](int begin) {
          return static_cast<double>(present(begin, begin + step * kUnitPositions, S)) *
                 static_cast<double>(d.D);
        };
        Node& left = nodes[unit * slabs.groups + group];
        if (middle < S)
          left = without_count(merge(with_count(left, count(middle - step * kUnitPositions)),
                                     with_count(nodes[(unit + step) * slabs.groups + group], count(middle))));
      }
  });
  __syncthreads();
}

// The groups' statistics, in every block of the slab.
__device__ __forceinline__ void merge_blocks(const ForwardCall& call, const Slabs& slabs,
                                             const SlabMemory& memory) {
  const SlabLeaf at = own_leaf(call.d, slabs);
  const std::int64_t first_group = at.n * call.d.G + split(at.channel, call.d.by_D).quotient;
  const Node* const nodes = in_shared<Node>(memory.nodes);
  const auto of_block = [&](const Node& node, int block) {
    const int positions =
        present(block_position(slabs, block), block_position(slabs, block + 1), static_cast<int>(call.d.S));
    return with_count(node, static_cast<double>(positions) * static_cast<double>(call.d.D));
  };
  const auto done = [&](int group, const Moments& m) {
    const Statistics s = statistics_of(m, call.eps);
    in_shared<Statistics>(memory.groups)[group] = s;
    if (at.rank == 0) store_statistics(call, first_group + group, s);
  };
  if (slabs.blocks == 1) {
    for_block(slabs.groups, [&](int group) { done(group, of_block(nodes[group], 0)); });
    return;
  }
  Node* const slots = in_shared<Node>(memory.slots);          // of each block and group
  Node* const met = call.roots + first_group * slabs.blocks;  // of each group and block
  if (slabs.together) {
    for_block(slabs.groups, [&](int group) { met[group * slabs.blocks + at.rank] = nodes[group]; });
    meet_all_blocks();
  } else {
    await_mailboxes();
    for_block(slabs.groups * slabs.blocks, [&](int i) {
      const int group = static_cast<int>(slabs.by_blocks.quotient(static_cast<unsigned>(i)));
      send_pair(arrived_bytes(), &slots[at.rank * slabs.groups + group].mean, i - group * slabs.blocks,
                nodes[group].mean, nodes[group].m2);
    });
    await_messages(arrived_bytes(), 16 * slabs.groups * slabs.blocks);
  }
  const int width = power_of_two_from(slabs.blocks);
  const int shift = count_bits(static_cast<unsigned>(width) - 1u);
  for_warps(slabs.groups << shift, [&](int i) {
    const int group = i >> shift, block = i & (width - 1);
    Moments m{};
    if (group < slabs.groups && block < slabs.blocks)
      m = of_block(
          slabs.together ? load_met(met + group * slabs.blocks + block) : slots[block * slabs.groups + group],
          block);
    m = warp_tree(m, width);
    if (group < slabs.groups && block == 0) done(group, m);
  });
}

// y of a leaf, four channels at a time: all coefficients at once would take too many registers. 16-bit
// results take the places of 16-bit values and are written as whole vectors.
template <Activation A, class T, class Y, int W>
__device__ __forceinline__ void write_leaf(const ForwardCall& call, const Slabs& slabs,
                                           const SlabMemory& memory, Packed<T, W> (&raw)[kMicroBatchRows],
                                           std::uint32_t nothing) {
  constexpr int kPart = 4;
  constexpr bool kInPlace = sizeof(T) == 2 && sizeof(Y) == 2;
  const SlabLeaf at = own_leaf(call.d, slabs);
  const auto first = [&] { return static_cast<Y*>(call.y) + offset_of(call.d, at, W); };
  float before = 0;
#pragma unroll
  for (int part = 0; part < W; part += kPart) {
    std::uint32_t column = static_cast<std::uint32_t>(at.column);
    wait_for(column, before, nothing);  // not to load the coefficients of all parts at once
    ForwardCoefficients own[kPart];
#pragma unroll
    for (int j = 0; j < kPart; ++j)
      own[j] = in_shared<ForwardCoefficients>(
          memory.coefficients)[(part + j) * slabs.columns + static_cast<int>(column)];
    Y* y = first() + part;
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v, y += call.d.C) {
      unpack_after(raw[v], before, nothing);
      float values[kPart];
#pragma unroll
      for (int j = 0; j < kPart; ++j)
        values[j] = forward_value<A>(
            raw[v][part + j],
            Coefficients{{own[j].mean_hi, own[j].mean_lo, 0.0f}, 0.0f, own[j].scale, own[j].bias});
      if constexpr (kInPlace) {
        std::uint32_t* const words = raw[v].words + part / 2;
        words[0] = pack_pair<Y>(values[0], values[1]);
        words[1] = pack_pair<Y>(values[2], values[3]);
        before = float_of(words[0] ^ words[1]);
      } else {
        before = values[0];
        if (v < at.rows) store(y, values, true, kPart);
      }
    }
  }
  if constexpr (kInPlace) {
    Y* y = first();
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v, y += call.d.C)
      if (v < at.rows) store_words(y, raw[v].words);
  }
}

template <class T, int W, Activation A>
__global__ void __launch_bounds__(slab_threads(W* static_cast<int>(sizeof(T)), kFitted), 1)
    forward_slabs(const ForwardCall call, const OnChip chip, const Slabs slabs, const SlabMemory memory) {
  release_next();
  wait_for_previous();
  Packed<T, W> raw[kMicroBatchRows];
  {
    const SlabLeaf at = own_leaf(call.d, slabs);
    load_leaf(raw, static_cast<const T*>(call.x) + offset_of(call.d, at, W), call.d.C, at.rows);
  }
  make_shares(in_shared<double>(memory.shares), static_cast<int>(call.d.D));
  if (slabs.blocks > 1 && !slabs.together) open_mailbox(arrived_bytes(), 16 * slabs.groups * slabs.blocks);
  {
    const SlabLeaf at = own_leaf(call.d, slabs);
    for_block(slabs.channels, [&](int channel) {
      in_shared<float2>(memory.parameters)[channel] = {
          load_parameter(call.weight, at.n, at.channel + channel, 1.0f),
          load_parameter(call.bias, at.n, at.channel + channel, 0.0f)};
    });
    if (at.rows > 0 && at.leaf % kUnitLeaves == 0) {  // the unit's first values
      float* const pivots =
          in_shared<float>(memory.pivots) + at.leaf / kUnitLeaves * slabs.channels + at.column;
#pragma unroll
      for (int j = 0; j < W; ++j) pivots[j * slabs.columns] = raw[0][j];
    }
  }
  __syncthreads();
  leaf_sums(call, slabs, memory, raw, nothing_of(chip.warps));
  __syncthreads();
  {
    const int position = block_position(slabs, own_leaf(call.d, slabs).rank);
    merge_leaves(call.d, slabs, memory, position, W);
    __syncthreads();
    merge_units(call.d, slabs, memory, position);
  }
  merge_blocks(call, slabs, memory);
  __syncthreads();
  for_block(slabs.channels, [&](int channel) {
    const Statistics s = in_shared<Statistics>(memory.groups)[group_of(slabs, channel)];
    const float2 parameters = in_shared<float2>(memory.parameters)[channel];
    in_shared<ForwardCoefficients>(memory.coefficients)[place_of(slabs, channel, W)] = {
        s.mean_hi, s.mean_lo, parameters.x * s.rstd, parameters.y};
  });
  __syncthreads();
  const std::uint32_t nothing = nothing_of(chip.warps);
  with_type(call.y_type, [&](auto type) {
    write_leaf<A, T, typename decltype(type)::type>(call, slabs, memory, raw, nothing);
  });
}

}  // namespace

cudaError_t launch_forward_slabs(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      const OnChip& chip = plan.forward_on_chip;
      const Slabs slabs = make_slabs(call.d, chip);
      const SlabMemory memory = slab_memory(slabs, 0);
      if constexpr (sizeof(T) == 2)
        if (chip.width == 8)
          return launch(forward_slabs<T, 8, activation()>, plan.group, queue, call, chip, slabs, memory);
      return launch(forward_slabs<T, 4, activation()>, plan.group, queue, call, chip, slabs, memory);
    });
  });
}

}  // namespace steadynorm::cuda
