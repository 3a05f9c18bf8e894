// SPDX-License-Identifier: Apache-2.0
// core's formulas of an element, for a vector of them, and the walk over a tile's vectors.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/formulas.h"
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

// The coefficients of a vector's elements.
struct Element {
  Floats mean_hi, mean_lo, scale, bias, rstd, weight, mean_dz, mean_dz_normalized;
};

STEADYNORM_HD Element row_element(const Coefficients& k, std::int64_t r) {
  return {broadcast(k.mean_hi[r]), broadcast(k.mean_lo[r]),
          broadcast(k.scale[r]),   broadcast(k.bias[r]),
          broadcast(k.rstd[r]),    broadcast(k.weight[r]),
          broadcast(k.mean_dz[r]), broadcast(k.mean_dz_normalized[r])};
}

STEADYNORM_HD Element column_element(const Coefficients& k, std::int64_t j) {
  return {load(k.mean_hi + j), load(k.mean_lo + j), load(k.scale + j),   load(k.bias + j),
          load(k.rstd + j),    load(k.weight + j),  load(k.mean_dz + j), load(k.mean_dz_normalized + j)};
}

STEADYNORM_HD Floats centred(Floats x, const Element& k) {
  return each(
      [](float v, float hi, float lo) {
        return steadynorm::centred(v, {hi, lo, 0});
      },
      x, k.mean_hi, k.mean_lo);
}

STEADYNORM_HD Floats affine(Floats from_mean, const Element& k) {
  return each([](float v, float scale, float bias) { return steadynorm::affine(v, scale, bias); }, from_mean,
              k.scale, k.bias);
}

template <Activation A>
STEADYNORM_HD Floats activate(Floats z) {
  return each([](float v) { return steadynorm::activate<A>(v); }, z);
}

template <Activation A>
STEADYNORM_HD Floats activate_backward(Floats dy, Floats z) {
  return each([](float d, float v) { return steadynorm::activate_backward<A>(d, v); }, dy, z);
}

STEADYNORM_HD Floats input_gradient(Floats dz, Floats from_mean, const Element& k) {
  return each(
      [](float weight, float v, float normalized, float mean_dz, float mean_dz_normalized, float rstd) {
        return steadynorm::input_gradient(weight, v, normalized, {mean_dz, mean_dz_normalized}, rstd);
      },
      k.weight, dz, from_mean * k.rstd, k.mean_dz, k.mean_dz_normalized, k.rstd);
}

// f(activation, x, y) with pointers as dispatch_pair has them.
template <class Y, class F>
STEADYNORM_HD void dispatch_kernel(Activation activation, Array x, Y y, F&& f) {
  dispatch_pair(x, y, [&](auto from, auto to) { dispatch(activation, [&](auto a) { f(a, from, to); }); });
}

// A pointer into `array` of the type that x, a pointer to constants, has.
template <class T>
STEADYNORM_HD T* like(const T*, MutableArray array) {
  return static_cast<T*>(array.data);
}
STEADYNORM_HD AnyPointer<void> like(AnyPointer<const void>, MutableArray array) {
  return {array.data, array.type};
}

// f(past, put): put(i, values, count) writes to element i of the array that begins at `to`; whether past the
// caches, the constant `past` says.
template <class Y, class F>
STEADYNORM_HD void dispatch_output(const MutableArray& array, Y to, const Tile& tile, F&& f) {
  if constexpr (std::is_pointer_v<Y>) {
    constexpr std::uintptr_t kElement = sizeof(*to), kBytes = kWidth * kElement;
    const auto first = reinterpret_cast<std::uintptr_t>(to + tile.offset);
    if (array.past_caches && (first | static_cast<std::uintptr_t>(tile.stride) * kElement) % kBytes == 0) {
      f(
          std::true_type{}, [to](std::int64_t i, Floats values, int count) __attribute__((always_inline)) {
            count == kWidth ? store_past(to + i, values) : store(to + i, values, count);
          });
      return finish_past();
    }
  }
  f(
      std::false_type{}, [to](std::int64_t i, Floats values, int count)
                             __attribute__((always_inline)) { store(to + i, values, count); });
}

// f(offset, count, coefficients) for each vector of the tile. Columns: of rows that are adjacent two at a
// time, which loads coefficients half as often, or one where they go past the caches (two streams take bf16
// 1x32x96^3 1.5 times as long); pieces of rows four at a time (one at a time bf16 1x512x256x256 takes 1.4;
// EPYC 9005, 2026-12).
template <bool kRow, bool kPast, class F>
STEADYNORM_HD void for_elements(const Tile tile, const Coefficients& k, F&& f) {
  const std::int64_t whole = tile.width / kWidth * kWidth;
  const int rest = static_cast<int>(tile.width - whole);
  if constexpr (kRow) {
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const std::int64_t begin = tile.offset + r * tile.stride;
      const Element element = row_element(k, r);
      for (std::int64_t j = 0; j < whole; j += kWidth) f(begin + j, kWidth, element);
      if (rest > 0) f(begin + whole, rest, element);
    }
  } else {
    const auto rows = [&](std::int64_t r, auto count) __attribute__((always_inline)) {
      const std::int64_t begin = tile.offset + r * tile.stride;
      for (std::int64_t j = 0; j < whole; j += kWidth) {
        const Element element = column_element(k, j);
        for (int i = 0; i < count; ++i) f(begin + i * tile.stride + j, kWidth, element);
      }
      if (rest > 0)
        for (int i = 0; i < count; ++i) f(begin + i * tile.stride + whole, rest, column_element(k, whole));
    };
    std::int64_t r = 0;
    if (tile.stride != tile.width)
      for (; r + 4 <= tile.rows; r += 4) rows(r, std::integral_constant<int, 4>{});
    if constexpr (!kPast)
      for (; r + 2 <= tile.rows; r += 2) rows(r, std::integral_constant<int, 2>{});
    for (; r < tile.rows; ++r) rows(r, std::integral_constant<int, 1>{});
  }
}

}  // namespace
}  // namespace steadynorm::cpu
