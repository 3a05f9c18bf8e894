// SPDX-License-Identifier: Apache-2.0
// The kernels for AVX-512 (x86-64-v4). Empty unless the build compiles this file for it.
#if defined(__AVX512F__)
#include "cpu/kernels_body.h"

namespace steadynorm::cpu {

extern const Kernels kAvx512Kernels;
const Kernels kAvx512Kernels = make_kernels("avx512");

}  // namespace steadynorm::cpu
#endif
