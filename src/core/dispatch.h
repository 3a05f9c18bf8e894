// SPDX-License-Identifier: Apache-2.0
// From a run-time value to a compile-time constant: dispatch(value, [&](auto constant) { ... }).
#pragma once

#include <type_traits>

#include "core/numeric.h"
#include "steadynorm/types.h"

namespace steadynorm {

template <class T>
struct Type {
  using type = T;
};

// f(Type<float>{}), f(Type<BFloat16>{}) or f(Type<Float16>{}). float64 never reaches a backend's kernels.
template <class F>
decltype(auto) dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bfloat16:
      return f(Type<BFloat16>{});
    case DType::float16:
      return f(Type<Float16>{});
    case DType::float32:
      return f(Type<float>{});
    case DType::float64:
      break;
  }
  throw Unsupported("group_norm: this backend serves float32, bfloat16 and float16, got float64");
}

template <class F>
decltype(auto) dispatch(Activation activation, F&& f) {
  switch (activation) {
    case Activation::relu:
      return f(std::integral_constant<Activation, Activation::relu>{});
    case Activation::silu:
      return f(std::integral_constant<Activation, Activation::silu>{});
    case Activation::gelu:
      return f(std::integral_constant<Activation, Activation::gelu>{});
    case Activation::gelu_tanh:
      return f(std::integral_constant<Activation, Activation::gelu_tanh>{});
    case Activation::none:
      break;
  }
  return f(std::integral_constant<Activation, Activation::none>{});
}

}  // namespace steadynorm
