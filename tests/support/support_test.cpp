// SPDX-License-Identifier: Apache-2.0
// The helpers that judge the backends: a helper that accepts everything would make every test pass.
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

#include "support/bits.h"
#include "support/bounds.h"
#include "support/cases.h"
#include "support/data.h"

namespace steadynorm::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Problem small(DType dtype = DType::float32) {
  Problem p;
  p.samples = 2;
  p.channels = 6;
  p.groups = 3;
  p.positions = 5;
  p.x = p.y = dtype;
  p.weight = {ParameterShape::per_channel, dtype};
  p.bias = {ParameterShape::per_sample, DType::float32};
  return p;
}

TEST(SupportRandom, IsTheSameSequenceEverywhere) {
  Random random(1);
  EXPECT_EQ(random.bits(), 2469588189546311528u);  // std::mt19937_64(1), fixed by the standard
  EXPECT_EQ(random.uniform(), static_cast<double>(2516265689700432462u >> 11) * 0x1p-53);
}

TEST(SupportRandom, NormalHasMeanZeroAndDeviationOne) {
  Random random(2);
  double sum = 0, squares = 0;
  for (int i = 0; i < 100000; ++i) {
    const double value = random.normal();
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / 1e5, 0, 0.02);
  EXPECT_NEAR(squares / 1e5, 1, 0.02);
}

TEST(SupportRandom, ProblemsAreValidAndOfEveryLayoutTypeAndActivation) {
  Random random(3);
  std::set<std::string> seen;
  for (int i = 0; i < 500; ++i) {
    const Problem p = random_problem(random, 5000);
    ASSERT_NO_THROW(validate(p)) << describe(p);
    ASSERT_LE(p.elements(), 5000) << describe(p);
    seen.insert(to_string(p.layout));
    seen.insert(to_string(p.x));
    seen.insert(to_string(p.activation));
  }
  EXPECT_EQ(seen.size(), 2u + 3u + 5u);
}

TEST(SupportData, EveryValueIsOneOfItsStorageType) {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16})
    for (const Kind kind : kFiniteKinds) {
      const Problem p = small(dtype);
      const Data d = make_data(p, kind, 4);
      EXPECT_EQ(load(store(d.x, dtype)), d.x) << to_string(kind);
      EXPECT_EQ(load(store(d.weight, dtype)), d.weight);
      if (dtype == DType::float16 && (kind == Kind::offset_1e5 || kind == Kind::offset_1e6))
        continue;  // overflow
      for (const double x : d.x) EXPECT_TRUE(std::isfinite(x)) << to_string(kind) << " " << to_string(dtype);
    }
}

TEST(SupportBits, EqualBytesAreEqualAndSignedZerosAreNot) {
  const float zero[] = {0.0f, 1.0f}, minus[] = {-0.0f, 1.0f};
  EXPECT_TRUE(same_bits("same", zero, zero, 4, {2}));
  EXPECT_FALSE(same_bits("signs", zero, minus, 4, {2}));
}

TEST(SupportBits, FailureNamesCaseCoordinateAndBothPatterns) {
  std::vector<float> a(24, 1.0f), b = a;
  b[17] = -2.0f;
  const std::string message = same_bits("a case", a.data(), b.data(), 4, {2, 3, 4}).message();
  EXPECT_EQ(message, "a case: 1 of 24 differ, first at [1, 1, 1]: 0x3f800000 instead of 0xc0000000");
}

TEST(SupportBounds, HalfUnitIsHalfTheGapBetweenNeighbours) {
  for (const float value : {1.0f, 1.5f, 1000.0f, 1e-30f, 1e30f, 1e-44f})
    EXPECT_EQ(
        half_unit(DType::float32, value),
        (static_cast<double>(std::nextafter(value, std::numeric_limits<float>::infinity())) - value) / 2);
  EXPECT_EQ(half_unit(DType::bfloat16, 1), 0x1p-8);
  EXPECT_EQ(half_unit(DType::float16, 1), 0x1p-11);
  EXPECT_EQ(half_unit(DType::float16, 0), 0x1p-25);
}

TEST(SupportBounds, AnErrorIsMeasuredInItsBound) {
  EXPECT_EQ(error_in_bounds(1, 1, 0, DType::float32), 0);
  EXPECT_DOUBLE_EQ(error_in_bounds(1 + 0x1p-24, 1, 0, DType::float32), 1);
  EXPECT_GT(error_in_bounds(1 + 0x1p-23, 1, 0, DType::float32), 1);
  EXPECT_LE(error_in_bounds(1 + 0x1p-23, 1, 0x1p-24, DType::float32), 1);
}

TEST(SupportBounds, NanMeetsNanAndOverflowMeetsInfinityAlone) {
  EXPECT_EQ(error_in_bounds(kNan, kNan, 0, DType::float32), 0);
  EXPECT_EQ(error_in_bounds(1, kNan, 0, DType::float32), kInfinity);
  EXPECT_EQ(error_in_bounds(kNan, 1, 0, DType::float32), kInfinity);
  EXPECT_EQ(error_in_bounds(kInfinity, 1, 0, DType::float32), kInfinity);
  EXPECT_EQ(error_in_bounds(kInfinity, 70000, 0, DType::float16), 0);
  EXPECT_EQ(error_in_bounds(-kInfinity, 70000, 0, DType::float16), kInfinity);
  EXPECT_EQ(error_in_bounds(kInfinity, 65000, 0, DType::float16), kInfinity);
}

TEST(SupportBounds, TheReferenceRoundedOncePassesAndAUnitMoreFails) {
  for (const Activation activation : {Activation::none, Activation::silu}) {
    Problem p = small();
    p.activation = activation;
    const Data d = make_data(p, Kind::normal, 5);
    const ExpectedForward forward = expect_forward(p, d);
    const ExpectedBackward backward = expect_backward(p, d);
    const auto check = [](const char* name, const Expected& expected) {
      const auto count = static_cast<std::int64_t>(expected.value.size());
      Array exact = store(expected.value, DType::float32);
      EXPECT_TRUE(within_bounds(name, exact, expected, {count}));
      std::vector<double> wrong = expected.value;
      wrong[7 % wrong.size()] += 1e-3;
      EXPECT_FALSE(within_bounds(name, store(wrong, DType::float32), expected, {count}));
    };
    check("y", forward.y);
    check("dx", backward.dx);
    check("dweight", backward.dweight);
    check("dbias", backward.dbias);
  }
}

TEST(SupportBounds, StayTight) {
  // A bound that a naive implementation meets holds nothing: on ordinary data it is a few roundings.
  Problem p = small();
  const Data d = make_data(p, Kind::normal, 6);
  for (const double slack : expect_forward(p, d).y.slack) EXPECT_LE(slack, 40 * kRounding);
  for (const double slack : expect_backward(p, d).dbias.slack) EXPECT_LE(slack, 100 * kRounding);
}

TEST(SupportCases, TheNamedShapesAreRead) {
  const std::vector<Case> cases = named_cases();
  ASSERT_GE(cases.size(), 30u);
  std::set<std::string> names;
  for (const Case& c : cases) EXPECT_TRUE(names.insert(c.name).second) << c.name << " occurs twice";
  EXPECT_EQ(cases[0].name, "unet3d-64");
  EXPECT_EQ(cases[0].shape, (std::vector<std::int64_t>{1, 64, 256, 256, 256}));
  EXPECT_EQ(cases[0].problem.positions, 1 << 24);
  EXPECT_EQ(cases[0].problem.groups, 8);
  EXPECT_EQ(cases[0].problem.layout, Layout::channels_last);
}

TEST(SupportCases, AMissingFileIsAnError) { EXPECT_THROW(read_cases("no/such.csv"), std::runtime_error); }

}  // namespace
}  // namespace steadynorm::test
