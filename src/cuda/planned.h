// SPDX-License-Identifier: Apache-2.0
// The entries with the plan given, for tests and benchmarks: forward(problem, ...) is
// forward(choose_plan(...), problem, ...).
#pragma once

#include "cuda/plan.h"
#include "steadynorm/cuda.h"

namespace steadynorm::cuda {

const DeviceInfo& current_device();

void forward(const Plan&, const Problem&, const ForwardArguments&, Stream);
void backward(const Plan&, const Problem&, const BackwardArguments&, Stream);

}  // namespace steadynorm::cuda
