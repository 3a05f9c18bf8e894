// SPDX-License-Identifier: Apache-2.0
// Which groups stay on chip, and with what blocks.
#include "cuda/plan_on_chip.h"

#include <algorithm>

#include "cuda/work.h"

namespace steadynorm::cuda {

bool has_whole_units(const Tree& tree) {
  const auto is_power_of_two = [](std::int64_t n) { return (n & (n - 1)) == 0; };
  return tree.unit_channels == 1 && tree.unit_positions == kLeafBlock &&
         tree.positions == tree.spatial_units * kLeafBlock && is_power_of_two(tree.channels) &&
         is_power_of_two(tree.spatial_units);
}

namespace {

// `items` of a group by blocks of `warps` warps; nothing where they need a larger cluster than the device
// has.
OnChip make_on_chip(std::int64_t items, int warps, int units, const DeviceInfo& device) {
  while (warps > 1 && warps * units > items) warps /= 2;
  const std::int64_t cluster = divide_up(items, warps * units);
  if (cluster > device.largest_cluster || cluster * warps * units != items) return {};
  return {static_cast<int>(cluster), warps, 0, units};
}

// Small blocks share an SM, and wait for less; a cluster has at most 16. us of H200, 2026-11-30, without an
// activation, from stream launches of the kernels alone (the chosen ones through the operator:
// bench/results), by blocks of 2 / 4 / 8 warps, 4 warps of 2 units, and by the sweeps:
//   forward   bf16  liger-c 48 / 38 / 42, 38, 51   liger-b - / - / 45, 41, 51   liger-a - / - / 4.7, 6.2, 7.7
//                   vae-512x128 - / - / 15.0, 13.5, 17.0
//             fp32  liger-c 87 / 92 / 101, -, 93   liger-b - / - / 120, -, 94
//   backward  bf16  liger-c 69 / 61 / 70, -, 113   liger-b - / - / 79, -, 111    liger-a - / - / 6.9, -, 9.1
//                   vae-512x128 - / - / 27, -, 24
//             fp32  liger-c 118 / 126 / 159, -, 185   liger-b - / - / 196, -, 189
// Kernels for units of any length lost to the sweeps: monai-128 19.2 against 15.7, monai-256 11.3
// against 10.6.
OnChip choose_groups(std::int64_t items, const Problem& p, bool backward, const DeviceInfo& device,
                     const OnChipChoice& choice) {
  const bool narrow = size_of(p.x) == 2 && (!backward || size_of(p.y) == 2);
  if (choice.warps >= 0) {
    const int most_warps = narrow || !backward ? kMaxOnChipWarps : kMaxOnChipWarps / 2;
    if (choice.warps == 0 || choice.warps > most_warps || (choice.units > 1 && (backward || !narrow)))
      return {};
    return make_on_chip(items, choice.warps, choice.units, device);
  }
  constexpr std::int64_t MiB = std::int64_t{1} << 20;
  const std::int64_t bytes = p.elements() * static_cast<std::int64_t>(size_of(p.x));
  if (!narrow) return make_on_chip(items, 2, 1, device);
  const OnChip four = make_on_chip(items, 4, 1, device);
  if (four.cluster > 0) return four;
  if (backward && bytes > 4 * MiB && bytes <= 32 * MiB) return {};
  if (!backward && bytes > 4 * MiB) return make_on_chip(items, 4, 2, device);
  return make_on_chip(items, 8, 1, device);
}

// Channels of a slab: as few whole groups as are whole vectors and sectors of 32 bytes, 128 bytes a row and
// two warps. Where sectors end inside a slab memory loses half (80 bytes; H200, 2026-11-30). 0: there are
// none.
std::int64_t slab_on_chip(const Problem& p, const Tree& tree, int width) {
  const std::int64_t leaves =
      std::min<std::int64_t>(kUnitLeaves, divide_up(p.positions, tree.leaf_positions));
  const auto narrow = static_cast<std::int64_t>(std::min(size_of(p.x), size_of(p.y)));
  for (std::int64_t groups = 1; groups <= p.groups; ++groups) {
    const std::int64_t slab = groups * tree.channels, bytes = slab * narrow;
    const bool all = groups == p.groups;
    if (p.groups % groups == 0 && slab % width == 0 && (all || (bytes % 32 == 0 && bytes >= 128)) &&
        leaves * (slab / width) >= 2 * kLanes)
      return slab;
  }
  return 0;
}

// channels_last: as few units a block as one cluster allows.
OnChip choose_slabs(const Problem& p, const Tree& tree, int width, bool backward, const DeviceInfo& device,
                    const OnChipChoice& choice) {
  // A thread keeps one micro-batch, which is a leaf of up to 8192 positions.
  if (choice.warps == 0 || tree.leaf_positions != kMicroBatchRows || tree.channel_units != 1 ||
      p.samples * p.channels * kMaxCluster > kGridLimit)
    return {};
  const std::int64_t slab = slab_on_chip(p, tree, width);
  if (slab == 0 || slab / width > kMaxOnChipWarps * kLanes) return {};
  const int wanted = choice.warps < 0 ? 4 : choice.warps;
  OnChip chip{1, 0, static_cast<int>(slab / width), 1};
  const Dimensions d = dimensions_of(p);
  const auto warps = [&] { return divide_up(make_slabs(d, chip, width).leaves * chip.columns, kLanes); };
  const auto cluster = [&] { return divide_up(tree.spatial_units, chip.units); };
  while (chip.units < kMaxOnChipUnits && cluster() > 1 &&
         (cluster() > device.largest_cluster || warps() < wanted))
    chip.units *= 2;
  if (cluster() > device.largest_cluster || warps() > kMaxOnChipWarps) return {};
  // us of H200, 2026-12-01, bf16, by these blocks and by the sweeps. 5 warps: sdxl-1280x32 forward 9.1, 13.2,
  // backward 13.5, 16.2; sdxl-2560x32 15.7, 17.5 and 24.3, 23.1. 10 to 16 warps: sdxl-640x64 18.5, 17.3 and
  // 32.4, 22.8; sdxl-1920x32 18.7, 16.8 and 26.1, 20.2; unet3d-1024 20.4, 18.8 and 26.7, 21.7; sd15-320x64,
  // of 5 MiB, 11.0, 13.5 and 21.2, 16.5; unet3d-2048, of 2 MiB, 9.3, 16.5 and 10.4, 11.0.
  const std::int64_t bytes = p.elements() * static_cast<std::int64_t>(size_of(p.x));
  const std::int64_t most = backward ? (warps() > 8 ? 3 : 8) : (warps() > 8 ? 6 : 12);  // MiB
  if (choice.warps < 0 && bytes > most << 20) return {};
  chip.cluster = static_cast<int>(cluster());
  chip.warps = static_cast<int>(warps());
  return chip;
}

Launch launch_of_slabs(const Problem& p, const OnChip& chip, int width, bool backward) {
  if (chip.cluster == 0) return {};
  const Slabs slabs = make_slabs(dimensions_of(p), chip, width);
  return {p.samples * (p.channels / slabs.channels) * chip.cluster, chip.warps * kLanes, 1,
          slab_memory(slabs, backward).bytes, chip.cluster};
}

}  // namespace

void choose_on_chip(Plan& plan, const Problem& p, const DeviceInfo& device, const OnChipChoice& choice) {
  const Tree tree = tree_of(p);
  if (p.layout == Layout::channels_last) {
    plan.forward_on_chip = choose_slabs(p, tree, vector_width(p), false, device, choice);
    plan.group = launch_of_slabs(p, plan.forward_on_chip, vector_width(p), false);
    const int width = std::min(vector_width(p), 16 / static_cast<int>(size_of(p.y)));
    plan.backward_on_chip = choose_slabs(p, tree, width, true, device, choice);
    plan.group_gradient = launch_of_slabs(p, plan.backward_on_chip, width, true);
    return;
  }
  const std::int64_t groups = p.samples * p.groups;
  if (!has_whole_units(tree) || groups * kMaxCluster > kGridLimit) return;
  const auto launch_of = [&](const OnChip& chip) {
    Launch l{groups * chip.cluster, chip.warps * kLanes};
    l.cluster = std::max(1, chip.cluster);
    return l;
  };
  plan.forward_on_chip = choose_groups(tree.roots(), p, false, device, choice);
  plan.group = launch_of(plan.forward_on_chip);
  plan.backward_on_chip = choose_groups(tree.roots(), p, true, device, choice);
  plan.group_gradient = launch_of(plan.backward_on_chip);
}

}  // namespace steadynorm::cuda
