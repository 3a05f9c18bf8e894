// SPDX-License-Identifier: Apache-2.0
// Vector conversions of every instruction set against core's scalar ones, bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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

// Whole vectors go past the caches, if all of a tile's rows begin at a multiple of one; ends and what lies
// between the rows do not.
TEST(CpuConversions, WhatGoesPastTheCachesHasTheSameBits) {
  constexpr std::int64_t kRows = 5, kMost = 1024;
  alignas(64) float x[kMost], dy[kMost], near[kMost], past[kMost];
  for (std::int64_t i = 0; i < kMost; ++i) x[i] = dy[i] = 0.37f * static_cast<float>(i % 83) - 11;
  cpu::Coefficients k{};
  for (int i = 0; i < cpu::kPanel; ++i) {
    k.mean_hi[i] = k.rstd[i] = 0.5f;
    k.scale[i] = k.weight[i] = k.mean_dz[i] = 1.0f + static_cast<float>(i);
  }
  for (const cpu::Kernels* kernels : instruction_sets())
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
      for (const std::int64_t width : {1, 15, 16, 75, 80})
        for (const std::int64_t stride : {80, 83})
          for (const std::int64_t offset : {0, 3, 16}) {
            const cpu::Tile tile{offset, kRows, stride, width};
            const auto run = [&](float* to, bool past_caches, bool row, bool gradient) {
              std::fill_n(to, kMost, -7.0f);
              const cpu::MutableArray out{to, dtype, past_caches};
              if (gradient)
                (row ? kernels->row_gradient : kernels->column_gradient)(Activation::relu, {x, dtype},
                                                                         {dy, dtype}, out, tile, k);
              else
                (row ? kernels->row_apply : kernels->column_apply)(Activation::relu, {x, dtype}, out, tile,
                                                                   k);
            };
            for (const bool row : {false, true})
              for (const bool gradient : {false, true}) {
                run(near, false, row, gradient);
                run(past, true, row, gradient);
                ASSERT_EQ(std::memcmp(near, past, sizeof near), 0)
                    << kernels->name << " " << size_of(dtype) << " bytes, width " << width << " stride "
                    << stride << " offset " << offset << (row ? " row" : " column")
                    << (gradient ? " gradient" : " apply");
              }
          }
}

}  // namespace
}  // namespace steadynorm::test
