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
  return {static_cast<int>(cluster), false, warps, 0, 0, units};
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
  if (four.blocks > 0) return four;
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

int gradient_width(const Problem& p) {
  return std::min(vector_width(p), 16 / static_cast<int>(size_of(p.y)));
}

Launch launch_of_slabs(const Problem& p, const OnChip& chip, bool backward) {
  if (chip.blocks == 0) return {};
  const Slabs slabs = make_slabs(dimensions_of(p), chip);
  Launch l{p.samples * (p.channels / slabs.channels) * chip.blocks, chip.warps * kLanes, 1,
           slab_memory(slabs, backward ? chip.width * static_cast<int>(size_of(p.y)) : 0).bytes};
  l.cluster = chip.together ? 1 : chip.blocks;
  l.together = chip.together;
  return l;
}

// Blocks of an SM.
std::int64_t resident(const Problem& p, const OnChip& chip, bool backward, const DeviceInfo& device) {
  constexpr std::size_t kOfSystem = 1024;  // shared memory, of a block
  const Launch l = launch_of_slabs(p, chip, backward);
  const bool fitted = device.major == 9;
  const int threads = backward ? slab_gradient_threads(fitted)
                               : slab_threads(chip.width * static_cast<int>(size_of(p.x)), fitted);
  const std::size_t by_shared = device.shared_per_sm / (static_cast<std::size_t>(l.shared_bytes) + kOfSystem);
  return std::min<std::int64_t>(threads / l.threads(), static_cast<std::int64_t>(by_shared));
}

// Whether a device that runs nothing else starts all blocks at once. Of an H200's 132 SMs, clusters of 8
// reach 120.
bool starts_at_once(const Problem& p, const OnChip& chip, bool backward, const DeviceInfo& device) {
  const Launch l = launch_of_slabs(p, chip, backward);
  const std::int64_t places = l.cluster == 1 ? device.sms : device.sms * 10 / 11 / l.cluster * l.cluster;
  return l.blocks <= places * resident(p, chip, backward, device);
}

// channels_last: as few units a block as allowed, with `wanted_warps` or more if there are.
OnChip make_slabs_on_chip(const Problem& p, const Tree& tree, int width, bool together, int wanted_warps,
                          bool backward, const DeviceInfo& device) {
  const std::int64_t slab = slab_on_chip(p, tree, width);
  if (slab == 0 || slab / width > kMaxOnChipWarps * kLanes) return {};
  OnChip chip{1, together, 0, width, static_cast<int>(slab / width), 1};
  const Dimensions d = dimensions_of(p);
  const auto warps = [&] { return divide_up(make_slabs(d, chip).leaves * chip.columns, kLanes); };
  const auto blocks = [&] { return divide_up(tree.spatial_units, chip.units); };
  const std::int64_t most_blocks = together ? kLanes : device.largest_cluster;
  while (chip.units < kMaxOnChipUnits && blocks() > 1 && (blocks() > most_blocks || warps() < wanted_warps))
    chip.units *= 2;
  if (blocks() > most_blocks || warps() > kMaxOnChipWarps) return {};
  chip.blocks = static_cast<int>(blocks());
  chip.together = together && chip.blocks > 1;
  chip.warps = static_cast<int>(warps());
  const Launch l = launch_of_slabs(p, chip, backward);
  if (l.shared_bytes > static_cast<int>(device.shared_per_block_optin)) return {};
  if (chip.together && !(device.runs_together && starts_at_once(p, chip, backward, device))) return {};
  return chip;
}

// channels_last. us of H200, 2026-12-01, 16-bit values, no activation, kernels alone: clusters, blocks that
// meet, sweeps.
//   forward   sd15-640x32 7.6, 8.2, 9.3   sdxl-1280x32 9.6, 10.1, 12.8   sdxl-2560x32 16.3, 13.9, 16.0
//             sdxl-640x64 18.4, 13.8, 16.7   sdxl-1920x32 18.4, 11.8, 15.5   unet3d-1024 21.0, 11.8, 17.6
//   backward  sd15-640x32 11.4, 11.0, 11.7   sdxl-1280x32 14.8, 13.5, 16.3   sdxl-2560x32 24.4, 19.4, 22.9
//             sdxl-640x64 26.4, 20.7, 23.0   sdxl-1920x32 26.8, 16.5, 20.1   unet3d-1024 28.4, 16.6, 22.1
// Blocks of a cluster exchange sooner, but need SMs of one GPC at once: where not all clusters start
// together, the last ones wait for SMs of which most have ended. Small blocks overlap then: (32, 320, 32,
// 32), in two waves of four blocks an SM, 25.4 and 27.9 by sweeps, (256, 512, 8, 8) without clusters 15.9 and
// 30.4; sdxl-2560x32 in fp32, two blocks an SM, 24.7 and 22.1.
OnChip choose_slabs(const Problem& p, const Tree& tree, int width, bool backward, const DeviceInfo& device,
                    const OnChipChoice& choice) {
  // A thread keeps one micro-batch, which is a leaf of up to 8192 positions.
  if (choice.warps == 0 || tree.leaf_positions != kMicroBatchRows || tree.channel_units != 1 ||
      p.samples * p.channels * kMaxCluster > kGridLimit)
    return {};
  const auto make = [&](int of_vector, bool together, int warps) {
    return make_slabs_on_chip(p, tree, of_vector, together, warps, backward, device);
  };
  if (choice.warps > 0) {
    const bool narrower = !backward && choice.width > 0;
    return make(narrower ? std::min(width, choice.width) : width, choice.together, choice.warps);
  }
  const OnChip cluster = make(width, false, 4);
  // Few threads wait for what each does alone. Vectors of 8 and of 4: sd15-1280x8 6.2, 4.8; (32, 256, 14, 14)
  // 9.0, 7.7; (64, 512, 16, 16), in two waves, 17.2, 18.1; sdxl-1280x32, of clusters of 8, 9.6, 10.7.
  if (!backward && width == 8 && cluster.blocks > 0 && cluster.blocks <= 2)
    if (const OnChip narrow = make(4, false, 4);
        narrow.blocks > 0 && starts_at_once(p, narrow, backward, device))
      return narrow;
  const bool small = cluster.blocks > 0 && cluster.blocks <= kPortableCluster;
  const bool at_once = small && starts_at_once(p, cluster, backward, device);
  if (at_once && (cluster.blocks <= 4 || !backward)) return cluster;
  if (const OnChip meeting = make(width, true, backward ? 9 : 8); meeting.blocks > 0) return meeting;
  if (at_once) return cluster;
  if (!small) return {};
  constexpr int kOverlapping = 4;                             // blocks of an SM; and half of them again
  constexpr std::int64_t kMeasured = std::int64_t{40} << 20;  // bytes, for clusters
  const std::int64_t places = resident(p, cluster, backward, device) * device.sms;
  const bool overlap =
      places >= kOverlapping * device.sms && 2 * launch_of_slabs(p, cluster, backward).blocks >= 3 * places;
  const bool measured =
      cluster.blocks == 1 || p.elements() * static_cast<std::int64_t>(size_of(p.x)) <= kMeasured;
  return overlap && measured ? cluster : OnChip{};
}

}  // namespace

void choose_on_chip(Plan& plan, const Problem& p, const DeviceInfo& device, const OnChipChoice& choice) {
  const Tree tree = tree_of(p);
  if (p.layout == Layout::channels_last) {
    plan.forward_on_chip = choose_slabs(p, tree, vector_width(p), false, device, choice);
    plan.group = launch_of_slabs(p, plan.forward_on_chip, false);
    plan.backward_on_chip = choose_slabs(p, tree, gradient_width(p), true, device, choice);
    plan.group_gradient = launch_of_slabs(p, plan.backward_on_chip, true);
    return;
  }
  const std::int64_t groups = p.samples * p.groups;
  if (!has_whole_units(tree) || groups * kMaxCluster > kGridLimit) return;
  const auto launch_of = [&](const OnChip& chip) {
    Launch l{groups * chip.blocks, chip.warps * kLanes};
    l.cluster = std::max(1, chip.blocks);
    return l;
  };
  plan.forward_on_chip = choose_groups(tree.roots(), p, false, device, choice);
  plan.group = launch_of(plan.forward_on_chip);
  plan.backward_on_chip = choose_groups(tree.roots(), p, true, device, choice);
  plan.group_gradient = launch_of(plan.backward_on_chip);
}

}  // namespace steadynorm::cuda
