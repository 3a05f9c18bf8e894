// SPDX-License-Identifier: Apache-2.0
// The definition of GroupNorm, in the order in which one would write it on paper. Values inside are long
// double, so that closed forms come out exact to double; nothing is shared with core's formulas, or it could
// not judge them.
#include "steadynorm/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace steadynorm::reference {

namespace {

using Real = long double;

constexpr double kSqrt2 = 1.41421356237309504880;
constexpr double kSqrt2Pi = 2.50662827463100050242;      // sqrt(2 pi)
constexpr double kSqrt2OverPi = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kCubic = 0.044715;

std::int64_t element(const Problem& p, std::int64_t n, std::int64_t c, std::int64_t s) {
  return p.layout == Layout::contiguous ? (n * p.channels + c) * p.positions + s
                                        : (n * p.positions + s) * p.channels + c;
}

// f(c, s) over the group, in the order of memory.
template <class F>
void for_each(const Problem& p, std::int64_t g, F&& f) {
  const std::int64_t D = p.channels_per_group(), S = p.positions;
  if (p.layout == Layout::contiguous) {
    for (std::int64_t c = g * D; c < (g + 1) * D; ++c)
      for (std::int64_t s = 0; s < S; ++s) f(c, s);
  } else {
    for (std::int64_t s = 0; s < S; ++s)
      for (std::int64_t c = g * D; c < (g + 1) * D; ++c) f(c, s);
  }
}

std::int64_t rows(const Problem& p, ParameterShape shape) {
  return shape == ParameterShape::per_sample ? p.samples : 1;
}

std::int64_t row(const Problem& p, ParameterShape shape, std::int64_t n, std::int64_t c) {
  return shape == ParameterShape::per_sample ? n * p.channels + c : c;
}

struct Affine {
  const Problem& p;
  const double* weights;
  const double* biases;

  Real weight(std::int64_t n, std::int64_t c) const {
    return p.weight.present() ? weights[row(p, p.weight.shape, n, c)] : 1;
  }
  Real bias(std::int64_t n, std::int64_t c) const {
    return p.bias.present() ? biases[row(p, p.bias.shape, n, c)] : 0;
  }
};

struct GroupStatistics {
  Real mean;
  Real rstd;
};

// Two passes, and between them what rounding the first mean lost.
GroupStatistics statistics(const Problem& p, const double* x, std::int64_t n, std::int64_t g) {
  const Real L = p.group_size();
  Real sum = 0, rest = 0, squares = 0;
  for_each(p, g, [&](std::int64_t c, std::int64_t s) { sum += x[element(p, n, c, s)]; });
  Real mean = sum / L;
  for_each(p, g, [&](std::int64_t c, std::int64_t s) { rest += x[element(p, n, c, s)] - mean; });
  mean += rest / L;
  for_each(p, g, [&](std::int64_t c, std::int64_t s) {
    const Real deviation = x[element(p, n, c, s)] - mean;
    squares += deviation * deviation;
  });
  return {mean, 1 / std::sqrt(squares / L + p.eps)};
}

// dy * activation'(z). A relu that is off passes nothing, not even an infinite dy.
Real through_activation(Activation activation, Real dy, Real z) {
  if (activation == Activation::relu && z <= 0) return 0;
  return dy * activate_derivative(activation, static_cast<double>(z));
}

}  // namespace

double activate(Activation activation, double z) {
  switch (activation) {
    case Activation::none:
      return z;
    case Activation::relu:
      return z <= 0 ? 0 : z;
    case Activation::silu:
      return z / (1 + std::exp(-z));
    case Activation::gelu:
      return z * (0.5 * std::erfc(-z / kSqrt2));
    case Activation::gelu_tanh:
      return 0.5 * z * (1 + std::tanh(kSqrt2OverPi * (z + kCubic * z * z * z)));
  }
  return z;
}

double activate_derivative(Activation activation, double z) {
  switch (activation) {
    case Activation::none:
      return 1;
    case Activation::relu:
      return z <= 0 ? 0 : 1;
    case Activation::silu:
      return (1 + z / (1 + std::exp(z))) / (1 + std::exp(-z));
    case Activation::gelu:
      return 0.5 * std::erfc(-z / kSqrt2) + z * std::exp(-0.5 * z * z) / kSqrt2Pi;
    case Activation::gelu_tanh: {
      const double t = std::tanh(kSqrt2OverPi * (z + kCubic * z * z * z));
      const double bell = 1 - t * t;
      const double inner = kSqrt2OverPi * (1 + 3 * kCubic * z * z);
      const bool flat = bell == 0 && std::isfinite(z);  // there z^2 may overflow
      return 0.5 * (1 + t) + (flat ? 0 : 0.5 * z * bell * inner);
    }
  }
  return 1;
}

void forward(const Problem& p, const double* x, const double* weight, const double* bias, double* y,
             double* mean, double* rstd) {
  validate(p);
  const Affine affine{p, weight, bias};
  for (std::int64_t n = 0; n < p.samples; ++n)
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const GroupStatistics group = statistics(p, x, n, g);
      if (mean) mean[n * p.groups + g] = static_cast<double>(group.mean);
      if (rstd) rstd[n * p.groups + g] = static_cast<double>(group.rstd);
      if (!y) continue;
      for_each(p, g, [&](std::int64_t c, std::int64_t s) {
        const std::int64_t i = element(p, n, c, s);
        const Real normalized = (x[i] - group.mean) * group.rstd;
        const Real z = affine.weight(n, c) * normalized + affine.bias(n, c);
        y[i] = activate(p.activation, static_cast<double>(z));
      });
    }
}

void backward(const Problem& p, const double* x, const double* dy, const double* weight, const double* bias,
              double* dx, double* dweight, double* dbias) {
  validate(p);
  const std::int64_t D = p.channels_per_group(), S = p.positions;
  const Real L = p.group_size();
  const Affine affine{p, weight, bias};
  // Added to, sample by sample: in double, so that [C] is within N * 2^-53 of the exact sum.
  if (!p.weight.present()) dweight = nullptr;
  if (!p.bias.present()) dbias = nullptr;
  if (dweight) std::fill_n(dweight, rows(p, p.weight.shape) * p.channels, 0.0);
  if (dbias) std::fill_n(dbias, rows(p, p.bias.shape) * p.channels, 0.0);
  for (std::int64_t n = 0; n < p.samples; ++n)
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const GroupStatistics group = statistics(p, x, n, g);
      const auto normalized = [&](std::int64_t i) { return (x[i] - group.mean) * group.rstd; };
      const auto dz = [&](std::int64_t c, std::int64_t i) {
        const Real z = affine.weight(n, c) * normalized(i) + affine.bias(n, c);
        return through_activation(p.activation, dy[i], z);
      };
      // The two means over the group that its mean and its rstd, being functions of every x, send back.
      Real mean_of_dz = 0, mean_of_dz_normalized = 0;
      for (std::int64_t c = g * D; c < (g + 1) * D; ++c) {
        const Real w = affine.weight(n, c);
        Real sum = 0, sum_normalized = 0;
        for (std::int64_t s = 0; s < S; ++s) {
          const std::int64_t i = element(p, n, c, s);
          const Real term = dz(c, i);
          sum += term;
          sum_normalized += term * normalized(i);
        }
        mean_of_dz += w * sum / L;
        mean_of_dz_normalized += w * sum_normalized / L;
        if (dweight) dweight[row(p, p.weight.shape, n, c)] += static_cast<double>(sum_normalized);
        if (dbias) dbias[row(p, p.bias.shape, n, c)] += static_cast<double>(sum);
      }
      if (!dx) continue;
      for_each(p, g, [&](std::int64_t c, std::int64_t s) {
        const std::int64_t i = element(p, n, c, s);
        const Real weighted = affine.weight(n, c) * dz(c, i);
        dx[i] =
            static_cast<double>(group.rstd * (weighted - mean_of_dz - normalized(i) * mean_of_dz_normalized));
      });
    }
}

}  // namespace steadynorm::reference
