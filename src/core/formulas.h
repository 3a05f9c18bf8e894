// SPDX-License-Identifier: Apache-2.0
// Every quantity's one formula, shared by the backends, forward and backward. docs/numerics.md derives their
// errors.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/activation.h"
#include "core/numeric.h"

namespace steadynorm {

// ---- statistics ----

// Moments of a set of values. count is an integer, exact in double; m2 is the sum of squared deviations from
// mean.
struct Moments {
  double count = 0;
  double mean = 0;
  double m2 = 0;
};

// The union of two sets, `a` before `b` in tree order. An empty set is absent, not zero.
STEADYNORM_HD Moments merge(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count;
  const double share =
      a.count == b.count ? 0.5 : b.count / count;  // equal counts need no division, and give its bits
  const double delta = b.mean - a.mean;
  return {count, a.mean + delta * share, (a.m2 + b.m2) + delta * delta * (a.count * share)};
}

// A micro-batch is summed in fp32 around its own fp32 mean m: d = sum(x - m), q = sum((x - m)^2). d repairs
// what rounding m lost.
//
// A run of micro-batches in order: the sums of x - pivot and of its square, in double. The pivot is one of
// the values, so that few digits of the squares cancel: at most as many as the run has values, times 2^-53.
struct PivotSums {
  double sum = 0;
  double squares = 0;
};

// One more micro-batch of n values: with t = m - pivot and e = x - m, sum(e + t) = n t + d and sum((e + t)^2)
// = q + 2 t d + n t^2.
STEADYNORM_HD PivotSums add_micro_batch(const PivotSums& before, double n, double pivot, double m, double d,
                                        double q) {
  const double t = m - pivot;
  const double sum = t * n + d;
  return {before.sum + sum, before.squares + (q + t * (sum + d))};
}

// Runs around one pivot.
STEADYNORM_HD PivotSums merge(const PivotSums& a, const PivotSums& b) {
  return {a.sum + b.sum, a.squares + b.squares};
}

// share = 1 / count.
STEADYNORM_HD Moments moments_of(const PivotSums& run, double count, double share, double pivot) {
  const double from_pivot = run.sum * share;
  const double m2 = run.squares - run.sum * from_pivot;
  return {count, pivot + from_pivot, m2 < 0 ? 0 : m2};  // a NaN stays
}

// Whether q lost nothing to overflow or underflow. Otherwise (huge, tiny or constant values, NaN) the
// micro-batch is computed again in double from the values that are still at hand. Below 2^-100, squares begin
// to leave fp32's range.
constexpr float kLeastReliable = 7.8886090522101181e-31f;  // 2^-100
constexpr float kLargestFinite = 3.4028234663852886e38f;

STEADYNORM_HD bool is_reliable(float q) { return q >= kLeastReliable && q <= kLargestFinite; }

// mean as hi + lo, so that x - mean loses nothing when |mean| >> deviation.
struct Statistics {
  float mean_hi;
  float mean_lo;
  float rstd;
};

STEADYNORM_HD Statistics statistics_of(const Moments& moments, double eps) {
  const float hi = static_cast<float>(moments.mean);
  const float lo = static_cast<float>(moments.mean - static_cast<double>(hi));
  return {hi, lo, static_cast<float>(1.0 / sqrt(moments.m2 / moments.count + eps))};
}

// ---- forward ----

STEADYNORM_HD float centred(float x, const Statistics& s) { return (x - s.mean_hi) - s.mean_lo; }

// z = affine(centred(x), weight * rstd, bias); y = activate(z).
STEADYNORM_HD float affine(float centred, float scale, float bias) { return centred * scale + bias; }

// ---- backward ----

// The two sums of a channel: sum(dz) and sum(dz * normalized), where dz = dy * activation'(z).
struct ChannelSums {
  double dz = 0;
  double dz_normalized = 0;
};

STEADYNORM_HD ChannelSums merge(const ChannelSums& a, const ChannelSums& b) {
  return {a.dz + b.dz, a.dz_normalized + b.dz_normalized};
}

// The two means over a group that dx subtracts: mean(weight * dz) and mean(weight * dz * normalized).
struct GroupMeans {
  float dz;
  float dz_normalized;
};

STEADYNORM_HD ChannelSums weighted(float weight, float dz, float dz_normalized) {
  return {static_cast<double>(weight) * dz, static_cast<double>(weight) * dz_normalized};
}

STEADYNORM_HD GroupMeans group_means(const ChannelSums& sums, double group_size) {
  return {static_cast<float>(sums.dz / group_size), static_cast<float>(sums.dz_normalized / group_size)};
}

// weight * dz rounds as it did in the sums, so that a group of one element gives exactly 0.
STEADYNORM_HD float input_gradient(float weight, float dz, float normalized, const GroupMeans& means,
                                   float rstd) {
  return rstd * ((weight * dz - means.dz) - normalized * means.dz_normalized);
}

}  // namespace steadynorm
