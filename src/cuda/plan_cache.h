// SPDX-License-Identifier: Apache-2.0
// What the entries derive from a problem and a device, kept: values of a pure function, no device state.
#pragma once

#include "cuda/plan.h"
#include "cuda/work.h"

namespace steadynorm::cuda {

struct Planned {
  Plan plan;
  Dimensions d;
  ForwardWorkspace forward;
  BackwardWorkspace backward;

  // Throws Unsupported when the device cannot hold the plan.
  Planned(const Problem&, const Plan&, const DeviceInfo&);
};

constexpr int kKeptPlans = 256;  // at most, of a thread

// By choose_plan(). The problem is validated, and must be one that the CUDA backend serves. `device` outlives
// the thread; the reference holds until this thread's next call.
const Planned& planned(const Problem&, const DeviceInfo& device);

}  // namespace steadynorm::cuda
