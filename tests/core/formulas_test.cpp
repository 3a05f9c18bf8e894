// SPDX-License-Identifier: Apache-2.0
#include "core/formulas.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "support/data.h"

namespace steadynorm {
namespace {

using test::Random;

constexpr double u = 0x1p-24;

// By the definition, in long double.
Moments moments_of(const std::vector<double>& values) {
  long double mean = 0, m2 = 0;
  for (const double value : values) mean += value;
  mean /= values.size();
  for (const double value : values) m2 += (value - mean) * (value - mean);
  return {static_cast<double>(values.size()), static_cast<double>(mean), static_cast<double>(m2)};
}

std::vector<double> draw(Random& random, std::int64_t count, double mean, double deviation) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = static_cast<float>(mean + deviation * random.normal());
  return values;
}

std::vector<double> joined(std::vector<double> a, const std::vector<double>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

void expect_identical(const Moments& a, const Moments& b) {
  EXPECT_EQ(a.count, b.count);
  EXPECT_EQ(a.mean, b.mean);
  EXPECT_EQ(a.m2, b.m2);
}

TEST(MomentsMerge, IsTheMomentsOfTheUnion) {
  Random random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const double offset = std::exp2(random.integer(0, 20));
    const std::vector<double> a = draw(random, random.integer(1, 200), offset, 1);
    const std::vector<double> b = draw(random, random.integer(1, 200), offset + random.normal(), 2);
    const Moments merged = merge(moments_of(a), moments_of(b)), exact = moments_of(joined(a, b));
    ASSERT_EQ(merged.count, exact.count);
    ASSERT_NEAR(merged.mean, exact.mean, 4e-16 * offset);
    // A mean in double is off by 2^-53 of itself, and the difference of two means by as much: M2 sees
    // delta^2.
    ASSERT_NEAR(merged.m2, exact.m2, exact.m2 * 1e-14 + exact.count * offset * 1e-15);
  }
}

TEST(MomentsMerge, SmallIntegersAreExact) {
  // {1, 3} and {5, 7}: means 2 and 6, together mean 4, M2 9 + 1 + 1 + 9.
  expect_identical(merge({2, 2, 2}, {2, 6, 2}), {4, 4, 20});
  // {0} and {4, 4, 4}: 3 * 4^2 / 4 more.
  expect_identical(merge({1, 0, 0}, {3, 4, 0}), {4, 3, 12});
}

TEST(MomentsMerge, AnAbsentSetLeavesTheOtherAsItIs) {
  const Moments some{3, 0.1, 0.7};
  expect_identical(merge(some, Moments{}), some);
  expect_identical(merge(Moments{}, some), some);
  // What an absent set holds beside its count is never looked at.
  const double nan = std::numeric_limits<double>::quiet_NaN();
  expect_identical(merge(some, {0, nan, nan}), some);
  expect_identical(merge({0, nan, nan}, some), some);
  EXPECT_EQ(merge(Moments{}, Moments{}).count, 0);
}

TEST(MomentsMerge, EqualCountsGiveTheBitsOfTheDivision) {
  Random random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    const double n = static_cast<double>(random.integer(1, std::int64_t{1} << 40));
    const Moments a{n, random.normal(), random.uniform()}, b{n, random.normal(), random.uniform()};
    const Moments merged = merge(a, b);
    const double share = b.count / (a.count + b.count), delta = b.mean - a.mean;
    ASSERT_EQ(merged.mean, a.mean + delta * share);
    ASSERT_EQ(merged.m2, (a.m2 + b.m2) + delta * delta * (a.count * share));
  }
}

TEST(MomentsMerge, EqualMeansAddNothing) {
  const Moments merged = merge({5, 1e6, 0}, {7, 1e6, 0});
  expect_identical(merged, {12, 1e6, 0});
}

// One micro-batch and no more.
Moments of_one(int n, double pivot, float m, float d, float q) {
  return moments_of(add_micro_batch({}, n, pivot, m, d, q), n, 1.0 / n, pivot);
}

TEST(MicroBatch, CorrectionRestoresTheRoundedMean) {
  // {1, 1 + 2^-23}: the mean 1 + 2^-24 is not an fp32 value; around m = 1, d = 2^-23 and q = 2^-46.
  for (const double pivot : {1.0, 1 + 0x1p-23})
    expect_identical(of_one(2, pivot, 1.0f, 0x1p-23f, 0x1p-46f), {2, 1 + 0x1p-24, 0x1p-47});
}

TEST(MicroBatch, AnyOriginNearTheMeanGivesTheSameMoments) {
  Random random(3);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<double> values = draw(random, 64, 1000, 1);
    const Moments exact = moments_of(values);
    const float m = static_cast<float>(exact.mean + 1e-4 * random.normal());
    double d = 0, q = 0;
    for (const double value : values) {
      d += value - m;
      q += (value - m) * (value - m);
    }
    const Moments got = of_one(64, values[0], m, static_cast<float>(d), static_cast<float>(q));
    ASSERT_NEAR(got.mean, exact.mean, 1e-10);
    ASSERT_NEAR(got.m2, exact.m2, exact.m2 * 2 * u);
  }
}

TEST(MicroBatch, VarianceIsNeverNegativeAndANanStays) {
  // d^2 / n above q by rounding: four equal values a hair above m.
  EXPECT_EQ(of_one(4, 1.0, 1.0f, 4 * 0x1.000002p-20f, 4 * 0x1p-40f).m2, 0);
  EXPECT_TRUE(std::isnan(of_one(4, 1.0, 1.0f, 0, std::numeric_limits<float>::quiet_NaN()).m2));
}

TEST(PivotSums, KeepTheMomentsOfARunAroundAnOutlier) {
  Random random(4);
  for (const double outlier : {0.0, 1e3, 1e6})
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<double> values = draw(random, 2048, 1000, 1);
      values[0] += outlier;  // it is the pivot of all
      PivotSums run;
      for (std::size_t i = 0; i < values.size(); i += 8) {
        const double mean = moments_of(std::vector<double>(values.begin() + i, values.begin() + i + 8)).mean;
        double q = 0;
        for (std::size_t j = i; j < i + 8; ++j) q += (values[j] - mean) * (values[j] - mean);
        run = add_micro_batch(run, 8, values[0], mean, 0.0, q);
      }
      const Moments exact = moments_of(values), got = moments_of(run, 2048, 1.0 / 2048, values[0]);
      ASSERT_NEAR(got.mean, exact.mean, 1e-9);
      ASSERT_NEAR(got.m2, exact.m2, exact.m2 * 1e-11);
    }
}

TEST(MicroBatchReliability, RefusesWhatFp32SquaresLost) {
  EXPECT_TRUE(is_reliable(1.0f));
  EXPECT_TRUE(is_reliable(0x1p-100f));
  EXPECT_TRUE(is_reliable(std::numeric_limits<float>::max()));
  EXPECT_FALSE(is_reliable(0.0f));
  EXPECT_FALSE(is_reliable(0x1.fffffep-101f));
  EXPECT_FALSE(is_reliable(std::numeric_limits<float>::infinity()));
  EXPECT_FALSE(is_reliable(std::numeric_limits<float>::quiet_NaN()));
}

TEST(Statistics, HiAndLoTogetherKeepFortyEightBitsOfTheMean) {
  Random random(4);
  for (int trial = 0; trial < 1000; ++trial) {
    const double mean = random.normal() * std::exp2(random.integer(-30, 60));
    const Statistics s = statistics_of({64, mean, 64}, 0);
    ASSERT_EQ(s.mean_hi, static_cast<float>(mean));
    ASSERT_LE(std::fabs(static_cast<double>(s.mean_hi) + s.mean_lo - mean), 0x1p-48 * std::fabs(mean));
  }
}

TEST(Statistics, RstdIsRoundedOnceAndEpsStaysDouble) {
  EXPECT_EQ(statistics_of({4, 0, 16}, 0).rstd, 0.5f);
  EXPECT_EQ(statistics_of({4, 0, 12}, 1).rstd, 0.5f);
  EXPECT_EQ(statistics_of({1, 3, 0}, 0x1p-40).rstd, 0x1p20f);
  // 1e-320 is no fp32 value.
  EXPECT_TRUE(std::isinf(statistics_of({1, 3, 0}, 0).rstd));
  EXPECT_EQ(statistics_of({1e6, 0, 1e6 * 1e60}, 1e-5).rstd, 1e-30f);
}

TEST(Centred, LosesNothingWhenTheMeanIsFarAboveTheDeviation) {
  Random random(5);
  for (const double offset : {1e3, 1e4, 1e5, 1e6})
    for (int trial = 0; trial < 200; ++trial) {
      const double mean = offset + random.uniform();
      const float x = static_cast<float>(mean + random.normal());
      const Statistics s = statistics_of({64, mean, 64}, 0);
      ASSERT_NEAR(centred(x, s), x - mean, 2 * u * std::fabs(x - mean) + 0x1p-47 * mean);
    }
}

TEST(ChannelSumsMerge, AddsEachSum) {
  const ChannelSums merged = merge(ChannelSums{1, 20}, ChannelSums{3, 0.5});
  EXPECT_EQ(merged.dz, 4);
  EXPECT_EQ(merged.dz_normalized, 20.5);
}

TEST(InputGradient, OfAGroupOfOneElementIsExactlyZero) {
  Random random(6);
  for (int trial = 0; trial < 5000; ++trial) {
    const float weight = static_cast<float>(random.normal()), dz = static_cast<float>(random.normal());
    const float rstd = static_cast<float>(std::exp2(random.integer(-20, 20)) * (1 + random.uniform()));
    const float normalized = 0;
    const GroupMeans means = group_means(weighted(weight, dz, dz * normalized), 1);
    ASSERT_EQ(input_gradient(weight, dz, normalized, means, rstd), 0) << weight << " " << dz;
  }
}

TEST(InputGradient, IsTheDefinition) {
  // rstd * (w dz - A - normalized * B) = 2 * (3 * 5 - 1 - 0.5 * 4)
  EXPECT_EQ(input_gradient(3, 5, 0.5f, {1, 4}, 2), 24);
}

TEST(GroupMeans, DivideTheSumsInDouble) {
  const GroupMeans means = group_means({3e300, 1}, 1e300);
  EXPECT_EQ(means.dz, 3);
  EXPECT_EQ(means.dz_normalized, 0);
  EXPECT_EQ(group_means({1, 2}, 3).dz, static_cast<float>(1.0 / 3));
}

}  // namespace
}  // namespace steadynorm
