// SPDX-License-Identifier: Apache-2.0
// A contiguous group that stays on chip: where a block and its warps stand in it.
#pragma once

#include <bit>

#include "cuda/contiguous.cuh"

namespace steadynorm::cuda {

namespace {

// Groups of 2^k units, each a full block of one channel, as most that come from images and volumes of powers
// of two: nodes need no counts then, and blocks fewer registers.
struct WholeUnits {
  int cluster_shift, channel_shift, spatial_shift;
  std::int64_t group_values;  // D S
  Divisor by_groups;          // of a sample
};

inline WholeUnits whole_units(const Dimensions& d, const OnChip& chip) {
  const auto shift = [](std::int64_t n) { return std::countr_zero(static_cast<std::uint64_t>(n)); };
  return {shift(chip.blocks), shift(d.D), shift(d.tree.spatial_units), d.D * d.S, Divisor(d.G)};
}

struct WholePlace {
  std::int64_t group;
  int rank, warp, lane, item;  // item: the warp's first
};

template <int kUnits>  // of a warp
__device__ __forceinline__ WholePlace whole_place(const OnChip& chip, const WholeUnits& units) {
  const unsigned block = block_index();
  WholePlace r;
  r.group = block >> units.cluster_shift;
  r.rank = static_cast<int>(block) & (chip.blocks - 1);
  r.warp = static_cast<int>(threadIdx.x) / kLanes;
  r.lane = static_cast<int>(threadIdx.x) % kLanes;
  r.item = (r.rank * chip.warps + r.warp) * kUnits;
  return r;
}

}  // namespace

}  // namespace steadynorm::cuda
