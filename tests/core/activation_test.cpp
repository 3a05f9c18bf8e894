// SPDX-License-Identifier: Apache-2.0
// Activations in fp32 against double libm, within the bounds of docs/numerics.md.
#include "core/activation.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "core/dispatch.h"

namespace steadynorm {
namespace {

constexpr double u = 0x1p-24;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr Activation kAll[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu,
                               Activation::gelu_tanh};
constexpr Activation kSmooth[] = {Activation::silu, Activation::gelu, Activation::gelu_tanh};

// The definitions, written so that no digit is lost: 1 + tanh(t) is 2 / (1 + e^-2t).
double logistic(double t) { return 1 / (1 + std::exp(-t)); }
double tanh_argument(double z) { return 2 * std::sqrt(2 / M_PI) * (z + 0.044715 * z * z * z); }

double value_of(Activation activation, double z) {
  switch (activation) {
    case Activation::silu:
      return z * logistic(z);
    case Activation::gelu:
      return z * 0.5 * std::erfc(-z / std::sqrt(2.0));
    case Activation::gelu_tanh:
      return z * logistic(tanh_argument(z));
    case Activation::relu:
      return std::fmax(z, 0);
    case Activation::none:
      break;
  }
  return z;
}

double derivative_of(Activation activation, double z) {
  switch (activation) {
    case Activation::silu:
      return logistic(z) * (1 + z * logistic(-z));
    case Activation::gelu:
      return 0.5 * std::erfc(-z / std::sqrt(2.0)) + z * std::exp(-z * z / 2) / std::sqrt(2 * M_PI);
    case Activation::gelu_tanh: {
      const double t = tanh_argument(z), slope = 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * z * z);
      return logistic(t) * (1 + z * logistic(-t) * slope);
    }
    case Activation::relu:
      return z > 0 ? 1 : 0;
    case Activation::none:
      break;
  }
  return 1;
}

float value(Activation activation, float z) {
  return dispatch(activation, [&](auto a) { return activate<decltype(a)::value>(z); });
}

float backward(Activation activation, float dy, float z) {
  return dispatch(activation, [&](auto a) { return activate_backward<decltype(a)::value>(dy, z); });
}

// f(z) for fp32 values of both signs from 2^-40 to 40: equally many of each binade, in no regular pattern of
// bits.
template <class F>
void sweep(F&& f) {
  for (std::uint32_t bits = bits_of(0x1p-40f); bits <= bits_of(40.0f); bits += 1009) {
    f(float_of(bits));
    f(-float_of(bits));
  }
}

struct Worst {
  double error = 0;
  float z = 0;

  void add(double e, float at) {
    if (e > error) *this = {e, at};
  }
};

TEST(ActivationValue, IsWithinFourRoundingsOfZ) {
  for (const Activation activation : kSmooth) {
    Worst worst;
    sweep([&](float z) {
      worst.add(std::fabs(value(activation, z) - value_of(activation, z)) / (u * std::fabs(z)), z);
    });
    EXPECT_LE(worst.error, 4) << to_string(activation) << " at " << worst.z;
  }
}

TEST(ActivationDerivative, IsWithinSixRoundings) {
  for (const Activation activation : kSmooth) {
    Worst worst;
    sweep([&](float z) {
      worst.add(std::fabs(backward(activation, 1, z) - derivative_of(activation, z)) / u, z);
    });
    EXPECT_LE(worst.error, 6) << to_string(activation) << " at " << worst.z;
  }
}

TEST(ActivationDerivative, IsTimesDy) {
  for (const Activation activation : kAll)
    for (const float z : {-3.0f, -0.5f, 0.25f, 2.0f}) {
      EXPECT_EQ(backward(activation, -4, z), -4 * backward(activation, 1, z)) << to_string(activation);
      EXPECT_EQ(backward(activation, 0, z), 0) << to_string(activation);
    }
}

TEST(ActivationNoneAndRelu, AreExact) {
  sweep([](float z) {
    ASSERT_EQ(value(Activation::none, z), z);
    ASSERT_EQ(value(Activation::relu, z), z > 0 ? z : 0);
    ASSERT_EQ(backward(Activation::none, 3, z), 3);
    ASSERT_EQ(backward(Activation::relu, 3, z), z > 0 ? 3 : 0);
  });
}

TEST(ActivationRelu, OfEitherZeroIsPlusZeroAndPassesNoGradient) {
  for (const float z : {0.0f, -0.0f}) {
    EXPECT_EQ(bits_of(value(Activation::relu, z)), 0u);
    EXPECT_EQ(bits_of(backward(Activation::relu, 1, z)), 0u);
  }
}

TEST(ActivationRelu, NanPassesAndSoDoesItsGradient) {
  EXPECT_TRUE(std::isnan(value(Activation::relu, kNan)));
  EXPECT_EQ(backward(Activation::relu, 3, kNan), 3);
}

TEST(ActivationNan, IsNeverHidden) {
  for (const Activation activation : kAll) {
    EXPECT_TRUE(std::isnan(value(activation, kNan))) << to_string(activation);
    EXPECT_TRUE(std::isnan(value(activation, -kNan))) << to_string(activation);
    EXPECT_TRUE(std::isnan(backward(activation, kNan, 1))) << to_string(activation);
  }
  for (const Activation activation : kSmooth)
    EXPECT_TRUE(std::isnan(backward(activation, 1, kNan))) << to_string(activation);
}

TEST(ActivationSaturation, HugeZGivesTheLimits) {
  for (const Activation activation : kSmooth)
    for (const float z : {100.0f, 1e4f, 1e10f, 1e20f, 1e30f, 3e38f}) {
      EXPECT_EQ(value(activation, z), z) << to_string(activation);
      EXPECT_EQ(value(activation, -z), 0) << to_string(activation) << " " << -z;
      EXPECT_EQ(backward(activation, 1, z), 1) << to_string(activation) << " " << z;
    }
}

// z * slope overflowed where the sigmoid is 0, and 0 * inf is NaN.
TEST(ActivationSaturation, GeluTanhGradientOfHugeNegativeZIsNotNan) {
  for (const Activation activation : kSmooth)
    for (const float z : {-100.0f, -1e4f, -1e10f, -1e20f, -1e30f, -2e36f, -3e38f})
      EXPECT_EQ(backward(activation, 1, z), 0) << to_string(activation) << " " << z;
}

TEST(ActivationInfinity, IsWhatTheDefinitionGives) {
  for (const Activation activation : kAll)
    EXPECT_EQ(value(activation, kInfinity), kInfinity) << to_string(activation);
  EXPECT_EQ(value(Activation::none, -kInfinity), -kInfinity);
  EXPECT_EQ(value(Activation::relu, -kInfinity), 0);
  for (const Activation activation : kSmooth)  // -inf * 0
    EXPECT_TRUE(std::isnan(value(activation, -kInfinity))) << to_string(activation);
}

TEST(ActivationZero, IsZeroWithSlopeOneHalf) {
  for (const Activation activation : kSmooth) {
    EXPECT_EQ(value(activation, 0.0f), 0.0f) << to_string(activation);
    EXPECT_NEAR(backward(activation, 1, 0.0f), 0.5, 4 * u) << to_string(activation);
  }
}

TEST(Exponential, IsWithinTwoUnits) {
  Worst worst;
  for (std::uint32_t bits = bits_of(0x1p-30f); bits <= bits_of(86.0f); bits += 97)
    for (const float t : {-float_of(bits), float_of(bits)}) {
      const double exact = std::exp(static_cast<double>(t));
      worst.add(std::fabs(exponential(t) - exact) / (exact * 2 * u), t);
    }
  EXPECT_LE(worst.error, 2) << "at " << worst.z;
}

TEST(Exponential, HasItsEnds) {
  EXPECT_EQ(exponential(0.0f), 1.0f);
  EXPECT_EQ(exponential(-0.0f), 1.0f);
  EXPECT_GT(exponential(-86.0f), 0.0f);
  EXPECT_LT(exponential(88.0f), kInfinity);
  EXPECT_EQ(exponential(90.0f), kInfinity);
  EXPECT_EQ(exponential(kInfinity), kInfinity);
  EXPECT_EQ(exponential(-1e30f), 0.0f);
  EXPECT_EQ(exponential(-kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(exponential(kNan)));
}

TEST(Sigmoid, ValueAndComplementEachHaveFullRelativePrecision) {
  Worst worst;
  sweep([&](float z) {
    const Sigmoid s = sigmoid(z);
    worst.add(std::fabs(s.value - logistic(z)) / logistic(z), z);
    worst.add(std::fabs(s.complement - logistic(-z)) / logistic(-z), z);
  });
  EXPECT_LE(worst.error, 6 * u) << "at " << worst.z;
}

TEST(Normal, TailKeepsRelativePrecisionToTheEndOfTheFit) {
  Worst worst;
  for (float z = 1.0f / 64; z < 12; z += 1.0f / 512)
    worst.add(std::fabs(normal(-z).integral / (0.5 * std::erfc(z / std::sqrt(2.0))) - 1), -z);
  // e^(-z^2/2) turns the rounding of z^2/2 <= 72 into a relative error of its own.
  EXPECT_LE(worst.error, 100 * u) << "at " << worst.z;
}

}  // namespace
}  // namespace steadynorm
