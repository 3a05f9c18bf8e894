// SPDX-License-Identifier: Apache-2.0
// The pieces that sweeps and blocks are made of: a few channels or positions each.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/kernels.h"
#include "cpu/sweeps.h"

namespace steadynorm::cpu {

// Contiguous channels this short are processed several at once, with a coefficient per value.
constexpr std::int64_t kShortChannel = 16;

// Values of an elementwise item, about: enough to hide its coefficients and its hand-out.
constexpr std::int64_t kItemValues = 16384;

using Field = float (Coefficients::*)[kPanel];
inline constexpr Field kFields[] = {&Coefficients::mean_hi, &Coefficients::mean_lo,
                                    &Coefficients::scale,   &Coefficients::bias,
                                    &Coefficients::rstd,    &Coefficients::weight,
                                    &Coefficients::mean_dz, &Coefficients::mean_dz_normalized};

// How many of the fields a sweep reads, and how it gets them.
struct Pass {
  int fields;
  void (ChannelSource::*coefficients)(std::int64_t, std::int64_t, Coefficients&) const;
};
inline constexpr Pass kApply{4, &ChannelSource::forward_coefficients};
inline constexpr Pass kSums{5, &ChannelSource::backward_coefficients};
inline constexpr Pass kGradient{8, &ChannelSource::backward_coefficients};

// a b -> a a a b b b
inline void repeat_each(Coefficients& k, const Pass& pass, std::int64_t count, std::int64_t times) {
  if (times == 1) return;
  for (int f = 0; f < pass.fields; ++f) {
    float* values = k.*kFields[f];
    for (std::int64_t i = count - 1; i >= 0; --i) {
      const float value = values[i];
      for (std::int64_t t = 0; t < times; ++t) values[i * times + t] = value;
    }
  }
}

// a b -> a b a b a b
inline void repeat_all(Coefficients& k, const Pass& pass, std::int64_t count, std::int64_t times) {
  for (int f = 0; f < pass.fields; ++f)
    for (std::int64_t t = 1; t < times; ++t) std::copy_n(k.*kFields[f], count, (k.*kFields[f]) + t * count);
}

// Contiguous channels per item of a sweep over whole channels, all samples' channels in a row.
inline std::int64_t channels_per_item(std::int64_t S) {
  return S <= kShortChannel ? kPanel / S : std::clamp<std::int64_t>(kItemValues / S, 1, kPanel);
}

// Calls body(row?, tile, coefficients) for positions [s, s + length) of `count` contiguous channels.
template <class Body>
inline void row_elements(const Problem& p, const ChannelSource& source, const Pass& pass, std::int64_t first,
                         std::int64_t count, std::int64_t s, std::int64_t length, Coefficients& k,
                         const Body& body) {
  const std::int64_t S = p.positions;
  (source.*pass.coefficients)(first, count, k);
  if (S <= kShortChannel) {
    repeat_each(k, pass, count, S);
    body(false, Tile{first * S, 1, 0, count * S}, k);
  } else {
    body(true, Tile{first * S + s, count, S, length}, k);
  }
}

// Positions of `count` channels_last channels that lie side by side: narrow rows are taken several at once.
inline std::int64_t positions_at_once(const Problem& p, std::int64_t count, std::int64_t most) {
  return count == p.channels ? std::min(kPanel / count, most) : 1;
}

// Coefficients for `times` positions of channels [c, c + count) of sample n.
inline void column_coefficients(const Problem& p, const ChannelSource& source, const Pass& pass,
                                std::int64_t n, std::int64_t c, std::int64_t count, std::int64_t times,
                                Coefficients& k) {
  (source.*pass.coefficients)(n * p.channels + c, count, k);
  repeat_all(k, pass, count, times);
}

// Calls body(false, tile, coefficients) for positions [s, s + length) of `count` channels_last channels of a
// sample, `times` of them at once.
template <class Body>
inline void column_elements(const Problem& p, std::int64_t n, std::int64_t c, std::int64_t count,
                            std::int64_t times, std::int64_t s, std::int64_t length, const Coefficients& k,
                            const Body& body) {
  const std::int64_t C = p.channels, offset = (n * p.positions + s) * C + c;
  const std::int64_t rows = length / times, rest = length % times;
  body(false, Tile{offset, rows, times * C, times * count}, k);
  if (rest > 0) body(false, Tile{offset + rows * times * C, 1, 0, rest * count}, k);
}

// Writes a tile of the sum, if there is one.
inline void add_residual(const Problem& p, const Input& x, const Tile& tile) {
  if (x.residual != nullptr) kernels().add({x.x, p.x}, x.residual, x.sum, tile);
}

// Moments of units [begin, end) of [N, G, root].
inline void row_moments(const Problem& p, const Tree& tree, const Input& x, std::int64_t begin,
                        std::int64_t end, Moments* roots) {
  const Kernels& kernel = kernels();
  const Array input{x.data(), p.x};
  const std::int64_t S = p.positions, D = p.channels_per_group();
  const std::int64_t leaf_length = tree.leaf_positions * tree.unit_channels;
  if (tree.roots() == 1) {  // groups are adjacent units; a sum is read again while it is in the cache
    const std::int64_t run =
        x.residual == nullptr ? end - begin : std::max<std::int64_t>(1, kItemValues / (D * S));
    for (std::int64_t i = begin; i < end; i += run) {
      const std::int64_t count = std::min(run, end - i);
      add_residual(p, x, {i * D * S, 1, 0, count * D * S});
      kernel.row_moments(input, i * D * S, D * S, leaf_length, count, roots + i);
    }
    return;
  }
  for (std::int64_t item = begin; item < end; ++item) {
    const std::int64_t group = item / tree.roots(), root = item % tree.roots();
    const std::int64_t unit = root / tree.channel_units, block = root % tree.channel_units;
    const std::int64_t c = tree.channel_begin(block), s = tree.unit_begin(unit);
    const std::int64_t length = (tree.channel_end(block) - c) * (tree.unit_end(unit) - s);
    const std::int64_t offset = (group * D + c) * S + s;
    add_residual(p, x, {offset, 1, 0, length});
    kernel.row_moments(input, offset, length, leaf_length, 1, roots + item);
  }
}

// Moments of a spatial unit of groups [group, group + groups) of sample n: whole groups, or one block of the
// channels of one.
inline void column_moments(const Problem& p, const Tree& tree, const Input& x, std::int64_t n,
                           std::int64_t unit, std::int64_t group, std::int64_t groups, std::int64_t block,
                           Moments* roots) {
  const std::int64_t C = p.channels, S = p.positions, D = p.channels_per_group();
  const std::int64_t channels = tree.channel_end(block) - tree.channel_begin(block);
  const std::int64_t s = tree.unit_begin(unit), c = group * D + tree.channel_begin(block);
  Moments columns[kPanel];
  const Tile tile{(n * S + s) * C + c, tree.unit_end(unit) - s, C, groups * channels};
  add_residual(p, x, tile);
  kernels().column_moments({x.data(), p.x}, tile, tree.leaf_positions, columns);
  for (std::int64_t i = 0; i < groups; ++i) {
    reduce_tree(columns + i * channels, channels);
    roots[((n * p.groups + group + i) * tree.spatial_units + unit) * tree.channel_units + block] =
        columns[i * channels];
  }
}

// Sums of contiguous channels of one spatial unit each.
inline void row_sums(const Problem& p, const Tree& tree, const ChannelSource& source, const void* x,
                     const void* dy, std::int64_t first, std::int64_t count, Coefficients& k,
                     ChannelPlanes units) {
  const Array input{x, p.x}, gradient{dy, p.y};
  const std::int64_t S = p.positions;
  float *dz = units.dz + first, *dz_normalized = units.dz_normalized + first;
  source.backward_coefficients(first, count, k);
  if (S <= kShortChannel) {
    repeat_each(k, kSums, count, S);
    kernels().run_sums(p.activation, input, gradient, {first * S, 1, 0, count * S}, S, k, dz, dz_normalized);
  } else {
    kernels().row_sums(p.activation, input, gradient, {first * S, count, S, S}, tree.leaf_positions, k, dz,
                       dz_normalized);
  }
}

// Sums of a spatial unit of a contiguous channel; k has the channel's coefficients.
inline void row_unit_sums(const Problem& p, const Tree& tree, const void* x, const void* dy,
                          std::int64_t channel, std::int64_t unit, const Coefficients& k,
                          ChannelPlanes units) {
  const std::int64_t C = p.channels, n = channel / C, c = channel % C, s = tree.unit_begin(unit);
  const std::int64_t to = (n * tree.spatial_units + unit) * C + c;
  kernels().row_sums(p.activation, {x, p.x}, {dy, p.y},
                     {channel * p.positions + s, 1, 0, tree.unit_end(unit) - s}, tree.leaf_positions, k,
                     units.dz + to, units.dz_normalized + to);
}

// Sums of a spatial unit of `count` channels_last channels; k has their coefficients.
inline void column_unit_sums(const Problem& p, const Tree& tree, const void* x, const void* dy,
                             std::int64_t n, std::int64_t unit, std::int64_t c, std::int64_t count,
                             const Coefficients& k, ChannelPlanes units) {
  const std::int64_t C = p.channels, s = tree.unit_begin(unit);
  const std::int64_t to = (n * tree.spatial_units + unit) * C + c;
  const Tile tile{(n * p.positions + s) * C + c, tree.unit_end(unit) - s, C, count};
  kernels().column_sums(p.activation, {x, p.x}, {dy, p.y}, tile, tree.leaf_positions, k, units.dz + to,
                        units.dz_normalized + to);
}

// What the last cache holds, about: the system's answer is not to be relied on (a virtual machine with an L3
// of 32 MiB is told 384).
constexpr std::int64_t kLastCacheBytes = 32 << 20;

// Whether what a call writes goes past the caches: when its tensors don't fit the last one, its output would
// be read there before it is written, and be gone before anyone reads it. There it gains up to half, below it
// costs a quarter (EPYC 9005, 2026-12, fp32 forward of 1x512x128x128 and 2x128x24x24x24).
inline bool past_caches(const Problem& p, std::size_t element_bytes) {
  return p.elements() * static_cast<std::int64_t>(element_bytes) > kLastCacheBytes;
}

inline auto apply_body(const Problem& p, const void* x, void* y) {
  return [&p, x, y](bool row, const Tile& tile, const Coefficients& k) {
    (row ? kernels().row_apply : kernels().column_apply)(
        p.activation, {x, p.x}, {y, p.y, past_caches(p, size_of(p.x) + size_of(p.y))}, tile, k);
  };
}

inline auto gradient_body(const Problem& p, const void* x, const void* dy, void* dx) {
  return [&p, x, dy, dx](bool row, const Tile& tile, const Coefficients& k) {
    (row ? kernels().row_gradient : kernels().column_gradient)(
        p.activation, {x, p.x}, {dy, p.y}, {dx, p.x, past_caches(p, 2 * size_of(p.x) + size_of(p.y))}, tile,
        k);
  };
}

}  // namespace steadynorm::cpu
