// SPDX-License-Identifier: Apache-2.0
// Sweeps over all of x: moments, apply, sums, dx. Each decides what one item is; kernels do the arithmetic.
#include "cpu/sweeps.h"

#include <algorithm>

#include "cpu/pieces.h"

namespace steadynorm::cpu {

namespace {

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
        row_elements(p, source, pass, first, std::min(channels, N * C - first), s,
                     std::min(kItemValues, S - s), k, body);
      }
    });
  } else {
    const std::int64_t width = std::min<std::int64_t>(C, kPanel), panels = divide_up(C, kPanel);
    const std::int64_t positions = divide_up(kItemValues, width), parts = divide_up(S, positions);
    const std::int64_t times = positions_at_once(p, width, S);
    parallel(N * parts * panels, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t n = item / (parts * panels), c = item % panels * kPanel;
        const std::int64_t s = item / panels % parts * positions, count = std::min(width, C - c);
        // Those of one panel serve all positions of a sample.
        if (item == begin || panels > 1 || item % parts == 0)
          column_coefficients(p, source, pass, n, c, count, times, k);
        column_elements(p, n, c, count, times, s, std::min(positions, S - s), k, body);
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

void unit_moments(const Problem& p, const Tree& tree, const Input& x, Moments* roots,
                  const ParallelFor& parallel) {
  if (p.layout == Layout::contiguous) {
    parallel(p.samples * p.groups * tree.roots(),
             [&](std::int64_t begin, std::int64_t end) { row_moments(p, tree, x, begin, end, roots); });
    return;
  }
  const Panels panels(p, tree);
  parallel(p.samples * tree.spatial_units * panels.per_sample, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t item = begin; item < end; ++item) {
      const std::int64_t panel = item % panels.per_sample, place = item / panels.per_sample;
      const std::int64_t n = place / tree.spatial_units, unit = place % tree.spatial_units;
      const std::int64_t first = panel * panels.groups;
      if (tree.channel_units > 1)
        column_moments(p, tree, x, n, unit, panel / tree.channel_units, 1, panel % tree.channel_units, roots);
      else
        column_moments(p, tree, x, n, unit, first, std::min(panels.groups, p.groups - first), 0, roots);
    }
  });
}

Moments merge_roots(const Tree& tree, Moments* roots) {
  for (std::int64_t unit = 0; unit < tree.spatial_units; ++unit)
    reduce_tree(roots + unit * tree.channel_units, tree.channel_units);
  reduce_tree(roots, tree.spatial_units, tree.channel_units);
  return roots[0];
}

void apply_sweep(const Problem& p, const ChannelSource& source, const void* x, void* y,
                 const ParallelFor& parallel) {
  elementwise_sweep(p, source, kApply, parallel, apply_body(p, x, y));
}

void gradient_sweep(const Problem& p, const ChannelSource& source, const void* x, const void* dy, void* dx,
                    const ParallelFor& parallel) {
  elementwise_sweep(p, source, kGradient, parallel, gradient_body(p, x, dy, dx));
}

void unit_sums(const Problem& p, const Tree& tree, const ChannelSource& source, const void* x, const void* dy,
               ChannelPlanes units, const ParallelFor& parallel) {
  const std::int64_t N = p.samples, C = p.channels, U = tree.spatial_units;
  if (p.layout == Layout::contiguous && U == 1) {
    const std::int64_t channels = channels_per_item(p.positions);
    parallel(divide_up(N * C, channels), [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t first = item * channels;
        row_sums(p, tree, source, x, dy, first, std::min(channels, N * C - first), k, units);
      }
    });
  } else if (p.layout == Layout::contiguous) {
    parallel(N * C * U, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        if (item == begin || item % U == 0) source.backward_coefficients(item / U, 1, k);
        row_unit_sums(p, tree, x, dy, item / U, item % U, k, units);
      }
    });
  } else {
    const std::int64_t panels = divide_up(C, kPanel);
    parallel(N * U * panels, [&](std::int64_t begin, std::int64_t end) {
      Coefficients k{};
      for (std::int64_t item = begin; item < end; ++item) {
        const std::int64_t c = item % panels * kPanel, place = item / panels, n = place / U;
        const std::int64_t count = std::min<std::int64_t>(kPanel, C - c);
        source.backward_coefficients(n * C + c, count, k);
        column_unit_sums(p, tree, x, dy, n, place % U, c, count, k, units);
      }
    });
  }
}

}  // namespace steadynorm::cpu
