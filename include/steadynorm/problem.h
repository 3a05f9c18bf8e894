// SPDX-License-Identifier: Apache-2.0
// A group normalisation without its data. Validation, reduction tree, plan and minimal traffic are functions
// of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "steadynorm/types.h"

namespace steadynorm {

struct Parameter {
  ParameterShape shape = ParameterShape::missing;
  DType dtype = DType::float32;

  bool present() const { return shape != ParameterShape::missing; }
};

struct Problem {
  std::int64_t samples = 0;    // N
  std::int64_t channels = 0;   // C
  std::int64_t groups = 0;     // G
  std::int64_t positions = 0;  // S, the product of the spatial sizes; 1 for [N, C]
  Layout layout = Layout::contiguous;
  DType x = DType::float32;  // of x and dx
  DType y = DType::float32;  // of y in forward, of dy in backward
  Parameter weight, bias;    // a gradient has its parameter's shape and dtype
  Activation activation = Activation::none;
  double eps = 1e-5;

  std::int64_t channels_per_group() const { return channels / groups; }         // D
  std::int64_t group_size() const { return channels_per_group() * positions; }  // L
  std::int64_t elements() const { return samples * channels * positions; }
};

// Throws InvalidArgument with one sentence: rule, expected, got.
void validate(const Problem&);

// Least traffic in bytes: forward reads x and writes y; backward reads x and dy and writes dx.
std::int64_t forward_bytes(const Problem&);
std::int64_t backward_bytes(const Problem&);

}  // namespace steadynorm
