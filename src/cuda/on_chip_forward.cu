// SPDX-License-Identifier: Apache-2.0
// Forward, contiguous, for groups that stay in the registers of one block or of a cluster: x is read once.
// The tree is the one that the statistics' sweep and the finalizing kernel evaluate, and so are the bits.
#include "core/dispatch.h"
#include "cuda/on_chip.cuh"

namespace steadynorm::cuda {

namespace {

struct WholeShared {
  Mailbox box;
  Node nodes[kMaxOnChipWarps * kMaxOnChipUnits];
  Node block;
  float2 parameters[kMaxOnChipWarps * kMaxOnChipUnits];  // weight and bias of each unit's channel
  Statistics statistics;
};

// A lane's first value of the warp's unit `unit`. Items are in the order of the tree: channels, then places
// along S.
__device__ __forceinline__ std::int64_t whole_offset(const ForwardCall& call, const WholeUnits& units,
                                                     const WholePlace& at, int unit) {
  return at.group * units.group_values + whole_item(at.item + unit, units.channel_shift, call.d.S) +
         kLaneWidth * at.lane;
}

// By the first warp of every block.
template <int kUnits>
__device__ __forceinline__ void merge_whole_group(const ForwardCall& call, const OnChip& chip,
                                                  const WholeUnits& units, WholeShared& shared) {
  const WholePlace at = whole_place<kUnits>(chip, units);
  const int nodes = chip.warps * kUnits;
  Node node = warp_tree_equal(shared.nodes[at.lane & (nodes - 1)], nodes, kLeafBlock);
  if (chip.blocks > 1) {
    if (at.lane == 0) shared.block = node;
    warp_barrier();
    node = shared.block;
    if (at.lane < chip.blocks) send_pair(shared.box, at.rank, at.lane, node.mean, node.m2);
    await_messages(shared.box, chip.blocks);
    const double* const slot = shared.box.slots[at.lane & (chip.blocks - 1)];
    node = warp_tree_equal({slot[0], slot[1]}, chip.blocks, kLeafBlock * nodes);
  }
  if (at.lane != 0) return;
  shared.statistics = statistics_of(with_count(node, static_cast<double>(units.group_values)), call.eps);
  if (at.rank == 0) store_statistics(call, at.group, shared.statistics);
}

template <class T, Activation A, int kUnits>  // threads of an SM that registers are for
constexpr int kWholeBound = sizeof(T) == 4                                        ? 512
                            : kUnits == 1                                         ? threads_of_sm(896, 512)
                            : A == Activation::gelu || A == Activation::gelu_tanh ? 384
                                                                                  : threads_of_sm(640, 384);

template <class T, Activation A, int kUnits>
__global__ void __launch_bounds__(kWholeBound<T, A, kUnits>)
    forward_whole_units(const ForwardCall call, const OnChip chip, const WholeUnits units) {
  constexpr int kOfMicroBatch = kMicroBatchRows * kLaneWidth;
  WholeShared& shared = *shared_memory<WholeShared>();
  release_next();
  wait_for_previous();
  Packed<T, kLaneWidth> raw[kUnits][kMicroBatchRows];
  {
    const WholePlace at = whole_place<kUnits>(chip, units);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const T* const x = static_cast<const T*>(call.x) + whole_offset(call, units, at, u);
#pragma unroll
      for (int v = 0; v < kMicroBatchRows; ++v) raw[u][v] = load<T, kLaneWidth>(x + kLeafRow * v);
    }
  }
  if (chip.blocks > 1) open_mailbox(shared.box, chip.blocks);
  {
    const WholePlace at = whole_place<kUnits>(chip, units);
    if (at.lane < kUnits) {
      const Split group = split(at.group, units.by_groups);
      const std::int64_t n = group.quotient;
      const std::int64_t channel =
          group.remainder * call.d.D + ((at.item + at.lane) & ((1 << units.channel_shift) - 1));
      shared.parameters[at.warp * kUnits + at.lane] = {load_parameter(call.weight, n, channel, 1.0f),
                                                       load_parameter(call.bias, n, channel, 0.0f)};
    }
    const std::uint32_t nothing = nothing_of(chip.warps);
    Node nodes[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const float pivot = raw[u][0][0];
      const PivotSums sums = add_rows<T, kMicroBatchRows, true>(
          {}, pivot, raw[u],
          static_cast<const T*>(call.x) + whole_offset(call, units, at, u) - kLaneWidth * at.lane, kLeafBlock,
          at.lane, kOfMicroBatch, [&](int j, float sum) { unpack_next(raw[u], j, sum, nothing); });
      nodes[u] = without_count(moments_of(sums, kOfMicroBatch, 1.0 / kOfMicroBatch, pivot));
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      nodes[u] = warp_tree_equal(nodes[u], kLanes, kOfMicroBatch);
      if (at.lane == 0) shared.nodes[at.warp * kUnits + u] = nodes[u];
    }
  }
  if (chip.blocks > 1) await_mailboxes();
  __syncthreads();
  if (threadIdx.x < kLanes) merge_whole_group<kUnits>(call, chip, units, shared);
  __syncthreads();

  const WholePlace at = whole_place<kUnits>(chip, units);
  const std::uint32_t nothing = nothing_of(chip.warps);
  const Statistics statistics = shared.statistics;
  float before = statistics.rstd;
  with_type(call.y_type, [&](auto type) {
    using Y = typename decltype(type)::type;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const float2 parameters = shared.parameters[at.warp * kUnits + u];
      const Coefficients c{statistics, parameters.x, parameters.x * statistics.rstd, parameters.y};
      Y* const y = static_cast<Y*>(call.y) + whole_offset(call, units, at, u);
#pragma unroll
      for (int v = 0; v < kMicroBatchRows; ++v) {
        unpack_after(raw[u][v], before, nothing);
        float values[kLaneWidth];
#pragma unroll
        for (int j = 0; j < kLaneWidth; ++j) values[j] = forward_value<A>(raw[u][v][j], c);
        store(y + kLeafRow * v, values, true, kLaneWidth);
        before = values[0];
      }
    }
  });
}

}  // namespace

int largest_cluster_on_chip() {
  return largest_cluster(forward_whole_units<BFloat16, Activation::none, 1>, kMaxOnChipWarps * kLanes,
                         sizeof(WholeShared));
}

cudaError_t launch_forward_on_chip(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const OnChip& chip = plan.forward_on_chip;
  const WholeUnits units = whole_units(call.d, chip);
  Launch shape = plan.group;
  shape.shared_bytes = sizeof(WholeShared);
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      if constexpr (sizeof(T) == 2)
        if (chip.units == 2)
          return launch(forward_whole_units<T, activation(), 2>, shape, queue, call, chip, units);
      return launch(forward_whole_units<T, activation(), 1>, shape, queue, call, chip, units);
    });
  });
}

}  // namespace steadynorm::cuda
