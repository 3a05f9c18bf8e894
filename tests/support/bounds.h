// SPDX-License-Identifier: Apache-2.0
// The bounds of docs/numerics.md as code, from the double reference's own quantities: the one place that
// knows them. An error is measured against half a unit of the result's dtype (the rounding at the store) plus
// `slack` (all else).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/data.h"

namespace steadynorm::test {

constexpr double kRounding = 0x1p-24;  // u, one rounding of fp32

// What a result should be, and how far from it, beyond its own rounding, it may be.
struct Expected {
  std::vector<double> value;
  std::vector<double> slack;
};

struct ExpectedForward {
  Expected y;           // in problem.layout
  Expected mean, rstd;  // [N, G]; of mean_hi + mean_lo, and of rstd before its rounding to fp32
};

struct ExpectedBackward {
  Expected dx;              // in problem.layout
  Expected dweight, dbias;  // as the parameters, empty when missing
};

ExpectedForward expect_forward(const Problem&, const Data&);
ExpectedBackward expect_backward(const Problem&, const Data&);

// Half the distance between neighbours of `value` in a storage type.
double half_unit(DType, double value);

// The error in units of its bound: at most 1 is right. NaN must meet NaN (0, or infinity), and what overflows
// the type may be its infinity.
double error_in_bounds(double actual, double expected, double slack, DType);

// Success when every element is within its bound; a failure names the case, the worst coordinate and the
// values.
::testing::AssertionResult within_bounds(const std::string& name, const Array& actual,
                                         const Expected& expected, const std::vector<std::int64_t>& shape);

// Likewise for saved statistics [3, N, G] against expect_forward.
::testing::AssertionResult statistics_within_bounds(const std::string& name, const Problem&,
                                                    const float* statistics, const ExpectedForward& expected);

}  // namespace steadynorm::test
