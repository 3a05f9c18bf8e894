// SPDX-License-Identifier: Apache-2.0
// Sweeps over x: moments, apply, sums, dx. Each decides what one item is; kernels do the arithmetic.
#include "cpu/sweeps.h"

#include <algorithm>
#include <utility>

namespace steadynorm::cpu {

namespace {

// Contiguous channels this short are processed several at once, with a coefficient per value.
constexpr std::int64_t kShortChannel = 16;

// Values of an elementwise item, about: enough to hide its coefficients and its hand-out.
constexpr std::int64_t kItemValues = 16384;

using Field = float (Coefficients::*)[kPanel];
constexpr Field kFields[] = {&Coefficients::mean_hi, &Coefficients::mean_lo,
                             &Coefficients::scale,   &Coefficients::bias,
                             &Coefficients::rstd,    &Coefficients::weight,
                             &Coefficients::mean_dz, &Coefficients::mean_dz_normalized};

// How many of the fields a sweep reads, and how it gets them.
struct Pass {
  int fields;
  void (ChannelSource::*coefficients)(std::int64_t, std::int64_t, Coefficients&) const;
};
constexpr Pass kApply{4, &ChannelSource::forward_coefficients};
constexpr Pass kSums{5, &ChannelSource::backward_coefficients};
constexpr Pass kGradient{8, &ChannelSource::backward_coefficients};

// a b -> a a a b b b
void repeat_each(Coefficients& k, const Pass& pass, std::int64_t count, std::int64_t times) {
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
void repeat_all(Coefficients& k, const Pass& pass, std::int64_t count, std::int64_t times) {
  for (int f = 0; f < pass.fields; ++f)
    for (std::int64_t t = 1; t < times; ++t) std::copy_n(k.*kFields[f], count, (k.*kFields[f]) + t * count);
}

// Contiguous channels per item of a sweep over whole channels, all samples' channels in a row.
std::int64_t channels_per_item(std::int64_t S) {
  return S <= kShortChannel ? kPanel / S : std::clamp<std::int64_t>(kItemValues / S, 1, kPanel);
}

// Hands body(row?, tile, coefficients) the whole of x, piece by piece.
template <class Body>
void elementwise_sweep(const Problem& p, const ChannelSource& source, const Pass& pass,
                       const ParallelFor& parallel, const Body& body) {
  const std::int64_t N = p.samples, C = p.channels, S = p.positions;
  if (p.layout == Layout::contiguous) {
    const std::int64_t channels = channels_per_item(S), parts = divide_up(S, kItemValues);
    parallel(divide_up(N * C, channels) * parts, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t first = item / parts * channels, s = item % parts * kItemValues;
        const std::int64_t count = std::min(channels, N * C - first);
        (source.*pass.coefficients)(first, count, k);
        if (S <= kShortChannel) {
          repeat_each(k, pass, count, S);
          body(false, Tile{first * S, 1, 0, count * S}, k);
        } else {
          body(true, Tile{first * S + s, count, S, std::min(kItemValues, S - s)}, k);
        }
      }
    });
  } else {
    // Narrow rows are taken `times` positions at once.
    const std::int64_t width = std::min<std::int64_t>(C, kPanel), panels = divide_up(C, kPanel);
    const std::int64_t times = std::min<std::int64_t>(kPanel / width, S);
    const std::int64_t positions = divide_up(kItemValues / width, times) * times;
    const std::int64_t parts = divide_up(S, positions);
    parallel(N * parts * panels, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t n = item / (parts * panels), c = item % panels * kPanel;
        const std::int64_t s = item / panels % parts * positions, here = std::min(positions, S - s);
        const std::int64_t count = std::min(width, C - c), offset = (n * S + s) * C + c;
        (source.*pass.coefficients)(n * C + c, count, k);
        repeat_all(k, pass, count, times);
        const std::int64_t rows = here / times, rest = here % times;
        body(false, Tile{offset, rows, times * C, times * count}, k);
        if (rest > 0) body(false, Tile{offset + rows * times * C, 1, 0, rest * count}, k);
      }
    });
  }
}

// Channels that a channels_last item takes at once: whole groups when they are small, else a block of one
// group.
struct Panels {
  std::int64_t groups;  // per panel
  std::int64_t per_sample;

  Panels(const Problem& p, const Tree& tree)
      : groups(std::max<std::int64_t>(1, kPanel / p.channels_per_group())),
        per_sample(tree.channel_units > 1 ? p.groups * tree.channel_units : divide_up(p.groups, groups)) {}
};

}  // namespace

void unit_moments(const Problem& p, const Tree& tree, const void* x, Moments* roots,
                  const ParallelFor& parallel) {
  const Kernels& kernel = kernels();
  const Array input{x, p.x};
  const std::int64_t N = p.samples, C = p.channels, G = p.groups, S = p.positions, D = p.channels_per_group();
  const std::int64_t leaf_length = tree.leaf_positions * tree.unit_channels;  // contiguous
  if (p.layout == Layout::contiguous && tree.roots() == 1) {                  // groups are adjacent units
    parallel(N * G, [&](std::int64_t begin, std::int64_t end) {
      kernel.row_moments(input, begin * D * S, D * S, leaf_length, end - begin, roots + begin);
    });
  } else if (p.layout == Layout::contiguous) {
    parallel(N * G * tree.roots(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t group = item / tree.roots(), root = item % tree.roots();
        const std::int64_t unit = root / tree.channel_units, block = root % tree.channel_units;
        const std::int64_t c = tree.channel_begin(block), s = tree.unit_begin(unit);
        const std::int64_t length = (tree.channel_end(block) - c) * (tree.unit_end(unit) - s);
        kernel.row_moments(input, (group * D + c) * S + s, length, leaf_length, 1, roots + item);
      }
    });
  } else {
    const Panels panels(p, tree);
    parallel(N * tree.spatial_units * panels.per_sample, [&](std::int64_t begin, std::int64_t end) {
      Moments columns[kPanel];
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t panel = item % panels.per_sample, place = item / panels.per_sample;
        const std::int64_t n = place / tree.spatial_units, unit = place % tree.spatial_units;
        const std::int64_t g = tree.channel_units > 1 ? panel / tree.channel_units : panel * panels.groups;
        const std::int64_t block = tree.channel_units > 1 ? panel % tree.channel_units : 0;
        const std::int64_t channels = tree.channel_end(block) - tree.channel_begin(block);
        const std::int64_t groups = tree.channel_units > 1 ? 1 : std::min(panels.groups, G - g);
        const std::int64_t s = tree.unit_begin(unit), c = g * D + tree.channel_begin(block);
        const Tile tile{(n * S + s) * C + c, tree.unit_end(unit) - s, C, groups * channels};
        kernel.column_moments(input, tile, tree.leaf_positions, columns);
        for (std::int64_t i = 0; i < groups; ++i) {
          reduce_tree(columns + i * channels, channels);
          roots[((n * G + g + i) * tree.spatial_units + unit) * tree.channel_units + block] =
              columns[i * channels];
        }
      }
    });
  }
}

Moments merge_roots(const Tree& tree, Moments* roots) {
  for (std::int64_t unit = 0; unit < tree.spatial_units; ++unit)
    reduce_tree(roots + unit * tree.channel_units, tree.channel_units);
  reduce_tree(roots, tree.spatial_units, tree.channel_units);
  return roots[0];
}

void apply_sweep(const Problem& p, const ChannelSource& source, const void* x, void* y,
                 const ParallelFor& parallel) {
  const Kernels& kernel = kernels();
  elementwise_sweep(p, source, kApply, parallel, [&](bool row, const Tile& tile, const Coefficients& k) {
    (row ? kernel.row_apply : kernel.column_apply)(p.activation, {x, p.x}, {y, p.y}, tile, k);
  });
}

void gradient_sweep(const Problem& p, const ChannelSource& source, const void* x, const void* dy, void* dx,
                    const ParallelFor& parallel) {
  const Kernels& kernel = kernels();
  elementwise_sweep(p, source, kGradient, parallel, [&](bool row, const Tile& tile, const Coefficients& k) {
    (row ? kernel.row_gradient : kernel.column_gradient)(p.activation, {x, p.x}, {dy, p.y}, {dx, p.x}, tile,
                                                         k);
  });
}

void unit_sums(const Problem& p, const Tree& tree, const ChannelSource& source, const void* x, const void* dy,
               ChannelPlanes units, const ParallelFor& parallel) {
  const Kernels& kernel = kernels();
  const Array input{x, p.x}, gradient{dy, p.y};
  const std::int64_t N = p.samples, C = p.channels, S = p.positions;
  if (p.layout == Layout::contiguous && tree.spatial_units == 1) {  // units are [N, C]
    const std::int64_t channels = channels_per_item(S);
    parallel(divide_up(N * C, channels), [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t first = item * channels, count = std::min(channels, N * C - first);
        float *dz = units.dz + first, *dz_normalized = units.dz_normalized + first;
        source.backward_coefficients(first, count, k);
        if (S <= kShortChannel) {
          repeat_each(k, kSums, count, S);
          kernel.run_sums(p.activation, input, gradient, {first * S, 1, 0, count * S}, S, k, dz,
                          dz_normalized);
        } else {
          kernel.row_sums(p.activation, input, gradient, {first * S, count, S, S}, tree.leaf_positions, k, dz,
                          dz_normalized);
        }
      }
    });
  } else if (p.layout == Layout::contiguous) {
    parallel(N * C * tree.spatial_units, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t channel = item / tree.spatial_units, unit = item % tree.spatial_units;
        const std::int64_t n = channel / C, c = channel % C, s = tree.unit_begin(unit);
        const std::int64_t to = (n * tree.spatial_units + unit) * C + c;
        source.backward_coefficients(channel, 1, k);
        kernel.row_sums(p.activation, input, gradient, {channel * S + s, 1, 0, tree.unit_end(unit) - s},
                        tree.leaf_positions, k, units.dz + to, units.dz_normalized + to);
      }
    });
  } else {
    const std::int64_t panels = divide_up(C, kPanel);
    parallel(N * tree.spatial_units * panels, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t c = item % panels * kPanel, place = item / panels;
        const std::int64_t n = place / tree.spatial_units, s = tree.unit_begin(place % tree.spatial_units);
        const std::int64_t count = std::min<std::int64_t>(kPanel, C - c);
        source.backward_coefficients(n * C + c, count, k);
        const Tile tile{(n * S + s) * C + c, tree.unit_end(place % tree.spatial_units) - s, C, count};
        kernel.column_sums(p.activation, input, gradient, tile, tree.leaf_positions, k,
                           units.dz + place * C + c, units.dz_normalized + place * C + c);
      }
    });
  }
}

}  // namespace steadynorm::cpu
