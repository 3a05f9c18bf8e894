// SPDX-License-Identifier: Apache-2.0
// Loads and stores of W consecutive elements of a storage type. A narrower access never changes which lane
// gets which element.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "cuda/device.cuh"
#include "steadynorm/types.h"

namespace steadynorm::cuda {

template <class T>
constexpr bool kIsFloat = __is_same(T, float);

// W elements as they lie in memory. Indices are compile-time constants after unrolling, so this stays in
// registers.
template <class T, int W>
struct Packed {
  static constexpr int kBytes = W * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  std::uint32_t words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (kIsFloat<T>) {
      return float_of(words[i]);
    } else if constexpr (__is_same(T, BFloat16)) {
      return float_of(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      return to_fp32(value(i));
    }
  }

  __device__ __forceinline__ T value(int i) const {
    if constexpr (kIsFloat<T>)
      return float_of(words[i]);
    else
      return T{static_cast<std::uint16_t>(i % 2 ? words[i / 2] >> 16 : words[i / 2])};
  }

  __device__ __forceinline__ bool is_zero(int i) const {
    return (kIsFloat<T> ? words[i] : words[i / 2] & (i % 2 ? 0xffff0000u : 0xffffu)) == 0;
  }

  __device__ __forceinline__ void put(int i, T value) {  // into a place that is 0
    if constexpr (kIsFloat<T>)
      words[i] = bits_of(value);
    else
      words[i / 2] |= static_cast<std::uint32_t>(value.bits) << (i % 2 ? 16 : 0);
  }
};

// The bits in which any of the vectors differs from the first.
template <class T, int W, int kCount>
__device__ __forceinline__ Packed<T, W> different_bits(const Packed<T, W> (&raw)[kCount]) {
  Packed<T, W> r{};
#pragma unroll
  for (int v = 1; v < kCount; ++v)
#pragma unroll
    for (int i = 0; i < Packed<T, W>::kWords; ++i) r.words[i] |= raw[v].words[i] ^ raw[0].words[i];
  return r;
}

// For 16-bit values: the compiler need not keep the values that it has made of them; without this, the
// statistics spill.
template <class T, int W, int kCount>
__device__ __forceinline__ void unpack_again(Packed<T, W> (&raw)[kCount]) {
  if constexpr (!kIsFloat<T>) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) forget_words(raw[v].words);
  }
}

// 0, which the compiler does not know; of a number below 2^16.
__device__ __forceinline__ std::uint32_t nothing_of(int number) {
  return static_cast<std::uint32_t>(number) >> 16;
}

// For 16-bit values that stay packed in registers while they are used several times: they are unpacked only
// when `value` is there, each time anew. Left to itself the compiler unpacks all of them at once, and keeps
// them: twice the registers. `nothing` is 0, which the compiler does not know.
template <class T, int W>
__device__ __forceinline__ void unpack_after(Packed<T, W>& raw, float value, std::uint32_t nothing) {
  if constexpr (!kIsFloat<T>) {
#pragma unroll
    for (int i = 0; i < Packed<T, W>::kWords; ++i) wait_for(raw.words[i], value, nothing);
  }
}

// The same of columns 2 i and 2 i + 1 alone.
template <class T, int W, int kCount>
__device__ __forceinline__ void unpack_after(Packed<T, W> (&raw)[kCount], int i, float value,
                                             std::uint32_t nothing) {
  if constexpr (!kIsFloat<T>) {
#pragma unroll
    for (int v = 0; v < kCount; ++v) wait_for(raw[v].words[i], value, nothing);
  }
}

// The same within sums of micro-batches, column by column: after the sum of column j.
template <class T, int W, int kCount>
__device__ __forceinline__ void unpack_next(Packed<T, W> (&raw)[kCount], int j, float sum,
                                            std::uint32_t nothing) {
  if (j % 2 == 0) return;
  if (j + 1 < W) return unpack_after(raw, j / 2 + 1, sum, nothing);
#pragma unroll
  for (int v = 0; v < kCount; ++v) unpack_after(raw[v], sum, nothing);
}

template <class T, int W>
constexpr int kAlignment = W* static_cast<int>(sizeof(T)) < 16 ? W* static_cast<int>(sizeof(T)) : 16;

STEADYNORM_HD bool is_aligned(const void* p, int bytes) {
  return reinterpret_cast<std::uintptr_t>(p) % static_cast<unsigned>(bytes) == 0;
}

// A whole vector, aligned to kAlignment.
template <class T, int W>
__device__ __forceinline__ Packed<T, W> load(const T* p) {
  Packed<T, W> r;
  load_words(r.words, p);
  return r;
}

// The first `valid` elements one by one, +0 in the other places. For ragged ends and misaligned rows.
template <class T, int W>
__device__ __forceinline__ Packed<T, W> load_some(const T* p, std::int64_t valid) {
  Packed<T, W> r{};
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (i < valid) r.put(i, p[i]);
  return r;
}

// W results, rounded once: a whole vector, aligned to kAlignment, or the first `valid` elements one by one.
template <class T, int W>
__device__ __forceinline__ void store(T* p, const float (&values)[W], bool whole, std::int64_t valid) {
  if constexpr (Packed<T, W>::kBytes >= 4) {
    if (whole) {
      std::uint32_t words[Packed<T, W>::kWords];
#pragma unroll
      for (int i = 0; i < Packed<T, W>::kWords; ++i) {
        if constexpr (kIsFloat<T>)
          words[i] = bits_of(values[i]);
        else
          words[i] = pack_pair<T>(values[2 * i], values[2 * i + 1]);
      }
      store_words(p, words);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (i < valid) {
      if constexpr (kIsFloat<T>)
        p[i] = values[i];
      else
        p[i] = T{static_cast<std::uint16_t>(pack_pair<T>(values[i], 0.0f))};
    }
}

// Values as they are, to where they are read again.
template <class T, int W>
__device__ __forceinline__ void store(T* p, const Packed<T, W>& values, bool whole, std::int64_t valid) {
  if constexpr (Packed<T, W>::kBytes >= 4)
    if (whole) return store_words(p, values.words);
#pragma unroll
  for (int i = 0; i < W; ++i)
    if (i < valid) p[i] = values.value(i);
}

// a + b, rounded once.
template <class T, int W>
__device__ __forceinline__ Packed<T, W> add(const Packed<T, W>& a, const Packed<T, W>& b) {
  Packed<T, W> r;
#pragma unroll
  for (int i = 0; i < Packed<T, W>::kWords; ++i) {
    if constexpr (kIsFloat<T>)
      r.words[i] = bits_of(a[i] + b[i]);
    else
      r.words[i] = pack_pair<T>(a[2 * i] + b[2 * i], a[2 * i + 1] + b[2 * i + 1]);
  }
  return r;
}

// ---- where the statistics have x from: memory, or the sum of two tensors ----

// A place in x + residual. Who loads a value of the two stores it in the sum, from where it is read again.
template <class T>
struct Summed {
  const T *x, *residual;
  T* sum;

  __device__ __forceinline__ Summed operator+(std::int64_t n) const { return {x + n, residual + n, sum + n}; }
  __device__ __forceinline__ Summed& operator+=(std::int64_t n) { return *this = *this + n; }
  __device__ __forceinline__ Summed& operator-=(std::int64_t n) { return *this = *this + -n; }
  __device__ __forceinline__ T operator[](std::int64_t i) const { return sum[i]; }
};

// Rows of both that a thread loads before it adds the first: kBytes of each are in flight.
template <class Row, int kCount, int kBytes = 64>
constexpr int kSummedRows = kBytes / Row::kBytes < kCount ? kBytes / Row::kBytes : kCount;

template <class T>
__device__ __forceinline__ bool is_aligned(const Summed<T>& p, int bytes) {
  return is_aligned(p.x, bytes) && is_aligned(p.residual, bytes) && is_aligned(p.sum, bytes);
}

template <class T, bool kSum>
__device__ __forceinline__ auto source_of(const ForwardCall& call) {
  if constexpr (kSum)
    return Summed<T>{static_cast<const T*>(call.addends[0]), static_cast<const T*>(call.addends[1]),
                     static_cast<T*>(call.sum)};
  else
    return static_cast<const T*>(call.x);
}

// f(kSum), as a constant.
template <class F>
cudaError_t with_source(const ForwardCall& call, const F& f) {
  return call.sum != nullptr ? f(std::true_type{}) : f(std::false_type{});
}

// f(Type<float>{}), f(Type<BFloat16>{}) or f(Type<Float16>{}), on the device.
template <class F>
__device__ __forceinline__ void with_type(DType dtype, const F& f) {
  if (dtype == DType::bfloat16)
    f(Type<BFloat16>{});
  else if (dtype == DType::float16)
    f(Type<Float16>{});
  else
    f(Type<float>{});
}

// The output's dtype is a run-time value: it changes one store, not the loop.
template <int W>
__device__ __forceinline__ void store(void* base, DType dtype, std::int64_t index, const float (&values)[W],
                                      bool whole, std::int64_t valid) {
  if (dtype == DType::bfloat16)
    store(static_cast<BFloat16*>(base) + index, values, whole, valid);
  else if (dtype == DType::float16)
    store(static_cast<Float16*>(base) + index, values, whole, valid);
  else
    store(static_cast<float*>(base) + index, values, whole, valid);
}

}  // namespace steadynorm::cuda
