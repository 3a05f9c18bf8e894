// SPDX-License-Identifier: Apache-2.0
// The channels' sums of backward, and dx. docs/numerics.md, "Backward".
#pragma once

#include <cstdint>

#include "core/formulas.h"
#include "core/tree.h"
#include "cpu/column_tree.h"
#include "cpu/running_tree.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

// What the sums add: dz and dz * normalized.
template <Activation A, bool kRow>
void terms_block(const float* __restrict x, const float* __restrict dy, int count, const Coefficients& k,
                 int row, float* __restrict dz, float* __restrict dz_normalized) {
  for (int j = 0; j < count; ++j) {
    const int i = kRow ? row : j;
    const float from_mean = centred(x[j], {k.mean_hi[i], k.mean_lo[i], k.rstd[i]});
    dz[j] = activate_backward<A>(dy[j], affine(from_mean, k.scale[i], k.bias[i]));
    dz_normalized[j] = dz[j] * (from_mean * k.rstd[i]);
  }
}

template <Activation A, bool kRow>
void gradient_block(const float* __restrict x, const float* __restrict dy, float* __restrict dx, int count,
                    const Coefficients& k, int row) {
  for (int j = 0; j < count; ++j) {
    const int i = kRow ? row : j;
    const float from_mean = centred(x[j], {k.mean_hi[i], k.mean_lo[i], k.rstd[i]});
    const float dz = activate_backward<A>(dy[j], affine(from_mean, k.scale[i], k.bias[i]));
    dx[j] = input_gradient(k.weight[i], dz, from_mean * k.rstd[i], {k.mean_dz[i], k.mean_dz_normalized[i]},
                           k.rstd[i]);
  }
}

// ---- rows ----

inline double lane_tree(double* nodes, int lanes) {
  for (int step = 1; step < lanes; step *= 2)
    for (int l = 0; l + step < lanes; l += 2 * step) nodes[l] += nodes[l + step];
  return nodes[0];
}

// The lanes' sums of a block of up to 2048 terms, in fp32 by columns (v), then within lanes (j); how many
// lanes have any. With fewer terms than a row, lanes hold one v each, and the seven missing ones add +0, once
// for all.
inline int block_sums(const float* terms, int length, float* lane_sums) {
  if (length < kLeafRow) {
    float last[kLaneWidth] = {};
    const int full = length / kLaneWidth, rest = length % kLaneWidth, lanes = full + (rest != 0);
    sum_lanes(terms, full, lane_sums);
    for (int j = 0; j < rest; ++j) last[j] = terms[full * kLaneWidth + j];
    if (rest != 0) sum_lanes(last, 1, lane_sums + full);
    for (int l = 0; l < lanes; ++l) lane_sums[l] += 0.0f;
    return lanes;
  }
  alignas(64) float tail[kLeafRow], columns[kLeafRow];
  alignas(64) static constexpr float kZeros[kLeafRow] = {};
  const int ragged = length % kLeafRow;
  Rows rows{};
  rows.present = (length + kLeafRow - 1) / kLeafRow;
  rows.rounded = round_rows(rows.present);
  rows.width = kLeafRow;
  for (int v = 0; v < rows.rounded; ++v) rows.row[v] = v < rows.present ? terms + v * kLeafRow : kZeros;
  if (ragged != 0) {
    const float* last = rows.row[rows.present - 1];
    for (int j = 0; j < ragged; ++j) tail[j] = last[j];
    for (int j = ragged; j < rows.width; ++j) tail[j] = 0;
    rows.row[rows.present - 1] = tail;
  }
  dispatch_rows(rows.rounded, [&](auto r) { sum_columns<r.value>(rows, columns); });
  sum_lanes(columns, kLanes, lane_sums);
  return kLanes;
}

// The sums of a leaf's lanes, over its blocks in order. The first is not added to zeros: it may be -0.
class LeafSum {
 public:
  void add(const float* terms, int length) {
    alignas(64) float block[kLanes];
    const int lanes = block_sums(terms, length, block);
    if (lanes_ == 0) {
      lanes_ = lanes;
      for (int l = 0; l < lanes; ++l) sums_[l] = static_cast<double>(block[l]);
      return;
    }
    for (int l = lanes; l < kLanes; ++l) block[l] = 0;
    for (int l = 0; l < lanes_; ++l) sums_[l] += static_cast<double>(block[l]);
  }

  double root() { return lane_tree(sums_, lanes_); }

 private:
  alignas(64) double sums_[kLanes];
  int lanes_ = 0;
};

inline double leaf_sum(const float* terms, int length) {
  LeafSum sum;
  sum.add(terms, length);
  return sum.root();
}

void row_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
              const Coefficients& k, float* dz, float* dz_normalized) {
  dispatch(activation, [&](auto a) {
    alignas(64) float x_buffer[kBlock], dy_buffer[kBlock];
    alignas(64) float dz_terms[kLeafBlock], dz_normalized_terms[kLeafBlock];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      RunningTree<ChannelSums> tree;
      for (std::int64_t leaf = 0; leaf < tile.width; leaf += leaf_positions) {
        const std::int64_t end = leaf + leaf_positions < tile.width ? leaf + leaf_positions : tile.width;
        LeafSum dz_sum, dz_normalized_sum;
        for (std::int64_t begin = leaf; begin < end; begin += kLeafBlock) {
          const int length = smaller(end - begin, kLeafBlock);
          for (int i = 0; i < length; i += kBlock) {
            const std::int64_t offset = tile.offset + r * tile.stride + begin + i;
            const int count = smaller(length - i, kBlock);
            terms_block<a.value, true>(load(x, offset, count, x_buffer), load(dy, offset, count, dy_buffer),
                                       count, k, static_cast<int>(r), dz_terms + i, dz_normalized_terms + i);
          }
          dz_sum.add(dz_terms, length);
          dz_normalized_sum.add(dz_normalized_terms, length);
        }
        tree.push({dz_sum.root(), dz_normalized_sum.root()});
      }
      const ChannelSums sums = tree.root();
      dz[r] = static_cast<float>(sums.dz);
      dz_normalized[r] = static_cast<float>(sums.dz_normalized);
    }
  });
}

void run_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t length,
              const Coefficients& k, float* dz, float* dz_normalized) {
  dispatch(activation, [&](auto a) {
    alignas(64) float x_buffer[kPanel], dy_buffer[kPanel], dz_terms[kPanel], dz_normalized_terms[kPanel];
    const int count = static_cast<int>(tile.width), n = static_cast<int>(length);
    terms_block<a.value, false>(load(x, tile.offset, count, x_buffer),
                                load(dy, tile.offset, count, dy_buffer), count, k, 0, dz_terms,
                                dz_normalized_terms);
    if (n == 1) {  // one value and its missing partners
      for (int i = 0; i < count; ++i) dz[i] = dz_terms[i] + 0.0f;
      for (int i = 0; i < count; ++i) dz_normalized[i] = dz_normalized_terms[i] + 0.0f;
      return;
    }
    for (int i = 0; i < count / n; ++i) {
      dz[i] = static_cast<float>(leaf_sum(dz_terms + i * n, n));
      dz_normalized[i] = static_cast<float>(leaf_sum(dz_normalized_terms + i * n, n));
    }
  });
}

// ---- columns ----

inline void column_batch_sum(const float (*terms)[kPanel], int present, int width, double* __restrict sums) {
  alignas(64) static constexpr float kZeros[kPanel] = {};
  alignas(64) float columns[kPanel];
  Rows rows{{}, present, round_rows(present), width};
  for (int v = 0; v < rows.rounded; ++v) rows.row[v] = v < present ? terms[v] : kZeros;
  dispatch_rows(rows.rounded, [&](auto r) { sum_columns<r.value>(rows, columns); });
  for (int j = 0; j < width; ++j) sums[j] = static_cast<double>(columns[j]);
}

void column_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
                 const Coefficients& k, float* dz, float* dz_normalized) {
  dispatch(activation, [&](auto a) {
    alignas(64) float x_buffer[kPanel], dy_buffer[kPanel];
    alignas(64) float dz_terms[kMicroBatchRows][kPanel], dz_normalized_terms[kMicroBatchRows][kPanel];
    ColumnTree tree;
    ColumnNode leaf, micro_batch;
    const int width = static_cast<int>(tile.width);
    for (std::int64_t begin = 0; begin < tile.rows; begin += leaf_positions) {
      const std::int64_t end = begin + leaf_positions < tile.rows ? begin + leaf_positions : tile.rows;
      for (std::int64_t s = begin; s < end; s += kMicroBatchRows) {
        const int present = smaller(end - s, kMicroBatchRows);
        for (int v = 0; v < present; ++v) {
          const std::int64_t offset = tile.offset + (s + v) * tile.stride;
          terms_block<a.value, false>(load(x, offset, width, x_buffer), load(dy, offset, width, dy_buffer),
                                      width, k, 0, dz_terms[v], dz_normalized_terms[v]);
        }
        ColumnNode& node = s == begin ? leaf : micro_batch;
        column_batch_sum(dz_terms, present, width, node.first);
        column_batch_sum(dz_normalized_terms, present, width, node.second);
        if (s != begin) merge_columns(leaf, micro_batch, width);
      }
      tree.push(leaf, width);
    }
    const ColumnNode& root = tree.root(width);
    for (int j = 0; j < width; ++j) dz[j] = static_cast<float>(root.first[j]);
    for (int j = 0; j < width; ++j) dz_normalized[j] = static_cast<float>(root.second[j]);
  });
}

// ---- dx ----

template <bool kRow>
void gradient_tile(Activation activation, Array x, Array dy, MutableArray dx, const Tile& tile,
                   const Coefficients& k) {
  dispatch(activation, [&](auto a) {
    alignas(64) float x_buffer[kBlock], dy_buffer[kBlock], dx_buffer[kBlock];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      for (std::int64_t j = 0; j < tile.width; j += kBlock) {
        const std::int64_t offset = tile.offset + r * tile.stride + j;
        const int count = smaller(tile.width - j, kBlock);
        float* out = destination(dx, offset, dx_buffer);
        gradient_block<a.value, kRow>(load(x, offset, count, x_buffer), load(dy, offset, count, dy_buffer),
                                      out, count, k, static_cast<int>(r));
        store(dx, offset, count, out);
      }
    }
  });
}

}  // namespace
}  // namespace steadynorm::cpu
