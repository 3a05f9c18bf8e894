// SPDX-License-Identifier: Apache-2.0
// From the roots of the units to the statistics of the groups: the upper levels of the tree.
#include <bit>

#include "cuda/coefficients.cuh"
#include "cuda/reduce.cuh"

namespace steadynorm::cuda {

namespace {

constexpr int kItemsOfThread = kFoldItems / kFoldThreads;

// What one group's nodes are, and where they come from: roots with absent ones between, or the results of a
// fold.
struct Level {
  const Moments* folded;  // null: the roots
  std::int64_t items;     // of a group, with the absent ones
  int segment;            // threads that share a chunk of items; a power of two up to kFoldThreads
  std::int64_t chunks;    // of a group; 1 in the last level
  int segment_shift;      // segment = 2^segment_shift
  int channel_shift;      // 2^channel_shift items of a place along S, as padded_roots() has them
};

__device__ __forceinline__ Moments load_item(const ForwardCall& call, const Level& level, std::int64_t group,
                                             std::int64_t item) {
  if (item >= level.items) return {};
  if (level.folded != nullptr) return level.folded[group * level.items + item];
  return load_root(call, group, item, level.channel_shift);
}

__device__ __forceinline__ void write_group(const ForwardCall& call, std::int64_t group, const Moments& m) {
  if (call.statistics_out != nullptr) store_statistics(call, group, statistics_of(m, call.eps));
  if (call.moments_out != nullptr) {
    call.moments_out[3 * group] = m.count;
    call.moments_out[3 * group + 1] = m.mean;
    call.moments_out[3 * group + 2] = m.m2;
  }
}

// A segment of threads merges a chunk: up to four items each, then lanes, then warps. `out` null: this is the
// last level.
__global__ void __launch_bounds__(kFoldThreads)
    merge_nodes(const ForwardCall call, const Level level, Moments* out) {
  __shared__ Moments warps[kFoldThreads / kLanes];
  release_next();
  wait_for_previous();
  const int thread = static_cast<int>(threadIdx.x), segment = level.segment, place = thread & (segment - 1);
  const std::int64_t chunk_items = level.chunks > 1 || level.items > kFoldThreads ? kFoldItems : segment;
  const int run = chunk_items == kFoldItems ? kItemsOfThread : 1;  // of a thread
  const std::int64_t chunks = call.d.N * call.d.G * level.chunks;
  const std::int64_t chunk = (std::int64_t{blockIdx.x} * kFoldThreads + thread) >> level.segment_shift;
  Split group{chunk < chunks ? chunk : 0, 0};
  if (level.chunks > 1) group = split(group.quotient, level.chunks);

  Moments items[kItemsOfThread];
#pragma unroll
  for (int i = 0; i < kItemsOfThread; ++i) {
    items[i] = Moments{};
    if (chunk < chunks && i < run)
      items[i] = load_item(call, level, group.quotient, group.remainder * chunk_items + place * run + i);
  }
  Moments m = warp_tree(merge(merge(items[0], items[1]), merge(items[2], items[3])),
                        segment < kLanes ? segment : kLanes);
  if (segment > kLanes) {
    if (thread % kLanes == 0) warps[thread / kLanes] = m;
    __syncthreads();
    // Each warp merges the warps' nodes of its own segment; the segment's first thread is the first lane of
    // one.
    const int first = (thread - place) / kLanes, lane = thread % kLanes;
    m = warp_tree(lane < segment / kLanes ? warps[first + lane] : Moments{}, segment / kLanes);
  }
  if (chunk >= chunks || place != 0) return;
  if (out != nullptr)
    out[chunk] = m;
  else
    write_group(call, group.quotient, m);
}

__global__ void __launch_bounds__(kFoldThreads)
    statistics_of_moments(const Call call, const double* moments, float* statistics) {
  release_next();
  wait_for_previous();
  const std::int64_t plane = call.d.N * call.d.G;
  const std::int64_t group = std::int64_t{blockIdx.x} * kFoldThreads + threadIdx.x;
  if (group >= plane) return;
  const Statistics s =
      statistics_of({moments[3 * group], moments[3 * group + 1], moments[3 * group + 2]}, call.eps);
  statistics[group] = s.mean_hi;
  statistics[plane + group] = s.mean_lo;
  statistics[2 * plane + group] = s.rstd;
}

}  // namespace

cudaError_t launch_finalize(const ForwardCall& call, const Plan&, const Queue& queue) {
  const std::int64_t groups = call.d.N * call.d.G;
  Level level{nullptr, padded_roots(call.d.tree), 0, 0, 0, channel_shift(call.d.tree)};
  Moments* folded = call.folded;
  for (;;) {
    level.chunks = divide_up(level.items, kFoldItems);
    level.segment = level.items > kFoldThreads ? kFoldThreads : power_of_two_from(level.items);
    level.segment_shift = std::countr_zero(static_cast<unsigned>(level.segment));
    const bool last = level.chunks == 1;
    Launch shape;
    shape.blocks = divide_up(groups * level.chunks, kFoldThreads / level.segment);
    shape.threads_x = kFoldThreads;
    const cudaError_t error = launch(merge_nodes, shape, queue, call, level, last ? nullptr : folded);
    if (error != cudaSuccess || last) return error;
    level.folded = folded;
    folded += groups * level.chunks;
    level.items = level.chunks;
  }
}

cudaError_t launch_statistics_of_moments(const Call& call, const double* moments, float* statistics,
                                         const Queue& queue) {
  Launch shape;
  shape.blocks = divide_up(call.d.N * call.d.G, kFoldThreads);
  shape.threads_x = kFoldThreads;
  return launch(statistics_of_moments, shape, queue, call, moments, statistics);
}

std::string built_architectures() {
#if defined(__CUDA_ARCH_LIST__)
  std::string list;
  for (const int architecture : {__CUDA_ARCH_LIST__})  // 900 is 9.0
    list += (list.empty() ? "" : ", ") + std::to_string(architecture / 100) + "." +
            std::to_string(architecture / 10 % 10);
  return list;
#else
  return "no device";
#endif
}

}  // namespace steadynorm::cuda
