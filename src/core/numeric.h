// SPDX-License-Identifier: Apache-2.0
// Storage types as bits, and the one rounding between them and fp32.
//
// Arithmetic is pinned: core, cpu and cuda are compiled without contraction (-ffp-contract=off, -fmad=false),
// so a * b + c rounds twice everywhere and a formula gives the same bits on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define STEADYNORM_HD __host__ __device__ __forceinline__
#else
// Forced, so that an object compiled for a newer instruction set exports no copy that an older machine could
// link to.
#define STEADYNORM_HD inline __attribute__((always_inline))
#endif

namespace steadynorm {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

STEADYNORM_HD std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

STEADYNORM_HD float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

STEADYNORM_HD float to_float(float value) { return value; }
STEADYNORM_HD float to_float(BFloat16 value) {
  return float_of(static_cast<std::uint32_t>(value.bits) << 16);
}

STEADYNORM_HD float to_float(Float16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));  // inf, nan
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));           // normal
  // Subnormal: magnitude * 2^-24, exact in fp32.
  const float small = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return float_of(sign | bits_of(small));
}

// Round to nearest, ties to even; a NaN stays a NaN.
template <class T>
STEADYNORM_HD T from_float(float value);

template <>
STEADYNORM_HD float from_float<float>(float value) {
  return value;
}

template <>
STEADYNORM_HD BFloat16 from_float<BFloat16>(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
STEADYNORM_HD Float16 from_float<Float16>(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // 65520 and above
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 aligns the last bit kept with 2^-24
    const std::uint32_t aligned = bits_of(float_of(magnitude) + 0.5f);
    return {static_cast<std::uint16_t>(sign | (aligned - 0x3f000000u))};
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
}

}  // namespace steadynorm
