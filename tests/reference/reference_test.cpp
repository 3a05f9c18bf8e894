// SPDX-License-Identifier: Apache-2.0
// The reference judges everything else, so nothing here trusts it: closed forms, finite differences, and
// other normalisations written out by hand.
#include "steadynorm/reference.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/data.h"

namespace steadynorm {
namespace {

using test::Data;
using test::Kind;
using test::Random;
using Values = std::vector<double>;

constexpr Layout kLayouts[] = {Layout::contiguous, Layout::channels_last};
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu,
                                       Activation::gelu_tanh};
constexpr ParameterShape kShapes[] = {ParameterShape::missing, ParameterShape::per_channel,
                                      ParameterShape::per_sample};

Problem problem(std::int64_t N, std::int64_t C, std::int64_t G, std::int64_t S,
                Layout layout = Layout::contiguous) {
  Problem p;
  p.samples = N;
  p.channels = C;
  p.groups = G;
  p.positions = S;
  p.layout = layout;
  p.x = p.y = p.weight.dtype = p.bias.dtype = DType::float64;
  return p;
}

std::size_t at(const Problem& p, std::int64_t n, std::int64_t c, std::int64_t s) {
  const std::int64_t C = p.channels, S = p.positions;
  return static_cast<std::size_t>(p.layout == Layout::contiguous ? (n * C + c) * S + s : (n * S + s) * C + c);
}

struct Forward {
  Values y, mean, rstd;
};

Forward forward(const Problem& p, const Data& d) {
  const auto groups = static_cast<std::size_t>(p.samples * p.groups);
  Forward f{Values(d.x.size()), Values(groups), Values(groups)};
  reference::forward(p, d.x.data(), d.weight.data(), d.bias.data(), f.y.data(), f.mean.data(), f.rstd.data());
  return f;
}

struct Backward {
  Values dx, dweight, dbias;
};

Backward backward(const Problem& p, const Data& d) {
  const double nan = std::numeric_limits<double>::quiet_NaN();  // whatever is not written shows
  Backward b{Values(d.x.size(), nan), Values(d.weight.size(), nan), Values(d.bias.size(), nan)};
  reference::backward(p, d.x.data(), d.dy.data(), d.weight.data(), d.bias.data(), b.dx.data(),
                      b.dweight.data(), b.dbias.data());
  return b;
}

// ---- closed forms ----

TEST(ReferenceForward, TwoValuesAtEqualSharesBecomePlusAndMinusOne) {
  for (const Layout layout : kLayouts) {
    Problem p = problem(1, 4, 2, 6, layout);
    p.eps = 0;
    Data d;
    d.x.resize(24);
    for (std::int64_t c = 0; c < 4; ++c)
      for (std::int64_t s = 0; s < 6; ++s) d.x[at(p, 0, c, s)] = (c < 2 ? 100 : -7) + ((c + s) % 2 ? 3 : -3);
    const Forward f = forward(p, d);
    for (std::int64_t c = 0; c < 4; ++c)
      for (std::int64_t s = 0; s < 6; ++s) EXPECT_EQ(f.y[at(p, 0, c, s)], (c + s) % 2 ? 1 : -1);
    EXPECT_EQ(f.mean, (Values{100, -7}));
    EXPECT_EQ(f.rstd, (Values{1.0 / 3, 1.0 / 3}));
  }
}

TEST(ReferenceForward, TwoValuesAtUnequalSharesHaveTheBernoulliVariance) {
  Problem p = problem(1, 1, 1, 10);
  p.eps = 0.5;
  Data d{{2, 2, 2, 2, 2, 2, 2, 12, 12, 12}, {}, {}, {}};  // share 0.3, gap 10: mean 5, variance 21
  const Forward f = forward(p, d);
  EXPECT_EQ(f.mean[0], 5);
  EXPECT_DOUBLE_EQ(f.rstd[0], 1 / std::sqrt(21.5));
  EXPECT_DOUBLE_EQ(f.y[9], 7 / std::sqrt(21.5));
}

TEST(ReferenceForward, AnArithmeticProgressionHasItsVariance) {
  for (const std::int64_t S : {2, 3, 10, 1000, 4097}) {
    Problem p = problem(1, 3, 1, S);
    p.eps = 0;
    const double L = 3.0 * static_cast<double>(S), step = 0.25;
    Data d;
    for (double i = 0; i < L; ++i) d.x.push_back(1000 + step * i);
    const Forward f = forward(p, d);
    EXPECT_DOUBLE_EQ(f.mean[0], 1000 + step * (L - 1) / 2);
    EXPECT_DOUBLE_EQ(f.rstd[0], 1 / (step * std::sqrt((L * L - 1) / 12)));
  }
}

TEST(ReferenceForward, AConstantGroupBecomesItsBias) {
  for (const Layout layout : kLayouts)
    for (const double value : {0.0, 0.1, -1e6 / 3, 1e30, 1e-30}) {
      Problem p = problem(2, 6, 3, 7, layout);
      p.weight.shape = p.bias.shape = ParameterShape::per_channel;
      Data d{Values(84, value), {}, {1, 2, 3, 4, 5, 6}, {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}};
      const Forward f = forward(p, d);
      for (std::int64_t c = 0; c < 6; ++c)
        EXPECT_EQ(f.y[at(p, 1, c, 3)], d.bias[static_cast<std::size_t>(c)]);
      EXPECT_EQ(f.mean[0], value);
      EXPECT_DOUBLE_EQ(f.rstd[0], 1 / std::sqrt(1e-5));
    }
}

// The sum of 100003 times 0.1 has more digits than a long double: what it loses must not become a deviation.
TEST(ReferenceForward, TheMeanOfAConstantIsExactAtAnyCount) {
  Problem p = problem(1, 1, 1, 100003);
  p.eps = 1e-36;
  const Forward f = forward(p, Data{Values(100003, 0.1), {}, {}, {}});
  EXPECT_EQ(f.mean[0], 0.1);
  EXPECT_EQ(f.y, Values(100003, 0));
}

TEST(ReferenceForward, ValuesOf1e30StayFinite) {
  Problem p = problem(1, 1, 1, 4);
  const Forward f = forward(p, Data{{1e30, -1e30, 1e30, -1e30}, {}, {}, {}});
  EXPECT_EQ(f.y, (Values{1, -1, 1, -1}));
  EXPECT_DOUBLE_EQ(f.rstd[0], 1e-30);
}

TEST(ReferenceForward, ALongOffsetLosesNothing) {
  // 1e6 +- 1/16 in turn: every value, the mean and the variance are exact in double.
  Problem p = problem(1, 2, 1, 50000);
  p.eps = 0;
  Data d;
  for (int i = 0; i < 100000; ++i) d.x.push_back(1e6 + (i % 2 ? 0.0625 : -0.0625));
  const Forward f = forward(p, d);
  EXPECT_EQ(f.mean[0], 1e6);
  EXPECT_EQ(f.rstd[0], 16);
  EXPECT_EQ(f.y[0], -1);
  EXPECT_EQ(f.y[99999], 1);
}

TEST(ReferenceForward, NanStaysInItsGroup) {
  for (const Layout layout : kLayouts) {
    const Problem p = problem(2, 6, 3, 5, layout);
    const Forward f = forward(p, test::make_data(p, Kind::nan_in_first_group, 1));
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t c = 0; c < 6; ++c)
        for (std::int64_t s = 0; s < 5; ++s)
          EXPECT_EQ(std::isnan(f.y[at(p, n, c, s)]), n == 0 && c < 2) << n << " " << c << " " << s;
  }
}

TEST(ReferenceBackward, OfAUniformDyIsZero) {
  // Moving every y alike is what the mean takes away; without weights dx is exactly its removal.
  const Problem p = problem(2, 6, 2, 35);
  Data d = test::make_data(p, Kind::normal, 2);
  d.dy.assign(d.dy.size(), 1);
  for (const double dx : backward(p, d).dx) EXPECT_NEAR(dx, 0, 1e-17);
}

TEST(ReferenceBackward, OfDyProportionalToXIsZeroWithoutEps) {
  Problem p = problem(1, 2, 1, 50);
  p.eps = 0;
  Data d = test::make_data(p, Kind::normal, 3);
  d.dy = d.x;  // scaling x is what rstd takes away
  for (const double dx : backward(p, d).dx) EXPECT_NEAR(dx, 0, 1e-17);
}

TEST(ReferenceBackward, OfOneDyIsTheProjection) {
  // dx = rstd (e_k - 1/L - x̂ x̂_k / L), by hand for x = ±3 in turn and dy = e_0.
  Problem p = problem(1, 1, 1, 4);
  p.eps = 0;
  const Backward b = backward(p, Data{{3, -3, 3, -3}, {1, 0, 0, 0}, {}, {}});
  const Values expected{1.0 / 6, 0, -1.0 / 6, 0};
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(b.dx[i], expected[i], 1e-17);
}

TEST(ReferenceBackward, ParameterGradientsAreTheirSums) {
  for (const Layout layout : kLayouts) {
    Problem p = problem(2, 2, 1, 2, layout);
    p.eps = 0;
    p.weight.shape = ParameterShape::per_channel;
    p.bias.shape = ParameterShape::per_sample;
    Data d{Values(8), Values(8), {2, 5}, {0, 0, 0, 0}};
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t c = 0; c < 2; ++c)
        for (std::int64_t s = 0; s < 2; ++s) {
          d.x[at(p, n, c, s)] = s ? 4 : -4;  // x̂ = ±1
          d.dy[at(p, n, c, s)] = static_cast<double>(100 * n + 10 * c + s);
        }
    const Backward b = backward(p, d);
    EXPECT_EQ(b.dweight, (Values{2, 2}));  // dy(s = 1) - dy(s = 0), over both samples
    EXPECT_EQ(b.dbias, (Values{1, 21, 201, 221}));
  }
}

// ---- finite differences ----

// The objective Σ dy·y, whose gradient backward claims to be.
double objective(const Problem& p, const Data& d) {
  const Forward f = forward(p, d);
  long double sum = 0;
  for (std::size_t i = 0; i < f.y.size(); ++i) sum += static_cast<long double>(d.dy[i]) * f.y[i];
  return static_cast<double>(sum);
}

void expect_gradient(const Problem& p, Data d, Values Data::*values, const Values& gradient,
                     const char* name) {
  constexpr double h = 1e-5;
  for (std::size_t i = 0; i < (d.*values).size(); ++i) {
    const double saved = (d.*values)[i];
    (d.*values)[i] = saved + h;
    const double above = objective(p, d);
    (d.*values)[i] = saved - h;
    const double below = objective(p, d);
    (d.*values)[i] = saved;
    ASSERT_NEAR(gradient[i], (above - below) / (2 * h), 1e-7) << describe(p) << ": " << name << " " << i;
  }
}

TEST(ReferenceBackward, IsTheFiniteDifferenceOfForward) {
  std::uint64_t seed = 10;
  for (const Layout layout : kLayouts)
    for (const Activation activation : kActivations)
      for (const ParameterShape weight : kShapes)
        for (const ParameterShape bias : kShapes) {
          Problem p = problem(2, 6, 2, 4, layout);
          p.activation = activation;
          p.weight.shape = weight;
          p.bias.shape = bias;
          p.eps = 1e-3;
          const Data d = test::make_data(p, Kind::normal, ++seed);
          const Backward b = backward(p, d);
          expect_gradient(p, d, &Data::x, b.dx, "dx");
          expect_gradient(p, d, &Data::weight, b.dweight, "dweight");
          expect_gradient(p, d, &Data::bias, b.dbias, "dbias");
        }
}

TEST(ReferenceActivation, DerivativesAreFiniteDifferences) {
  for (const Activation activation : kActivations)
    for (double z = -12; z <= 12; z += 0.01) {
      const double h = 1e-5;
      if (activation == Activation::relu && std::fabs(z) < 2 * h) continue;
      const double slope =
          (reference::activate(activation, z + h) - reference::activate(activation, z - h)) / (2 * h);
      ASSERT_NEAR(reference::activate_derivative(activation, z), slope, 2e-9)
          << to_string(activation) << " " << z;
    }
}

TEST(ReferenceActivation, KnownValues) {
  using enum Activation;
  EXPECT_EQ(reference::activate(relu, -2), 0);
  EXPECT_EQ(reference::activate(relu, 2), 2);
  EXPECT_DOUBLE_EQ(reference::activate(silu, std::log(3.0)), 0.75 * std::log(3.0));  // sigmoid(ln 3) = 3/4
  EXPECT_NEAR(reference::activate(gelu, 1), 0.84134474606854293, 1e-16);  // the normal integral to 1
  EXPECT_NEAR(reference::activate(gelu_tanh, 1), 0.84119199060827676, 1e-15);
  for (const Activation activation : {silu, gelu, gelu_tanh}) {
    EXPECT_EQ(reference::activate(activation, 0), 0);
    EXPECT_EQ(reference::activate_derivative(activation, 0), 0.5);
    for (const double huge : {1e3, 1e30, 1e200}) {
      EXPECT_EQ(reference::activate(activation, huge), huge);
      EXPECT_EQ(reference::activate(activation, -huge), 0);
      EXPECT_EQ(reference::activate_derivative(activation, huge), 1);
      EXPECT_EQ(reference::activate_derivative(activation, -huge), 0);
    }
  }
}

TEST(ReferenceActivation, ReluStopsItsGradientAtZeroAndPassesItAtNan) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(reference::activate_derivative(Activation::relu, 0.0), 0);
  EXPECT_EQ(reference::activate_derivative(Activation::relu, -0.0), 0);
  EXPECT_EQ(reference::activate_derivative(Activation::relu, nan), 1);
  for (const Activation activation : kActivations)
    EXPECT_TRUE(std::isnan(reference::activate(activation, nan))) << to_string(activation);
}

TEST(ReferenceBackward, ReluThatIsOffStopsAnInfiniteDy) {
  Problem p = problem(1, 2, 2, 2);
  p.activation = Activation::relu;
  p.bias.shape = ParameterShape::per_channel;
  const double infinity = std::numeric_limits<double>::infinity();
  const Backward b = backward(p, Data{{-1, 1, -1, 1}, {infinity, 1, 1, 1}, {}, {0, 0}});
  EXPECT_EQ(b.dbias, (Values{1, 1}));
}

// ---- layouts, edges, other normalisations ----

TEST(ReferenceLayouts, AgreeElementwise) {
  Random random(20);
  for (int trial = 0; trial < 30; ++trial) {
    Problem p = test::random_problem(random, 2000), q = p;
    p.layout = Layout::contiguous;
    q.layout = Layout::channels_last;
    const Data d = test::make_data(p, Kind::normal, random.bits());
    Data e = d;
    const auto for_each = [&](auto&& f) {
      for (std::int64_t n = 0; n < p.samples; ++n)
        for (std::int64_t c = 0; c < p.channels; ++c)
          for (std::int64_t s = 0; s < p.positions; ++s) f(at(p, n, c, s), at(q, n, c, s));
    };
    for_each([&](std::size_t i, std::size_t j) {
      e.x[j] = d.x[i];
      e.dy[j] = d.dy[i];
    });
    const Forward f = forward(p, d), g = forward(q, e);
    const Backward b = backward(p, d), r = backward(q, e);
    for_each([&](std::size_t i, std::size_t j) {
      ASSERT_NEAR(f.y[i], g.y[j], 1e-13 * (1 + std::fabs(f.y[i]))) << describe(p);
      ASSERT_NEAR(b.dx[i], r.dx[j], 1e-12 * (1 + f.rstd[0]) * (1 + std::fabs(b.dx[i]))) << describe(p);
    });
    for (std::size_t i = 0; i < b.dweight.size(); ++i)
      ASSERT_NEAR(b.dweight[i], r.dweight[i], 1e-11) << describe(p);
    for (std::size_t i = 0; i < b.dbias.size(); ++i)
      ASSERT_NEAR(b.dbias[i], r.dbias[i], 1e-11) << describe(p);
  }
}

TEST(ReferenceEdges, NoSamplesGiveZeroParameterGradients) {
  Problem p = problem(0, 6, 3, 4);
  p.weight.shape = p.bias.shape = ParameterShape::per_channel;
  const Data d{{}, {}, Values(6, 1), Values(6, 0)};
  const Forward f = forward(p, d);
  EXPECT_TRUE(f.y.empty());
  const Backward b = backward(p, d);
  EXPECT_EQ(b.dweight, Values(6, 0));
  EXPECT_EQ(b.dbias, Values(6, 0));
}

TEST(ReferenceEdges, AGroupOfOneElementIsItsBiasAndItsDxIsExactlyZero) {
  for (const Activation activation : kActivations) {
    Problem p = problem(3, 5, 5, 1);
    p.activation = activation;
    p.weight.shape = p.bias.shape = ParameterShape::per_sample;
    const Data d = test::make_data(p, Kind::normal, 30);
    const Forward f = forward(p, d);
    for (std::size_t i = 0; i < f.y.size(); ++i)
      EXPECT_EQ(f.y[i], reference::activate(activation, d.bias[i]));
    const Backward b = backward(p, d);
    EXPECT_EQ(b.dx, Values(15, 0));
    EXPECT_EQ(b.dweight, Values(15, 0));
  }
}

TEST(ReferenceEdges, AnyOutputMayBeLeftOut) {
  Problem p = problem(2, 6, 2, 5);
  p.weight.shape = p.bias.shape = ParameterShape::per_channel;
  const Data d = test::make_data(p, Kind::normal, 31);
  const Backward all = backward(p, d);
  Values dx(60), dweight(6), dbias(6);
  const auto call = [&](double* a, double* b, double* c) {
    reference::backward(p, d.x.data(), d.dy.data(), d.weight.data(), d.bias.data(), a, b, c);
  };
  call(dx.data(), nullptr, nullptr);
  call(nullptr, dweight.data(), nullptr);
  call(nullptr, nullptr, dbias.data());
  EXPECT_EQ(dx, all.dx);
  EXPECT_EQ(dweight, all.dweight);
  EXPECT_EQ(dbias, all.dbias);
  reference::forward(p, d.x.data(), d.weight.data(), d.bias.data(), nullptr, nullptr, nullptr);
}

TEST(ReferenceEdges, AnInvalidProblemIsRejectedBeforeAnyWork) {
  const Problem p = problem(1, 30, 4, 1);
  EXPECT_THROW(reference::forward(p, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr), InvalidArgument);
  EXPECT_THROW(reference::backward(p, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
               InvalidArgument);
}

// The standardised values of a set, from the textbook.
Values standardised(const Values& values, double eps) {
  double mean = 0, variance = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (const double value : values)
    variance += (value - mean) * (value - mean) / static_cast<double>(values.size());
  Values result;
  for (const double value : values) result.push_back((value - mean) / std::sqrt(variance + eps));
  return result;
}

TEST(ReferenceOneGroup, IsLayerNormOverChannelsAndPositions) {
  for (const Layout layout : kLayouts) {
    const Problem p = problem(3, 4, 1, 5, layout);
    const Data d = test::make_data(p, Kind::normal, 40);
    const Forward f = forward(p, d);
    for (std::size_t n = 0; n < 3; ++n) {
      const Values sample(d.x.begin() + static_cast<std::ptrdiff_t>(20 * n),
                          d.x.begin() + static_cast<std::ptrdiff_t>(20 * (n + 1)));
      const Values expected = standardised(sample, p.eps);
      for (std::size_t i = 0; i < 20; ++i) EXPECT_NEAR(f.y[20 * n + i], expected[i], 1e-14);
    }
  }
}

TEST(ReferenceOneChannelPerGroup, IsInstanceNormOverPositions) {
  for (const Layout layout : kLayouts) {
    const Problem p = problem(2, 3, 3, 8, layout);
    const Data d = test::make_data(p, Kind::normal, 41);
    const Forward f = forward(p, d);
    for (std::int64_t n = 0; n < 2; ++n)
      for (std::int64_t c = 0; c < 3; ++c) {
        Values channel;
        for (std::int64_t s = 0; s < 8; ++s) channel.push_back(d.x[at(p, n, c, s)]);
        const Values expected = standardised(channel, p.eps);
        for (std::int64_t s = 0; s < 8; ++s)
          EXPECT_NEAR(f.y[at(p, n, c, s)], expected[static_cast<std::size_t>(s)], 1e-14);
      }
  }
}

TEST(ReferenceParameters, OneRowForAllIsThatRowForEach) {
  Problem p = problem(3, 4, 2, 5), q = p;
  p.weight.shape = p.bias.shape = ParameterShape::per_channel;
  q.weight.shape = q.bias.shape = ParameterShape::per_sample;
  const Data d = test::make_data(p, Kind::normal, 50);
  Data e = d;
  for (int n = 1; n < 3; ++n) {
    e.weight.insert(e.weight.end(), d.weight.begin(), d.weight.end());
    e.bias.insert(e.bias.end(), d.bias.begin(), d.bias.end());
  }
  EXPECT_EQ(forward(p, d).y, forward(q, e).y);
  const Backward shared = backward(p, d), rows = backward(q, e);
  EXPECT_EQ(shared.dx, rows.dx);
  for (std::size_t c = 0; c < 4; ++c) {
    EXPECT_DOUBLE_EQ(shared.dweight[c], rows.dweight[c] + rows.dweight[4 + c] + rows.dweight[8 + c]);
    EXPECT_DOUBLE_EQ(shared.dbias[c], rows.dbias[c] + rows.dbias[4 + c] + rows.dbias[8 + c]);
  }
}

}  // namespace
}  // namespace steadynorm
