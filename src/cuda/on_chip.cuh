// SPDX-License-Identifier: Apache-2.0
// A group that stays on chip: where a block and its warps stand in it, and the shared memory of a block.
#pragma once

#include "cuda/contiguous.cuh"

namespace steadynorm::cuda {

namespace {

// Threads of an SM that registers are for: those that the values of x and dy take, and some 48 more.
template <int kBytes>  // of the values of x, and of dy, at one place
constexpr int kOnChipBound = kBytes <= 4 ? 512 : 384;

struct OnChipPlace {
  std::int64_t group;
  int rank;  // of the block in its cluster
  int warp, lane, item;
};

__device__ __forceinline__ OnChipPlace on_chip_place(const OnChip& chip) {
  const unsigned block = block_index(), cluster = static_cast<unsigned>(chip.cluster), group = block / cluster;
  OnChipPlace r;
  r.group = group;
  r.rank = static_cast<int>(block - group * cluster);
  r.warp = static_cast<int>(threadIdx.x) / kLanes;
  r.lane = static_cast<int>(threadIdx.x) % kLanes;
  r.item = r.rank * chip.warps + r.warp;
  return r;
}

}  // namespace

}  // namespace steadynorm::cuda
