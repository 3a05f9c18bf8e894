// SPDX-License-Identifier: Apache-2.0
// Backward, contiguous, for groups whose x and dy stay in the registers of one block or of a cluster: both
// are read once. The sums are those of the sweeps, in the same tree: units, rows of channels, groups.
#pragma once

#include "core/dispatch.h"
#include "cuda/on_chip.cuh"

namespace steadynorm::cuda {

namespace {

// Threads of an SM that registers are for: of 16-bit x and dy, their values take 64 of them, of fp32 128.
template <class T, class U, Activation A>
constexpr int kWholeGradientBound = sizeof(T) + sizeof(U) > 4                        ? 384
                                    : A == Activation::none || A == Activation::relu ? threads_of_sm(640, 512)
                                                                                     : 512;

struct BackwardShared {
  Mailbox box;
  float2 units[kMaxOnChipWarps];  // rounded as a sweep stores them
  ChannelSums block;
  GroupMeans means;
  Coefficients coefficients[kMaxOnChipWarps];  // of each unit's channel
};

// The sums of a unit by one warp, whose values stay in raw_x and raw_dy; lane 0 gets them.
template <class T, class U, Activation A>
__device__ __forceinline__ ChannelSums unit_sums(Packed<T, kLaneWidth> (&raw_x)[kMicroBatchRows],
                                                 Packed<U, kLaneWidth> (&raw_dy)[kMicroBatchRows],
                                                 const Coefficients& c, std::uint32_t nothing) {
  const Pair sums = micro_batch_sum<kMicroBatchRows, kLaneWidth>(
      [&](int v, int j) {
        const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
        return Pair{g.dz, g.dz * g.normalized};
      },
      [&](int j, const Pair& column) {
        unpack_next(raw_x, j, column.first, nothing);
        unpack_next(raw_dy, j, column.first, nothing);
      });
  return warp_tree(ChannelSums{sums.first, sums.second}, kLanes, kLanes);
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
      if (call.rows != nullptr && (wanted.weight_sums || wanted.bias_sums))
        call.rows[row] = float2{dz, dz_normalized};
    } else {  // the sum over one sample, which makes +0 of -0
      if (wanted.weight_sums) store_parameter(call.dweight, call.weight.dtype, c, dz_normalized + 0.0f);
      if (wanted.bias_sums) store_parameter(call.dbias, call.bias.dtype, c, dz + 0.0f);
    }
  }
  return weighted(load_parameter(call.weight, n, c, 1.0f), dz, dz_normalized);
}

// From the units' sums to the means of the group, by the first warp of every block of its cluster. A channel
// has 2^spatial_shift units.
__device__ __forceinline__ void merge_channels(const BackwardCall& call, const OnChip& chip,
                                               const Wanted& wanted, int spatial_shift,
                                               BackwardShared& shared, int rank, int lane,
                                               const Split& group) {
  const int units = 1 << spatial_shift;
  ChannelSums sums{};
  if (lane < chip.warps) sums = {shared.units[lane].x, shared.units[lane].y};
  // Lane i of `lanes`, a power of two, holds the node of `run` items from first + i * run on. Within a
  // channel first; then its row is complete, and channels follow.
  const auto merge_lanes = [&](int first, int run, int lanes, bool rows, bool writes) {
    const int item = first + lane * run;
    const int channel = item >> spatial_shift, place = item & (units - 1);
    int step = 1;
    for (; step < lanes && step * run < units; step *= 2) {
      const ChannelSums right = shuffle_down(sums, step);
      sums = merge(sums, right);
    }
    if (rows && place == 0 && lane < lanes)
      sums = finish_row(call, wanted, group.quotient, group.remainder * call.d.D + channel, sums, writes);
    for (; step < lanes; step *= 2) {
      const ChannelSums right = shuffle_down(sums, step);
      sums = merge(sums, right);
    }
  };
  const bool whole_channels = chip.warps >= units;
  merge_lanes(rank * chip.warps, 1, chip.warps, whole_channels, true);
  if (chip.blocks > 1) {
    if (lane == 0) shared.block = sums;
    warp_barrier();
    sums = shared.block;
    if (lane < chip.blocks) send_pair(shared.box, rank, lane, sums.dz, sums.dz_normalized);
    await_messages(shared.box, chip.blocks);
    const double* const slot = shared.box.slots[lane < chip.blocks ? lane : 0];
    sums = {slot[0], slot[1]};
    merge_lanes(0, chip.warps, power_of_two_from(chip.blocks), !whole_channels, rank == 0);
  }
  if (lane == 0)
    shared.means = group_means(sums, static_cast<double>(call.d.D) * static_cast<double>(call.d.S));
}

template <class T, class U, Activation A>
__global__ void __launch_bounds__(kWholeGradientBound<T, U, A>)
    backward_whole_units(const BackwardCall call, const OnChip chip, const WholeUnits units,
                         const Wanted wanted) {
  BackwardShared& shared = *shared_memory<BackwardShared>();
  release_next();
  wait_for_previous();
  Packed<T, kLaneWidth> raw_x[kMicroBatchRows];
  Packed<U, kLaneWidth> raw_dy[kMicroBatchRows];
  // Items are in the order of the tree: places along S, then channels; so they lie in memory.
  const auto offset = [&](const WholePlace& at) {
    return at.group * units.group_values + at.item * kLeafBlock + kLaneWidth * at.lane;
  };
  {
    const WholePlace at = whole_place<1>(chip, units);
    const T* const x = static_cast<const T*>(call.x) + offset(at);
    const U* const dy = static_cast<const U*>(call.dy) + offset(at);
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v) {
      raw_x[v] = load<T, kLaneWidth>(x + kLeafRow * v);
      raw_dy[v] = load<U, kLaneWidth>(dy + kLeafRow * v);
    }
  }
  if (chip.blocks > 1) open_mailbox(shared.box, chip.blocks);
  {
    const WholePlace at = whole_place<1>(chip, units);
    if (at.lane == 0) {
      const Split group = split(at.group, units.by_groups);
      shared.coefficients[at.warp] = load_coefficients(
          call, group.quotient, group.remainder * call.d.D + (at.item >> units.spatial_shift), at.group);
    }
    warp_barrier();
    const Coefficients c = shared.coefficients[at.warp];
    const ChannelSums sums = unit_sums<T, U, A>(raw_x, raw_dy, c, nothing_of(chip.warps));
    if (at.lane == 0)
      shared.units[at.warp] = {static_cast<float>(sums.dz), static_cast<float>(sums.dz_normalized)};
  }
  if (chip.blocks > 1) await_mailboxes();
  __syncthreads();
  if (threadIdx.x < kLanes) {
    const WholePlace at = whole_place<1>(chip, units);
    merge_channels(call, chip, wanted, units.spatial_shift, shared, at.rank, at.lane,
                   split(at.group, units.by_groups));
  }
  __syncthreads();

  const WholePlace at = whole_place<1>(chip, units);
  const Coefficients c = shared.coefficients[at.warp];
  const GroupMeans means = shared.means;
  const std::uint32_t nothing = nothing_of(chip.warps);
  float before = means.dz;
  T* const dx = static_cast<T*>(call.dx) + offset(at);
#pragma unroll
  for (int v = 0; v < kMicroBatchRows; ++v) {
    unpack_after(raw_x[v], before, nothing);
    unpack_after(raw_dy[v], before, nothing);
    float values[kLaneWidth];
#pragma unroll
    for (int j = 0; j < kLaneWidth; ++j) {
      const Gradient g = backward_value<A>(raw_x[v][j], raw_dy[v][j], c);
      values[j] = input_gradient(c.weight, g.dz, g.normalized, means, c.statistics.rstd);
    }
    before = values[0];
    store(dx + kLeafRow * v, values, true, kLaneWidth);
  }
}

}  // namespace

template <Activation A>
cudaError_t backward_on_chip_of(const BackwardCall& call, const Plan& plan, const Queue& queue) {
  const OnChip& chip = plan.backward_on_chip;
  Launch shape = plan.group_gradient;
  shape.shared_bytes = sizeof(BackwardShared);
  return dispatch(call.x_type, [&](auto x_type) {
    return dispatch(call.y_type, [&](auto y_type) {
      using T = typename decltype(x_type)::type;
      using U = typename decltype(y_type)::type;
      return launch(backward_whole_units<T, U, A>, shape, queue, call, chip, whole_units(call.d, chip),
                    call.wanted());
    });
  });
}

}  // namespace steadynorm::cuda
