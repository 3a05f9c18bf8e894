// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan.h"

#include <algorithm>
#include <numeric>
#include <ostream>

#include "cuda/work.h"

namespace steadynorm::cuda {

namespace {

constexpr int kNodeBytes = 16;  // a node, or a channel's two sums
constexpr std::int64_t kGridLimit = 2147483647;

// What a plan may choose; everything else follows.
struct Choice {
  int warps = kLeafWarps;
  int column_target = 32;  // column threads of a reduction
  int column_threads = kColumnThreads;
  int channels_of_thread = 8;  // channels_last statistics of a 16-bit type: 8 or 4
  int sweep_columns = 64;      // at most, of a sweep
  int sweep_rows = 16;
  bool reverse = false;
};

std::int64_t bytes_of_x(const Problem& p) { return p.elements() * static_cast<std::int64_t>(size_of(p.x)); }
int vector_width(const Problem& p) { return 16 / static_cast<int>(size_of(p.x)); }

int levels_for(std::int64_t nodes) {
  int levels = 0;
  while ((std::int64_t{1} << levels) <= nodes) ++levels;
  return nodes > 1 ? levels : 0;
}

int power_of_two_until(std::int64_t n) {
  int p = 1;
  while (2 * p <= n) p *= 2;
  return p;
}

Runs make_runs(const Tree& tree, int warps) {
  Runs r;
  r.warps = warps;
  const std::int64_t leaves =
      tree.positions >= kContiguousLeaf ? tree.unit_positions / tree.leaf_positions : 1;
  r.runs_per_unit = static_cast<int>(std::min<std::int64_t>(warps, leaves));
  r.leaves_per_run = leaves / r.runs_per_unit;
  r.levels = levels_for(r.leaves_per_run);
  return r;
}

Launch launch_of(const Runs& r, std::int64_t units) {
  return {divide_up(units * r.runs_per_unit, r.warps), r.warps * kLanes, 1,
          r.warps * (1 + r.levels) * kNodeBytes};
}

// Slabs start at multiples of `quantum` channels: what must stay together.
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
    r.slab = std::min(p.channels, std::max<std::int64_t>(1, target * r.width / quantum) * quantum);
    r.slabs = divide_up(p.channels, r.slab);
  }
  r.columns = static_cast<int>(divide_up(r.slab, r.width));
  const std::int64_t leaves = divide_up(std::min(tree.unit_positions, p.positions), tree.leaf_positions);
  r.lanes = std::min(power_of_two_from(leaves), power_of_two_until(std::max(1, threads / r.columns)));
  r.rounds = divide_up(leaves, r.lanes);
  r.levels = levels_for(r.rounds);
  return r;
}

Launch launch_of(const Columns& r, const Problem& p, const Tree& tree) {
  return {p.samples * tree.spatial_units * r.slabs, r.columns, r.lanes,
          static_cast<int>((r.lanes + r.levels) * r.columns * r.width * kNodeBytes)};
}

// Statistics need whole channel units in a block; backward sums do not, each channel being alone there.
Columns choose_columns(const Problem& p, const DeviceInfo& device, const Choice& choice, bool whole_units) {
  const Tree tree = tree_of(p);
  const std::int64_t D = p.channels_per_group();
  const int width = whole_units ? std::min(vector_width(p), choice.channels_of_thread) : kBackwardWidth;
  const bool split_groups = whole_units && tree.channel_units > 1;
  bool vectors = p.channels % width == 0 && !(split_groups && D % width != 0);
  std::int64_t quantum = whole_units ? D : width;
  if (vectors && whole_units && !split_groups)
    quantum = std::min(p.channels, std::lcm(D, std::int64_t{width}));
  if (!split_groups &&
      quantum > 128 * width) {  // groups that straddle vectors and are wide: give up the vectors
    vectors = false;
    quantum = D;
  }
  int target = choice.column_target;
  Columns best = make_columns(p, tree, width, quantum, vectors, split_groups, target, choice.column_threads);
  // Small problems: narrower slabs, down to 64 bytes, until there are two blocks for every SM. Not yet
  // measured.
  while (target > 4 && launch_of(best, p, tree).blocks < 2 * device.sms) {
    target /= 2;
    best = make_columns(p, tree, width, quantum, vectors, split_groups, target, choice.column_threads);
  }
  // A wide slab with a deep counter may not fit shared memory; fewer lanes only deepen it, so drop the
  // vectors.
  if (launch_of(best, p, tree).shared_bytes > static_cast<int>(device.shared_per_block_optin) &&
      !split_groups)
    best = make_columns(p, tree, width, whole_units ? D : width, vectors && !whole_units, false, 1,
                        choice.column_threads);
  return best;
}

Sweep choose_sweep(const Problem& p, const DeviceInfo& device, const Choice& choice, int width) {
  Sweep r;
  r.reverse = choice.reverse;
  r.width = width;
  if (p.layout == Layout::contiguous) return r;
  const std::int64_t vectors = divide_up(p.channels, width);
  r.slabs = divide_up(vectors, choice.sweep_columns);
  r.columns = static_cast<int>(divide_up(vectors, r.slabs));
  r.lanes = static_cast<int>(std::clamp<std::int64_t>(kColumnThreads / r.columns, 1, p.positions));
  r.rows = choice.sweep_rows;
  // Fewer rows a thread until there are four blocks for every SM. Not yet measured.
  while (r.rows > 4 && p.samples * r.slabs * divide_up(p.positions, r.lanes * r.rows) < 4 * device.sms)
    r.rows /= 2;
  return r;
}

Launch launch_of(const Sweep& r, const Problem& p) {
  if (p.layout == Layout::contiguous)
    return {divide_up(p.elements(), kTileThreads * kTileVectors * vector_width(p)), kTileThreads, 1, 0};
  return {p.samples * r.slabs * divide_up(p.positions, r.lanes * r.rows), r.columns, r.lanes, 0};
}

Plan make_plan(const Problem& p, const DeviceInfo& device, const Choice& choice) {
  const Tree tree = tree_of(p);
  const Dimensions d = dimensions_of(p);
  Plan plan;
  plan.overlap = device.major >= 9;
  // H200, 2026-11-30: evict_last reads are 3 % faster from 64 MB on, and make no difference below 32 MB.
  plan.sticky = bytes_of_x(p) >= (std::int64_t{64} << 20);
  plan.apply = choose_sweep(p, device, choice, vector_width(p));
  plan.gradient =
      choose_sweep(p, device, choice, p.layout == Layout::contiguous ? vector_width(p) : kBackwardWidth);
  if (p.layout == Layout::contiguous) {
    plan.runs = plan.sum_runs = make_runs(tree, choice.warps);
    plan.statistics = launch_of(plan.runs, contiguous_units(d));
    plan.sums = launch_of(plan.sum_runs, contiguous_sum_units(d));
  } else {
    plan.columns = choose_columns(p, device, choice, true);
    plan.sum_columns = choose_columns(p, device, choice, false);
    plan.statistics = launch_of(plan.columns, p, tree);
    plan.sums = launch_of(plan.sum_columns, p, tree);
  }
  plan.write = launch_of(plan.apply, p);
  plan.input = launch_of(plan.gradient, p);
  plan.unit_lanes = power_of_two_from(divide_up(tree.spatial_units, kUnitsOfThread));
  plan.rows = {tree.spatial_units == 1 ? 0 : divide_up(p.samples * p.channels, kRowThreads / plan.unit_lanes),
               kRowThreads / plan.unit_lanes, plan.unit_lanes, kRowThreads * kNodeBytes};
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
  for (const int warps : {1, 2, 4, 8}) add({.warps = warps});
  add({.channels_of_thread = 4});
  for (const int target : {1, 8, 64})
    for (const int threads : {64, kColumnThreads})
      add({.column_target = target,
           .column_threads = threads,
           .sweep_columns = 16,
           .sweep_rows = 4,
           .reverse = true});
  return plans;
}

void require_legal(const Plan& plan, const DeviceInfo& device) {
  const auto require = [&](const char* kernel, const Launch& l) {
    if (l.blocks > kGridLimit)
      throw Unsupported("group_norm: " + std::string(kernel) + " needs at most 2147483647 blocks, got " +
                        std::to_string(l.blocks));
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
}

std::ostream& operator<<(std::ostream& out, const Plan& p) {
  if (p.columns.columns > 0)
    out << "channels_last: " << p.columns.columns << " columns of " << p.columns.width << " channels x "
        << p.columns.lanes << " lanes, " << p.columns.rounds << " rounds, slab " << p.columns.slab
        << (p.columns.vectors ? "" : ", no vectors") << "; sums " << p.sum_columns.columns << " x "
        << p.sum_columns.lanes << "; sweep " << p.apply.columns << " x " << p.apply.lanes << " x "
        << p.apply.rows << " rows";
  else
    out << "contiguous: " << p.runs.warps << " warps, " << p.runs.runs_per_unit << " runs of "
        << p.runs.leaves_per_run << " leaves a unit";
  return out << (p.sticky ? ", evict_last" : "") << (p.overlap ? ", overlapped" : "") << "\n  statistics "
             << p.statistics << "\n  write " << p.write << "\n  sums " << p.sums << "\n  rows " << p.rows
             << "\n  input " << p.input << "\n";
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
