// SPDX-License-Identifier: Apache-2.0
// Vector conversions of every instruction set against core's scalar ones, bit for bit.
#include <cmath>
#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "core/numeric.h"
#include "cpu/kernels.h"

namespace steadynorm::test {
namespace {

constexpr int kPatterns = 1 << 16;

std::vector<const cpu::Kernels*> instruction_sets() {
  std::vector<const cpu::Kernels*> list;
  for (const cpu::Kernels* const* k = cpu::available_kernels(); *k != nullptr; ++k) list.push_back(*k);
  return list;
}

// Every pattern, from a pointer that no vector is aligned to, and an odd count.
template <class T>
void expect_widened(DType dtype) {
  std::vector<T> values(kPatterns + 1);
  for (int i = 0; i < kPatterns; ++i)
    values[static_cast<std::size_t>(i) + 1].bits = static_cast<std::uint16_t>(i);
  for (const cpu::Kernels* kernels : instruction_sets()) {
    std::vector<float> widened(kPatterns - 1, -1.0f);
    kernels->widen({values.data(), dtype}, 1, kPatterns - 1, widened.data());
    for (int i = 0; i < kPatterns - 1; ++i) {
      const float expected = to_float(T{static_cast<std::uint16_t>(i)}),
                  actual = widened[static_cast<std::size_t>(i)];
      if (std::isnan(expected))  // hardware makes a signalling one quiet, as the first operation would
        ASSERT_TRUE(std::isnan(actual) && std::signbit(actual) == std::signbit(expected))
            << kernels->name << " " << i;
      else
        ASSERT_EQ(bits_of(actual), bits_of(expected)) << kernels->name << " " << i;
    }
  }
}

TEST(CpuConversions, WidenEveryBfloat16) { expect_widened<BFloat16>(DType::bfloat16); }
TEST(CpuConversions, WidenEveryFloat16) { expect_widened<Float16>(DType::float16); }

// Values around every tie of both narrow types: all upper halves with lower halves that round down, tie and
// round up.
std::vector<float> around_ties() {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < kPatterns; ++high)
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x2fffu, 0x3000u, 0x7fffu,
                                    0x8000u, 0x8001u, 0xefffu, 0xf000u, 0xffffu}) {
      const float value = float_of(high << 16 | low);
      values.push_back(std::isnan(value) ? float_of(bits_of(value) | 0x00400000u) : value);  // quiet
    }
  return values;
}

// Stored by an apply that changes no value: ((x - 0) - 0) * 1 + -0.
template <class T>
void expect_narrowed(DType dtype) {
  const std::vector<float> x = around_ties();
  const auto count = static_cast<std::int64_t>(x.size());
  cpu::Coefficients k{};
  k.scale[0] = 1;
  k.bias[0] = -0.0f;
  for (const cpu::Kernels* kernels : instruction_sets()) {
    std::vector<T> y(x.size());
    kernels->row_apply(Activation::none, {x.data(), DType::float32}, {y.data(), dtype}, {0, 1, 0, count}, k);
    for (std::size_t i = 0; i < x.size(); ++i)
      ASSERT_EQ(y[i].bits, from_float<T>(x[i]).bits) << kernels->name << " " << std::hexfloat << x[i];
  }
}

TEST(CpuConversions, NarrowToBfloat16) { expect_narrowed<BFloat16>(DType::bfloat16); }
TEST(CpuConversions, NarrowToFloat16) { expect_narrowed<Float16>(DType::float16); }

}  // namespace
}  // namespace steadynorm::test
