// SPDX-License-Identifier: Apache-2.0
// Loads and stores of W consecutive elements of a storage type, with L2 hints, and the ordering between the kernels of
// one call. A hint or a narrower access never changes which lane gets which element.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "core/numeric.h"
#include "steadynorm/types.h"

namespace steadynorm::cuda {

// ---- programmatic dependent launch ----
// A kernel may start before the one in front of it has ended; what that one wrote is visible after wait_for_previous().
// Every block of every kernel calls it, so the end of a kernel implies the end of all before it.

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- hints ----

enum class Hint : int { normal, first, last };  // what L2 evicts first, or last

__device__ __forceinline__ std::uint64_t make_policy(Hint hint) {
  std::uint64_t policy;
  if (hint == Hint::last)
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  else if (hint == Hint::first)
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- packed elements ----

__device__ __forceinline__ float to_fp32(float value) { return value; }
__device__ __forceinline__ float to_fp32(BFloat16 value) { return to_float(value); }
__device__ __forceinline__ float to_fp32(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

// W elements as they lie in memory. Indices are compile-time constants after unrolling, so this stays in registers.
template <class T, int W>
struct Packed {
  static constexpr int kBytes = W * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  std::uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      const std::uint32_t word = words[i / 2];
      if constexpr (sizeof(T) == 2 && kIsHalf) {
        return to_fp32(Float16{static_cast<std::uint16_t>(i % 2 ? word >> 16 : word)});
      } else {
        return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = 0;
  }

  __device__ __forceinline__ void put(int i, T value) {  // into a cleared place
    if constexpr (sizeof(T) == 4)
      words[i] = __float_as_uint(value);
    else
      words[i / 2] |= static_cast<std::uint32_t>(value.bits) << (i % 2 ? 16 : 0);
  }

 private:
  static constexpr bool kIsHalf = __is_same(T, Float16);
};

template <class T, int W>
constexpr int kAlignment = W * static_cast<int>(sizeof(T)) < 16 ? W * static_cast<int>(sizeof(T)) : 16;

// A whole vector, aligned to kAlignment. L1 is bypassed, except where a lane's 32 bytes take two instructions: each of
// them touches every sector, and L1 saves the second trip.
template <class T, int W>
__device__ __forceinline__ Packed<T, W> load(const T* p, std::uint64_t policy) {
  Packed<T, W> r;
  constexpr int kBytes = Packed<T, W>::kBytes;
  if constexpr (kBytes == 2) {
    unsigned short h;
    asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=h"(h) : "l"(p), "l"(policy));
    r.words[0] = h;
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(r.words[0]) : "l"(p), "l"(policy));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(r.words[0]), "=r"(r.words[1])
                 : "l"(p), "l"(policy));
  } else if constexpr (kBytes == 16) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(r.words[0]), "=r"(r.words[1]), "=r"(r.words[2]), "=r"(r.words[3])
                 : "l"(p), "l"(policy));
  } else {
    static_assert(kBytes == 32);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(r.words[4 * h]), "=r"(r.words[4 * h + 1]), "=r"(r.words[4 * h + 2]), "=r"(r.words[4 * h + 3])
                   : "l"(reinterpret_cast<const char*>(p) + 16 * h), "l"(policy));
  }
  return r;
}

// The first `valid` elements one by one, +0 in the other places. For ragged ends and misaligned rows.
template <class T, int W>
__device__ __forceinline__ Packed<T, W> load_some(const T* p, std::int64_t valid) {
  Packed<T, W> r;
  r.clear();
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (i < valid) r.put(i, p[i]);
  return r;
}

template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float a, float b);

template <>
__device__ __forceinline__ std::uint32_t pack_pair<BFloat16>(float a, float b) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

template <>
__device__ __forceinline__ std::uint32_t pack_pair<Float16>(float a, float b) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

// W results, rounded once; a whole aligned vector, or the first `valid` elements one by one.
template <class T, int W>
__device__ __forceinline__ void store(T* p, const float (&values)[W], bool whole, std::int64_t valid,
                                      std::uint64_t policy) {
  constexpr int kBytes = Packed<T, W>::kBytes;
  if (kBytes >= 4 && whole) {
    std::uint32_t words[Packed<T, W>::kWords];
#pragma unroll
    for (int i = 0; i < Packed<T, W>::kWords; ++i) {
      if constexpr (sizeof(T) == 4)
        words[i] = __float_as_uint(values[i]);
      else
        words[i] = pack_pair<T>(values[2 * i % W], values[(2 * i + 1) % W]);
    }
    if constexpr (kBytes == 4) {
      asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(p), "r"(words[0]), "l"(policy) : "memory");
    } else if constexpr (kBytes == 8) {
      asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(p), "r"(words[0]), "r"(words[1]),
                   "l"(policy)
                   : "memory");
    } else if constexpr (kBytes >= 16) {
#pragma unroll
      for (int h = 0; h < kBytes / 16; ++h)
        asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                         reinterpret_cast<char*>(p) + 16 * h),
                     "r"(words[4 * h]), "r"(words[4 * h + 1]), "r"(words[4 * h + 2]), "r"(words[4 * h + 3]), "l"(policy)
                     : "memory");
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (i < valid) {
      if constexpr (sizeof(T) == 4) {
        p[i] = values[i];
      } else {
        p[i] = T{static_cast<std::uint16_t>(pack_pair<T>(values[i], 0.0f))};
      }
    }
}

// The output's dtype is a run-time value: it changes one store, not the loop.
template <int W>
__device__ __forceinline__ void store(void* base, DType dtype, std::int64_t index, const float (&values)[W], bool whole,
                                      std::int64_t valid, std::uint64_t policy) {
  if (dtype == DType::bfloat16)
    store(static_cast<BFloat16*>(base) + index, values, whole, valid, policy);
  else if (dtype == DType::float16)
    store(static_cast<Float16*>(base) + index, values, whole, valid, policy);
  else
    store(static_cast<float*>(base) + index, values, whole, valid, policy);
}

}  // namespace steadynorm::cuda
