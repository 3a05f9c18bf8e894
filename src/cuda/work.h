// SPDX-License-Identifier: Apache-2.0
// Which part of a problem a block or a warp works on. Shared by the kernels and by the plan's test, which
// counts that every part is covered once.
#pragma once

#include <bit>
#include <cstdint>

#include "core/numeric.h"
#include "core/tree.h"
#include "cuda/plan.h"

namespace steadynorm::cuda {

// 64-bit division takes some 80 instructions on a GPU, 32-bit some 20.
STEADYNORM_HD std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

struct Split {
  std::int64_t quotient, remainder;
};

STEADYNORM_HD Split split(std::int64_t a, std::int64_t b) {
  const std::int64_t q = quotient(a, b);
  return {q, a - q * b};
}

// Division by a number that the host knows: of n < 2^31 a multiplication and a shift.
struct Divisor {
  std::int64_t divisor = 1;
  std::uint32_t multiplier = 0x80000001u;
  int shift = 31;  // beyond 62: too large a divisor

  Divisor() = default;
  explicit Divisor(std::int64_t d) : divisor(d) {
    while (shift < 63 && (std::int64_t{1} << (shift - 31)) < d) ++shift;
    if (shift < 63)
      multiplier =
          static_cast<std::uint32_t>((std::uint64_t{1} << shift) / static_cast<std::uint64_t>(d) + 1);
  }
  STEADYNORM_HD std::uint32_t quotient(std::uint32_t n) const {
    return static_cast<std::uint32_t>((std::uint64_t{n} * multiplier) >> shift);
  }
};

STEADYNORM_HD Split split(std::int64_t a, const Divisor& b) {
  const std::int64_t q = (a >> 31) == 0 && b.shift < 63
                             ? std::int64_t{b.quotient(static_cast<std::uint32_t>(a))}
                             : a / b.divisor;
  return {q, a - q * b.divisor};
}

STEADYNORM_HD int power_of_two_from(std::int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

struct Dimensions {
  std::int64_t N, C, G, S, D;
  Tree tree;
  Divisor by_C, by_D, by_spatial_units, by_roots;
};

inline Dimensions dimensions_of(const Problem& p) {
  const Tree tree = tree_of(p);
  return {p.samples,
          p.channels,
          p.groups,
          p.positions,
          p.channels_per_group(),
          tree,
          Divisor(p.channels),
          Divisor(p.channels_per_group()),
          Divisor(tree.spatial_units),
          Divisor(tree.roots())};
}

// contiguous: unit `index` in memory order. begin is its first element, root its place among all groups'
// roots.
struct ContiguousUnit {
  std::int64_t begin, length, root;
};

struct ChannelUnit {
  std::int64_t row, begin, length;  // row = n * C + c
};

STEADYNORM_HD std::int64_t contiguous_units(const Dimensions& d) { return d.N * d.G * d.tree.roots(); }

STEADYNORM_HD ContiguousUnit contiguous_unit(const Dimensions& d, std::int64_t index) {
  const Tree& t = d.tree;
  const Split group = split(index, d.by_roots);
  const Split channel = split(group.remainder, d.by_spatial_units);  // of channel units
  const std::int64_t unit = channel.remainder;
  const std::int64_t channels = t.channel_end(channel.quotient) - t.channel_begin(channel.quotient);
  return {group.quotient * d.D * d.S + t.channel_begin(channel.quotient) * d.S + t.unit_begin(unit),
          channels * (t.unit_end(unit) - t.unit_begin(unit)),
          group.quotient * t.roots() + unit * t.channel_units + channel.quotient};
}

// On chip: the first value of item `item` of a group of whole units, in the order of forward's tree: 2^shift
// channels, then places along S. Backward's items, places and then channels, lie in memory as they come.
STEADYNORM_HD std::int64_t whole_item(int item, int shift, std::int64_t S) {
  const int channel = item & ((1 << shift) - 1);
  return channel * S + std::int64_t{item >> shift} * kLeafBlock;
}

// Backward sums, contiguous: one channel at a time. root = channel row * spatial units + spatial unit.
STEADYNORM_HD std::int64_t contiguous_sum_units(const Dimensions& d) {
  return d.N * d.C * d.tree.spatial_units;
}

STEADYNORM_HD ChannelUnit contiguous_sum_unit(const Dimensions& d, std::int64_t index) {
  const Split row = split(index, d.by_spatial_units);
  return {row.quotient, row.quotient * d.S + d.tree.unit_begin(row.remainder),
          d.tree.unit_end(row.remainder) - d.tree.unit_begin(row.remainder)};
}

// channels_last: 16-byte sums in shared memory between two leaves of a block, 2 modulo the 8 that all banks
// hold.
STEADYNORM_HD int leaf_pitch(const Columns& columns) {
  const int slab = columns.columns * columns.width;
  return slab + ((2 - slab) & 7);
}

// channels_last: the slab, the spatial unit and the sample of a block; slabs of the same rows are neighbours.
struct SlabUnit {
  std::int64_t n, unit, channel_begin, channel_end;
};

// A slab is `slab` channels in a row, or, for the statistics of groups larger than a channel unit, one
// channel unit.
STEADYNORM_HD SlabUnit slab_unit(const Dimensions& d, const Columns& columns, std::int64_t index) {
  const Split slab = split(index, columns.slabs);
  const Split unit = split(slab.quotient, d.by_spatial_units);
  SlabUnit r{unit.quotient, unit.remainder, 0, 0};
  if (!columns.by_channel_unit) {
    r.channel_begin = slab.remainder * columns.slab;
    const std::int64_t end = r.channel_begin + columns.slab;
    r.channel_end = end < d.C ? end : d.C;
  } else {
    const Split group = split(slab.remainder, d.tree.channel_units);
    r.channel_begin = group.quotient * d.D + d.tree.channel_begin(group.remainder);
    r.channel_end = group.quotient * d.D + d.tree.channel_end(group.remainder);
  }
  return r;
}

// channels_last, on chip: how slabs of whole groups lie in samples, and threads in a block. Leaf r of a block
// is the work of `columns` threads in a row.
struct Slabs {
  int channels, groups;  // of a slab
  int width;             // channels of a column
  int columns, leaves;   // leaves: of a block, the last absent where the volume ends before
  int units, unit_shift;
  int channel_shift;  // a group's channels are padded to 2^channel_shift with absent ones
  int blocks;         // of a slab
  bool together, sums_samples;
  Divisor by_blocks, by_slabs, by_columns, by_channels, by_D;
};

inline Slabs make_slabs(const Dimensions& d, const OnChip& chip) {
  const auto shift = [](std::int64_t n) {
    return std::countr_zero(static_cast<unsigned>(power_of_two_from(n)));
  };
  Slabs r{};
  r.columns = chip.columns;
  r.width = chip.width;
  r.channels = chip.columns * chip.width;
  r.groups = static_cast<int>(r.channels / d.D);
  r.units = chip.units;
  r.unit_shift = shift(chip.units);
  r.channel_shift = shift(d.D);
  r.blocks = chip.blocks;
  r.together = chip.together;
  r.sums_samples = sums_samples(chip, d.N) && d.N > 1;
  const std::int64_t leaves = divide_up(d.S, d.tree.leaf_positions);
  r.leaves = static_cast<int>(chip.units == 1 && leaves < kUnitLeaves ? leaves : chip.units * kUnitLeaves);
  r.by_blocks = Divisor(chip.blocks);
  r.by_slabs = Divisor(d.C / r.channels);
  r.by_columns = Divisor(chip.columns);
  r.by_channels = Divisor(r.channels);
  r.by_D = Divisor(d.D);
  return r;
}

struct SlabLeaf {
  std::int64_t n, channel;  // the slab's first
  int rank;                 // of the block in its slab
  int leaf, column;         // of the block; a leaf beyond all is of a thread that only fills a warp
  std::int64_t position;    // of the leaf's first row
  int rows;                 // 0: the leaf is absent
};

STEADYNORM_HD SlabLeaf slab_leaf(const Dimensions& d, const Slabs& slabs, unsigned block, unsigned thread) {
  SlabLeaf r;
  const std::uint32_t slab = slabs.by_blocks.quotient(block), n = slabs.by_slabs.quotient(slab);
  r.rank = static_cast<int>(block) - static_cast<int>(slab) * slabs.blocks;
  r.n = n;
  r.channel = (slab - n * static_cast<std::uint32_t>(slabs.by_slabs.divisor)) *
              static_cast<std::int64_t>(slabs.channels);
  r.leaf = static_cast<int>(slabs.by_columns.quotient(thread));
  r.column = static_cast<int>(thread) - r.leaf * slabs.columns;
  r.position = (r.rank * slabs.units * kUnitLeaves + r.leaf) * kMicroBatchRows;
  const std::int64_t rest = d.S - r.position;
  r.rows = r.leaf >= slabs.leaves || rest <= 0 ? 0
           : rest < kMicroBatchRows            ? static_cast<int>(rest)
                                               : kMicroBatchRows;
  return r;
}

// Where a block's shared memory holds what: offsets in bytes.
struct SlabMemory {
  int slots;         // of a cluster: two words of each block and group, backward of each block and channel
  int dy;            // backward: of each thread's leaf
  int leaves;        // two sums of each leaf and channel
  int roots;         // of each unit and channel: two words, backward two floats
  int nodes;         // forward: of each unit and group; backward: of the runs of 32 channels of a group
  int pivots;        // forward: of each unit and channel
  int shares;        // forward: of the levels of a group's channels
  int parameters;    // forward: weight and bias
  int sums;          // backward: weighted, of each channel
  int coefficients;  // of each channel
  int groups;        // of each group: statistics or means
  int bytes;
};

// dy_bytes: of a column's vector; 0: forward.
inline SlabMemory slab_memory(const Slabs& s, int dy_bytes) {
  const bool backward = dy_bytes > 0;
  SlabMemory r{};
  int end = 16;  // the count of what has arrived
  const auto take = [&](int items, int bytes) {
    const int begin = end;
    end += (items * bytes + 15) / 16 * 16;
    return begin;
  };
  const int items = 1 << s.channel_shift, of_units = s.units * s.channels;
  r.slots = take(s.together ? 0 : s.blocks * (backward ? s.channels : s.groups), 16);
  const int threads = static_cast<int>(divide_up(s.leaves * s.columns, kLanes) * kLanes);
  r.dy = take(threads * kMicroBatchRows, dy_bytes);
  r.leaves = take(s.leaves * s.channels, backward ? 8 : 16);
  r.roots = take(of_units, backward ? 8 : 16);
  r.nodes = take(s.groups * (!backward ? s.units : items > kLanes ? items / kLanes : 1), 16);
  r.pivots = backward ? 0 : take(of_units, 4);
  r.shares = backward ? 0 : take(kChannelLevels, 8);
  r.parameters = backward ? 0 : take(s.channels, 8);
  r.sums = backward ? take(s.channels, 16) : 0;
  r.coefficients = take(s.channels, backward ? 32 : 16);
  r.groups = take(s.groups, backward ? 8 : 12);
  r.bytes = end;
  return r;
}

}  // namespace steadynorm::cuda
