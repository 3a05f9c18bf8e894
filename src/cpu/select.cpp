// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"

namespace steadynorm::cpu {

extern const Kernels kBaselineKernels;

const Kernels& kernels() { return kBaselineKernels; }

}  // namespace steadynorm::cpu
