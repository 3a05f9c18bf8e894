// SPDX-License-Identifier: Apache-2.0
// The channels_last layout: how a thread reads its channels along the volume, and where a block of a sweep
// lies.
#pragma once

#include "cuda/coefficients.cuh"
#include "cuda/reduce.cuh"

namespace steadynorm::cuda {

constexpr int kSweepRows = 4;  // rows that a thread of a sweep loads before it uses the first

// kCount rows of a thread's channels; +0 for the rows beyond `rows`.
template <class T, int W, int kCount>
__device__ __forceinline__ void load_rows(Packed<T, W> (&raw)[kCount], const T* x, std::int64_t pitch,
                                          int rows, int channels, bool aligned, std::uint64_t policy) {
  if (aligned && rows >= kCount) {
#pragma unroll
    for (int v = 0; v < kCount; ++v, x += pitch) raw[v] = load<T, W>(x, policy);
  } else {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      if (aligned && v < rows)
        raw[v] = load<T, W>(x + v * pitch, policy);
      else
        raw[v] = load_some<T, W>(x + v * pitch, v < rows ? channels : 0);
    }
  }
}

// Where a channel lies in its channel unit.
struct ChannelPlace {
  std::int64_t group, unit;  // of the sample; of the group
  int index, unit_channels;
};

__device__ __forceinline__ ChannelPlace channel_place(const Dimensions& d, std::int64_t channel) {
  const Split group = split(channel, d.D);
  const std::int64_t unit = group.remainder / kChannelBlock;  // unit_channels is D, or kChannelBlock
  const std::int64_t begin = d.tree.channel_begin(unit);
  return {group.quotient, unit, static_cast<int>(group.remainder - begin),
          static_cast<int>(d.tree.channel_end(unit) - begin)};
}

// A block of a sweep is columns x lanes threads on columns x (lanes * rows) vectors; a thread's rows lie
// `lanes` apart.
struct SweepPlace {
  std::int64_t n, channel, offset;  // offset: the first element of the thread
  int channels, rows;               // of the thread; not positive outside
};

__device__ __forceinline__ SweepPlace sweep_place(const Dimensions& d, const Sweep& sweep, int width) {
  const std::int64_t block = sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const std::int64_t tile_rows = sweep.lanes * sweep.rows;
  const Split slab = split(block, sweep.slabs);
  const Split tile = split(slab.quotient, divide_up(d.S, tile_rows));
  SweepPlace r;
  r.n = tile.quotient;
  r.channel = (slab.remainder * sweep.columns + threadIdx.x) * width;
  const std::int64_t channels = d.C - r.channel;
  const std::int64_t position = tile.remainder * tile_rows + threadIdx.y;
  const std::int64_t rows = position < d.S ? divide_up(d.S - position, sweep.lanes) : 0;
  r.rows = static_cast<int>(rows < sweep.rows ? rows : sweep.rows);
  r.channels = r.rows == 0 ? 0 : static_cast<int>(channels < width ? channels : width);
  r.offset = (r.n * d.S + position) * d.C + r.channel;
  return r;
}

}  // namespace steadynorm::cuda
