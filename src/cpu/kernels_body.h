// SPDX-License-Identifier: Apache-2.0
// The kernels, once. An isa file compiles this for its instruction set and exports the table that
// make_kernels returns.
#pragma once

#include "cpu/elements.h"
#include "cpu/kernels_column_moments.h"
#include "cpu/kernels_gradient.h"
#include "cpu/kernels_moments.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

void add_tile(Array x, const void* residual, void* sum, const Tile& tile) {
  dispatch(x.type, [&](auto type) {
    using T = typename decltype(type)::type;
    const T *const a = static_cast<const T*>(x.data), *const b = static_cast<const T*>(residual);
    T* const to = static_cast<T*>(sum);
    for (std::int64_t row = 0; row < tile.rows; ++row) {
      const std::int64_t begin = tile.offset + row * tile.stride, end = begin + tile.width;
      for (std::int64_t i = begin; i < end; i += kWidth) {
        const int count = smaller(end - i, kWidth);
        store(to + i, load(a + i, count) + load(b + i, count), count);
      }
    }
  });
}

template <bool kRow>
void apply_tile(Activation activation, Array x, MutableArray y, const Tile& tile, const Coefficients& k) {
  dispatch_kernel(activation, x, y, [&](auto a, auto x, auto to) {
    dispatch_output(y, to, tile, [&](auto past, auto put) {
      for_elements<kRow, past.value>(tile, k, [&](std::int64_t i, int count, const Element& element) {
        put(i, activate<a.value>(affine(centred(load(x + i, count), element), element)), count);
      });
    });
  });
}

void widen_array(Array from, std::int64_t offset, std::int64_t count, float* to) {
  dispatch(from.type, [&](auto type) {
    const auto* values = static_cast<const typename decltype(type)::type*>(from.data) + offset;
    for (std::int64_t i = 0; i < count; i += kWidth) {
      const int here = smaller(count - i, kWidth);
      store(to + i, load(values + i, here), here);
    }
  });
}

constexpr Kernels make_kernels(const char* name) {
  return {name,
          row_moments,
          column_moments,
          add_tile,
          apply_tile<true>,
          apply_tile<false>,
          row_sums,
          run_sums,
          column_sums,
          gradient_tile<true>,
          gradient_tile<false>,
          widen_array};
}

}  // namespace
}  // namespace steadynorm::cpu
