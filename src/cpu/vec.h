// SPDX-License-Identifier: Apache-2.0
// Vectors of the instruction set's own width: storage to fp32 and back, and the pairwise trees of a
// micro-batch. Every element is a value of its own, so that the width cannot change a bit. Included by one
// isa file each, hence no linkage.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "core/dispatch.h"
#include "core/numeric.h"
#include "core/tree.h"
#include "cpu/kernels.h"

namespace steadynorm::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef std::int32_t Mask __attribute__((vector_size(4 * kWidth)));  // of comparisons: 0 or -1
typedef std::uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef std::uint16_t HalfWords __attribute__((vector_size(2 * kWidth)));

inline int smaller(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

// A formula of core, for every element. GCC must not unroll the loop before it has made a vector of it.
template <class F, class... V>
STEADYNORM_HD Floats each(F&& formula, const V&... values) {
  Floats result;
#pragma GCC unroll 1
  for (int i = 0; i < kWidth; ++i) result[i] = formula(values[i]...);
  return result;
}

STEADYNORM_HD Floats broadcast(float value) { return value - Floats{}; }

// The first `count` elements.
STEADYNORM_HD Mask first_of(int count) {
  Mask index;
  for (int i = 0; i < kWidth; ++i) index[i] = i;
  return index < count;
}

STEADYNORM_HD bool any(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  std::int32_t all = 0;
  for (int i = 0; i < kWidth; ++i) all |= mask[i];
  return all != 0;
#endif
}

// ---- storage ----

template <class T>
struct Stored {
  using Vector = HalfWords;
};
template <>
struct Stored<float> {
  using Vector = Floats;
};

// core's to_float and from_float, whole vectors at once; a test compares them for every pattern.
template <class T>
STEADYNORM_HD Floats widen(typename Stored<T>::Vector v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#if defined(__AVX512F__)
    const __m512i to_odd = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0,
                                            5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    return (Floats)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, to_odd, _mm512_castsi256_si512((__m256i)v));
#elif defined(__AVX2__)
    return (Floats)((Words)_mm256_cvtepu16_epi32((__m128i)v) << 16);
#else
    return (Floats)(__builtin_convertvector(v, Words) << 16);
#endif
  } else {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)v);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)v);
#else
    const Words bits = __builtin_convertvector(v, Words), magnitude = bits & 0x7fffu;
    const Words normal =
        (magnitude << 13) + (magnitude >= 0x7c00u ? Words{} + 0x70000000u : Words{} + 0x38000000u);
    const Words small = (Words)(__builtin_convertvector((Mask)magnitude, Floats) * 5.9604644775390625e-8f);
    return (Floats)((magnitude >= 0x0400u ? normal : small) | (bits & 0x8000u) << 16);
#endif
  }
}

STEADYNORM_HD HalfWords high_halves(Words words) {
#if defined(__AVX512F__)
  const __m512i odd = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21,
                                       19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return (HalfWords)_mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, (__m512i)words));
#else
  return __builtin_convertvector(words >> 16, HalfWords);
#endif
}

template <class T>
STEADYNORM_HD typename Stored<T>::Vector narrow(Floats v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const Words bits = (Words)v;
#if defined(__AVX512F__)
    const __m512i word = (__m512i)bits;
    const Words rounded = (Words)_mm512_mask_add_epi32(
        _mm512_add_epi32(word, _mm512_set1_epi32(0x7fff)),
        _mm512_test_epi32_mask(word, _mm512_set1_epi32(0x10000)), word, _mm512_set1_epi32(0x8000));
#else
    const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
#endif
    return high_halves(v == v ? rounded : bits | 0x400000u);
  } else {
#if defined(__F16C__)
    // Of a NaN only the sign is kept.
    v = v == v ? v : (Floats)(((Words)v & 0x80000000u) | 0x7fc00000u);
#if defined(__AVX512F__)
    return (HalfWords)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (HalfWords)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
#else
    const Words bits = (Words)v, magnitude = bits & 0x7fffffffu;
    const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000u;
    const Words finite = magnitude < 0x38800000u ? small : normal;
    const Words large = magnitude > 0x7f800000u ? Words{} + 0x7e00u : Words{} + 0x7c00u;
    return __builtin_convertvector((magnitude < 0x477ff000u ? finite : large) | (bits >> 16 & 0x8000u),
                                   HalfWords);
#endif
  }
}

template <class T>
STEADYNORM_HD Floats load(const T* from) {
  typename Stored<T>::Vector v;
  std::memcpy(&v, from, sizeof v);
  return widen<T>(v);
}

template <class T>
STEADYNORM_HD void store(T* to, Floats values) {
  const typename Stored<T>::Vector v = narrow<T>(values);
  std::memcpy(to, &v, sizeof v);
}

// The same past the caches, to an address that is a multiple of the vector's size in bytes: the line it is in
// is not read first.
template <class T>
STEADYNORM_HD void store_past(T* to, Floats values) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    _mm512_stream_ps(to, (__m512)values);
  else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)narrow<T>(values));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    _mm256_stream_ps(to, (__m256)values);
  else
    _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)narrow<T>(values));
#else
  store(to, values);
#endif
}

// Such stores are seen by other threads after this.
STEADYNORM_HD void finish_past() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

#if defined(__AVX512F__)
template <class T>
STEADYNORM_HD Floats load_some(const T* from, int count) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (std::is_same_v<T, float>)
    return (Floats)_mm512_maskz_loadu_ps(mask, from);
  else
    return widen<T>((HalfWords)_mm256_maskz_loadu_epi16(mask, from));
}

template <class T>
STEADYNORM_HD void store_some(T* to, Floats values, int count) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (std::is_same_v<T, float>)
    _mm512_mask_storeu_ps(to, mask, (__m512)values);
  else
    _mm256_mask_storeu_epi16(to, mask, (__m256i)narrow<T>(values));
}
#else
template <class T>
[[gnu::noinline]] Floats load_some(const T* from, int count) {
  T values[kWidth] = {};
  for (int i = 0; i < count; ++i) values[i] = from[i];
  return load(values);
}

template <class T>
[[gnu::noinline]] void store_some(T* to, Floats values, int count) {
  T rounded[kWidth];
  store(rounded, values);
  for (int i = 0; i < count; ++i) to[i] = rounded[i];
}
#endif

// The first `count` values, at least one; the others are +0, and not read.
template <class T>
STEADYNORM_HD Floats load(const T* from, int count) {
  return count == kWidth ? load(from) : load_some(from, count);
}

template <class T>
STEADYNORM_HD void store(T* to, Floats values, int count) {
  if (count == kWidth)
    store(to, values);
  else
    store_some(to, values, count);
}

// A pointer to values whose type only the run knows: what mixed types cost is a call for each vector.
template <class Void>
struct AnyPointer {
  Void* data;
  DType type;

  template <class T>
  STEADYNORM_HD auto as() const {
    if constexpr (std::is_const_v<Void>)
      return static_cast<const T*>(data);
    else
      return static_cast<T*>(data);
  }
};

template <class Void>
STEADYNORM_HD AnyPointer<Void> operator+(AnyPointer<Void> p, std::int64_t offset) {
  if (p.type == DType::float32) return {p.template as<float>() + offset, p.type};
  return {p.template as<BFloat16>() + offset, p.type};
}

[[gnu::noinline]] Floats load(AnyPointer<const void> from, int count = kWidth) {
  if (from.type == DType::float32) return load(from.template as<float>(), count);
  if (from.type == DType::bfloat16) return load(from.template as<BFloat16>(), count);
  return load(from.template as<Float16>(), count);
}

[[gnu::noinline]] void store(AnyPointer<void> to, Floats values, int count = kWidth) {
  if (to.type == DType::float32) return store(to.as<float>(), values, count);
  if (to.type == DType::bfloat16) return store(to.as<BFloat16>(), values, count);
  store(to.as<Float16>(), values, count);
}

// f(x, y) with pointers to the arrays' type when they have one type, else with AnyPointers.
template <class Y, class F>
STEADYNORM_HD void dispatch_pair(Array x, Y y, F&& f) {
  using Void = std::remove_pointer_t<decltype(y.data)>;
  if (x.type != y.type) return f(AnyPointer<const void>{x.data, x.type}, AnyPointer<Void>{y.data, y.type});
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    f(static_cast<const T*>(x.data), AnyPointer<Void>{y.data, y.type}.template as<T>());
  });
}

// Fetches what a pass will read: strided streams are more than the hardware's prefetchers follow. The address
// need not exist.
template <class T>
STEADYNORM_HD void prefetch(const T* from) {
  __builtin_prefetch(from);
}
STEADYNORM_HD void prefetch(AnyPointer<const void>) {}

// ---- trees ----

// f(constant) for a run-time number of rows, 0 to 8.
template <int kMost = kMicroBatchRows, class F>
STEADYNORM_HD void dispatch_rows(int rows, F&& f) {
  if (rows == kMost) return f(std::integral_constant<int, kMost>{});
  if constexpr (kMost > 0) dispatch_rows<kMost - 1>(rows, f);
}

// The aligned binary tree over the first R of 8 values. The missing ones add +0, which only turns a sum of -0
// into +0: once where a whole subtree is met by a missing one.
template <int R, int kFirst = 0, int kCount = kMicroBatchRows, class F>
STEADYNORM_HD auto pairwise(F&& value) {
  if constexpr (kCount == 1) {
    return value(kFirst);
  } else {
    constexpr int kMiddle = kFirst + kCount / 2;
    const auto left = pairwise<R, kFirst, kCount / 2>(value);
    if constexpr (kMiddle < R)
      return left + pairwise<R, kMiddle, kCount / 2>(value);
    else if constexpr (kMiddle == R)
      return left + 0.0f;
    else
      return left;
  }
}

template <int... i>
STEADYNORM_HD Floats evens(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (2 * i)...);
}
template <int kDistance, int... i>
STEADYNORM_HD Floats swapped(Floats a, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, a, (i ^ kDistance)...);
}
using Elements = std::make_integer_sequence<int, kWidth>;

STEADYNORM_HD Floats evens(Floats a, Floats b) { return evens(a, b, Elements{}); }

// The j half of a contiguous micro-batch takes 8 vectors: the columns of kWidth lanes.
using LaneColumns = Floats[kLaneWidth];

// Sums of neighbours by fours: a's first two, b's first two, a's next two, ...
template <int... i>
STEADYNORM_HD Floats add_in_fours(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 4 * 4 + i % 2 * 2 + i / 2 % 2 * kWidth)...) +
         __builtin_shufflevector(a, b, (i / 4 * 4 + i % 2 * 2 + 1 + i / 2 % 2 * kWidth)...);
}
STEADYNORM_HD Floats add_in_fours(Floats a, Floats b) { return add_in_fours(a, b, Elements{}); }

template <int... i>
STEADYNORM_HD Floats add_fours(Floats a, Floats b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 4 * 8 + i % 4)...) +
         __builtin_shufflevector(a, b, (i / 4 * 8 + 4 + i % 4)...);
}

// Element 4 * lane + vector of each half to 2 * vector + lane: what add_fours leaves of 16 lanes.
template <int... i>
STEADYNORM_HD Floats lanes_in_order(Floats a, std::integer_sequence<int, i...>) {
  if constexpr (kWidth == 16)
    return __builtin_shufflevector(a, a, (i / 8 * 8 + i % 2 * 4 + i % 8 / 2)...);
  else
    return a;
}

// The sum of each lane's columns. Vectors are shuffled within fours for as long as may be: that is cheaper
// than across them.
STEADYNORM_HD Floats lane_sums(const LaneColumns& c) {
  const Floats low = add_in_fours(add_in_fours(c[0], c[1]), add_in_fours(c[2], c[3]));
  const Floats high = add_in_fours(add_in_fours(c[4], c[5]), add_in_fours(c[6], c[7]));
  if constexpr (kWidth == 4)
    return add_in_fours(low, high);
  else
    return lanes_in_order(add_fours(low, high, Elements{}), Elements{});
}

// The first of each lane's columns.
STEADYNORM_HD Floats lane_firsts(const LaneColumns& c) {
  const Floats low = evens(evens(c[0], c[1]), evens(c[2], c[3]));
  const Floats high = evens(evens(c[4], c[5]), evens(c[6], c[7]));
  return evens(low, high);
}

// Vectors that hold whole lanes.
constexpr int kLaneVectors = kWidth < kLaneWidth ? kLaneWidth / kWidth : 1;
constexpr int kChunk = kLaneVectors * kWidth;

// The sum of each lane's columns in every one of them, the same for each of the vectors.
STEADYNORM_HD Floats spread_lane_sums(const Floats (&columns)[kLaneVectors]) {
  Floats sum[kLaneVectors];
  for (int p = 0; p < kLaneVectors; ++p) {
    sum[p] = columns[p] + swapped<1>(columns[p], Elements{});
    sum[p] += swapped<2>(sum[p], Elements{});
  }
  if constexpr (kLaneVectors == 1)
    return sum[0] + swapped<4 % kWidth>(sum[0], Elements{});
  else
    return sum[0] + sum[1];
}

}  // namespace
}  // namespace steadynorm::cpu
