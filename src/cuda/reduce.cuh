// SPDX-License-Identifier: Apache-2.0
// The aligned binary tree over the lanes of a warp.
#pragma once

#include "cuda/device.cuh"
#include "cuda/reduce.h"

namespace steadynorm::cuda {

// Threads of an SM that registers are for: fitted on compute capability 9.0, fewer elsewhere, where the same
// code takes some more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr bool kFitted = false;
#else
constexpr bool kFitted = true;
#endif

constexpr int threads_of_sm(int fitted, int others) { return kFitted ? fitted : others; }

__device__ __forceinline__ ChannelSums shuffle_down(const ChannelSums& sums, int step) {
  return {shuffle_down(sums.dz, step), shuffle_down(sums.dz_normalized, step)};
}

__device__ __forceinline__ Node shuffle_down(const Node& node, int step) {
  return {shuffle_down(node.mean, step), shuffle_down(node.m2, step)};
}

__device__ __forceinline__ PivotSums shuffle_down(const PivotSums& sums, int step) {
  return {shuffle_down(sums.sum, step), shuffle_down(sums.squares, step)};
}

// A group's items as one aligned binary tree: the channel units of a place along S are padded with absent
// ones to 2^channel_shift.
inline int channel_shift(const Tree& tree) {
  int shift = 0;
  while ((std::int64_t{1} << shift) < tree.channel_units) ++shift;
  return shift;
}

__device__ __forceinline__ Moments load_root(const ForwardCall& call, std::int64_t group, std::int64_t item,
                                             int shift) {
  const Tree& tree = call.d.tree;
  const std::int64_t place = item >> shift, channel = item - (place << shift);
  if (channel >= tree.channel_units || place >= tree.spatial_units) return {};
  return with_count(call.roots[group * tree.roots() + place * tree.channel_units + channel],
                    tree.count(place, channel));
}

// The aligned binary tree over the lanes of a warp, full or with counts; lane 0 gets the root.
__device__ __forceinline__ Node warp_tree(Node node, double count) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    const Node right{shuffle_down(node.mean, step), shuffle_down(node.m2, step)};
    node = without_count(merge(with_count(node, count), with_count(right, count)));
    count *= 2;
  }
  return node;
}

// Over `width` lanes, a power of two, whose nodes are all there and have `count` values each.
__device__ __forceinline__ Node warp_tree_equal(Node node, int width, double count) {
#pragma unroll 1
  for (int step = 1; step < width; step *= 2, count *= 2)
    node = merge_equal(node, shuffle_down(node, step), count * 0.5);
  return node;
}

// Over aligned segments of `width` lanes, a power of two; the first lane of each gets its root.
__device__ __forceinline__ Moments warp_tree(Moments m, int width) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1  // its divisions are long, and a kernel's first run fetches every instruction
  for (int step = 1; step < width; step *= 2) {
    const Moments right{shuffle_down(m.count, step), shuffle_down(m.mean, step), shuffle_down(m.m2, step)};
    if ((lane & (2 * step - 1)) == 0) m = merge(m, right);
  }
  return m;
}

// Of each segment, a power of two of lanes, the first `there` lanes hold a node.
__device__ __forceinline__ ChannelSums warp_tree(ChannelSums s, int width, int there) {
  const int place = threadIdx.x & (width - 1);
#pragma unroll 1
  for (int step = 1; step < width; step *= 2) {
    const ChannelSums right{shuffle_down(s.dz, step), shuffle_down(s.dz_normalized, step)};
    if (place + step < there) s = merge(s, right);
  }
  return s;
}

}  // namespace steadynorm::cuda
