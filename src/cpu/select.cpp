// SPDX-License-Identifier: Apache-2.0
// The build defines STEADYNORM_CPU_AVX2 and STEADYNORM_CPU_AVX512 when it compiles those isa files for their
// instruction set. Every processor with AVX2 has the F16C conversions too.
#include <atomic>

#include "cpu/kernels.h"

namespace steadynorm::cpu {

extern const Kernels kBaselineKernels, kAvx2Kernels, kAvx512Kernels;

namespace {

struct Available {
  const Kernels* list[4] = {};

  Available() {
    const Kernels** next = list;
#if defined(STEADYNORM_CPU_AVX512)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512cd"))
      *next++ = &kAvx512Kernels;
#endif
#if defined(STEADYNORM_CPU_AVX2)
    if (__builtin_cpu_supports("avx2")) *next++ = &kAvx2Kernels;
#endif
    *next = &kBaselineKernels;
  }
};

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels* const* available_kernels() {
  static const Available available;
  return available.list;
}

const Kernels& kernels() {
  const Kernels* current = chosen.load(std::memory_order_relaxed);
  return current != nullptr ? *current : **available_kernels();
}

void use_kernels(const Kernels* kernels) { chosen.store(kernels, std::memory_order_relaxed); }

}  // namespace steadynorm::cpu
