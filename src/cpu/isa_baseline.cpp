// SPDX-License-Identifier: Apache-2.0
// The kernels for what every machine of the architecture has.
#include "cpu/kernels_body.h"

namespace steadynorm::cpu {

extern const Kernels kBaselineKernels;
const Kernels kBaselineKernels = make_kernels("baseline");

}  // namespace steadynorm::cpu
