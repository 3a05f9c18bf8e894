// SPDX-License-Identifier: Apache-2.0
#include "support/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "steadynorm/reference.h"

namespace steadynorm::test {

namespace {

constexpr double u = kRounding;
// Products of fp32 values may fall into its subnormals, where a rounding is not relative.
constexpr double kUnderflow = 0x1p-140;

std::size_t row(const Problem& p, const Parameter& parameter, std::int64_t n, std::int64_t c) {
  return static_cast<std::size_t>(parameter.shape == ParameterShape::per_sample ? n * p.channels + c : c);
}

// One element on its way through the definition, in double, with the error that fp32 may put on z and dz.
struct Element {
  std::int64_t n, g, c;
  std::size_t index;
  double weight, normalized, magnitude, z;

  double z_slack() const { return u * (10 * magnitude + 2 * std::fabs(weight)); }

  // Where z is so near 0 that its sign is open, relu's slope may be 0 or 1.
  double dz_slack(Activation activation, double dy) const {
    if (activation == Activation::none) return 0;
    if (activation == Activation::relu) return std::fabs(z) <= z_slack() ? std::fabs(dy) : 0;
    return std::fabs(dy) * (u * (7 + 4 * std::fabs(z)) + 0.8 * z_slack());
  }
};

template <class F>
void for_each_element(const Problem& p, const Data& data, const std::vector<double>& mean,
                      const std::vector<double>& rstd, F&& f) {
  const std::int64_t C = p.channels, S = p.positions, D = p.channels_per_group();
  for (std::int64_t n = 0; n < p.samples; ++n)
    for (std::int64_t c = 0; c < C; ++c) {
      const double weight = p.weight.present() ? data.weight[row(p, p.weight, n, c)] : 1;
      const double bias = p.bias.present() ? data.bias[row(p, p.bias, n, c)] : 0;
      const std::int64_t g = c / D;
      const auto group = static_cast<std::size_t>(n * p.groups + g);
      for (std::int64_t s = 0; s < S; ++s) {
        const auto i = static_cast<std::size_t>(p.layout == Layout::contiguous ? (n * C + c) * S + s
                                                                               : (n * S + s) * C + c);
        const double normalized = (data.x[i] - mean[group]) * rstd[group];
        const double magnitude = std::max(std::fabs(weight * normalized), std::fabs(bias));
        f(Element{n, g, c, i, weight, normalized, magnitude, weight * normalized + bias});
      }
    }
}

const double* pointer(const std::vector<double>& values) { return values.empty() ? nullptr : values.data(); }

std::vector<double> zeros(std::int64_t count) { return std::vector<double>(static_cast<std::size_t>(count)); }

std::string coordinate(std::size_t index, const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::size_t d = shape.size(); d-- > 0; index /= static_cast<std::size_t>(shape[d]))
    text = std::to_string(index % static_cast<std::size_t>(shape[d])) + (text.empty() ? "" : ", ") + text;
  return "[" + text + "]";
}

struct Format {
  int digits;        // of the significand
  int min_exponent;  // of a normal value
  double largest;
};

Format format(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return {8, -126, 0x1.fep127};
    case DType::float16:
      return {11, -14, 65504};
    case DType::float32:
      return {24, -126, 0x1.fffffep127};
    case DType::float64:
      break;
  }
  return {53, -1022, std::numeric_limits<double>::max()};
}

}  // namespace

ExpectedForward expect_forward(const Problem& p, const Data& data) {
  ExpectedForward e;
  Expected &y = e.y, &mean = e.mean, &rstd = e.rstd;
  y.value = y.slack = zeros(p.elements());
  mean.value = mean.slack = rstd.value = rstd.slack = zeros(p.samples * p.groups);
  reference::forward(p, pointer(data.x), pointer(data.weight), pointer(data.bias), y.value.data(),
                     mean.value.data(), rstd.value.data());
  std::vector<double> squares = zeros(p.samples * p.groups);
  for_each_element(p, data, mean.value, rstd.value, [&](const Element& element) {
    squares[static_cast<std::size_t>(element.n * p.groups + element.g)] +=
        element.normalized * element.normalized;
    const double m = element.magnitude, w = std::fabs(element.weight);
    double slack = u * (18 * m + 2.3 * w);
    if (p.activation == Activation::none) slack = u * (8 * m + 2 * w);
    if (p.activation == Activation::relu) slack = u * (10 * m + 2 * w);
    y.slack[element.index] = slack + kUnderflow;
  });
  for (std::size_t i = 0; i < mean.value.size(); ++i) {
    const double deviation = std::sqrt(squares[i] / static_cast<double>(p.group_size())) / rstd.value[i];
    mean.slack[i] = 2 * u * deviation + 0x1p-47 * std::fabs(mean.value[i]) + kUnderflow;
    rstd.slack[i] = (p.layout == Layout::contiguous ? 4.5 : 3) * u * rstd.value[i];
  }
  return e;
}

ExpectedBackward expect_backward(const Problem& p, const Data& data) {
  ExpectedBackward e;
  Expected &dx = e.dx, &dweight = e.dweight, &dbias = e.dbias;
  dx.value = dx.slack = zeros(p.elements());
  dweight.value = dweight.slack = zeros(parameter_count(p, p.weight));
  dbias.value = dbias.slack = zeros(parameter_count(p, p.bias));
  std::vector<double> mean = zeros(p.samples * p.groups), rstd = mean;
  const double *x = pointer(data.x), *weight = pointer(data.weight), *bias = pointer(data.bias);
  reference::forward(p, x, weight, bias, nullptr, mean.data(), rstd.data());
  reference::backward(p, x, pointer(data.dy), weight, bias, dx.value.data(), dweight.value.data(),
                      dbias.value.data());

  // Of a group: the means of a = |weight dz| and of a |x̂|, and of what an activation's error does to each.
  struct Means {
    double a = 0, a_normalized = 0, slack = 0, slack_normalized = 0;
  };
  std::vector<Means> means(mean.size());
  const double L = static_cast<double>(p.group_size());
  const auto group = [&](const Element& el) { return static_cast<std::size_t>(el.n * p.groups + el.g); };
  const auto slope = [&](double z) { return reference::activate_derivative(p.activation, z); };
  for_each_element(p, data, mean, rstd, [&](const Element& el) {
    const double dy = data.dy[el.index], dz = std::fabs(dy * slope(el.z)),
                 slack = el.dz_slack(p.activation, dy);
    const double normalized = std::fabs(el.normalized), w = std::fabs(el.weight);
    Means& m = means[group(el)];
    m.a += w * dz / L;
    m.a_normalized += w * dz * normalized / L;
    m.slack += w * slack / L;
    m.slack_normalized += w * slack * normalized / L;
    if (p.weight.present())
      dweight.slack[row(p, p.weight, el.n, el.c)] += u * dz * (16 * normalized + 2) + slack * normalized;
    if (p.bias.present()) dbias.slack[row(p, p.bias, el.n, el.c)] += 8 * u * dz + slack;
  });
  for_each_element(p, data, mean, rstd, [&](const Element& el) {
    const double dy = data.dy[el.index], a = std::fabs(el.weight * dy * slope(el.z));
    const double normalized = std::fabs(el.normalized);
    const Means& m = means[group(el)];
    const double products = 16 * u * (a + m.a + normalized * m.a_normalized);
    const double centring = 2 * u * (m.a_normalized + normalized * m.a);
    const double activation =
        std::fabs(el.weight) * el.dz_slack(p.activation, dy) + m.slack + normalized * m.slack_normalized;
    dx.slack[el.index] = rstd[group(el)] * (products + centring + activation + kUnderflow) + kUnderflow;
  });
  for (double& slack : dweight.slack) slack += kUnderflow;
  for (double& slack : dbias.slack) slack += kUnderflow;
  return e;
}

double half_unit(DType dtype, double value) {
  const Format f = format(dtype);
  int exponent = f.min_exponent;
  if (value != 0 && std::isfinite(value)) exponent = std::max(exponent, std::ilogb(value));
  return std::ldexp(0.5, exponent - (f.digits - 1));
}

double error_in_bounds(double actual, double expected, double slack, DType dtype) {
  constexpr double wrong = std::numeric_limits<double>::infinity();
  if (std::isnan(expected)) return std::isnan(actual) ? 0 : wrong;
  if (std::isnan(actual)) return wrong;
  if (actual == expected) return 0;
  const double largest = format(dtype).largest;
  if (std::isinf(actual)) {
    const bool overflows = std::fabs(expected) + slack >= largest + half_unit(dtype, largest);
    return overflows && (actual > 0) == (expected > 0) ? 0 : wrong;
  }
  if (std::isinf(expected)) return wrong;
  // The value that is rounded may be `slack` away from the expected one, and there lie in the next binade.
  return std::fabs(actual - expected) / (half_unit(dtype, std::fabs(expected) + slack) + slack);
}

::testing::AssertionResult within_bounds(const std::string& name, const Array& actual,
                                         const Expected& expected, const std::vector<std::int64_t>& shape) {
  const std::vector<double> values = load(actual);
  if (values.size() != expected.value.size())
    return ::testing::AssertionFailure()
           << name << ": " << values.size() << " elements, expected " << expected.value.size();
  double worst = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double error = error_in_bounds(values[i], expected.value[i], expected.slack[i], actual.dtype);
    if (error > worst) {
      worst = error;
      at = i;
    }
  }
  if (worst <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << name << ": " << worst << " of the bound at " << coordinate(at, shape) << ": " << values[at]
         << " instead of " << expected.value[at] << ", slack " << expected.slack[at];
}

::testing::AssertionResult statistics_within_bounds(const std::string& name, const Problem& p,
                                                    const float* statistics,
                                                    const ExpectedForward& expected) {
  const std::int64_t count = p.samples * p.groups;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const double mean = static_cast<double>(statistics[i]) + statistics[count + i],
                 rstd = statistics[2 * count + i];
    const double mean_error =
        error_in_bounds(mean, expected.mean.value[at], expected.mean.slack[at], DType::float64);
    const double rstd_error =
        error_in_bounds(rstd, expected.rstd.value[at], expected.rstd.slack[at], DType::float32);
    if (mean_error <= 1 && rstd_error <= 1) continue;
    return ::testing::AssertionFailure()
           << name << ": group " << coordinate(at, {p.samples, p.groups}) << ": mean " << mean
           << " instead of " << expected.mean.value[at] << " (" << mean_error << " of the bound), rstd "
           << rstd << " instead of " << expected.rstd.value[at] << " (" << rstd_error << " of the bound)";
  }
  return ::testing::AssertionSuccess();
}

}  // namespace steadynorm::test
