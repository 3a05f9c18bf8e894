// SPDX-License-Identifier: Apache-2.0
// The channels_last layout: how a thread reads its channels along the volume, and where a block of a sweep
// lies.
#pragma once

#include "cuda/coefficients.cuh"
#include "cuda/reduce.cuh"

namespace steadynorm::cuda {

constexpr int kSweepRows = 4;  // rows that a thread of a sweep loads before it uses the first
// kCount whole rows of a thread's channels, aligned.
template <class T, int W, int kCount>
__device__ __forceinline__ void load_rows(Packed<T, W> (&raw)[kCount], const T* x, std::int64_t pitch) {
#pragma unroll
  for (int v = 0; v < kCount; ++v, x += pitch) raw[v] = load<T, W>(x);
}

template <class T, int W, int kCount>
__device__ __forceinline__ void load_rows(Packed<T, W> (&raw)[kCount], Summed<T> p, std::int64_t pitch) {
  constexpr int kRows = kSummedRows < Packed<T, W>, kCount,
                W == 8 ? 32 : 64 > ;  // of eight channels 64 spill
#pragma unroll
  for (int begin = 0; begin < kCount; begin += kRows, p += kRows * pitch) {
    Packed<T, W> x[kRows], residual[kRows];
    load_rows(x, p.x, pitch);
    load_rows(residual, p.residual, pitch);
#pragma unroll
    for (int v = 0; v < kRows; ++v) {
      raw[begin + v] = add(x[v], residual[v]);
      store(p.sum + v * pitch, raw[begin + v], true, W);
    }
  }
}

// What is ragged or misaligned: a micro-batch of one channel, or one row of a thread's. +0 for what is not
// there.
template <class T, int kCount>
__device__ __forceinline__ void load_column(float (&values)[kCount], const T* x, std::int64_t pitch,
                                            int rows) {
#pragma unroll
  for (int v = 0; v < kCount; ++v, x += pitch) values[v] = v < rows ? to_fp32(*x) : 0.0f;
}

template <class T, int kCount>
__device__ __forceinline__ void load_column(float (&values)[kCount], Summed<T> p, std::int64_t pitch,
                                            int rows) {
#pragma unroll
  for (int v = 0; v < kCount; ++v, p += pitch) {
    values[v] = 0.0f;
    if (v >= rows) continue;
    const Packed<T, 1> sum = add(load_some<T, 1>(p.x, 1), load_some<T, 1>(p.residual, 1));
    store(p.sum, sum, false, 1);
    values[v] = sum[0];
  }
}

// Moves every item to the place in front, and `last` behind all. So a loop over the channels of a thread that
// is not unrolled works on item 0, and what it needs is needed once: unrolled, it would take more registers
// than the aligned path.
template <int W, class Item>
__device__ __forceinline__ void rotate(Item (&items)[W], const Item& last) {
#pragma unroll
  for (int j = 1; j < W; ++j) items[j - 1] = items[j];
  items[W - 1] = last;
}

template <int W = kColumnWidth, class T>
__device__ __forceinline__ Packed<T, W> load_row(const T* x, int channels, bool aligned) {
  return aligned ? load<T, W>(x) : load_some<T, W>(x, channels);
}

// Not stored: whoever sums the row does that.
template <int W, class T>
__device__ __forceinline__ Packed<T, W> load_row(const Summed<T>& p, int channels, bool aligned) {
  return add(load_row<W>(p.x, channels, aligned), load_row<W>(p.residual, channels, aligned));
}

// A thread of a block that reduces: the column of its channels and the lane of its leaves. Threads that only
// fill the last warp have a lane beyond all.
struct ColumnPlace {
  int column, lane;
};

__device__ __forceinline__ ColumnPlace column_place(const Columns& p) {
  const int lane = static_cast<int>(threadIdx.x / static_cast<unsigned>(p.columns));
  return {static_cast<int>(threadIdx.x) - lane * p.columns, lane};
}

// The sums of a unit's channels: the leaves', added up as a tree, a channel at a time: four leaves by a
// thread, and those by neighbouring threads. leaf(begin, rows, sums) fills the sums of a thread's channels,
// and done(channel, sums) gets each channel's, by one thread of the block. `shared`: for the sums of every
// leaf, leaf i in row i / 4 + 4 (i % 4): rows that neighbouring threads read lie in different banks. An
// absent leaf is not added.
template <int W, class Sums, class Leaf, class Done>
__device__ __forceinline__ void sum_leaves(const Columns& p, Sums* shared, int leaf_positions, int length,
                                           const ColumnPlace& at, bool active, const Leaf& leaf,
                                           const Done& done) {
  constexpr int kRun = 4, kRuns = kUnitLeaves / kRun;
  static_assert(sizeof(Sums) == 16);
  const int pitch = leaf_pitch(p), work = p.columns * W * kRuns;
  if (at.lane < p.lanes) {
#pragma unroll 1
    for (int i = at.lane; i < kUnitLeaves; i += p.lanes) {
      Sums of_thread[W]{};
      const int begin = i * leaf_positions, rows = present(begin, begin + leaf_positions, length);
      if (active && rows > 0) leaf(begin, rows, of_thread);
#pragma unroll
      for (int j = 0; j < W; ++j)
        shared[(i / kRun + i % kRun * kRuns) * pitch + j * p.columns + at.column] = of_thread[j];
    }
  }
  __syncthreads();
  const int there = (length + leaf_positions - 1) / leaf_positions;
  for (int first = 0; first < work;
       first += static_cast<int>(blockDim.x)) {  // the whole block goes through it
    const int i = first + static_cast<int>(threadIdx.x);
    const int channel = i / kRuns,
              leaves = there - i % kRuns * kRun;  // that are there of the run and behind it
    Sums sums{};
    if (i < work) {
      const Sums* const run = shared + i % kRuns * pitch + channel % W * p.columns + channel / W;
      const auto of = [&](int k) { return run[k * kRuns * pitch]; };
      sums = leaves > 1 ? merge(of(0), of(1)) : of(0);
      if (leaves > 2) sums = merge(sums, leaves > 3 ? merge(of(2), of(3)) : of(2));
    }
#pragma unroll
    for (int step = 1; step < kRuns; step *= 2) {
      const Sums right = shuffle_down(sums, step);
      if (leaves > step * kRun) sums = merge(sums, right);
    }
    if (i < work && i % kRuns == 0) done(channel, sums);
  }
}

// What merge_channels() needs besides: of each level of the tree over `members` channels, the right child's
// share of a node's values where they are fewer than the left's. By all threads, a barrier before it is used.
static_assert(1 << kChannelLevels == kChannelBlock);

__device__ __forceinline__ void make_shares(double* shares, int members) {
  const int level = static_cast<int>(threadIdx.x);
  if (level >= kChannelLevels) return;
  const int full = 1 << level, rest = members & (full - 1);
  shares[level] = static_cast<double>(rest) / static_cast<double>(full + rest);
}

// The tree over the channels of each channel unit, over roots[units * members]: whole units in aligned runs
// of lanes, a power of two for each, and the runs of a warp's length that are left once more.
// positions(unit): of each of its channels; 0 where the unit is absent. A merge() is written with its
// division done before.
template <class Positions, class Done>
__device__ __forceinline__ void merge_channels(Node* roots, const double* shares, int units, int members,
                                               const Positions& positions, const Done& done) {
  int width = power_of_two_from(members), stride = 1;  // lanes of a unit; channels of a lane
  for (;;) {
    const int lanes = width < kLanes ? width : kLanes;
    const int shift = count_bits(static_cast<unsigned>(width) - 1u), work = units * width;
#pragma unroll 1
    for (int first = 0; first < work; first += static_cast<int>(blockDim.x)) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int unit = i >> shift, index = (i & (width - 1)) * stride;
      const int there = unit < units ? positions(unit) : 0, present_members = there > 0 ? members - index : 0;
      Node node{};
      if (present_members > 0) node = roots[unit * members + index];
      double weight = static_cast<double>(there * stride) * 0.5;
      const double* share = shares + count_bits(static_cast<unsigned>(stride) - 1u);
      int full = stride;
#pragma unroll 1
      for (int step = 1; step < lanes; step *= 2, full *= 2, weight *= 2, ++share) {
        const Node right = shuffle_down(node, step);
        const int rest = present_members - full;
        const double of_right = rest < full ? *share : 0.5;
        const double delta = right.mean - node.mean;
        const Node both{
            node.mean + delta * of_right,
            (node.m2 + right.m2) + delta * delta * (rest < full ? (weight + weight) * of_right : weight)};
        if (rest > 0) node = both;
      }
      if (present_members > 0 && (i & (lanes - 1)) == 0) {
        if (width <= kLanes)
          done(unit, node);
        else
          roots[unit * members + index] = node;
      }
    }
    if (width <= kLanes) return;
    width /= kLanes;
    stride *= kLanes;
    __syncthreads();
  }
}

// What forward and backward need of a channel. A block makes them once, in shared memory.
struct alignas(16) ForwardCoefficients {
  float mean_hi, mean_lo, scale, bias;
};

struct alignas(16) BackwardCoefficients {
  float mean_hi, mean_lo, rstd, bias, weight;
  GroupMeans means;
};

// f(place, channel, group) for each of `columns` x 4 channels from `begin` on, by the threads of the block;
// its place is where the thread of that column looks for it: column + columns * (0 .. 3).
template <class F>
__device__ __forceinline__ void for_channels_of_block(const Dimensions& d, std::int64_t n, std::int64_t begin,
                                                      int columns, const F& f) {
  const int threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int i = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x); i < columns * kColumnWidth;
       i += threads)
    if (begin + i < d.C)
      f(i % kColumnWidth * columns + i / kColumnWidth, begin + i, n * d.G + quotient(begin + i, d.D));
}

__device__ __forceinline__ void load_backward(const BackwardCall& call, std::int64_t n, std::int64_t begin,
                                              int columns, BackwardCoefficients* shared, bool means) {
  for_channels_of_block(call.d, n, begin, columns, [&](int place, std::int64_t channel, std::int64_t group) {
    const Statistics s = load_statistics(call, group);
    const float bias = load_parameter(call.bias, n, channel, 0.0f),
                weight = load_parameter(call.weight, n, channel, 1.0f);
    shared[place] = {s.mean_hi, s.mean_lo, s.rstd,
                     bias,      weight,    means ? load_means(call, group) : GroupMeans{0.0f, 0.0f}};
  });
}

__device__ __forceinline__ Coefficients coefficients_of(const BackwardCoefficients& b) {
  return {{b.mean_hi, b.mean_lo, b.rstd}, b.weight, b.weight * b.rstd, b.bias};
}

// f(typed pointer): the dtype is a run-time value, asked for once a batch of rows.
template <class F>
__device__ __forceinline__ void with_type(void* p, DType dtype, const F& f) {
  if (dtype == DType::bfloat16)
    f(static_cast<BFloat16*>(p));
  else if (dtype == DType::float16)
    f(static_cast<Float16*>(p));
  else
    f(static_cast<float*>(p));
}

// A block of a sweep is columns x lanes threads on columns x (lanes * rows) vectors; a thread's rows lie
// `lanes` apart.
struct SweepPlace {
  std::int64_t n, block_channel, channel, offset;  // offset: the first element of the thread
  int channels, rows;                              // of the thread; not positive outside
};

__device__ __forceinline__ SweepPlace sweep_place(const Dimensions& d, const Sweep& sweep) {
  constexpr int width = kColumnWidth;
  const std::int64_t block = sweep.reverse ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const std::int64_t tile_rows = sweep.lanes * sweep.rows;
  const Split slab = split(block, sweep.slabs);
  const Split tile = split(slab.quotient, divide_up(d.S, tile_rows));
  SweepPlace r;
  r.n = tile.quotient;
  r.block_channel = slab.remainder * sweep.columns * width;
  r.channel = r.block_channel + threadIdx.x * static_cast<unsigned>(width);
  const std::int64_t channels = d.C - r.channel;
  const std::int64_t position = tile.remainder * tile_rows + threadIdx.y;
  const std::int64_t rows = position < d.S ? divide_up(d.S - position, sweep.lanes) : 0;
  r.rows = static_cast<int>(rows < sweep.rows ? rows : sweep.rows);
  r.channels = r.rows == 0 ? 0 : static_cast<int>(channels < width ? channels : width);
  r.offset = (r.n * d.S + position) * d.C + r.channel;
  return r;
}

}  // namespace steadynorm::cuda
