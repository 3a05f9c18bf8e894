// SPDX-License-Identifier: Apache-2.0
// channels_last, for slabs of whole groups that stay in the registers of one block or of a cluster: what
// forward and backward share. A thread keeps one leaf, which is one micro-batch, of a vector of channels. A
// channel's place in shared memory is column + columns * (its place in the column's vector), so that no two
// threads meet in a bank.
#pragma once

#include "cuda/channels_last.cuh"
#include "cuda/on_chip.cuh"

namespace steadynorm::cuda {

namespace {

template <class T>
__device__ __forceinline__ T* in_shared(int offset) {
  return reinterpret_cast<T*>(shared_memory<unsigned char>() + offset);
}

__device__ __forceinline__ std::uint64_t& arrived_bytes() { return *shared_memory<std::uint64_t>(); }

__device__ __forceinline__ SlabLeaf own_leaf(const Dimensions& d, const Slabs& slabs) {
  return slab_leaf(d, slabs, block_index(), threadIdx.x);
}

// The first element of a thread.
__device__ __forceinline__ std::int64_t offset_of(const Dimensions& d, const SlabLeaf& leaf, int width) {
  return (leaf.n * d.S + leaf.position) * d.C + leaf.channel + leaf.column * width;
}

template <class T, int W>
__device__ __forceinline__ void load_leaf(Packed<T, W> (&raw)[kMicroBatchRows], const T* x,
                                          std::int64_t pitch, int rows) {
  if (rows == kMicroBatchRows) {
    load_rows(raw, x, pitch);
  } else {
#pragma unroll
    for (int v = 0; v < kMicroBatchRows; ++v, x += pitch) {
      raw[v] = {};
      if (v < rows) raw[v] = load<T, W>(x);
    }
  }
}

// f(i) for i < items, by the threads of the block.
template <class F>
__device__ __forceinline__ void for_block(int items, const F& f) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < items; i += static_cast<int>(blockDim.x)) f(i);
}

// f(i) for i < items and some beyond, by whole warps.
template <class F>
__device__ __forceinline__ void for_warps(int items, const F& f) {
#pragma unroll 1
  for (int first = 0; first < items; first += static_cast<int>(blockDim.x))
    f(first + static_cast<int>(threadIdx.x));
}

constexpr int kUnitPositions = kUnitLeaves * kMicroBatchRows;

// Positions of unit `unit` of a block that begins at `position`; 0: the unit is absent.
__device__ __forceinline__ int unit_length(const Dimensions& d, int position, int unit) {
  const int begin = position + unit * kUnitPositions;
  return present(begin, begin + kUnitPositions, static_cast<int>(d.S));
}

__device__ __forceinline__ int block_position(const Slabs& slabs, int rank) {
  return rank * slabs.units * kUnitPositions;
}

// The aligned binary tree over items first .. first + kCount - 1, of which those below `there` are there.
// Four that all are there are loaded together, as kAll promises; more of them would take too many registers.
template <int kCount, bool kAll = false, class Load>
__device__ __forceinline__ auto merge_items(int there, const Load& load, int first = 0) {
  if constexpr (kCount == 1) {
    return load(first);
  } else {
    if constexpr (kCount == 4 && !kAll)
      if (there >= first + kCount) return merge_items<kCount, true>(there, load, first);
    auto node = merge_items<kCount / 2, kAll>(there, load, first);
    if (kAll || there > first + kCount / 2)
      node = merge(node, merge_items<kCount / 2, kAll>(there, load, first + kCount / 2));
    return node;
  }
}

// A channel of the slab from its place.
__device__ __forceinline__ int channel_of(const Slabs& slabs, int place, int width) {
  const int j = static_cast<int>(slabs.by_columns.quotient(static_cast<unsigned>(place)));
  return (place - j * slabs.columns) * width + j;
}

__device__ __forceinline__ int place_of(const Slabs& slabs, int channel, int width) {
  return channel % width * slabs.columns + channel / width;
}

// The group, of the slab, of a channel.
__device__ __forceinline__ int group_of(const Slabs& slabs, int channel) {
  return static_cast<int>(slabs.by_D.quotient(static_cast<unsigned>(channel)));
}

}  // namespace

}  // namespace steadynorm::cuda
