// SPDX-License-Identifier: Apache-2.0
// Forward, contiguous, for groups that stay in the registers of one block or of a cluster: x is read once.
// The tree is the one that the statistics' sweep and the finalizing kernel evaluate, and so are the bits.
#include "core/dispatch.h"
#include "cuda/on_chip.cuh"

namespace steadynorm::cuda {

namespace {

struct ForwardShared {
  Mailbox box;
  Moments nodes[kMaxOnChipWarps];
  float2 parameters[kMaxOnChipWarps];  // weight and bias of each unit's first channel
  Statistics statistics;
};

// The moments of a unit by one warp, whose values stay in `raw`; lane 0 gets them.
template <class T>
__device__ __forceinline__ Moments unit_moments(Packed<T, kLaneWidth> (&raw)[kMicroBatchRows], const T* x,
                                                int length, int lane, std::uint32_t nothing) {
  constexpr int kOfMicroBatch = kMicroBatchRows * kLaneWidth;
  const float pivot = raw[0][0];
  const auto again = [&](int j, float sum) { unpack_next(raw, j, sum, nothing); };
  if (length == kLeafBlock) {
    const PivotSums sums =
        add_rows<T, kMicroBatchRows, true>({}, pivot, raw, x, kLeafBlock, lane, kOfMicroBatch, again);
    return with_count(
        warp_tree(without_count(moments_of(sums, kOfMicroBatch, 1.0 / kOfMicroBatch, pivot)), kOfMicroBatch),
        kLeafBlock);
  }
  const int count = lane_count(length, lane);
  Moments moments{};
  if (count > 0)
    moments = moments_of(add_rows<T, kMicroBatchRows, false>({}, pivot, raw, x, length, lane, count, again),
                         count, 1.0 / count, pivot);
  return warp_tree(moments, kLanes);
}

struct WholeShared {
  Mailbox box;
  Node nodes[kMaxOnChipWarps * kMaxOnChipUnits];
  float2 parameters[kMaxOnChipWarps * kMaxOnChipUnits];  // weight and bias of each unit's channel
  Statistics statistics;
};

// A lane's first value of the warp's unit `unit`. Items are in the order of the tree: channels, then places
// along S.
__device__ __forceinline__ std::int64_t whole_offset(const ForwardCall& call, const WholeUnits& units,
                                                     const WholePlace& at, int unit) {
  const int item = at.item + unit;
  const int channel = item & ((1 << units.channel_shift) - 1), place = item >> units.channel_shift;
  return at.group * units.group_values + channel * call.d.S + place * kLeafBlock + kLaneWidth * at.lane;
}

// By the first warp of every block.
template <int kUnits>
__device__ __forceinline__ void merge_whole_group(const ForwardCall& call, const OnChip& chip,
                                                  const WholeUnits& units, WholeShared& shared) {
  const WholePlace at = whole_place<kUnits>(chip, units);
  const int nodes = chip.warps * kUnits;
  Node node = warp_tree_equal(shared.nodes[at.lane & (nodes - 1)], nodes, kLeafBlock);
  if (chip.cluster > 1) {
    if (at.lane == 0) shared.nodes[0] = node;
    warp_barrier();
    node = shared.nodes[0];
    if (at.lane < chip.cluster) send_message(shared.box, at.rank, at.lane, node.mean, node.m2, 0);
    await_messages(shared.box, chip.cluster);
    const double* const slot = shared.box.slots[at.lane & (chip.cluster - 1)];
    node = warp_tree_equal({slot[0], slot[1]}, chip.cluster, kLeafBlock * nodes);
  }
  if (at.lane != 0) return;
  shared.statistics = statistics_of(with_count(node, static_cast<double>(units.group_values)), call.eps);
  if (at.rank == 0) store_statistics(call, at.group, shared.statistics);
}

template <class T, Activation A, int kUnits>  // threads of an SM that registers are for
constexpr int kWholeBound = sizeof(T) == 4                                        ? 512
                            : kUnits == 1                                         ? 896
                            : A == Activation::gelu || A == Activation::gelu_tanh ? 384
                                                                                  : 640;

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
  if (chip.cluster > 1) open_mailbox(shared.box, chip.cluster);
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
  if (chip.cluster > 1) await_mailboxes();
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

// From the units' nodes to the statistics of the group, by the first warp of every block of its cluster.
__device__ __forceinline__ void merge_group(const ForwardCall& call, const OnChip& chip,
                                            ForwardShared& shared, const OnChipPlace& at) {
  if (at.warp != 0) return;
  Moments moments = warp_tree(at.lane < chip.warps ? shared.nodes[at.lane] : Moments{}, chip.warps);
  if (chip.cluster > 1) {
    if (at.lane == 0) shared.nodes[0] = moments;
    warp_barrier();
    moments = shared.nodes[0];
    if (at.lane < chip.cluster)
      send_message(shared.box, at.rank, at.lane, moments.count, moments.mean, moments.m2);
    await_messages(shared.box, chip.cluster);
    const double* const slot = shared.box.slots[at.lane < chip.cluster ? at.lane : 0];
    moments = warp_tree(at.lane < chip.cluster ? Moments{slot[0], slot[1], slot[2]} : Moments{},
                        power_of_two_from(chip.cluster));
  }
  if (at.lane != 0) return;
  shared.statistics = statistics_of(moments, call.eps);
  if (at.rank == 0) store_statistics(call, at.group, shared.statistics);
}

// The sample and the channel of a unit's first value.
__device__ __forceinline__ RowPlace row_of(const ForwardCall& call, const OnChipPlace& at,
                                           int channel_shift) {
  const Split group = split(at.group, call.d.G);
  const int unit = at.item & ((1 << channel_shift) - 1);
  return {group.quotient, group.remainder * call.d.D + unit * call.d.tree.unit_channels, at.group};
}

template <class T, Activation A>
__global__ void __launch_bounds__(512)
    forward_on_chip(const ForwardCall call, const OnChip chip, const int channel_shift) {
  ForwardShared& shared = *shared_memory<ForwardShared>();
  if (chip.cluster > 1) open_mailbox(shared.box, chip.cluster);
  release_next();
  wait_for_previous();
  Packed<T, kLaneWidth> raw[kMicroBatchRows];
  {
    const OnChipPlace at = on_chip_place(chip);
    const ContiguousUnit unit = contiguous_item(call.d, at.group, at.item, channel_shift);
    const int length = static_cast<int>(unit.length);
    const T* const x = static_cast<const T*>(call.x) + unit.begin;
    Moments moments{};
    if (length > 0) {
      load_leaf_rows<T, kMicroBatchRows>(raw, x, 0, length, at.lane, true);
      const RowPlace row = row_of(call, at, channel_shift);
      if (at.lane == 0)
        shared.parameters[at.warp] = {load_parameter(call.weight, row.n, row.c, 1.0f),
                                      load_parameter(call.bias, row.n, row.c, 0.0f)};
      moments = unit_moments(raw, x, length, at.lane, nothing_of(chip.warps));
    }
    if (at.lane == 0) shared.nodes[at.warp] = moments;
  }
  if (chip.cluster > 1) await_mailboxes();
  __syncthreads();
  // Again, and below once more, so that no register keeps it meanwhile.
  merge_group(call, chip, shared, on_chip_place(chip));
  __syncthreads();

  const OnChipPlace at = on_chip_place(chip);
  const ContiguousUnit unit = contiguous_item(call.d, at.group, at.item, channel_shift);
  const float2 parameters = shared.parameters[at.warp];
  Coefficients c{shared.statistics, parameters.x, parameters.x * shared.statistics.rstd, parameters.y};
  with_type(call.y_type, [&](auto type) {
    using Y = typename decltype(type)::type;
    const int offset = kLaneWidth * at.lane;
    Y* const y = static_cast<Y*>(call.y) + unit.begin + offset;
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v) {
      if (kLeafRow * v + offset >= unit.length) break;
      if (call.d.tree.unit_channels > 1) {  // S is a multiple of a lane's width, which so has one channel
        const RowPlace row = row_of(call, at, channel_shift);
        c = load_coefficients(
            call, c.statistics, row.n,
            row.c + static_cast<unsigned>(kLeafRow * v + offset) / static_cast<unsigned>(call.d.S));
      }
      float values[kLaneWidth];
#pragma unroll
      for (int j = 0; j < kLaneWidth; ++j) values[j] = forward_value<A>(raw[v][j], c);
      store(y + kLeafRow * v, values, true, kLaneWidth);
    }
  });
}

}  // namespace

int largest_cluster_on_chip() {
  return largest_cluster(forward_on_chip<BFloat16, Activation::none>, kMaxOnChipWarps * kLanes,
                         sizeof(ForwardShared));
}

cudaError_t launch_forward_on_chip(const ForwardCall& call, const Plan& plan, const Queue& queue) {
  const OnChip& chip = plan.forward_on_chip;
  const bool whole = has_whole_units(call.d.tree);
  Launch shape = plan.group;
  shape.shared_bytes = whole ? sizeof(WholeShared) : sizeof(ForwardShared);
  return dispatch(call.x_type, [&](auto type) {
    return dispatch(call.activation, [&](auto activation) {
      using T = typename decltype(type)::type;
      if constexpr (sizeof(T) == 2)
        if (chip.units == 2)
          return launch(forward_whole_units<T, activation(), 2>, shape, queue, call, chip,
                        whole_units(call.d, chip));
      if (whole)
        return launch(forward_whole_units<T, activation(), 1>, shape, queue, call, chip,
                      whole_units(call.d, chip));
      return launch(forward_on_chip<T, activation()>, shape, queue, call, plan.forward_on_chip,
                    channel_shift(call.d.tree));
    });
  });
}

}  // namespace steadynorm::cuda
