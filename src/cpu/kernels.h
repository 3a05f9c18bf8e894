// SPDX-License-Identifier: Apache-2.0
// The contract of the inner kernels: all that an instruction set has to supply. Row kernels run along memory
// (contiguous), column kernels across rows (channels_last); the elementwise ones serve both.
//
// Kernels know storage types, trees and formulas; not groups, samples, threads or parameters. Offsets and
// strides are in elements. Every instruction set gives the same bits.
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
#include "steadynorm/types.h"

namespace steadynorm::cpu {

// Columns that one call of a column kernel takes at most: a kilobyte of each row, and its coefficients stay
// in L1.
constexpr int kPanel = kChannelBlock;

// What the formulas need beside an element: column kernels read entry j for column j, row kernels entry r for
// row r.
struct Coefficients {
  alignas(64) float mean_hi[kPanel];
  float mean_lo[kPanel];
  float scale[kPanel];  // weight * rstd
  float bias[kPanel];
  float rstd[kPanel];  // from here on for backward alone
  float weight[kPanel];
  float mean_dz[kPanel];             // of the group, over weight * dz
  float mean_dz_normalized[kPanel];  // over weight * dz * normalized
};

struct Array {
  const void* data;
  DType type;
};

struct MutableArray {
  void* data;
  DType type;
  bool past_caches = false;  // written there, where the instruction set can
};

// Elements offset + row * stride + column. Row kernels take at most kPanel rows, column kernels width <=
// kPanel.
struct Tile {
  std::int64_t offset;
  std::int64_t rows;
  std::int64_t stride;
  std::int64_t width;
};

struct Kernels {
  const char* name;

  // Moments of `count` adjacent contiguous units of `length` values each.
  void (*row_moments)(Array x, std::int64_t offset, std::int64_t length, std::int64_t leaf_length,
                      std::int64_t count, Moments* moments);

  // Moments of each column over a channels_last unit's positions, the tile's rows.
  void (*column_moments)(Array x, const Tile& tile, std::int64_t leaf_positions, Moments* moments);

  // sum = x + residual, all of one type, rounded once.
  void (*add)(Array x, const void* residual, void* sum, const Tile& tile);

  // y = activate(affine(centred(x))).
  void (*row_apply)(Activation, Array x, MutableArray y, const Tile& tile, const Coefficients&);
  void (*column_apply)(Activation, Array x, MutableArray y, const Tile& tile, const Coefficients&);

  // sum(dz) and sum(dz * normalized), rounded to fp32: of each row, a contiguous unit of one channel ...
  void (*row_sums)(Activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
                   const Coefficients&, float* dz, float* dz_normalized);
  // ... of each of width / length adjacent channels of `length` positions; coefficients come per value ...
  void (*run_sums)(Activation, Array x, Array dy, const Tile& tile, std::int64_t length, const Coefficients&,
                   float* dz, float* dz_normalized);
  // ... and of each column over a channels_last unit's positions.
  void (*column_sums)(Activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
                      const Coefficients&, float* dz, float* dz_normalized);

  void (*row_gradient)(Activation, Array x, Array dy, MutableArray dx, const Tile& tile, const Coefficients&);
  void (*column_gradient)(Activation, Array x, Array dy, MutableArray dx, const Tile& tile,
                          const Coefficients&);

  // `count` values as fp32: parameters.
  void (*widen)(Array from, std::int64_t offset, std::int64_t count, float* to);
};

// The best kernels that this machine runs.
const Kernels& kernels();

// All that this machine runs, best first, and a null. For tests: use_kernels makes kernels() return that one.
const Kernels* const* available_kernels();
void use_kernels(const Kernels*);

}  // namespace steadynorm::cpu
