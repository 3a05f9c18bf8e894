// SPDX-License-Identifier: Apache-2.0
// How a problem is put on a device, as plain values: chosen by a pure function, compared, printed, tested
// without a GPU. A plan decides who evaluates which part of the reduction tree, never what is evaluated: all
// plans give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "core/tree.h"
#include "steadynorm/problem.h"

namespace steadynorm::cuda {

// Facts of a device that never change.
struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;
  int sms = 0;
  int max_threads_per_sm = 0;
  int registers_per_sm = 0;
  std::size_t shared_per_sm = 0;
  std::size_t shared_per_block_optin = 0;
  std::size_t l2_bytes = 0;
  int largest_cluster = 1;     // blocks of 512 threads, a power of two
  bool runs_together = false;  // cooperative launches

  bool operator==(const DeviceInfo&) const = default;
};

struct Launch {
  std::int64_t blocks = 0;
  int threads_x = 1, threads_y = 1;
  int shared_bytes = 0;
  int cluster = 1;        // blocks in a row that exchange messages; divides `blocks`
  bool together = false;  // all blocks run at once, so that each may wait for all

  int threads() const { return threads_x * threads_y; }
  bool operator==(const Launch&) const = default;
};

// contiguous: a warp evaluates a leaf, and neighbouring warps a unit's.
struct Runs {
  int warps = 0;             // of a block
  int leaves_per_unit = 1;   // a power of two that divides warps
  bool full_leaves = false;  // every unit is a leaf of one full block

  bool operator==(const Runs&) const = default;
};

// channels_last: `columns` threads along the channels, each with `width` of them; `lanes` along the volume.
struct Columns {
  int width = 0;
  int columns = 0;
  int lanes = 0;                 // a power of two up to kUnitLeaves; each evaluates every lanes-th leaf
  bool vectors = false;          // every thread's channels are one aligned vector, if the pointer is
  bool by_channel_unit = false;  // a slab is one channel unit of a group
  std::int64_t slab = 0;         // channels of a block; for the statistics, whole channel units
  std::int64_t slabs = 0;

  bool operator==(const Columns&) const = default;
};

// An element-wise sweep. contiguous: threads x vectors in a row; channels_last: columns x lanes, `rows` a
// thread.
struct Sweep {
  int width = 0;
  int columns = 0;
  int lanes = 0;
  int rows = 0;
  std::int64_t slabs = 1;  // column blocks along the channels
  bool reverse = false;    // last tile first: what the reductions read last is still in L2

  bool operator==(const Sweep&) const = default;
};

// A group stays in the registers of one block or of several: x, and dy, are read once. A block keeps an
// aligned part of the group's tree. contiguous: each warp one unit or two. channels_last: the blocks have a
// slab of whole groups of one sample, and a thread one leaf of a vector of its channels.
struct OnChip {
  int blocks = 0;         // of a group or slab; 0: no group stays
  bool together = false;  // they are no cluster: all blocks of the launch run at once, and meet once
  int warps = 0;          // of a block; contiguous: a power of two
  int width = 0;          // channels_last: channels of a vector
  int columns = 0;        // channels_last: vectors of a slab
  int units = 1;  // contiguous: of a warp, 2 only in 16-bit forward where units are whole; channels_last: of
                  // a block, a power of two up to kMaxOnChipUnits

  bool operator==(const OnChip&) const = default;
};

// Backward: whether blocks that meet sum the parameters' gradients over the samples too. Each sample costs a
// trip to L2, a launch of its own two microseconds.
inline bool sums_samples(const OnChip& chip, std::int64_t samples) { return chip.together && samples <= 4; }

struct Plan {
  // Where these serve, the sweeps serve only what is misaligned, or asks for parameter gradients alone.
  OnChip forward_on_chip, backward_on_chip;
  Runs runs;        // contiguous: statistics
  Runs sum_runs;    // contiguous: backward sums, where a unit is never more than one channel
  Columns columns;  // channels_last: both
  Columns sum_columns;
  Sweep apply;
  Sweep gradient;
  int unit_lanes = 1;          // backward: threads along the units of a channel, kUnitsOfThread each
  bool rows_together = false;  // backward: one launch from the units' sums to means and parameter gradients
  bool overlap = false;        // programmatic dependent launch

  Launch statistics, finalize, write;  // forward; finalize may be preceded by folds, see fold_blocks()
  Launch sums, rows, input;            // backward
  Launch group, group_gradient;        // on chip

  bool operator==(const Plan&) const = default;
};

std::ostream& operator<<(std::ostream&, const Plan&);

Plan choose_plan(const Problem&, const DeviceInfo&);

// Other legal plans for the same problem, for tests: each must give the same bits.
std::vector<Plan> legal_plans(const Problem&, const DeviceInfo&);

// Throws Unsupported when the device or the grid cannot hold the plan.
void require_legal(const Plan&, const DeviceInfo&);

// ---- sizes that both the plan and the workspace need ----

Tree tree_of(const Problem&);

// Nodes of a group as one aligned binary tree: the channel units of a place are padded with absent ones to a
// power of two.
std::int64_t padded_roots(const Tree&);

// Whether a contiguous group is 2^k units, each a full block of one channel: it has kernels of its own.
bool has_whole_units(const Tree&);

constexpr std::int64_t kGridLimit = 2147483647;  // blocks
constexpr int kPortableCluster = 8;              // blocks of a cluster on every device that has them
constexpr int kMaxCluster = 16;
constexpr int kMaxOnChipWarps = 16;
constexpr int kMaxOnChipUnits = 4;
constexpr int kFoldItems = 1024;  // nodes that a block merges
constexpr int kFoldThreads = 256;
constexpr int kLeafWarps = 4;        // contiguous: at most, of a block that reduces
constexpr int kColumnThreads = 256;  // channels_last: at most, of a block
constexpr int kTileThreads =
    256;  // contiguous: of a block of an element-wise sweep, four vectors each: fewer leave
constexpr int kTileVectors = 4;    // what a thread does once dearer than its elements
constexpr int kChannelLevels = 8;  // channels_last: of the tree over a unit's channels
constexpr int kColumnWidth = 4;    // channels_last: channels of a thread, but for the statistics
constexpr int kUnitsOfThread = 8;  // backward: of a channel, merged by one thread
constexpr int kRowThreads = 256;   // backward: of a block that makes rows

// channels_last: the threads of an SM that the registers of the kernels that reduce are for.
constexpr int statistics_threads(int width) { return width == 8 ? 512 : 640; }
constexpr int sums_threads(int bytes) { return bytes > 4 ? 384 : 512; }  // of a value of x and one of dy
// On chip, for vectors of `bytes`; fitted: to compute capability 9.0.
constexpr int slab_threads(int bytes, bool fitted) { return bytes > 8 ? 640 : fitted ? 1024 : 768; }
constexpr int slab_gradient_threads(bool fitted) { return fitted ? 640 : 512; }

// Workspaces depend on the problem alone.
struct ForwardWorkspace {
  std::size_t roots, folded, statistics, bytes;  // offsets, and the size
};
struct BackwardWorkspace {
  std::size_t partials, rows, means, bytes;
};
ForwardWorkspace forward_layout(const Problem&);
BackwardWorkspace backward_layout(const Problem&);

}  // namespace steadynorm::cuda
