// SPDX-License-Identifier: Apache-2.0
// Backward, per channel: rows from the units' sums, then group means and parameter gradients from the rows.
#include "cuda/coefficients.cuh"
#include "cuda/reduce.cuh"

namespace steadynorm::cuda {

namespace {

constexpr int kChannelThreads = 256;
constexpr int kGradientChannels = 32;                                // of a block that sums over samples
constexpr int kGradientLanes = kChannelThreads / kGradientChannels;  // blocks of 32 samples at a time

// The tree over the units of a row, by threads_y lanes of kUnitsOfThread units each; lane 0 gets it, rounded.
// The whole block calls this, threads_x rows at a time, with `nodes` for a node of each thread.
__device__ __forceinline__ float2 row_of_units(const BackwardCall& call, bool contiguous, std::int64_t n,
                                               std::int64_t c, bool active, ChannelSums* nodes) {
  const std::int64_t units = call.d.tree.spatial_units;
  const int first = static_cast<int>(threadIdx.y) * kUnitsOfThread;
  const int there = present<int>(first, first + kUnitsOfThread, static_cast<int>(units));
  const std::int64_t unit_stride = contiguous ? 1 : call.d.C;
  ChannelSums sums[kUnitsOfThread]{};
  if (active) {
    const std::int64_t begin = contiguous ? (n * call.d.C + c) * units : n * units * call.d.C + c;
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; ++i)
      if (i < there) {
        const float2 unit = call.partials[begin + (first + i) * unit_stride];
        sums[i] = {unit.x, unit.y};
      }
  }
#pragma unroll
  for (int step = 1; step < kUnitsOfThread; step *= 2)
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; i += 2 * step)
      if (i + step < there) sums[i] = merge(sums[i], sums[i + step]);

  const int width = static_cast<int>(blockDim.x), lane = static_cast<int>(threadIdx.y);
  const int lanes_there = static_cast<int>(divide_up(units, kUnitsOfThread));
  ChannelSums* const own = nodes + lane * width + threadIdx.x;
  *own = sums[0];
  for (int step = 1; step < static_cast<int>(blockDim.y); step *= 2) {
    __syncthreads();
    if (lane % (2 * step) == 0 && lane + step < lanes_there) *own = merge(*own, own[step * width]);
  }
  return {static_cast<float>(own->dz), static_cast<float>(own->dz_normalized)};
}

__global__ void __launch_bounds__(kRowThreads) rows_of_units(const BackwardCall call, const bool contiguous) {
  release_next();
  wait_for_previous();
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const bool active = row < call.d.N * call.d.C;
  const Split sample = split(active ? row : 0, call.d.by_C);
  const float2 sums =
      row_of_units(call, contiguous, sample.quotient, sample.remainder, active, shared_memory<ChannelSums>());
  if (active && threadIdx.y == 0) call.rows[row] = sums;
}

// A segment of threads per group: an aligned binary tree over its channels, 256 at a time.
__device__ void group_mean(const BackwardCall& call, std::int64_t block, int segment) {
  __shared__ ChannelSums warps[kChannelThreads / kLanes];
  __shared__ ChannelSums levels[40];
  const int thread = static_cast<int>(threadIdx.x), place = thread % segment;
  const std::int64_t group = block * (kChannelThreads / segment) + thread / segment, D = call.d.D;
  const std::int64_t groups = call.d.N * call.d.G;
  const std::int64_t rounds = divide_up(D, segment);
  ChannelSums sums{};
  for (std::int64_t round = 0; round < rounds; ++round) {
    const std::int64_t d = round * segment + place;
    const int there = static_cast<int>(D - round * segment < segment ? D - round * segment : segment);
    sums = {};
    if (group < groups && d < D) {
      const Split sample = split(group, call.d.G);
      const float2 row = call.rows[group * D + d];
      sums = weighted(load_parameter(call.weight, sample.quotient, sample.remainder * D + d, 1.0f), row.x,
                      row.y);
    }
    const int first_lane = place / kLanes * kLanes;
    const int lanes_there = there - first_lane < 0 ? 0 : there - first_lane;
    sums = warp_tree(sums, segment < kLanes ? segment : kLanes, lanes_there < kLanes ? lanes_there : kLanes);
    if (segment > kLanes) {
      __syncthreads();
      if (thread % kLanes == 0) warps[thread / kLanes] = sums;
      __syncthreads();
      const int warps_there = (there + kLanes - 1) / kLanes;
      ChannelSums w[kChannelThreads / kLanes];
#pragma unroll
      for (int i = 0; i < kChannelThreads / kLanes; ++i)
        w[i] = i < warps_there && place == 0 ? warps[thread / kLanes + i] : ChannelSums{};
#pragma unroll
      for (int step = 1; step < kChannelThreads / kLanes; step *= 2)
#pragma unroll
        for (int i = 0; i < kChannelThreads / kLanes; i += 2 * step)
          if (i + step < warps_there) w[i] = merge(w[i], w[i + step]);
      sums = w[0];
    }
    if (rounds > 1 && thread == 0) push_node(levels, round, sums);
  }
  if (place != 0 || group >= groups) return;
  if (rounds > 1) sums = root_of_nodes(levels, rounds);
  const GroupMeans means = group_means(sums, static_cast<double>(D) * static_cast<double>(call.d.S));
  call.means[group] = float2{means.dz, means.dz_normalized};
}

// [C]: blocks of 32 samples, each from 0 in order; then the blocks in order.
__device__ void sum_over_samples(const BackwardCall& call, std::int64_t block, bool weight, bool bias) {
  __shared__ ChannelSums blocks[kGradientLanes][kGradientChannels];
  const int channel = static_cast<int>(threadIdx.x) % kGradientChannels,
            lane = static_cast<int>(threadIdx.x) / kGradientChannels;
  const std::int64_t c = block * kGradientChannels + channel, N = call.d.N, C = call.d.C;
  ChannelSums total{};
  for (std::int64_t first = 0; first < N; first += kGradientLanes * kSampleBlock) {
    const std::int64_t begin = first + lane * kSampleBlock;
    const std::int64_t end = begin + kSampleBlock < N ? begin + kSampleBlock : N;
    ChannelSums sums{};
    if (c < C)
#pragma unroll 8
      for (std::int64_t n = begin; n < end; ++n) {
        const float2 row = call.rows[n * C + c];
        sums = merge(sums, ChannelSums{row.x, row.y});
      }
    __syncthreads();
    blocks[lane][channel] = sums;
    __syncthreads();
    if (lane == 0)
      for (int i = 0; i < kGradientLanes && first + i * kSampleBlock < N; ++i)
        total = merge(total, blocks[i][channel]);
  }
  if (lane != 0 || c >= C) return;
  if (weight) store_parameter(call.dweight, call.weight.dtype, c, static_cast<float>(total.dz_normalized));
  if (bias) store_parameter(call.dbias, call.bias.dtype, c, static_cast<float>(total.dz));
}

// All of the above for one group of all samples by one block, in one launch: where there is little of it. A
// thread has a channel of a sample, sample by sample.
__global__ void __launch_bounds__(kRowThreads)
    rows_means_and_parameters(const BackwardCall call, const bool contiguous, const Wanted wanted) {
  __shared__ float2 rows[kRowThreads];
  __shared__ ChannelSums channels[kRowThreads];
  release_next();
  wait_for_previous();
  const std::int64_t g = blockIdx.x;
  const int D = static_cast<int>(call.d.D), N = static_cast<int>(call.d.N),
            width = static_cast<int>(blockDim.x);
  const int thread = static_cast<int>(threadIdx.y) * width + static_cast<int>(threadIdx.x);
  for (int first = 0; first < N * D; first += width) {
    const int r = first + static_cast<int>(threadIdx.x), n = r / D;
    const float2 row =
        row_of_units(call, contiguous, n, g * D + (r - n * D), r < N * D, shared_memory<ChannelSums>());
    __syncthreads();
    if (threadIdx.y == 0 && r < N * D) rows[r] = row;
  }
  __syncthreads();
  const int n = thread / D, d = thread - n * D;
  const std::int64_t channel = g * D + d;
  if (n < N) {
    const float2 row = rows[thread];
    channels[thread] = weighted(load_parameter(call.weight, n, channel, 1.0f), row.x, row.y);
    if (wanted.weight_rows) store_parameter(call.dweight, call.weight.dtype, n * call.d.C + channel, row.y);
    if (wanted.bias_rows) store_parameter(call.dbias, call.bias.dtype, n * call.d.C + channel, row.x);
  }
  for (int step = 1; step < D; step *= 2) {
    __syncthreads();
    if (n < N && d % (2 * step) == 0 && d + step < D)
      channels[thread] = merge(channels[thread], channels[thread + step]);
  }
  if (n < N && d == 0 && call.dx != nullptr) {
    const GroupMeans means =
        group_means(channels[thread], static_cast<double>(D) * static_cast<double>(call.d.S));
    call.means[n * call.d.G + g] = float2{means.dz, means.dz_normalized};
  }
  if (n > 0) return;
  ChannelSums total{}, block{};
  for (int i = 0; i < N; ++i) {
    const float2 row = rows[i * D + d];
    block = merge(block, ChannelSums{row.x, row.y});
    if ((i + 1) % kSampleBlock == 0 || i + 1 == N) {
      total = merge(total, block);
      block = {};
    }
  }
  if (wanted.weight_sums)
    store_parameter(call.dweight, call.weight.dtype, channel, static_cast<float>(total.dz_normalized));
  if (wanted.bias_sums) store_parameter(call.dbias, call.bias.dtype, channel, static_cast<float>(total.dz));
}

// Which blocks do what; any of the three may be empty.
struct Roles : Wanted {
  std::int64_t means, sums;
  int segment;  // threads of a group
};

__global__ void __launch_bounds__(kChannelThreads)
    means_and_parameters(const BackwardCall call, const Roles roles) {
  release_next();
  wait_for_previous();
  std::int64_t block = blockIdx.x;
  if (block < roles.means) return group_mean(call, block, roles.segment);
  block -= roles.means;
  if (block < roles.sums) return sum_over_samples(call, block, roles.weight_sums, roles.bias_sums);
  block -= roles.sums;
  const std::int64_t i = block * kChannelThreads + threadIdx.x;
  if (i >= call.d.N * call.d.C) return;
  const float2 row = call.rows[i];
  if (roles.weight_rows) store_parameter(call.dweight, call.weight.dtype, i, row.y);
  if (roles.bias_rows) store_parameter(call.dbias, call.bias.dtype, i, row.x);
}

cudaError_t launch_means_and_parameters(const BackwardCall& call, const Queue& queue) {
  Roles roles{call.wanted(), 0, 0, 0};
  roles.segment = call.d.D > kChannelThreads ? kChannelThreads : power_of_two_from(call.d.D);
  if (call.dx != nullptr) roles.means = divide_up(call.d.N * call.d.G, kChannelThreads / roles.segment);
  if (roles.weight_sums || roles.bias_sums) roles.sums = divide_up(call.d.C, kGradientChannels);
  Launch shape;
  shape.blocks = roles.means + roles.sums;
  if (roles.weight_rows || roles.bias_rows) shape.blocks += divide_up(call.d.N * call.d.C, kChannelThreads);
  shape.threads_x = kChannelThreads;
  return launch(means_and_parameters, shape, queue, call, roles);
}

}  // namespace

cudaError_t launch_parameters(const BackwardCall& call, const Queue& queue) {
  Roles roles{};
  roles.weight_sums = call.wanted().weight_sums;
  roles.bias_sums = call.wanted().bias_sums;
  if (roles.weight_sums || roles.bias_sums) roles.sums = divide_up(call.d.C, kGradientChannels);
  Launch shape;
  shape.blocks = roles.sums;
  shape.threads_x = kChannelThreads;
  return launch(means_and_parameters, shape, queue, call, roles);
}

cudaError_t launch_channels(const BackwardCall& call, const Plan& plan, Layout layout, const Queue& queue) {
  const bool contiguous = layout == Layout::contiguous;
  if (plan.rows_together)
    return launch(rows_means_and_parameters, plan.rows, queue, call, contiguous, call.wanted());
  const cudaError_t error = launch(rows_of_units, plan.rows, queue, call, contiguous);
  return error != cudaSuccess ? error : launch_means_and_parameters(call, queue);
}

}  // namespace steadynorm::cuda
