// SPDX-License-Identifier: Apache-2.0
// Storage types against the definition of a binary format, written with ldexp and nearbyint rather than with
// bits.
#include "core/numeric.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

namespace steadynorm {
namespace {

struct Format {
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  unsigned infinity() const { return ((1u << exponent_bits) - 1u) << fraction_bits; }
};
constexpr Format kBFloat16{8, 7}, kFloat16{5, 10};

bool is_nan(const Format& f, unsigned bits) { return (bits & 0x7fffu) > f.infinity(); }

double decode(const Format& f, unsigned bits) {
  const int exponent = static_cast<int>((bits & 0x7fffu) >> f.fraction_bits);
  const unsigned fraction = bits & ((1u << f.fraction_bits) - 1u);
  const double sign = bits & 0x8000u ? -1 : 1;
  if ((bits & 0x7fffu) == f.infinity()) return sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - f.bias() - f.fraction_bits);
  return sign * std::ldexp((1u << f.fraction_bits) + fraction, exponent - f.bias() - f.fraction_bits);
}

// The nearest value of the format, ties to even: nearbyint in units of the last place, under the default
// rounding mode.
double nearest(const Format& f, double value) {
  if (value == 0 || std::isinf(value)) return value;
  const int unit = std::max(std::ilogb(value), 1 - f.bias()) - f.fraction_bits;
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  const double limit =
      std::ldexp(1, f.bias() + 1);  // the first value that the format would need a larger exponent for
  return std::fabs(rounded) >= limit ? std::copysign(std::numeric_limits<double>::infinity(), value)
                                     : rounded;
}

template <class T>
void expect_reads_exactly(const Format& f) {
  for (unsigned bits = 0; bits < 0x10000u; ++bits) {
    const float value = to_float(T{static_cast<std::uint16_t>(bits)});
    if (is_nan(f, bits)) {
      EXPECT_TRUE(std::isnan(value)) << bits;
    } else {
      EXPECT_EQ(static_cast<double>(value), decode(f, bits)) << bits;
      EXPECT_EQ(std::signbit(value), (bits & 0x8000u) != 0) << bits;
    }
  }
}

template <class T>
void expect_nearest(const Format& f, float value) {
  const double stored = decode(f, from_float<T>(value).bits);
  ASSERT_EQ(stored, nearest(f, value)) << std::hexfloat << value;
  ASSERT_EQ(std::signbit(stored), std::signbit(value)) << std::hexfloat << value;
}

// Rounding is monotonic, so the values around each boundary between two neighbours decide every other.
template <class T>
void expect_rounds_to_nearest_even(const Format& f) {
  for (unsigned bits = 0; bits < f.infinity(); ++bits) {
    const double low = decode(f, bits), unit = std::ldexp(1, 1 - f.bias() - f.fraction_bits);
    const bool last = bits + 1 == f.infinity();
    const double high = last ? low + std::max(unit, low - decode(f, bits - 1)) : decode(f, bits + 1);
    const float middle = static_cast<float>(low + (high - low) / 2);
    for (const float value : {static_cast<float>(low), middle, std::nextafter(middle, 0.0f),
                              std::nextafter(middle, std::numeric_limits<float>::infinity())}) {
      expect_nearest<T>(f, value);
      expect_nearest<T>(f, -value);
    }
  }
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32);
       bits += 2099) {  // and all of fp32's range, sampled
    const float value = float_of(static_cast<std::uint32_t>(bits));
    if (!std::isnan(value)) expect_nearest<T>(f, value);
  }
}

template <class T>
void expect_values_survive_a_round_trip(const Format& f) {
  for (unsigned bits = 0; bits < 0x10000u; ++bits) {
    if (is_nan(f, bits)) continue;
    const T value{static_cast<std::uint16_t>(bits)};
    EXPECT_EQ(from_float<T>(to_float(value)).bits, bits);
  }
}

template <class T>
void expect_nan_stays_nan(const Format& f) {
  // Payloads whose high bits are zero would become infinity if they were only cut off.
  for (const std::uint32_t payload :
       {0x1u, 0x1fffu, 0x2000u, 0xffffu, 0x10000u, 0x3fffffu, 0x400000u, 0x7fffffu})
    for (const std::uint32_t sign : {0u, 0x80000000u})
      EXPECT_TRUE(is_nan(f, from_float<T>(float_of(sign | 0x7f800000u | payload)).bits)) << payload;
}

TEST(BFloat16Read, EveryPatternIsItsValue) { expect_reads_exactly<BFloat16>(kBFloat16); }
TEST(BFloat16Rounding, IsToNearestEven) { expect_rounds_to_nearest_even<BFloat16>(kBFloat16); }
TEST(BFloat16Rounding, KeepsEveryValueOfItsOwn) { expect_values_survive_a_round_trip<BFloat16>(kBFloat16); }
TEST(BFloat16Rounding, KeepsNan) { expect_nan_stays_nan<BFloat16>(kBFloat16); }

TEST(Float16Read, EveryPatternIsItsValue) { expect_reads_exactly<Float16>(kFloat16); }
TEST(Float16Rounding, IsToNearestEven) { expect_rounds_to_nearest_even<Float16>(kFloat16); }
TEST(Float16Rounding, KeepsEveryValueOfItsOwn) { expect_values_survive_a_round_trip<Float16>(kFloat16); }
TEST(Float16Rounding, KeepsNan) { expect_nan_stays_nan<Float16>(kFloat16); }

TEST(BFloat16Rounding, GivesTheseBits) {
  EXPECT_EQ(from_float<BFloat16>(1.0f).bits, 0x3f80);
  EXPECT_EQ(from_float<BFloat16>(0x1.01p0f).bits, 0x3f80);  // a tie, to even below
  EXPECT_EQ(from_float<BFloat16>(0x1.03p0f).bits, 0x3f82);  // a tie, to even above
  EXPECT_EQ(from_float<BFloat16>(3.4028235e38f).bits, 0x7f80);
  EXPECT_EQ(from_float<BFloat16>(-0.0f).bits, 0x8000);
  EXPECT_EQ(from_float<BFloat16>(0x1p-133f).bits, 0x0001);
  EXPECT_EQ(from_float<BFloat16>(0x1p-134f).bits, 0x0000);
}

TEST(Float16Rounding, GivesTheseBits) {
  EXPECT_EQ(from_float<Float16>(1.0f).bits, 0x3c00);
  EXPECT_EQ(from_float<Float16>(2049.0f).bits, 0x6800);   // a tie, to even below
  EXPECT_EQ(from_float<Float16>(2051.0f).bits, 0x6802);   // a tie, to even above
  EXPECT_EQ(from_float<Float16>(65519.0f).bits, 0x7bff);  // the last that does not overflow
  EXPECT_EQ(from_float<Float16>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Float16>(-1e30f).bits, 0xfc00);
  EXPECT_EQ(from_float<Float16>(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(from_float<Float16>(0x1p-25f).bits, 0x0000);  // a tie, to even below
  EXPECT_EQ(from_float<Float16>(0x1.8p-24f).bits, 0x0002);
  EXPECT_EQ(from_float<Float16>(0x1.ffcp-15f).bits, 0x0400);  // rounds up into the normal values
}

TEST(Float32Storage, IsTheValueItself) {
  for (const std::uint32_t bits : {0x00000001u, 0x80000000u, 0x7f800000u, 0x3f800001u})
    EXPECT_EQ(bits_of(to_float(from_float<float>(float_of(bits)))), bits);
}

#if defined(__FLT16_MAX__)
TEST(Float16Rounding, AgreesWithTheCompilersOwnType) {
  __extension__ using Native = _Float16;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 4099) {
    const float value = float_of(static_cast<std::uint32_t>(bits));
    if (std::isnan(value)) continue;
    const Native native = static_cast<Native>(value);
    std::uint16_t expected;
    std::memcpy(&expected, &native, sizeof expected);
    ASSERT_EQ(from_float<Float16>(value).bits, expected) << std::hexfloat << value;
  }
}
#endif

}  // namespace
}  // namespace steadynorm
