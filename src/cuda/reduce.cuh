// SPDX-License-Identifier: Apache-2.0
// The aligned binary tree over the lanes of a warp.
#pragma once

#include "cuda/device.cuh"
#include "cuda/reduce.h"

namespace steadynorm::cuda {

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

// Over aligned segments of `width` lanes, a power of two; the first lane of each gets its root.
__device__ __forceinline__ Moments warp_tree(Moments m, int width) {
  const int lane = threadIdx.x % kLanes;
  for (int step = 1; step < width; step *= 2) {
    const Moments right{shuffle_down(m.count, step), shuffle_down(m.mean, step), shuffle_down(m.m2, step)};
    if (lane % (2 * step) == 0) m = merge(m, right);
  }
  return m;
}

// Of each segment the first `there` lanes hold a node.
__device__ __forceinline__ ChannelSums warp_tree(ChannelSums s, int width, int there) {
  const int place = threadIdx.x % width;
  for (int step = 1; step < width; step *= 2) {
    const ChannelSums right{shuffle_down(s.dz, step), shuffle_down(s.dz_normalized, step)};
    if (place + step < there) s = merge(s, right);
  }
  return s;
}

}  // namespace steadynorm::cuda
