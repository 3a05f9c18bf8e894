// SPDX-License-Identifier: Apache-2.0
// Plans without a GPU: legal on every described device for every named case, every part of the work done
// once.
#include "cuda/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <sstream>

#include "cuda/work.h"
#include "support/cases.h"
#include "support/data.h"

namespace steadynorm::test {
namespace {

using namespace cuda;

DeviceInfo device(const char* name, int major, int sms, std::size_t shared_per_sm,
                  std::size_t shared_per_block) {
  return {name,
          major,
          0,
          sms,
          2048,
          65536,
          shared_per_sm,
          shared_per_block,
          std::size_t{50} << 20,
          major < 9 ? 1 : 16,
          true};
}

const DeviceInfo kDevices[] = {device("A100", 8, 108, 167936, 166912), device("H200", 9, 132, 233472, 232448),
                               device("B200", 10, 148, 233472, 232448)};
constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float16};

std::vector<Problem> problems() {
  std::vector<Problem> list;
  for (const Case& c : named_cases())
    for (const DType dtype : kTypes) {
      Problem p = c.problem;
      p.x = p.y = dtype;
      list.push_back(p);
    }
  Random random(3);
  for (int i = 0; i < 300; ++i) list.push_back(random_problem(random, 3000000));
  return list;
}

TEST(CudaPlan, IsLegalForEveryCaseOnEveryDevice) {
  for (const Problem& p : problems())
    for (const DeviceInfo& d : kDevices)
      for (const Plan& plan : legal_plans(p, d))
        EXPECT_NO_THROW(require_legal(plan, d)) << describe(p) << plan;
}

TEST(CudaPlan, IsDeterministicAndPrintable) {
  for (const Problem& p : problems())
    for (const DeviceInfo& d : kDevices) {
      const Plan plan = choose_plan(p, d);
      EXPECT_EQ(plan, choose_plan(p, d)) << describe(p);
      std::ostringstream text;
      text << plan;
      EXPECT_NE(text.str().find("statistics"), std::string::npos);
    }
}

TEST(CudaPlan, ChannelsOfAVectorStayTogetherInTheNamedCases) {
  for (const Case& c : named_cases()) {
    if (c.problem.layout != Layout::channels_last) continue;
    for (const DType dtype : kTypes) {
      Problem p = c.problem;
      p.x = p.y = dtype;
      const Plan plan = choose_plan(p, kDevices[1]);
      EXPECT_TRUE(plan.columns.vectors && plan.sum_columns.vectors) << c.name;
      EXPECT_EQ(plan.columns.slab % plan.columns.width, 0) << c.name;
    }
  }
}

// Statistics, contiguous: the units of all blocks' warps cover x, and each root, once.
void expect_contiguous_units_cover(const Problem& p, const Plan& plan) {
  const Dimensions d = dimensions_of(p);
  ASSERT_EQ(plan.runs.warps % plan.runs.leaves_per_unit, 0);
  EXPECT_GE(plan.statistics.blocks * (plan.runs.warps / plan.runs.leaves_per_unit), contiguous_units(d))
      << describe(p);
  if (plan.runs.full_leaves) EXPECT_EQ(plan.runs.leaves_per_unit, 1) << describe(p);
  EXPECT_GE(plan.sums.blocks * (plan.sum_runs.warps / plan.sum_runs.leaves_per_unit), contiguous_sum_units(d))
      << describe(p);
  EXPECT_EQ(plan.runs.leaves_per_unit * d.tree.leaf_positions, d.tree.unit_positions) << describe(p);
  std::map<std::int64_t, std::int64_t> parts;
  std::map<std::int64_t, int> roots;
  for (std::int64_t i = 0; i < contiguous_units(d); ++i) {
    const ContiguousUnit unit = contiguous_unit(d, i);
    parts[unit.begin] = unit.length;
    ++roots[unit.root];
  }
  std::int64_t next = 0;
  for (const auto& [begin, length] : parts) {
    ASSERT_EQ(begin, next) << describe(p);
    next += length;
  }
  EXPECT_EQ(next, p.elements()) << describe(p);
  EXPECT_EQ(static_cast<std::int64_t>(roots.size()), d.N * d.G * d.tree.roots());
  EXPECT_EQ(roots.rbegin()->first, d.N * d.G * d.tree.roots() - 1);

  next = 0;
  for (std::int64_t i = 0; i < contiguous_sum_units(d); ++i) {
    const ChannelUnit unit = contiguous_sum_unit(d, i);
    ASSERT_EQ(unit.begin, next) << describe(p);
    next += unit.length;
  }
  EXPECT_EQ(next, p.elements()) << describe(p);
}

// On chip, contiguous: the warps of a group's blocks cover its units once.
void expect_on_chip_covers(const Problem& p, const Plan& plan) {
  const Tree tree = tree_of(p);
  for (const auto& [chip, launch] :
       {std::pair{plan.forward_on_chip, plan.group}, std::pair{plan.backward_on_chip, plan.group_gradient}}) {
    if (chip.blocks == 0) continue;
    ASSERT_TRUE(has_whole_units(tree)) << describe(p);
    EXPECT_EQ(chip.blocks * chip.warps * chip.units, tree.roots()) << describe(p);
    EXPECT_FALSE(chip.together) << describe(p);
    EXPECT_EQ(launch.cluster, chip.blocks) << describe(p);
    EXPECT_EQ(launch.blocks, p.samples * p.groups * chip.blocks) << describe(p);
  }
  if (plan.forward_on_chip.blocks == 0) return;
  const int shift = std::countr_zero(static_cast<std::uint64_t>(tree.channels));
  std::set<std::int64_t> units;
  for (int item = 0; item < tree.roots(); ++item) units.insert(whole_item(item, shift, tree.positions));
  EXPECT_EQ(static_cast<std::int64_t>(units.size()), tree.roots()) << describe(p);
  EXPECT_EQ(*units.rbegin(), tree.channels * tree.positions - kLeafBlock) << describe(p);
  EXPECT_TRUE(std::all_of(units.begin(), units.end(), [](auto begin) { return begin % kLeafBlock == 0; }));
}

// On chip: the threads of all blocks cover each leaf of each vector of channels once, slabs are whole groups,
// and their rows 128 bytes or more of whole sectors of 32, except where a slab is all channels.
void expect_slabs_on_chip_cover(const Problem& p, const OnChip& chip, const Launch& launch, bool backward) {
  if (chip.blocks == 0) return;
  const Dimensions d = dimensions_of(p);
  const Slabs slabs = make_slabs(d, chip);
  const int width = chip.width, narrowest = 16 / static_cast<int>(std::max(size_of(p.x), size_of(p.y)));
  if (backward)
    EXPECT_EQ(width, narrowest) << describe(p);
  else
    EXPECT_TRUE(width == 4 || width == 16 / static_cast<int>(size_of(p.x))) << describe(p);
  EXPECT_LE(launch.threads(), 512) << describe(p);
  EXPECT_GE(launch.threads(), 64) << describe(p);
  EXPECT_EQ(launch.threads() % kLanes, 0) << describe(p);
  EXPECT_EQ(launch.together, chip.together) << describe(p);
  EXPECT_EQ(launch.cluster, chip.together ? 1 : chip.blocks) << describe(p);
  const int dy_bytes = backward ? width * static_cast<int>(size_of(p.y)) : 0;
  EXPECT_EQ(launch.shared_bytes, slab_memory(slabs, dy_bytes).bytes) << describe(p);
  ASSERT_EQ(slabs.groups * d.D, slabs.channels) << describe(p);
  ASSERT_EQ(p.channels % slabs.channels, 0) << describe(p);
  if (slabs.channels < p.channels) {
    for (const DType dtype : {p.x, p.y}) {
      const std::size_t bytes = static_cast<std::size_t>(slabs.channels) * size_of(dtype);
      EXPECT_EQ(bytes % 32, 0u) << describe(p);
      EXPECT_GE(bytes, 128u) << describe(p);
    }
  }
  const std::int64_t leaves = divide_up(p.positions, kMicroBatchRows), vectors = p.channels / width;
  ASSERT_EQ(vectors * width, p.channels) << describe(p);
  std::vector<int> rows(static_cast<std::size_t>(p.samples * leaves * vectors));
  for (std::int64_t b = 0; b < launch.blocks; ++b)
    for (int t = 0; t < launch.threads(); ++t) {
      const SlabLeaf at = slab_leaf(d, slabs, static_cast<unsigned>(b), static_cast<unsigned>(t));
      EXPECT_EQ(at.rank, b % chip.blocks);
      if (at.rows == 0) continue;
      ASSERT_LT(at.leaf, slabs.leaves) << describe(p);
      ASSERT_EQ(at.position / kMicroBatchRows % kUnitLeaves, at.leaf % kUnitLeaves) << describe(p);
      const std::int64_t vector = at.channel / width + at.column;
      rows.at(static_cast<std::size_t>((at.n * leaves + at.position / kMicroBatchRows) * vectors + vector)) +=
          at.rows;
    }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t leaf = static_cast<std::int64_t>(i) / vectors % leaves;
    ASSERT_EQ(rows[i], std::min<std::int64_t>(kMicroBatchRows, p.positions - leaf * kMicroBatchRows))
        << describe(p);
  }
}

// channels_last: the slabs of a place cover its channels once, and no channel unit is cut.
void expect_slabs_cover(const Problem& p, const Columns& columns, const Launch& launch, bool whole_units) {
  const Dimensions d = dimensions_of(p);
  EXPECT_EQ(launch.blocks, d.N * d.tree.spatial_units * columns.slabs);
  EXPECT_GE(columns.columns * columns.width, columns.slab) << describe(p);
  EXPECT_EQ(columns.lanes & (columns.lanes - 1), 0);
  EXPECT_LE(columns.lanes, kUnitLeaves) << describe(p);
  std::int64_t next = 0;
  for (std::int64_t s = 0; s < columns.slabs; ++s) {
    const SlabUnit slab = slab_unit(d, columns, s);
    ASSERT_EQ(slab.channel_begin, next) << describe(p);
    next = slab.channel_end;
    ASSERT_LE(slab.channel_end - slab.channel_begin, columns.slab) << describe(p);
    if (columns.vectors) EXPECT_EQ(slab.channel_begin % columns.width, 0) << describe(p);
    if (whole_units)
      for (const std::int64_t border : {slab.channel_begin, slab.channel_end})
        EXPECT_TRUE(border % d.D == 0 || border % d.D % kChannelBlock == 0) << describe(p);
  }
  EXPECT_EQ(next, d.C) << describe(p);
  const SlabUnit last = slab_unit(d, columns, launch.blocks - 1);
  EXPECT_EQ(last.n, d.N - 1);
  EXPECT_EQ(last.unit, d.tree.spatial_units - 1);
}

void expect_sweep_covers(const Problem& p, const Sweep& sweep, const Launch& launch) {
  if (p.layout == Layout::contiguous) {
    EXPECT_GE(launch.blocks * kTileThreads * kTileVectors * sweep.width, p.elements()) << describe(p);
    return;
  }
  EXPECT_GE(sweep.slabs * sweep.columns * sweep.width, p.channels) << describe(p);
  EXPECT_EQ(launch.blocks, p.samples * sweep.slabs * divide_up(p.positions, sweep.lanes * sweep.rows))
      << describe(p);
}

TEST(CudaPlan, CoversEveryUnitOnce) {
  for (const Problem& p : problems())
    for (const Plan& plan : legal_plans(p, kDevices[1])) {
      if (p.layout == Layout::channels_last) {
        expect_slabs_cover(p, plan.columns, plan.statistics, true);
        expect_slabs_cover(p, plan.sum_columns, plan.sums, false);
        expect_slabs_on_chip_cover(p, plan.forward_on_chip, plan.group, false);
        expect_slabs_on_chip_cover(p, plan.backward_on_chip, plan.group_gradient, true);
      } else if (p.elements() < 20000000) {
        expect_contiguous_units_cover(p, plan);
        expect_on_chip_covers(p, plan);
      }
      expect_sweep_covers(p, plan.apply, plan.write);
      expect_sweep_covers(p, plan.gradient, plan.input);
      if (HasFailure()) return;
    }
}

// One launch, x read once, where it was measured faster.
TEST(CudaPlan, KeepsSmallGroupsOnChip) {
  std::string kept;
  for (const Case& c : named_cases()) {
    Problem p = c.problem;
    p.x = p.y = DType::bfloat16;
    const Plan plan = choose_plan(p, kDevices[1]);
    if (p.layout == Layout::contiguous && plan.forward_on_chip.blocks > 0) kept += c.name + " ";
    EXPECT_LE(choose_plan(p, kDevices[0]).group.cluster, 1) << c.name;  // A100 has none
  }
  EXPECT_EQ(kept, "liger-a liger-b liger-c liger-d liger-e vae-512x128-nchw ");
}

// As measured: clusters where they start at once, and other cases of up to 10 MiB by blocks that meet.
TEST(CudaPlan, KeepsSmallChannelsLastCasesOnChip) {
  const auto text = [](const OnChip& chip) {
    if (chip.blocks == 0) return std::string("-");
    return std::to_string(chip.width * chip.columns) + " x " + std::to_string(chip.blocks) +
           (chip.together ? " meeting" : "");
  };
  std::map<std::string, std::string> slabs;  // channels of a slab and its blocks, forward and backward
  for (const Case& c : named_cases()) {
    Problem p = c.problem;
    if (p.layout != Layout::channels_last) continue;
    p.x = p.y = DType::bfloat16;
    const Plan plan = choose_plan(p, kDevices[1]);
    slabs[c.name] = text(plan.forward_on_chip) + ", " + text(plan.backward_on_chip);
    const std::vector<Plan> plans = legal_plans(p, kDevices[1]);
    EXPECT_TRUE(std::any_of(plans.begin(), plans.end(), [](const Plan& other) {
      return other.forward_on_chip.blocks + other.backward_on_chip.blocks == 0;
    })) << c.name;
  }
  const std::map<std::string, std::string> expected = {{"sdxl-1280x32", "80 x 8, 80 x 4 meeting"},
                                                       {"sdxl-2560x32", "80 x 4 meeting, 80 x 4 meeting"},
                                                       {"sdxl-1920x32", "240 x 8 meeting, 240 x 8 meeting"},
                                                       {"sdxl-640x64", "80 x 16 meeting, 80 x 16 meeting"},
                                                       {"sd15-320x64", "80 x 16 meeting, 80 x 16 meeting"},
                                                       {"unet3d-1024", "128 x 32 meeting, 128 x 16 meeting"},
                                                       {"sd15-640x32", "80 x 8, 80 x 4 meeting"},
                                                       {"sd15-1280x16", "80 x 2, 80 x 2"},
                                                       {"sd15-1280x8", "80 x 1, 80 x 1"},
                                                       {"unet3d-64", "-, -"},
                                                       {"sdxl-960x64", "-, -"}};
  for (const auto& [name, slab] : expected) EXPECT_EQ(slabs[name], slab) << name;
}

// All blocks that meet have a place at once, by registers and by shared memory, on every device.
TEST(CudaPlan, BlocksThatMeetRunTogether) {
  int meeting = 0;
  const auto expect_places = [&](const DeviceInfo& d, const Launch& l, int threads_of_sm) {
    if (!l.together) return;
    ++meeting;
    const auto by_shared = static_cast<std::int64_t>(d.shared_per_sm) / (l.shared_bytes + 1024);
    EXPECT_LE(l.blocks, d.sms * std::min<std::int64_t>(threads_of_sm / l.threads(), by_shared)) << d.name;
  };
  for (const Problem& p : problems())
    for (const DeviceInfo& d : kDevices)
      for (const Plan& plan : legal_plans(p, d)) {
        const int vector = plan.forward_on_chip.width * static_cast<int>(size_of(p.x));
        expect_places(d, plan.group, slab_threads(vector, d.major == 9));
        expect_places(d, plan.group_gradient, slab_gradient_threads(d.major == 9));
      }
  EXPECT_GE(meeting, 50);
  for (DeviceInfo d : kDevices) {
    d.runs_together = false;
    for (const Problem& p : problems())
      for (const Plan& plan : legal_plans(p, d))
        EXPECT_FALSE(plan.group.together || plan.group_gradient.together) << describe(p) << d.name;
  }
}

// Without cooperative launches: by clusters that start at once, or by sweeps.
TEST(CudaPlan, DoesWithoutMeetings) {
  DeviceInfo shared = kDevices[1];
  shared.runs_together = false;
  std::map<std::string, std::string> blocks;  // of a slab, forward and backward
  for (const Case& c : named_cases()) {
    Problem p = c.problem;
    if (p.layout != Layout::channels_last) continue;
    p.x = p.y = DType::bfloat16;
    const Plan plan = choose_plan(p, shared);
    blocks[c.name] =
        std::to_string(plan.forward_on_chip.blocks) + ", " + std::to_string(plan.backward_on_chip.blocks);
  }
  const std::map<std::string, std::string> expected = {
      {"sdxl-1280x32", "8, 8"}, {"sdxl-2560x32", "0, 0"}, {"sdxl-640x64", "0, 0"}, {"sdxl-1920x32", "0, 0"},
      {"sd15-320x64", "0, 0"},  {"unet3d-1024", "0, 0"},  {"sd15-640x32", "8, 8"}, {"sd15-1280x8", "1, 1"}};
  for (const auto& [name, of] : expected) EXPECT_EQ(blocks[name], of) << name;
}

TEST(CudaPlan, OffersAlternativesToTest) {
  for (const Case& c : named_cases()) EXPECT_GE(legal_plans(c.problem, kDevices[1]).size(), 2u) << c.name;
}

TEST(CudaPlan, HugeVolumesFitSharedMemory) {
  for (const DType dtype : kTypes)
    for (const std::int64_t D : {1, 3, 10, 65, 129, 255, 256, 300, 4096}) {
      Problem p;
      p.samples = 1;
      p.channels = 8 * D;
      p.groups = 8;
      p.positions = std::int64_t{1} << 29;
      p.layout = Layout::channels_last;
      p.x = p.y = dtype;
      for (const DeviceInfo& d : kDevices)
        EXPECT_NO_THROW(require_legal(choose_plan(p, d), d)) << describe(p);
    }
}

TEST(CudaPlan, WorkspacesDependOnTheProblemAlone) {
  Problem p;
  p.samples = 2;
  p.channels = 64;
  p.groups = 8;
  p.positions = 32 * 32 * 32;
  p.layout = Layout::channels_last;
  const ForwardWorkspace w = forward_layout(p);
  EXPECT_EQ(w.bytes % 256, 0u);
  EXPECT_GE(w.bytes, static_cast<std::size_t>(2 * 8 * tree_of(p).roots()) * 16);
  EXPECT_GE(backward_layout(p).bytes, static_cast<std::size_t>(2 * 64 * (tree_of(p).spatial_units + 1)) * 8);
}

}  // namespace
}  // namespace steadynorm::test
