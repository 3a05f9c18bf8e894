// SPDX-License-Identifier: Apache-2.0
// The loops under the kernels: storage to fp32 and back, and the pairwise trees of a micro-batch. Plain loops
// over blocks of at most 2048 values, which compilers turn into vectors of whatever width the instruction set
// has; since every lane is its own value, the width cannot change a bit. Included by one isa file each, hence
// no linkage.
#pragma once

#include <cstdint>

#include "core/dispatch.h"
#include "core/numeric.h"
#include "core/tree.h"
#include "cpu/kernels.h"

namespace steadynorm::cpu {
namespace {

constexpr int kBlock = kLeafRow;  // 256 values: what one step of an elementwise kernel takes

inline int smaller(std::int64_t a, std::int64_t b) { return static_cast<int>(a < b ? a : b); }

template <class T>
void widen_values(const T* __restrict from, int count, float* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <class T>
void narrow_values(const float* __restrict from, int count, T* __restrict to) {
  for (int i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
}

// Values [offset, offset + count) as fp32: where they lie, or in `buffer`.
inline const float* load(Array from, std::int64_t offset, int count, float* buffer) {
  if (count <= 0) __builtin_unreachable();
  if (from.type == DType::float32) return static_cast<const float*>(from.data) + offset;
  if (from.type == DType::bfloat16)
    widen_values(static_cast<const BFloat16*>(from.data) + offset, count, buffer);
  else
    widen_values(static_cast<const Float16*>(from.data) + offset, count, buffer);
  return buffer;
}

// Where to compute values that store() then rounds into place.
inline float* destination(MutableArray to, std::int64_t offset, float* buffer) {
  return to.type == DType::float32 ? static_cast<float*>(to.data) + offset : buffer;
}

inline void store(MutableArray to, std::int64_t offset, int count, const float* values) {
  if (to.type == DType::bfloat16)
    narrow_values(values, count, static_cast<BFloat16*>(to.data) + offset);
  else if (to.type == DType::float16)
    narrow_values(values, count, static_cast<Float16*>(to.data) + offset);
}

// The aligned binary tree over R values; the missing 8 - R add +0, which only turns a sum of -0 into +0.
template <int R, class F>
STEADYNORM_HD float pairwise(F&& value) {
  if constexpr (R == 8)
    return ((value(0) + value(1)) + (value(2) + value(3))) + ((value(4) + value(5)) + (value(6) + value(7)));
  else if constexpr (R == 4)
    return ((value(0) + value(1)) + (value(2) + value(3))) + 0.0f;
  else if constexpr (R == 2)
    return (value(0) + value(1)) + 0.0f;
  else
    return value(0) + 0.0f;
}

// Up to 8 rows that are summed column by column. Rows from `present` to `rounded` are padding.
struct Rows {
  const float* row[kMicroBatchRows];
  int present;
  int rounded;  // 1, 2, 4 or 8
  int width;    // columns, a multiple of kLaneWidth in contiguous leaves
};

template <class F>
void dispatch_rows(int rounded, F&& f) {
  if (rounded == 8) return f(std::integral_constant<int, 8>{});
  if (rounded == 4) return f(std::integral_constant<int, 4>{});
  if (rounded == 2) return f(std::integral_constant<int, 2>{});
  f(std::integral_constant<int, 1>{});
}

inline int round_rows(int present) { return present > 4 ? 8 : (present > 2 ? 4 : present); }

template <int R>
void sum_columns(const Rows& rows, float* __restrict sums) {
  const float* const* row = rows.row;
  const float *r0 = row[0], *r1 = row[1 % R], *r2 = row[2 % R], *r3 = row[3 % R];
  const float *r4 = row[4 % R], *r5 = row[5 % R], *r6 = row[6 % R], *r7 = row[7 % R];
  for (int j = 0; j < rows.width; ++j) {
    const float value[] = {r0[j], r1[j], r2[j], r3[j], r4[j], r5[j], r6[j], r7[j]};
    sums[j] = pairwise<R>([&](int v) { return value[v]; });
  }
}

// Deviations from `centre`: their sums d and the sums q of their squares.
template <int R>
void sum_deviations(const Rows& rows, const float* __restrict centre, float* __restrict d,
                    float* __restrict q) {
  const float* const* row = rows.row;
  const float *r0 = row[0], *r1 = row[1 % R], *r2 = row[2 % R], *r3 = row[3 % R];
  const float *r4 = row[4 % R], *r5 = row[5 % R], *r6 = row[6 % R], *r7 = row[7 % R];
  for (int j = 0; j < rows.width; ++j) {
    const float m = centre[j];
    const float e[] = {r0[j] - m, r1[j] - m, r2[j] - m, r3[j] - m,
                       r4[j] - m, r5[j] - m, r6[j] - m, r7[j] - m};
    d[j] = pairwise<R>([&](int v) { return e[v]; });
    q[j] = pairwise<R>([&](int v) { return e[v] * e[v]; });
  }
}

// The j half of a contiguous micro-batch: lanes of kLaneWidth columns.
inline void sum_lanes(const float* __restrict columns, int lanes, float* __restrict sums) {
  for (int l = 0; l < lanes; ++l) {
    const float* c = columns + kLaneWidth * l;
    sums[l] = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
  }
}

}  // namespace
}  // namespace steadynorm::cpu
