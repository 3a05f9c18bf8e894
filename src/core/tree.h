// SPDX-License-Identifier: Apache-2.0
// The reduction tree of a problem: a function of (D, S, layout) alone, so that no launch, thread count, batch
// or storage type can change a bit. docs/numerics.md, "The tree", is its specification.
//
//   micro-batch   8 x 8 values of a lane (contiguous), 8 positions of a channel (channels_last)       fp32
//   leaf          32 lanes, each a run of micro-batches; a run of micro-batches      double from here up
//   unit          leaves of one channel or of a block of channels; its root is what is stored
//   group         units: over channel blocks first, then over the volume
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "steadynorm/types.h"

namespace steadynorm {

constexpr int kMicroBatchRows = 8;                      // values that one accumulator adds pairwise
constexpr int kLanes = 32;                              // of a contiguous leaf
constexpr int kLaneWidth = 8;                           // consecutive values of a lane
constexpr int kLeafRow = kLanes * kLaneWidth;           // 256 consecutive values, a row of a contiguous leaf
constexpr int kLeafBlock = kLeafRow * kMicroBatchRows;  // 2048: a micro-batch of each lane
constexpr int kContiguousUnits = 128;                   // at most, along a channel
constexpr int kContiguousUnitLeaves = 4;                // at most, of a unit
constexpr int kUnitLeaves = 16;     // channels_last: leaves of a unit, each the work of one thread
constexpr int kChannelBlock = 256;  // channels of a channels_last unit, at most
constexpr int kSampleBlock = 32;    // samples that dweight and dbias add before the next block

// Forward reduces units of unit_positions x unit_channels. Backward sums each channel alone, over the same
// spatial units.
struct Tree {
  std::int64_t channels;        // D, of the group
  std::int64_t positions;       // S
  std::int64_t leaf_positions;  // along the volume; ragged at its end
  std::int64_t unit_positions;  // a power of two times leaf_positions, or S
  std::int64_t unit_channels;
  std::int64_t spatial_units;
  std::int64_t channel_units;

  STEADYNORM_HD std::int64_t roots() const { return spatial_units * channel_units; }

  // Root r = spatial unit * channel_units + channel unit.
  STEADYNORM_HD std::int64_t unit_begin(std::int64_t spatial_unit) const {
    return spatial_unit * unit_positions;
  }
  STEADYNORM_HD std::int64_t unit_end(std::int64_t spatial_unit) const {
    const std::int64_t end = (spatial_unit + 1) * unit_positions;
    return end < positions ? end : positions;
  }
  STEADYNORM_HD std::int64_t channel_begin(std::int64_t channel_unit) const {
    return channel_unit * unit_channels;
  }
  STEADYNORM_HD std::int64_t channel_end(std::int64_t channel_unit) const {
    const std::int64_t end = (channel_unit + 1) * unit_channels;
    return end < channels ? end : channels;
  }
  STEADYNORM_HD double count(std::int64_t spatial_unit, std::int64_t channel_unit) const {
    return static_cast<double>(unit_end(spatial_unit) - unit_begin(spatial_unit)) *
           static_cast<double>(channel_end(channel_unit) - channel_begin(channel_unit));
  }
};

STEADYNORM_HD std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The smallest from * 2^k of which at most `limit` cover `size`.
STEADYNORM_HD std::int64_t double_until(std::int64_t from, std::int64_t size, std::int64_t limit) {
  while (divide_up(size, from) > limit) from *= 2;
  return from;
}

// channels_last: of a leaf. Short ones while they are few, so that small volumes fill a device too.
STEADYNORM_HD std::int64_t channels_last_leaf(std::int64_t positions) {
  const std::int64_t leaf = double_until(kMicroBatchRows, positions, 1024);
  return leaf <= 64 ? leaf : double_until(64, positions, 8192);
}

STEADYNORM_HD Tree make_tree(std::int64_t channels_per_group, std::int64_t positions, Layout layout) {
  const std::int64_t D = channels_per_group, S = positions;
  Tree tree{};
  tree.channels = D;
  tree.positions = S;
  if (layout == Layout::channels_last) {
    tree.leaf_positions = channels_last_leaf(S);
    tree.unit_positions = kUnitLeaves * tree.leaf_positions;
    tree.unit_channels = D < kChannelBlock ? D : kChannelBlock;
  } else if (S >= kLeafBlock) {
    // Channels of more units than that have units of four blocks or more. Up to 16 blocks are one leaf.
    tree.unit_positions =
        S <= kContiguousUnits * kLeafBlock ? kLeafBlock : double_until(4 * kLeafBlock, S, kContiguousUnits);
    tree.leaf_positions = tree.unit_positions;
    for (int i = 1; i < kContiguousUnitLeaves && tree.leaf_positions > 16 * kLeafBlock; i *= 2)
      tree.leaf_positions /= 2;
    tree.unit_channels = 1;
  } else {  // a leaf is a run of whole channels, a power of two of them
    tree.leaf_positions = S;
    tree.unit_positions = S;
    tree.unit_channels = 1;
    while (tree.unit_channels < D && tree.unit_channels * 2 * S <= kLeafBlock) tree.unit_channels *= 2;
    if (tree.unit_channels > D) tree.unit_channels = D;
  }
  tree.spatial_units = divide_up(S, tree.unit_positions);
  tree.channel_units = divide_up(D, tree.unit_channels);
  return tree;
}

// Merges nodes[0], nodes[stride], ... nodes[(count - 1) * stride] in place into nodes[0]: the aligned binary
// tree, in which an absent right child leaves its sibling as it is.
template <class Node>
STEADYNORM_HD void reduce_tree(Node* nodes, std::int64_t count, std::int64_t stride = 1) {
  for (std::int64_t step = 1; step < count; step *= 2)
    for (std::int64_t i = 0; i + step < count; i += 2 * step)
      nodes[i * stride] = merge(nodes[i * stride], nodes[(i + step) * stride]);
}

}  // namespace steadynorm
