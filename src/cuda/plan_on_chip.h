// SPDX-License-Identifier: Apache-2.0
// The part of a plan that is about groups on chip.
#pragma once

#include "cuda/plan.h"

namespace steadynorm::cuda {

// Negative: by what was measured.
struct OnChipChoice {
  int warps = -1;  // of a block; 0: no group stays on chip
  int units = 1;   // contiguous: of a warp; only if warps is positive
  int width = 0;   // channels_last, only if warps is positive: channels of a vector; 0: as many as 16 bytes
  bool together = false;  // channels_last, only if warps is positive
};

// Values in 16 bytes of x.
inline int vector_width(const Problem& p) { return 16 / static_cast<int>(size_of(p.x)); }

void choose_on_chip(Plan&, const Problem&, const DeviceInfo&, const OnChipChoice&);

}  // namespace steadynorm::cuda
