// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX2. Empty unless the build compiles this file for it.
#if defined(__AVX2__)
#include "cpu/kernels_body.h"

namespace steadynorm::cpu {

extern const Kernels kAvx2Kernels;
const Kernels kAvx2Kernels = make_kernels("avx2");

}  // namespace steadynorm::cpu
#endif
