// SPDX-License-Identifier: Apache-2.0
// Backward, contiguous, for groups whose x and dy stay in the registers of one block or of a cluster: both are
// read once. The sums are those of the sweeps, in the same tree: units, rows of channels, groups.
#pragma once

#include <bit>

#include "core/dispatch.h"
#include "cuda/on_chip.cuh"

namespace steadynorm::cuda {

namespace {

struct BackwardShared {
  Mailbox box;
  float2 units[kMaxOnChipWarps];  // rounded as a sweep stores them
  ChannelSums block;
  GroupMeans means;
};

// The sums of a unit by one warp, whose values stay in raw_x and raw_dy; lane 0 gets them.
template <class T, class U, Activation A, bool kFull>
__device__ __forceinline__ ChannelSums unit_sums(const Packed<T, kLaneWidth> (&raw_x)[kMicroBatchRows],
                                                 const Packed<U, kLaneWidth> (&raw_dy)[kMicroBatchRows],
                                                 int length, int lane, const Coefficients& c) {
  const Pair sums = micro_batch_sum<kMicroBatchRows, kLaneWidth>([&](int v, int j) {
    const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
    const bool there = kFull || j < lane_rest(length, lane, v);
    return there ? Pair{g.dz, g.dz * g.normalized} : Pair{0.0f, 0.0f};
  });
  const int lanes = kFull || length >= kLeafRow ? kLanes : (length + kLaneWidth - 1) / kLaneWidth;
  return warp_tree(ChannelSums{sums.first, sums.second}, kLanes, lanes);
}

// A channel's row of one sample: to where it is wanted, and what the group adds of it.
__device__ __forceinline__ ChannelSums finish_row(const BackwardCall& call, const Wanted& wanted,
                                                  std::int64_t n, std::int64_t c, const ChannelSums& sums,
                                                  bool writes) {
  const float dz = static_cast<float>(sums.dz), dz_normalized = static_cast<float>(sums.dz_normalized);
  if (writes) {
    const std::int64_t row = n * call.d.C + c;
    if (wanted.weight_rows) store_parameter(call.dweight, call.weight.dtype, row, dz_normalized);
    if (wanted.bias_rows) store_parameter(call.dbias, call.bias.dtype, row, dz);
    if (call.d.N > 1) {
      if (wanted.weight_sums || wanted.bias_sums) call.rows[row] = float2{dz, dz_normalized};
    } else {  // the sum over one sample, which makes +0 of -0
      if (wanted.weight_sums) store_parameter(call.dweight, call.weight.dtype, c, dz_normalized + 0.0f);
      if (wanted.bias_sums) store_parameter(call.dbias, call.bias.dtype, c, dz + 0.0f);
    }
  }
  return weighted(load_parameter(call.weight, n, c, 1.0f), dz, dz_normalized);
}

// From the units' sums to the means of the group, by the first warp of every block of its cluster. A channel
// has 2^spatial_shift units, of which the last are absent.
__device__ __forceinline__ void merge_channels(const BackwardCall& call, const OnChip& chip,
                                               const Wanted& wanted, int spatial_shift,
                                               BackwardShared& shared, const OnChipPlace& at) {
  if (at.warp != 0) return;
  const Split group = split(at.group, call.d.G);
  const int units = 1 << spatial_shift, spatial_units = static_cast<int>(call.d.tree.spatial_units);
  const int D = static_cast<int>(call.d.D);
  ChannelSums sums{};
  if (at.lane < chip.warps) sums = {shared.units[at.lane].x, shared.units[at.lane].y};
  // Lane i of `lanes`, a power of two, holds the node of `run` items from first + i * run on. Within a channel
  // first; then its row is complete, and channels follow.
  const auto merge_lanes = [&](int first, int run, int lanes, bool rows, bool writes) {
    const int item = first + at.lane * run;
    const int channel = item >> spatial_shift, place = item & (units - 1);
    int step = 1;
    for (; step < lanes && step * run < units; step *= 2) {
      const ChannelSums right = shuffle_down(sums, step);
      if (place + step * run < spatial_units) sums = merge(sums, right);
    }
    if (rows && place == 0 && channel < D && at.lane < lanes)
      sums = finish_row(call, wanted, group.quotient, group.remainder * D + channel, sums, writes);
    for (; step < lanes; step *= 2) {
      const ChannelSums right = shuffle_down(sums, step);
      if (channel + (step * run >> spatial_shift) < D) sums = merge(sums, right);
    }
  };
  const bool whole_channels = chip.warps >= units;
  merge_lanes(at.rank * chip.warps, 1, chip.warps, whole_channels, true);
  if (chip.cluster > 1) {
    if (at.lane == 0) shared.block = sums;
    warp_barrier();
    sums = shared.block;
    if (at.lane < chip.cluster) send_message(shared.box, at.rank, at.lane, sums.dz, sums.dz_normalized, 0);
    await_messages(shared.box, chip.cluster);
    const double* const slot = shared.box.slots[at.lane < chip.cluster ? at.lane : 0];
    sums = {slot[0], slot[1]};
    merge_lanes(0, chip.warps, power_of_two_from(chip.cluster), !whole_channels, at.rank == 0);
  }
  if (at.lane == 0)
    shared.means = group_means(sums, static_cast<double>(call.d.D) * static_cast<double>(call.d.S));
}

template <class T, class U, Activation A>
__global__ void __launch_bounds__(kOnChipBound<sizeof(T) + sizeof(U)>)
    backward_on_chip(const BackwardCall call, const OnChip chip, const int spatial_shift,
                     const Wanted wanted) {
  BackwardShared& shared = *shared_memory<BackwardShared>();
  if (chip.cluster > 1) open_mailbox(shared.box, chip.cluster);
  release_next();
  wait_for_previous();
  Packed<T, kLaneWidth> raw_x[kMicroBatchRows];
  Packed<U, kLaneWidth> raw_dy[kMicroBatchRows];
  Coefficients c{};
  {
    const OnChipPlace at = on_chip_place(chip);
    const ChannelUnit unit = contiguous_sum_item(call.d, at.group, at.item, spatial_shift);
    const int length = static_cast<int>(unit.length);
    ChannelSums sums{};
    if (length > 0) {
      load_leaf_rows<T, kMicroBatchRows>(raw_x, static_cast<const T*>(call.x) + unit.begin, 0, length,
                                         at.lane, true);
      load_leaf_rows<U, kMicroBatchRows>(raw_dy, static_cast<const U*>(call.dy) + unit.begin, 0, length,
                                         at.lane, true);
      const RowPlace row = row_place(call.d, unit.row);
      c = load_coefficients(call, row.n, row.c, row.group);
      sums = length == kLeafBlock ? unit_sums<T, U, A, true>(raw_x, raw_dy, length, at.lane, c)
                                  : unit_sums<T, U, A, false>(raw_x, raw_dy, length, at.lane, c);
    }
    if (at.lane == 0)
      shared.units[at.warp] = {static_cast<float>(sums.dz), static_cast<float>(sums.dz_normalized)};
  }
  unpack_again(raw_x);
  unpack_again(raw_dy);
  if (chip.cluster > 1) await_mailboxes();
  __syncthreads();
  // Again, and below once more, so that no register keeps it meanwhile.
  merge_channels(call, chip, wanted, spatial_shift, shared, on_chip_place(chip));
  __syncthreads();

  const OnChipPlace at = on_chip_place(chip);
  const ChannelUnit unit = contiguous_sum_item(call.d, at.group, at.item, spatial_shift);
  const GroupMeans means = shared.means;
  const int offset = kLaneWidth * at.lane;
  T* const dx = static_cast<T*>(call.dx) + unit.begin + offset;
#pragma unroll
  for (int v = 0; v < kMicroBatchRows; ++v) {
    if (kLeafRow * v + offset >= unit.length) break;
    float values[kLaneWidth];
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
      values[j] = input_gradient(c.weight, g.dz, g.normalized, means, c.statistics.rstd);
    }
    store(dx + kLeafRow * v, values, true, kLaneWidth);
  }
}

}  // namespace

template <Activation A>
cudaError_t backward_on_chip_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  Launch shape = plan.group_gradient;
  shape.shared_bytes = sizeof(BackwardShared);
  const int spatial_shift =
      std::countr_zero(static_cast<unsigned>(power_of_two_from(call.d.tree.spatial_units)));
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      return launch(backward_on_chip<T, U, A>, shape, queue, call, plan.backward_on_chip, spatial_shift,
                    call.wanted());
    });
  });
}

}  // namespace steadynorm::cuda
