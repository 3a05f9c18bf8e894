// SPDX-License-Identifier: Apache-2.0
// The specification as plain loops in double. Slow, single-threaded, and right; shares no formula with the
// backends.
#pragma once

#include "steadynorm/problem.h"

namespace steadynorm::reference {

// All arrays are double whatever problem.x and problem.y say, in problem.layout; weight and bias are [C] or
// [N, C] by problem.weight and problem.bias, null when missing. mean and rstd are [N, G]; each output may be
// null.
void forward(const Problem& problem, const double* x, const double* weight, const double* bias, double* y,
             double* mean, double* rstd);

void backward(const Problem& problem, const double* x, const double* dy, const double* weight,
              const double* bias, double* dx, double* dweight, double* dbias);

double activate(Activation, double z);
double activate_derivative(Activation, double z);

}  // namespace steadynorm::reference
