// SPDX-License-Identifier: Apache-2.0
// Every output within the bounds of docs/numerics.md of the double reference, on data that hurts.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cpu/run_cpu.h"
#include "support/bits.h"
#include "support/bounds.h"

namespace steadynorm::test {
namespace {

std::vector<std::int64_t> parameter_shape(const Problem& p, const Parameter& parameter) {
  if (parameter.shape == ParameterShape::per_sample) return {p.samples, p.channels};
  return {parameter_count(p, parameter)};
}

void expect_accurate(const Problem& p, Kind kind, std::uint64_t seed) {
  const Data data = make_data(p, kind, seed);
  const Inputs in(p, data);
  const std::string name = describe(p) + ", " + to_string(kind) + ", seed " + std::to_string(seed) + ", ";
  const ExpectedForward forward_expected = expect_forward(p, data);
  const Forward forward = run_forward(p, in);
  EXPECT_TRUE(within_bounds(name + "y", forward.y, forward_expected.y, image_shape(p)));
  EXPECT_TRUE(statistics_within_bounds(name + "statistics", p, forward.statistics.data(), forward_expected));
  const ExpectedBackward expected = expect_backward(p, data);
  const Backward backward = run_backward(p, in, forward.statistics);
  EXPECT_TRUE(within_bounds(name + "dx", backward.dx, expected.dx, image_shape(p)));
  EXPECT_TRUE(
      within_bounds(name + "dweight", backward.dweight, expected.dweight, parameter_shape(p, p.weight)));
  EXPECT_TRUE(within_bounds(name + "dbias", backward.dbias, expected.dbias, parameter_shape(p, p.bias)));
}

Problem problem(std::int64_t N, std::int64_t C, std::int64_t G, std::int64_t S, Layout layout) {
  Problem p;
  p.samples = N;
  p.channels = C;
  p.groups = G;
  p.positions = S;
  p.layout = layout;
  p.weight = p.bias = {ParameterShape::per_channel, DType::float32};
  return p;
}

TEST(CpuAccuracy, RandomProblemsOfEveryKindStayWithinBounds) {
  Random random(1);
  for (int i = 0; i < 60; ++i) {
    const Problem p = random_problem(random, 40000);
    for (const Kind kind : kFiniteKinds) expect_accurate(p, kind, static_cast<std::uint64_t>(i));
    if (HasFailure()) return;
  }
}

// Sizes at which the tree, a leaf, a panel or a run of channels begins or ends.
TEST(CpuAccuracy, RaggedSizesStayWithinBounds) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    for (const std::int64_t S :
         {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 2047, 2048, 2049, 5000})
      for (const std::int64_t D : {1, 3, 5})
        expect_accurate(problem(2, 3 * D, 3, S, layout), Kind::offset_1e3, 2);
    for (const std::int64_t D : {31, 255, 256, 257, 300, 513})
      for (const std::int64_t S : {1, 9, 70})
        expect_accurate(problem(1, 2 * D, 2, S, layout), Kind::normal, 3);
  }
}

TEST(CpuAccuracy, LongChannelsStayWithinBounds) {
  for (const Kind kind : {Kind::normal, Kind::offset_1e5, Kind::two_valued}) {
    expect_accurate(problem(1, 2, 1, 300001, Layout::contiguous), kind, 4);
    expect_accurate(problem(1, 6, 2, 70003, Layout::channels_last), kind, 4);
  }
}

TEST(CpuAccuracy, EveryActivationAndStorageTypeStaysWithinBounds) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const Activation activation :
         {Activation::none, Activation::relu, Activation::silu, Activation::gelu, Activation::gelu_tanh})
      for (const DType x : {DType::float32, DType::bfloat16, DType::float16})
        for (const DType y : {DType::float32, DType::bfloat16, DType::float16}) {
          Problem p = problem(2, 24, 4, 143, layout);
          p.activation = activation;
          p.x = x;
          p.y = y;
          p.weight = {ParameterShape::per_sample, y};
          p.bias = {ParameterShape::per_channel, x};
          expect_accurate(p, Kind::normal, 5);
        }
}

TEST(CpuAccuracy, NarrowOutputIsTheFp32AnswerRoundedOnce) {
  Random random(6);
  for (int i = 0; i < 30; ++i) {
    Problem p = random_problem(random, 20000);
    const Data data = make_data(p, Kind::normal, 6);
    p.y = DType::float32;
    const Forward wide = run_forward(p, Inputs(p, data));
    for (const DType narrow : {DType::bfloat16, DType::float16}) {
      p.y = narrow;
      const Forward forward = run_forward(p, Inputs(p, data));
      EXPECT_TRUE(same_bits(describe(p), forward.y, store(load(wide.y), narrow), image_shape(p)));
    }
  }
}

TEST(CpuAccuracy, NanStaysInItsGroup) {
  Random random(7);
  for (int i = 0; i < 40; ++i) {
    Problem p = random_problem(random, 20000);
    p.activation = random.pick({Activation::none, Activation::relu, Activation::silu, Activation::gelu});
    Data data = make_data(p, Kind::normal, 7);
    const Inputs clean(p, data);
    const Forward before = run_forward(p, clean);
    for (const double poison :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      data.x[0] = poison;
      const Inputs poisoned(p, data);
      const Forward after = run_forward(p, poisoned);
      const Backward gradient = run_backward(p, poisoned, after.statistics);
      const std::vector<double> y = load(after.y), y_before = load(before.y), dx = load(gradient.dx);
      for (std::int64_t e = 0; e < p.elements(); ++e) {
        const std::int64_t c = p.layout == Layout::contiguous ? e / p.positions % p.channels : e % p.channels;
        const bool inside = e / (p.channels * p.positions) == 0 && c < p.channels_per_group();
        const auto at = static_cast<std::size_t>(e);
        ASSERT_EQ(std::isnan(y[at]), inside) << describe(p) << " element " << e;
        ASSERT_EQ(std::isnan(dx[at]), inside) << describe(p) << " element " << e;
        if (!inside) {
          ASSERT_EQ(y[at], y_before[at]) << describe(p) << " element " << e;
        }
      }
    }
  }
}

// 100 + 0.01 r: the variance is 1e-4, which E[x²] − E[x]² in fp32 loses.
TEST(CpuAccuracy, VarianceSurvivesAnOffset) {
  Problem p = problem(1, 1, 1, 32768, Layout::contiguous);
  Data data = make_data(p, Kind::normal, 8);
  for (double& x : data.x) x = round_to(DType::float32, 100 + 0.01 * x);
  const ExpectedForward expected = expect_forward(p, data);
  const Forward forward = run_forward(p, Inputs(p, data));
  EXPECT_TRUE(statistics_within_bounds("offset", p, forward.statistics.data(), expected));
}

// Rounding the mean of eight such values to fp32 loses a thousand times the bound. Beside groups of values so
// small that their squares are lost, whose sums are taken again, and alone.
TEST(CpuAccuracy, MeanFarFromZeroSurvivesBesideTinyValues) {
  for (const std::int64_t S : {70, 9000})
    for (const double other : {1e-20, 1.0}) {
      const Problem p = problem(1, 6, 2, S, Layout::channels_last);
      Data data = make_data(p, Kind::normal, 9);
      for (std::size_t i = 0; i < data.x.size(); ++i)
        data.x[i] = round_to(DType::float32, i % 6 < 3 ? other * data.x[i] : 1e4 + data.x[i]);
      const Forward forward = run_forward(p, Inputs(p, data));
      EXPECT_TRUE(
          statistics_within_bounds(describe(p), p, forward.statistics.data(), expect_forward(p, data)));
    }
}

// A serial fp32 sum of ones stops at 2^24.
TEST(CpuAccuracy, MeanOfManyOnesIsExactlyOne) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    Problem p = problem(1, 4, 1, std::int64_t{1} << 23, layout);
    p.x = p.y = DType::bfloat16;
    p.weight = p.bias = {};
    Inputs in(p, {});
    in.x = Array(p.x, p.elements());
    std::fill(reinterpret_cast<std::uint16_t*>(in.x.bytes.data()),
              reinterpret_cast<std::uint16_t*>(in.x.bytes.data()) + p.elements(), std::uint16_t{0x3f80});
    const Forward forward = run_forward(p, in);
    EXPECT_EQ(forward.statistics[0], 1.0f);
    EXPECT_EQ(forward.statistics[1], 0.0f);
  }
}

}  // namespace
}  // namespace steadynorm::test
