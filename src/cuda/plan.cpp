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
// Batches of a group's rows, of one sample after the other, that one block makes: each costs about a
// microsecond, and a launch of its own two to three. H200, 2026-11-30: backward of liger-d, 64 samples, took
// 192 us with all in a block (bench/results).
constexpr int kRowsTogether = 2;

// What a plan may choose; everything else follows.
struct Choice {
  int warps = kLeafWarps;
  int leaves = 0;            // that a warp evaluates together; 0: as many as leave the device full
  int column_channels = 64;  // of a block that reduces, about
  int column_lanes = 16;     // of such a block, times what fewer columns leave
  int rows_together = kRowsTogether;
  int sweep_columns = 64;  // at most, of a sweep
  int sweep_rows = 32;
  bool reverse = true;
  OnChipChoice on_chip{};
};

int power_of_two_until(std::int64_t n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

// Leaves of one block that a warp evaluates together, of `leaves` of the tensor: fewer where the warps would
// not fill the device twice.
int leaves_together(std::int64_t leaves, const DeviceInfo& device, const Choice& choice) {
  if (choice.leaves > 0) return choice.leaves;
  int together = kFullLeaves;
  while (together > 1 && leaves < std::int64_t{2 * 16} * device.sms * together) together /= 2;
  return together;
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

// Shared memory: a node for each warp, or what the warp's lanes exchange.
Launch launch_of(const Runs& r, std::int64_t units) {
  const std::int64_t warps = r.full_leaves > 0 ? divide_up(units, r.full_leaves) : units * r.leaves_per_unit;
  const int nodes = r.full_leaves > 0 ? kFullLeaves * kNodesOfLeaf : 1;
  return {divide_up(warps, r.warps), r.warps * kLanes, 1, r.warps * nodes * kNodeBytes};
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

// Shared memory: the leaves' sums, then the channels' roots and pivots or coefficients. Whole warps, for the
// shuffles.
Launch launch_of(const Columns& r, const Problem& p, const Tree& tree) {
  const std::int64_t nodes = (kUnitLeaves + 2) * r.columns * r.width;
  return {p.samples * tree.spatial_units * r.slabs,
          static_cast<int>(divide_up(r.columns * r.lanes, kLanes) * kLanes), 1,
          static_cast<int>(nodes * kNodeBytes)};
}

// Statistics need whole channel units in a block; backward sums do not, each channel being alone there.
Columns choose_columns(const Problem& p, const DeviceInfo& device, const Choice& choice, bool whole_units) {
  const Tree tree = tree_of(p);
  const std::int64_t D = p.channels_per_group();
  // H200, 2026-11-30: statistics of (128, 2^21) bf16 in 133 us with vectors of 16 bytes, 139 with 8, 138 with
  // 4; wider sums lose what coefficients and partial sums cost in threads.
  int width = whole_units ? vector_width(p) : kColumnWidth;
  while (whole_units && width > 2 && p.channels % width != 0) width /= 2;
  const int threads = choice.column_lanes * 64 / width;
  const bool split_groups = whole_units && tree.channel_units > 1;
  bool vectors = p.channels % width == 0 && !(split_groups && D % width != 0);
  std::int64_t quantum = whole_units ? D : width;
  if (vectors && whole_units && !split_groups)
    quantum = std::min(p.channels, std::lcm(D, std::int64_t{width}));
  if (!split_groups && quantum > kWidestSlab) {  // groups that straddle vectors and are wide: give them up
    vectors = false;
    quantum = D;
  }
  int target = choice.column_channels;
  const auto make = [&] {
    return make_columns(p, tree, width, quantum, vectors, split_groups, target, threads);
  };
  Columns best = make();
  // Small problems: narrower slabs, down to 64 bytes, until there is a block for every SM. Not yet measured.
  while (target > 32 && launch_of(best, p, tree).blocks < device.sms) {
    target /= 2;
    best = make();
  }
  // A wide slab may not fit shared memory: then drop the vectors.
  if (launch_of(best, p, tree).shared_bytes > static_cast<int>(device.shared_per_block_optin) &&
      !split_groups) {
    target = 1;
    quantum = whole_units ? D : width;
    vectors = vectors && !whole_units;
    best = make();
  }
  return best;
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
    if (full_leaves(tree)) {
      const int together = plan.runs.full_leaves = leaves_together(units, device, choice);
      while (plan.runs.warps > 1 && units < std::int64_t{2} * device.sms * plan.runs.warps * together)
        plan.runs.warps /= 2;
    }
    plan.statistics = launch_of(plan.runs, units);
    plan.sums = launch_of(plan.sum_runs, contiguous_sum_units(d));
  } else {
    plan.columns = choose_columns(p, device, choice, true);
    plan.sum_columns = choose_columns(p, device, choice, false);
    plan.statistics = launch_of(plan.columns, p, tree);
    plan.sums = launch_of(plan.sum_columns, p, tree);
  }
  choose_on_chip(plan, p, device, choice.on_chip);
  plan.write = launch_of(plan.apply, p, 16);
  plan.input = launch_of(plan.gradient, p, 32);
  plan.unit_lanes = power_of_two_from(divide_up(tree.spatial_units, kUnitsOfThread));
  const int rows = kRowThreads / plan.unit_lanes;
  plan.rows_together =
      p.samples > 0 && d.D <= kRowThreads && p.samples * divide_up(d.D, rows) <= choice.rows_together;
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
  for (const int warps : {0, 1, 2, 4, 8, 16}) add({.on_chip = {.warps = warps}});
  for (const int warps : {1, 4}) add({.on_chip = {.warps = warps, .units = 2}});
  for (const int warps : {1, 2}) add({.warps = warps, .on_chip = {.warps = 0}});
  for (const int leaves : {2, kFullLeaves})
    for (const int warps : {2, kLeafWarps}) add({.warps = warps, .leaves = leaves, .on_chip = {.warps = 0}});
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
        << p.runs.full_leaves << " full leaves a warp";
  for (const auto& [name, chip] : {std::pair{"forward", p.forward_on_chip}, {"backward", p.backward_on_chip}})
    if (chip.cluster > 0) {
      out << ", " << name << " on chip by " << chip.cluster << " blocks of " << chip.warps << " warps, ";
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
