// SPDX-License-Identifier: Apache-2.0
// Which part of a problem a block or a warp works on. Shared by the kernels and by the plan's test, which
// counts that every part is covered once.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "core/tree.h"
#include "cuda/plan.h"

namespace steadynorm::cuda {

struct Dimensions {
  std::int64_t N, C, G, S, D;
  Tree tree;
};

inline Dimensions dimensions_of(const Problem& p) {
  return {p.samples, p.channels, p.groups, p.positions, p.channels_per_group(), tree_of(p)};
}

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

STEADYNORM_HD int power_of_two_from(std::int64_t n) {
  int p = 1;
  while (p < n) p *= 2;
  return p;
}

// contiguous: unit `index` in memory order. begin is its first element, root its place among all groups'
// roots.
struct ContiguousUnit {
  std::int64_t begin, length, root;
};

STEADYNORM_HD std::int64_t contiguous_units(const Dimensions& d) { return d.N * d.G * d.tree.roots(); }

STEADYNORM_HD ContiguousUnit contiguous_unit(const Dimensions& d, std::int64_t index) {
  const Tree& t = d.tree;
  const Split group = split(index, t.roots());
  const Split channel = split(group.remainder, t.spatial_units);  // of channel units
  const std::int64_t unit = channel.remainder;
  const std::int64_t channels = t.channel_end(channel.quotient) - t.channel_begin(channel.quotient);
  return {group.quotient * d.D * d.S + t.channel_begin(channel.quotient) * d.S + t.unit_begin(unit),
          channels * (t.unit_end(unit) - t.unit_begin(unit)),
          group.quotient * t.roots() + unit * t.channel_units + channel.quotient};
}

// Backward sums, contiguous: one channel at a time. root = channel row * spatial units + spatial unit.
STEADYNORM_HD std::int64_t contiguous_sum_units(const Dimensions& d) {
  return d.N * d.C * d.tree.spatial_units;
}

struct ChannelUnit {
  std::int64_t row, begin, length;  // row = n * C + c
};

STEADYNORM_HD ChannelUnit contiguous_sum_unit(const Dimensions& d, std::int64_t index) {
  const Split row = split(index, d.tree.spatial_units);
  return {row.quotient, row.quotient * d.S + d.tree.unit_begin(row.remainder),
          d.tree.unit_end(row.remainder) - d.tree.unit_begin(row.remainder)};
}

// channels_last: the slab, the spatial unit and the sample of a block; slabs of the same rows are neighbours.
struct SlabUnit {
  std::int64_t n, unit, channel_begin, channel_end;
};

// A slab is `slab` channels in a row, or, for the statistics of groups larger than a channel unit, one
// channel unit.
STEADYNORM_HD SlabUnit slab_unit(const Dimensions& d, const Columns& columns, std::int64_t index) {
  const Split slab = split(index, columns.slabs);
  const Split unit = split(slab.quotient, d.tree.spatial_units);
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

// Where channel c of a slab lies in a block's shared memory: neighbouring threads, neighbouring words.
STEADYNORM_HD int column_of(const Columns& p, int c) { return c % p.width * p.columns + c / p.width; }

}  // namespace steadynorm::cuda
