// SPDX-License-Identifier: Apache-2.0
// Groups that fit the cache, a block of them at a time: the second pass finds there what the first has read.
#include "cpu/blocks.h"

#include <algorithm>

#include "cpu/pieces.h"

namespace steadynorm::cpu {

namespace {

// What a block's first pass may read: half of a core's L2 of 1 MiB, with room for what the second one writes.
constexpr std::int64_t kCacheBytes = 512 * 1024;

// With fewer blocks threads are idle; a problem that one thread does anyway needs none.
constexpr std::int64_t kLeastBlocks = 8;
constexpr std::int64_t kOneThreadElements = 32768;

// What a channels_last block takes of each row at least, unless it takes all; of a large sample more. Against
// sweeps, that save it the strides, pieces of 480 bytes take 1.2 to 1.8 times as long (fp32 2x1280x32x32 and
// 2x640x32x32), but 0.9 of the time where the sample is small (2x1280x16x16; EPYC 9005, 2 cores, 2026-12).
constexpr std::int64_t kLeastRowBytes = 384, kLeastLargeRowBytes = 768;
constexpr std::int64_t kLargeSampleBytes = 2 << 20;

struct Channels {
  std::int64_t first, end;  // of all samples' channels in a row
};

Channels channels_of(const Problem& p, const GroupRange& block) {
  const std::int64_t D = p.channels_per_group();
  return {block.first * D, block.end * D};
}

void block_moments(const Problem& p, const Tree& tree, const Input& x, const GroupRange& block,
                   Moments* roots) {
  if (p.layout == Layout::contiguous)
    return row_moments(p, tree, x, block.first * tree.roots(), block.end * tree.roots(), roots);
  const std::int64_t n = block.first / p.groups, group = block.first % p.groups;
  for (std::int64_t unit = 0; unit < tree.spatial_units; ++unit)
    for (std::int64_t part = 0; part < tree.channel_units; ++part)
      column_moments(p, tree, x, n, unit, group, block.end - block.first, part, roots);
}

void block_sums(const Problem& p, const Tree& tree, const ChannelSource& source, const void* x,
                const void* dy, const Channels& channels, Coefficients& k, ChannelPlanes units) {
  const std::int64_t C = p.channels, U = tree.spatial_units;
  const std::int64_t step = p.layout == Layout::channels_last ? kPanel
                            : U > 1                           ? 1
                                                              : channels_per_item(p.positions);
  for (std::int64_t first = channels.first; first < channels.end; first += step) {
    const std::int64_t count = std::min(step, channels.end - first);
    if (p.layout == Layout::contiguous && U == 1) {
      row_sums(p, tree, source, x, dy, first, count, k, units);
      continue;
    }
    source.backward_coefficients(first, count, k);
    for (std::int64_t unit = 0; unit < U; ++unit) {
      if (p.layout == Layout::contiguous)
        row_unit_sums(p, tree, x, dy, first, unit, k, units);
      else
        column_unit_sums(p, tree, x, dy, first / C, unit, first % C, count, k, units);
    }
  }
}

template <class Body>
void block_elements(const Problem& p, const ChannelSource& source, const Pass& pass, const Channels& channels,
                    Coefficients& k, const Body& body) {
  const std::int64_t C = p.channels, S = p.positions;
  const std::int64_t step = p.layout == Layout::channels_last ? kPanel : channels_per_item(S);
  for (std::int64_t first = channels.first; first < channels.end; first += step) {
    const std::int64_t count = std::min(step, channels.end - first);
    if (p.layout == Layout::contiguous) {
      row_elements(p, source, pass, first, count, 0, S, k, body);
      continue;
    }
    const std::int64_t n = first / C, c = first % C, times = positions_at_once(p, count, S);
    column_coefficients(p, source, pass, n, c, count, times, k);
    column_elements(p, n, c, count, times, 0, S, k, body);
  }
}

}  // namespace

Blocks::Blocks(const Problem& p, std::size_t element_bytes) : problem_(p) {
  const std::int64_t G = p.groups, D = p.channels_per_group(),
                     size = static_cast<std::int64_t>(element_bytes);
  const std::int64_t bytes = p.group_size() * size;
  if (bytes > kCacheBytes) return;
  if (p.layout == Layout::contiguous) {
    groups_ = std::max<std::int64_t>(1, kItemValues / p.group_size());
    count_ = divide_up(p.samples * G, groups_);
  } else {
    const std::int64_t least_row = G * bytes > kLargeSampleBytes ? kLeastLargeRowBytes : kLeastRowBytes;
    groups_ = std::clamp<std::int64_t>(std::min(kPanel / D, kCacheBytes / bytes), 1, G);
    while (groups_ > 1 && p.samples * divide_up(G, groups_) < kLeastBlocks &&
           groups_ / 2 * D * size >= least_row)
      groups_ /= 2;
    if (groups_ < G && groups_ * D * size < least_row) return;
    count_ = p.samples * divide_up(G, groups_);
  }
  if (count_ < kLeastBlocks && p.elements() >= kOneThreadElements) count_ = 0;
}

GroupRange Blocks::operator[](std::int64_t i) const {
  const std::int64_t G = problem_.groups, NG = problem_.samples * G;
  if (problem_.layout == Layout::contiguous) return {i * groups_, std::min((i + 1) * groups_, NG)};
  const std::int64_t per_sample = divide_up(G, groups_), sample = i / per_sample * G;
  const std::int64_t first = sample + i % per_sample * groups_;
  return {first, std::min(first + groups_, sample + G)};
}

void forward_blocks(const Problem& p, const Tree& tree, const Blocks& blocks, const ChannelSource& source,
                    const Input& x, void* y, Moments* roots, float* statistics, const ParallelFor& parallel) {
  const auto body = apply_body(p, x.data(), y);
  parallel(blocks.count(), [&](std::int64_t begin, std::int64_t end) {
    Coefficients k{};
    for (std::int64_t i = begin; i < end; ++i) {
      const GroupRange block = blocks[i];
      block_moments(p, tree, x, block, roots);
      finish_statistics(p, tree, roots, block, statistics);
      block_elements(p, source, kApply, channels_of(p, block), k, body);
    }
  });
}

void backward_blocks(const Problem& p, const Tree& tree, const Blocks& blocks, const ChannelSource& sums,
                     const ChannelSource& gradient, const void* x, const void* dy, void* dx,
                     ChannelPlanes units, ChannelPlanes rows, GroupMeans* means,
                     const ParallelFor& parallel) {
  const auto body = gradient_body(p, x, dy, dx);
  parallel(blocks.count(), [&](std::int64_t begin, std::int64_t end) {
    Coefficients k{};
    for (std::int64_t i = begin; i < end; ++i) {
      const GroupRange block = blocks[i];
      const Channels channels = channels_of(p, block);
      block_sums(p, tree, sums, x, dy, channels, k, units);
      if (tree.spatial_units > 1) merge_unit_sums(p, tree, units, rows, channels.first, channels.end);
      find_group_means(p, sums, rows, block, means);
      block_elements(p, gradient, kGradient, channels, k, body);
    }
  });
}

}  // namespace steadynorm::cpu
