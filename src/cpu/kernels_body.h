// SPDX-License-Identifier: Apache-2.0
// The kernels, once. An isa file compiles this for its instruction set and exports the table that
// make_kernels returns.
#pragma once

#include "cpu/kernels_gradient.h"
#include "cpu/kernels_moments.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

template <Activation A, bool kRow>
void apply_block(const float* __restrict x, float* __restrict y, int count, const Coefficients& k, int row) {
  for (int j = 0; j < count; ++j) {
    const int i = kRow ? row : j;
    const Statistics statistics{k.mean_hi[i], k.mean_lo[i], k.rstd[i]};
    y[j] = activate<A>(affine(centred(x[j], statistics), k.scale[i], k.bias[i]));
  }
}

template <bool kRow>
void apply_tile(Activation activation, Array x, MutableArray y, const Tile& tile, const Coefficients& k) {
  dispatch(activation, [&](auto a) {
    alignas(64) float x_buffer[kBlock], y_buffer[kBlock];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      for (std::int64_t j = 0; j < tile.width; j += kBlock) {
        const std::int64_t offset = tile.offset + r * tile.stride + j;
        const int count = smaller(tile.width - j, kBlock);
        float* out = destination(y, offset, y_buffer);
        apply_block<a.value, kRow>(load(x, offset, count, x_buffer), out, count, k, static_cast<int>(r));
        store(y, offset, count, out);
      }
    }
  });
}

void widen(Array from, std::int64_t offset, std::int64_t count, float* to) {
  const float* values = load(from, offset, static_cast<int>(count), to);
  if (values == to) return;
  for (std::int64_t i = 0; i < count; ++i) to[i] = values[i];
}

constexpr Kernels make_kernels(const char* name) {
  return {name,     row_moments, column_moments, apply_tile<true>,    apply_tile<false>,
          row_sums, run_sums,    column_sums,    gradient_tile<true>, gradient_tile<false>,
          widen};
}

}  // namespace
}  // namespace steadynorm::cpu
