// SPDX-License-Identifier: Apache-2.0
#include "core/tree.h"

#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "core/formulas.h"
#include "support/bits.h"
#include "support/data.h"

namespace steadynorm {

// A node that records how it came to be. Found by reduce_tree as Moments' merge is.
struct Symbol {
  std::string text;
};
Symbol merge(const Symbol& a, const Symbol& b) { return {"(" + a.text + " " + b.text + ")"}; }

namespace {

using test::Random;

constexpr Layout kLayouts[] = {Layout::contiguous, Layout::channels_last};

bool is_power_of_two(std::int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

template <class F>
void for_each_tree(F&& f) {
  for (const Layout layout : kLayouts) {
    const auto check = [&](std::int64_t D, std::int64_t S) {
      SCOPED_TRACE(std::string(to_string(layout)) + " D=" + std::to_string(D) + " S=" + std::to_string(S));
      f(make_tree(D, S, layout), layout);
    };
    for (const std::int64_t D : {1, 2, 3, 7, 8, 33, 255, 256, 257, 600})
      for (const std::int64_t S :
           {1,    2,    7,    8,    9,    63,   64,    65,    200,   682,    683,    1023,
            1024, 1025, 2047, 2048, 2049, 5000, 32767, 32768, 32769, 262143, 262144, 262145})
        check(D, S);
    Random random(7);
    for (int trial = 0; trial < 300; ++trial)
      check(random.integer(1, 1000), static_cast<std::int64_t>(std::exp2(32 * random.uniform())));
  }
}

// The ranges of consecutive units meet, start at 0 and end at `size`, so that each value lies in exactly one.
template <class Begin, class End>
void expect_partition(std::int64_t units, std::int64_t size, Begin&& begin, End&& end) {
  ASSERT_GT(units, 0);
  ASSERT_EQ(begin(0), 0);
  ASSERT_EQ(end(units - 1), size);
  for (std::int64_t i = 0; i < units; ++i) {
    ASSERT_LT(begin(i), end(i));
    if (i > 0) {
      ASSERT_EQ(begin(i), end(i - 1));
    }
  }
}

TEST(TreeUnits, CoverEveryElementExactlyOnce) {
  for_each_tree([](const Tree& tree, Layout) {
    expect_partition(
        tree.spatial_units, tree.positions, [&](std::int64_t i) { return tree.unit_begin(i); },
        [&](std::int64_t i) { return tree.unit_end(i); });
    expect_partition(
        tree.channel_units, tree.channels, [&](std::int64_t i) { return tree.channel_begin(i); },
        [&](std::int64_t i) { return tree.channel_end(i); });
  });
}

TEST(TreeUnits, CountsAddUpToTheGroup) {
  for_each_tree([](const Tree& tree, Layout) {
    double count = 0;
    for (std::int64_t s = 0; s < tree.spatial_units; ++s)
      for (std::int64_t c = 0; c < tree.channel_units; ++c) count += tree.count(s, c);
    ASSERT_EQ(count, static_cast<double>(tree.channels) * static_cast<double>(tree.positions));
    ASSERT_EQ(tree.roots(), tree.spatial_units * tree.channel_units);
  });
}

TEST(TreeUnits, AreAtMostAsManyAsTheLimitAndNoCoarserThanItAsks) {
  for_each_tree([](const Tree& tree, Layout layout) {
    const bool contiguous = layout == Layout::contiguous;
    // channels_last: 1024 leaves of up to 64 positions are enough. contiguous: long channels have long
    // leaves.
    const bool small = tree.positions <= (contiguous ? 128 * 2048 : 65536);
    const std::int64_t limit = contiguous ? 128 : (small ? 64 : 512);
    const std::int64_t smallest = contiguous ? (small ? 2048 : 8192) : (small ? 128 : 1024);
    ASSERT_LE(tree.spatial_units, limit);
    // A unit of half the positions would have been too many, or is below the smallest.
    if (tree.unit_positions > smallest) {
      const std::int64_t half = tree.unit_positions / 2;
      ASSERT_GT((tree.positions + half - 1) / half, limit);
    }
  });
}

TEST(TreeUnits, BordersArePowersOfTwoOfLeaves) {
  for_each_tree([](const Tree& tree, Layout layout) {
    ASSERT_EQ(tree.unit_positions % tree.leaf_positions, 0);
    ASSERT_TRUE(is_power_of_two(tree.unit_positions / tree.leaf_positions));
    if (layout == Layout::channels_last) {
      ASSERT_TRUE(is_power_of_two(tree.leaf_positions));
      ASSERT_GE(tree.leaf_positions, 8);
      ASSERT_EQ(tree.unit_positions / tree.leaf_positions, 16);
      ASSERT_EQ(tree.unit_channels, tree.channels < 256 ? tree.channels : 256);
    } else if (tree.positions >= 2048) {
      ASSERT_EQ(tree.leaf_positions % 2048, 0);
      ASSERT_LE(tree.unit_positions / tree.leaf_positions, 4);
      ASSERT_EQ(tree.unit_channels, 1);
    } else {
      ASSERT_EQ(tree.leaf_positions, tree.positions);
      ASSERT_EQ(tree.spatial_units, 1);
    }
  });
}

TEST(TreeUnits, ARunOfSmallChannelsIsTheLargestPowerOfTwoThatFitsALeaf) {
  for_each_tree([](const Tree& tree, Layout layout) {
    if (layout != Layout::contiguous || tree.positions >= 2048) return;
    ASSERT_TRUE(is_power_of_two(tree.unit_channels) || tree.unit_channels == tree.channels);
    ASSERT_LE(tree.unit_channels * tree.positions, 2048);
    if (tree.unit_channels < tree.channels) {
      ASSERT_GT(2 * tree.unit_channels * tree.positions, 2048);
    }
  });
}

TEST(TreeUnits, KnownProblemsHaveTheseTrees) {
  const Tree volume =
      make_tree(8, 256 * 256 * 256, Layout::channels_last);  // 64 channels in 8 groups at 256^3
  EXPECT_EQ(volume.unit_positions, 32768);
  EXPECT_EQ(volume.spatial_units, 512);
  EXPECT_EQ(volume.channel_units, 1);
  const Tree map = make_tree(64, 128 * 128, Layout::channels_last);
  EXPECT_EQ(map.leaf_positions, 16);
  EXPECT_EQ(map.spatial_units, 64);
  const Tree video = make_tree(4, 20 * 256 * 256, Layout::contiguous);
  EXPECT_EQ(video.leaf_positions, 16384);
  EXPECT_EQ(video.unit_positions, 16384);
  const Tree huge = make_tree(1, std::int64_t{1} << 24, Layout::contiguous);
  EXPECT_EQ(huge.leaf_positions, 32768);
  EXPECT_EQ(huge.unit_positions, 131072);
  const Tree ragged = make_tree(3, 1000, Layout::contiguous);
  EXPECT_EQ(ragged.unit_channels, 2);
  EXPECT_EQ(ragged.channel_units, 2);
  EXPECT_EQ(ragged.channel_end(1), 3);
  const Tree one = make_tree(1, 1, Layout::channels_last);
  EXPECT_EQ(one.roots(), 1);
  EXPECT_EQ(one.leaf_positions, 8);
}

// The aligned binary tree by its definition: the node over [first, first + size) joins its two halves; what
// lies beyond `count` is absent.
std::string defined(std::int64_t first, std::int64_t size, std::int64_t count) {
  if (first >= count) return "";
  if (size == 1) return std::to_string(first);
  const std::string left = defined(first, size / 2, count),
                    right = defined(first + size / 2, size / 2, count);
  return right.empty() ? left : "(" + left + " " + right + ")";
}

TEST(ReduceTree, MergesInTheOrderOfTheAlignedBinaryTree) {
  for (std::int64_t count = 1; count <= 300; ++count)
    for (const std::int64_t stride : {1, 3}) {
      std::vector<Symbol> nodes(static_cast<std::size_t>(count * stride), Symbol{"untouched"});
      for (std::int64_t i = 0; i < count; ++i)
        nodes[static_cast<std::size_t>(i * stride)].text = std::to_string(i);
      reduce_tree(nodes.data(), count, stride);
      ASSERT_EQ(nodes[0].text, defined(0, 512, count)) << count << " nodes, stride " << stride;
      for (std::size_t i = 0; i < nodes.size(); ++i) {
        if (i % static_cast<std::size_t>(stride) == 0) continue;
        ASSERT_EQ(nodes[i].text, "untouched");
      }
    }
}

TEST(ReduceTree, OfOneNodeIsThatNode) {
  Symbol node{"x"};
  reduce_tree(&node, 1);
  EXPECT_EQ(node.text, "x");
}

TEST(ReduceTree, EqualLeavesOfSmallCountsLookLikeThis) {
  std::vector<Symbol> nodes{{"a"}, {"b"}, {"c"}, {"d"}, {"e"}};
  reduce_tree(nodes.data(), 5);
  EXPECT_EQ(nodes[0].text, "(((a b) (c d)) e)");
}

TEST(ReduceTree, AlignedPartsEvaluatedElsewhereGiveTheSameBits) {
  Random random(8);
  for (const std::int64_t count : {1, 2, 5, 16, 31, 100, 128, 511, 512}) {
    std::vector<Moments> nodes(static_cast<std::size_t>(count));
    for (Moments& node : nodes)
      node = {static_cast<double>(random.integer(1, 2048)), 100 + random.normal(), 1000 * random.uniform()};
    std::vector<Moments> whole = nodes;
    reduce_tree(whole.data(), count);
    for (std::int64_t part = 1; part <= 512; part *= 2) {
      std::vector<Moments> roots;
      for (std::int64_t first = 0; first < count; first += part) {
        const std::int64_t size = count - first < part ? count - first : part;
        std::vector<Moments> mine(nodes.begin() + first, nodes.begin() + first + size);
        reduce_tree(mine.data(), size);
        roots.push_back(mine[0]);
      }
      reduce_tree(roots.data(), static_cast<std::int64_t>(roots.size()));
      EXPECT_TRUE(test::same_bits(std::to_string(count) + " nodes in parts of " + std::to_string(part),
                                  roots.data(), whole.data(), sizeof(double), {1, 3}));
    }
  }
}

TEST(ReduceTree, TrailingAbsentNodesChangeNoBit) {
  Random random(9);
  for (std::int64_t count = 1; count <= 40; ++count) {
    std::vector<Moments> nodes(64);
    for (std::int64_t i = 0; i < count; ++i)
      nodes[static_cast<std::size_t>(i)] = {3, random.normal(), random.uniform()};
    std::vector<Moments> padded = nodes;
    reduce_tree(nodes.data(), count);
    reduce_tree(padded.data(), 64);
    EXPECT_TRUE(test::same_bits(std::to_string(count) + " of 64", padded.data(), nodes.data(), sizeof(double),
                                {1, 3}));
  }
}

}  // namespace
}  // namespace steadynorm
