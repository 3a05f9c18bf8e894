// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan.h"

#include <algorithm>
#include <numeric>
#include <ostream>
#include <utility>

#include "cuda/plan_on_chip.h"
#include "cuda/work.h"

namespace steadynorm::cuda {

namespace {

constexpr int kNodeBytes = 16;  // a node, or a channel's two sums
constexpr int kCoefficientBytes = 32;
constexpr std::int64_t kWidestSlab = 512;  // channels
// Batches of a group's rows, of all samples, that one block makes: each costs about two microseconds, and a
// launch of its own two to three (H200, 2026-12-01).
constexpr int kRowsTogether = 2;

// What a plan may choose; everything else follows.
struct Choice {
  int warps = kLeafWarps;
  int column_channels = 64;  // of a block that reduces, about
  int column_lanes = 0;  // of such a block, times what fewer columns leave; 0: what choose_columns() finds
  int rows_together = kRowsTogether;
  int sweep_columns = 64;  // at most, of a sweep
  // H200, 2026-12-01, bf16, 16 and 32: apply 248 and 253 us for 512 MiB, 998 and 1014 for 2 GiB; input
  // gradient 370 and 372, 1467 and 1480.
  int sweep_rows = 16;
  bool reverse = true;
  OnChipChoice on_chip{};
};

int power_of_two_until(std::int64_t n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

Runs make_runs(const Tree& tree, int warps) {
  Runs r;
  r.leaves_per_unit = static_cast<int>(tree.unit_positions / tree.leaf_positions);
  r.warps = std::max(warps, r.leaves_per_unit);
  return r;
}

// Whether every unit of the statistics is one full block of values.
bool full_leaves(const Tree& tree) {
  return tree.unit_positions * tree.unit_channels == kLeafBlock &&
         tree.positions % tree.unit_positions == 0 && tree.channels % tree.unit_channels == 0;
}

// Shared memory: a node for each warp.
Launch launch_of(const Runs& r, std::int64_t units) {
  return {divide_up(units * r.leaves_per_unit, r.warps), r.warps * kLanes, 1, r.warps * kNodeBytes};
}

// Slabs of about `target` channels, which start at multiples of `quantum`: what must stay together.
Columns make_columns(const Problem& p, const Tree& tree, int width, std::int64_t quantum, bool vectors,
                     bool by_channel_unit, int target, int threads) {
  Columns r;
  r.width = width;
  r.vectors = vectors;
  r.by_channel_unit = by_channel_unit;
  if (by_channel_unit) {
    r.slab = tree.unit_channels;
    r.slabs = p.groups * tree.channel_units;
  } else {
    const std::int64_t quanta = divide_up(p.channels, quantum);
    const std::int64_t of_slab = std::clamp<std::int64_t>((2 * target / quantum + 1) / 2, 1, quanta);
    r.slab =
        std::min(p.channels, divide_up(quanta, divide_up(quanta, of_slab)) * quantum);  // of about equal size
    r.slabs = divide_up(p.channels, r.slab);
  }
  r.columns = static_cast<int>(divide_up(r.slab, width));
  const std::int64_t leaves = divide_up(std::min(tree.unit_positions, p.positions), tree.leaf_positions);
  r.lanes = std::min(power_of_two_from(leaves), power_of_two_until(std::max(1, threads / r.columns)));
  return r;
}

// Shared memory: the leaves' sums, then the channels' roots and pivots, and the shares; or coefficients. No
// byte more: what is left of an SM's is L1, where values on their way land. 195 KiB of blocks on an SM
// instead of 188 cost the statistics of unet3d-128 in fp32 4 % (H200, 2026-12-01). Whole warps, for the
// shuffles.
Launch launch_of(const Columns& r, const Problem& p, const Tree& tree) {
  const int slab = r.columns * r.width;
  return {p.samples * tree.spatial_units * r.slabs,
          static_cast<int>(divide_up(r.columns * r.lanes, kLanes) * kLanes), 1,
          (kUnitLeaves * leaf_pitch(r) + slab) * kNodeBytes + (slab * 4 + 7) / 8 * 8 + kChannelLevels * 8};
}

// What the blocks that reduce cost, in leaves' micro-batches of a thread: in as many waves as they need, each
// as long as a block, which has its first values and its tree to wait for besides. H200, 2026-12-01, bf16,
// sums in us by lanes 16 / 8 / 4, and these costs: sdxl-320x128 19.4 / 19.5 / 17.1, 12 / 12 / 10;
// sdxl-640x64 14.1 / 13.0 / 11.9, 9 / 8 / 6; unet3d-512 22.3 / 20.8 / 24.0, 12 / 10 / 18; vae-512x256-nhwc
// 37.5 / 35.8 / 41.7, 20 / 18 / 34.
std::int64_t cost_of(const Columns& r, const Launch& l, const Tree& tree, std::int64_t positions,
                     int threads_of_sm, const DeviceInfo& device) {
  constexpr std::int64_t kOfBlock = 2;
  const std::int64_t leaves = divide_up(std::min(tree.unit_positions, positions), tree.leaf_positions);
  const std::int64_t batches =
      divide_up(leaves, r.lanes) * divide_up(std::min(tree.leaf_positions, positions), kMicroBatchRows);
  const std::int64_t resident = std::int64_t{device.sms} * std::max(1, threads_of_sm / l.threads());
  return divide_up(l.blocks, resident) * (kOfBlock + batches);
}

// Statistics need whole channel units in a block; backward sums do not, each channel being alone there.
Columns choose_columns(const Problem& p, const DeviceInfo& device, const Choice& choice, bool whole_units,
                       int width) {
  const Tree tree = tree_of(p);
  const std::int64_t D = p.channels_per_group();
  while (whole_units && width > 2 && p.channels % width != 0) width /= 2;
  const bool split_groups = whole_units && tree.channel_units > 1;
  bool vectors = p.channels % width == 0 && !(split_groups && D % width != 0);
  std::int64_t quantum = whole_units ? D : width;
  if (vectors && whole_units && !split_groups)
    quantum = std::min(p.channels, std::lcm(D, std::int64_t{width}));
  if (!split_groups && quantum > kWidestSlab) {  // groups that straddle vectors and are wide: give them up
    vectors = false;
    quantum = D;
  }
  const auto make = [&](int target, int lanes) {
    return make_columns(p, tree, width, quantum, vectors, split_groups, target, lanes * 64 / width);
  };
  const auto cost = [&](const Columns& r) {
    const int threads =
        whole_units ? statistics_threads(width) : sums_threads(static_cast<int>(size_of(p.x) + size_of(p.y)));
    return cost_of(r, launch_of(r, p, tree), tree, p.positions, threads, device);
  };
  int target = choice.column_channels;
  const int lanes = choice.column_lanes > 0 ? choice.column_lanes : kUnitLeaves;
  Columns best = make(target, lanes);
  // Small problems: narrower slabs, down to 64 bytes, until there is a block for every SM. Not yet measured.
  while (target > 32 && launch_of(best, p, tree).blocks < device.sms) best = make(target /= 2, lanes);
  if (choice.column_lanes == 0) {
    // Slabs of 32 channels lose in large tensors, where a row of them is less than DRAM likes: 47 and 41 us
    // for the statistics of unet3d-256, but 10.0 and 11.6 for those of vae-512x128-nhwc (H200, 2026-12-01).
    const auto bytes = p.elements() * static_cast<std::int64_t>(size_of(p.x));
    const bool narrower = whole_units && target > 32 && bytes <= std::int64_t{32} << 20;
    // 80 channels where they divide C: sdxl-320x128 in fp32 14.6 us, and 15.9 with 60.
    const bool fives = whole_units && p.channels % 80 == 0;
    for (const int of_slab : {target, fives ? 80 : target, narrower ? 32 : target})
      for (int l = lanes; l >= kUnitLeaves / 4; l /= 2)
        if (const Columns other = make(of_slab, l);
            cost(other) < cost(best) || (of_slab < target && cost(other) == cost(best)))
          best = other;
  }
  // A wide slab may not fit shared memory: then drop the vectors.
  if (launch_of(best, p, tree).shared_bytes > static_cast<int>(device.shared_per_block_optin) &&
      !split_groups) {
    quantum = whole_units ? D : width;
    vectors = vectors && !whole_units;
    best = make(1, lanes);
  }
  return best;
}

Columns choose_statistics_columns(const Problem& p, const DeviceInfo& device, const Choice& choice) {
  // H200, 2026-11-30: statistics of (128, 2^21) bf16 in 133 us with vectors of 16 bytes, 139 with 8, 138 with
  // 4. But 5 or 10 threads along the channels leave many of a warp's idle: sdxl-320x128 12.9 us, 11.1 with 20
  // of half the width.
  const int width = vector_width(p);
  const Columns best = choose_columns(p, device, choice, true, width);
  const int threads = best.columns * best.lanes,
            whole = static_cast<int>(divide_up(threads, kLanes) * kLanes);
  return best.width == 8 && 8 * (whole - threads) > whole ? choose_columns(p, device, choice, true, 4) : best;
}

// Wider sums lose what coefficients and partial sums cost in threads.
Columns choose_sum_columns(const Problem& p, const DeviceInfo& device, const Choice& choice) {
  return choose_columns(p, device, choice, false, kColumnWidth);
}

Sweep choose_sweep(const Problem& p, const DeviceInfo& device, const Choice& choice) {
  Sweep r;
  r.reverse = choice.reverse;
  r.width = p.layout == Layout::contiguous ? vector_width(p) : kColumnWidth;
  if (p.layout == Layout::contiguous) return r;
  const std::int64_t vectors = divide_up(p.channels, r.width);
  r.slabs = divide_up(vectors, choice.sweep_columns);
  r.columns = static_cast<int>(divide_up(vectors, r.slabs));
  r.lanes = static_cast<int>(std::clamp<std::int64_t>(kColumnThreads / r.columns, 1, p.positions));
  r.rows = choice.sweep_rows;
  // Fewer rows a thread until there are four blocks for every SM. Not yet measured.
  while (r.rows > 4 && p.samples * r.slabs * divide_up(p.positions, r.lanes * r.rows) < 4 * device.sms)
    r.rows /= 2;
  return r;
}

// contiguous: `row_bytes` of shared memory for each channel row that a tile may touch, unless a vector may
// cross a row's end.
Launch launch_of(const Sweep& r, const Problem& p, int row_bytes) {
  if (p.layout == Layout::contiguous) {
    const std::int64_t vectors = kTileThreads * kTileVectors, row = p.positions / r.width;
    const std::int64_t rows = p.positions % r.width == 0 ? divide_up(vectors, row) + 1 : 0;
    return {divide_up(p.elements(), vectors * r.width), kTileThreads, 1, static_cast<int>(rows * row_bytes)};
  }
  // Shared memory: the coefficients of each channel.
  return {p.samples * r.slabs * divide_up(p.positions, r.lanes * r.rows), r.columns, r.lanes,
          r.columns * kColumnWidth * kCoefficientBytes};
}

Plan make_plan(const Problem& p, const DeviceInfo& device, const Choice& choice) {
  const Tree tree = tree_of(p);
  const Dimensions d = dimensions_of(p);
  Plan plan;
  plan.overlap = device.major >= 9;
  plan.apply = plan.gradient = choose_sweep(p, device, choice);
  if (p.layout == Layout::contiguous) {
    const std::int64_t units = contiguous_units(d);
    plan.runs = plan.sum_runs = make_runs(tree, choice.warps);
    plan.runs.full_leaves = full_leaves(tree);
    plan.statistics = launch_of(plan.runs, units);
    plan.sums = launch_of(plan.sum_runs, contiguous_sum_units(d));
  } else {
    plan.columns = choose_statistics_columns(p, device, choice);
    plan.sum_columns = choose_sum_columns(p, device, choice);
    plan.statistics = launch_of(plan.columns, p, tree);
    plan.sums = launch_of(plan.sum_columns, p, tree);
  }
  choose_on_chip(plan, p, device, choice.on_chip);
  plan.write = launch_of(plan.apply, p, 16);
  plan.input = launch_of(plan.gradient, p, 32);
  plan.unit_lanes = power_of_two_from(divide_up(tree.spatial_units, kUnitsOfThread));
  const int rows = kRowThreads / plan.unit_lanes;
  const std::int64_t of_group = p.samples * d.D;
  plan.rows_together =
      p.samples > 0 && of_group <= kRowThreads && divide_up(of_group, rows) <= choice.rows_together;
  plan.rows = {plan.rows_together        ? p.groups
               : tree.spatial_units == 1 ? 0
                                         : divide_up(p.samples * p.channels, rows),
               rows, plan.unit_lanes, kRowThreads * kNodeBytes};
  return plan;
}

std::ostream& operator<<(std::ostream& out, const Launch& l) {
  return out << l.blocks << " x (" << l.threads_x << ", " << l.threads_y << "), " << l.shared_bytes
             << " B shared";
}

}  // namespace

Tree tree_of(const Problem& p) { return make_tree(p.channels_per_group(), p.positions, p.layout); }

std::int64_t padded_roots(const Tree& tree) {
  return tree.spatial_units * power_of_two_from(tree.channel_units);
}

Plan choose_plan(const Problem& problem, const DeviceInfo& device) {
  return make_plan(problem, device, Choice{});
}

std::vector<Plan> legal_plans(const Problem& problem, const DeviceInfo& device) {
  std::vector<Plan> plans{choose_plan(problem, device)};
  const auto add = [&](const Choice& choice) {
    const Plan plan = make_plan(problem, device, choice);
    try {
      require_legal(plan, device);
    } catch (const Unsupported&) {
      return;
    }
    if (std::find(plans.begin(), plans.end(), plan) == plans.end()) plans.push_back(plan);
  };
  add({.on_chip = {.warps = 0}});
  if (problem.layout == Layout::contiguous) {
    for (const int warps : {1, 2, 4, 8, 16}) add({.on_chip = {.warps = warps}});
    for (const int warps : {1, 4}) add({.on_chip = {.warps = warps, .units = 2}});
  } else {
    for (const bool together : {false, true}) {
      for (const int warps : {1, 8, 16}) add({.on_chip = {.warps = warps, .together = together}});
      add({.on_chip = {.warps = 4, .width = 4, .together = together}});
    }
  }
  for (const int warps : {1, 2}) add({.warps = warps, .on_chip = {.warps = 0}});
  for (const int channels : {4, 32, 256})
    for (const int lanes : {4, 32})
      add({.column_channels = channels,
           .column_lanes = lanes,
           .rows_together = lanes == 4 ? 0 : 64,
           .sweep_columns = 16,
           .sweep_rows = 4,
           .reverse = false,
           .on_chip = {.warps = 0}});
  return plans;
}

void require_legal(const Plan& plan, const DeviceInfo& device) {
  const auto require = [&](const char* kernel, const Launch& l) {
    if (l.blocks > kGridLimit)
      throw Unsupported("group_norm: " + std::string(kernel) + " needs at most 2147483647 blocks, got " +
                        std::to_string(l.blocks));
    if (l.cluster > device.largest_cluster)
      throw Unsupported("group_norm: " + std::string(kernel) + " needs clusters of at most " +
                        std::to_string(device.largest_cluster) + " blocks on this device, got " +
                        std::to_string(l.cluster));
    if (l.together && !device.runs_together)
      throw Unsupported("group_norm: " + std::string(kernel) +
                        " needs a device that runs all blocks of a launch together, got one that cannot");
    if (l.threads() > 1024 || l.shared_bytes > static_cast<int>(device.shared_per_block_optin))
      throw Unsupported("group_norm: " + std::string(kernel) + " needs at most 1024 threads and " +
                        std::to_string(device.shared_per_block_optin) +
                        " bytes of shared memory on this device, got " + std::to_string(l.threads()) +
                        " and " + std::to_string(l.shared_bytes));
  };
  require("statistics", plan.statistics);
  require("apply", plan.write);
  require("sums", plan.sums);
  require("rows", plan.rows);
  require("input gradient", plan.input);
  require("forward on chip", plan.group);
  require("backward on chip", plan.group_gradient);
}

std::ostream& operator<<(std::ostream& out, const Plan& p) {
  if (p.columns.columns > 0)
    out << "channels_last: " << p.columns.columns << " columns of " << p.columns.width << " x "
        << p.columns.lanes << " lanes, slab " << p.columns.slab << (p.columns.vectors ? "" : ", no vectors")
        << "; sums " << p.sum_columns.columns << " x " << p.sum_columns.lanes << "; sweep " << p.apply.columns
        << " x " << p.apply.lanes << " x " << p.apply.rows << " rows";
  else
    out << "contiguous: " << p.runs.warps << " warps, " << p.runs.leaves_per_unit << " leaves a unit, "
        << (p.runs.full_leaves ? "full leaves" : "leaves");
  for (const auto& [name, chip] : {std::pair{"forward", p.forward_on_chip}, {"backward", p.backward_on_chip}})
    if (chip.blocks > 0) {
      out << ", " << name << " on chip by " << chip.blocks << (chip.together ? " meeting" : "")
          << " blocks of " << chip.warps << " warps, ";
      if (chip.columns > 0) out << chip.columns << " columns of ";
      out << chip.units << " units";
    }
  return out << (p.overlap ? ", overlapped" : "") << "\n  statistics " << p.statistics << "\n  write "
             << p.write << "\n  sums " << p.sums << "\n  rows " << p.rows << "\n  input " << p.input << "\n";
}

namespace {

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

ForwardWorkspace forward_layout(const Problem& p) {
  const Tree tree = tree_of(p);
  const std::int64_t groups = p.samples * p.groups;
  std::int64_t folded = 0;
  for (std::int64_t items = padded_roots(tree); items > kFoldItems;)
    folded += items = divide_up(items, kFoldItems);
  ForwardWorkspace w{};
  w.roots = 0;
  w.folded = aligned(static_cast<std::size_t>(groups * tree.roots()) * kNodeBytes);
  w.statistics = w.folded + aligned(static_cast<std::size_t>(groups * folded) * 24);
  w.bytes = w.statistics + aligned(static_cast<std::size_t>(groups) * 12);
  return w;
}

BackwardWorkspace backward_layout(const Problem& p) {
  const std::int64_t rows = p.samples * p.channels, units = tree_of(p).spatial_units;
  BackwardWorkspace w{};
  w.partials = 0;  // one unit: its sums are the rows
  w.rows = units > 1 ? aligned(static_cast<std::size_t>(rows * units) * 8) : 0;
  w.means = w.rows + aligned(static_cast<std::size_t>(rows) * 8);
  w.bytes = w.means + aligned(static_cast<std::size_t>(p.samples * p.groups) * 8);
  return w;
}

}  // namespace steadynorm::cuda
