// SPDX-License-Identifier: Apache-2.0
// The channels' sums of backward, and dx. docs/numerics.md, "Backward".
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/formulas.h"
#include "core/tree.h"
#include "cpu/column_tree.h"
#include "cpu/elements.h"
#include "cpu/running_tree.h"
#include "cpu/vec.h"

namespace steadynorm::cpu {
namespace {

// What the sums add: dz and dz * normalized.
struct Terms {
  Floats dz, dz_normalized;
};

STEADYNORM_HD Terms operator+(const Terms& a, const Terms& b) {
  return {a.dz + b.dz, a.dz_normalized + b.dz_normalized};
}
STEADYNORM_HD Terms operator+(const Terms& a, float b) { return {a.dz + b, a.dz_normalized + b}; }

template <Activation A>
STEADYNORM_HD Terms terms(Floats x, Floats dy, const Element& k) {
  const Floats from_mean = centred(x, k);
  const Floats dz = activate_backward<A>(dy, affine(from_mean, k));
  return {dz, dz * (from_mean * k.rstd)};
}

// ---- rows ----

// The tree over lanes, of which the absent ones are -0: adding it changes nothing.
template <int kCount>
STEADYNORM_HD double lane_tree(const double* lanes) {
  if constexpr (kCount == 1) {
    return lanes[0];
  } else {
    alignas(64) double nodes[kCount / 2];
    for (int i = 0; i < kCount / 2; ++i) nodes[i] = lanes[2 * i] + lanes[2 * i + 1];
    return lane_tree<kCount / 2>(nodes);
  }
}

// Sums of a block's lanes.
struct BlockSums {
  alignas(64) float dz[kLanes];
  alignas(64) float dz_normalized[kLanes];
};

// The sums of `rows` rows of `count` terms, `stride` apart; of the last one only `last` terms are there.
template <Activation A, bool kFetch, class X, class Y>
STEADYNORM_HD Terms sum_rows(X x, Y dy, std::int64_t stride, int rows, int count, int last,
                             const Element& k) {
  if constexpr (A == Activation::none || A == Activation::relu) {  // the others are not worth the code
    const auto whole = [&](int v) __attribute__((always_inline)) {
      if constexpr (kFetch) {
        prefetch(x + (kMicroBatchRows + v) * stride);
        prefetch(dy + (kMicroBatchRows + v) * stride);
      }
      return terms<A>(load(x + v * stride), load(dy + v * stride), k);
    };
    if (last == kWidth) {
      Terms sum;
      dispatch_rows(
          rows, [&](auto count) __attribute__((always_inline)) { sum = pairwise<count.value>(whole); });
      return sum;
    }
  }
  const auto row = [&](int v) __attribute__((always_inline)) {
    const int here = v < rows - 1 ? count : last;
    Terms t = terms<A>(load(x + v * stride, here), load(dy + v * stride, here), k);
    if (here < kWidth) {
      const Mask present = first_of(here);
      t = {present ? t.dz : Floats{}, present ? t.dz_normalized : Floats{}};
    }
    return t;
  };
  if (rows == 1) return row(0) + 0.0f;
  Terms value[kMicroBatchRows] = {};
#pragma GCC unroll 1
  for (int v = 0; v < rows; ++v) value[v] = row(v);
  return pairwise<kMicroBatchRows>([&](int v) { return value[v]; });
}

// A block of up to 2048 terms. Lanes without any sum up to +0.
template <Activation A, class X, class Y>
[[gnu::noinline]] void block_sums(X x, Y dy, int length, const Element& k, BlockSums& to) {
  const int rows = length / kLeafRow, ragged = length % kLeafRow;
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    LaneColumns dz, dz_normalized;
    for (int i = 0; i < kLaneWidth; ++i) {
      const int c = lane * kLaneWidth + i * kWidth, last = smaller(ragged - c, kWidth);
      Terms sum{};
      if (rows > 0 || last > 0)
        sum = sum_rows<A, true>(x + c, dy + c, kLeafRow, rows + (last > 0), kWidth, last > 0 ? last : kWidth,
                                k);
      dz[i] = sum.dz;
      dz_normalized[i] = sum.dz_normalized;
    }
    store(to.dz + lane, lane_sums(dz));
    store(to.dz_normalized + lane, lane_sums(dz_normalized));
  }
}

// The sums of a leaf's lanes, over its blocks in order. The first is not added to zeros: it may be -0.
class LeafSums {
 public:
  void add(const BlockSums& block, int length) {
    if (first_) {
      first_ = false;
      for (int l = 0; l < kLanes; ++l) {
        const bool absent = l * kLaneWidth >= length;
        dz_[l] = absent ? -0.0 : static_cast<double>(block.dz[l]);
        dz_normalized_[l] = absent ? -0.0 : static_cast<double>(block.dz_normalized[l]);
      }
      return;
    }
    for (int l = 0; l < kLanes; ++l) dz_[l] += static_cast<double>(block.dz[l]);
    for (int l = 0; l < kLanes; ++l) dz_normalized_[l] += static_cast<double>(block.dz_normalized[l]);
  }

  ChannelSums root() const { return {lane_tree<kLanes>(dz_), lane_tree<kLanes>(dz_normalized_)}; }

 private:
  alignas(64) double dz_[kLanes];
  alignas(64) double dz_normalized_[kLanes];
  bool first_ = true;
};

template <Activation A, class X, class Y>
ChannelSums leaf_sums(X x, Y dy, std::int64_t length, const Element& k) {
  LeafSums sums;
  for (std::int64_t i = 0; i < length; i += kLeafBlock) {
    const int here = smaller(length - i, kLeafBlock);
    BlockSums block;
    block_sums<A>(x + i, dy + i, here, k, block);
    sums.add(block, here);
  }
  return sums.root();
}

// Values between what is read and what is fetched: the trees between short rows stop the hardware's
// prefetchers (without, backward of fp32 32x256x14x14 takes 1.15 of the time, EPYC 9005, 2026-12).
constexpr int kAhead = 1024;

// `rows` rows of less than 256 terms each: every lane is eight consecutive terms. Rows lie side by side, each
// padded to a power of two of lanes, so that a level of all their trees is one loop.
inline int short_row_lanes(std::int64_t width) {
  int lanes = 1;
  while (lanes * kLaneWidth < width) lanes *= 2;
  return lanes;
}

constexpr int kShortRowLanes = kLeafBlock / kLaneWidth;  // of a block of rows

// The sums of lanes that lie one after the other.
inline void short_row_lane_sums(const float* terms, int count, float* lane) {
  for (int l = 0; l < count; l += kWidth) {
    LaneColumns columns;
    for (int i = 0; i < kLaneWidth; ++i) columns[i] = load(terms + l * kLaneWidth + i * kWidth);
    store(lane + l, lane_sums(columns) + 0.0f);
  }
}

typedef double Doubles __attribute__((vector_size(4 * kWidth)));

template <int... i>
STEADYNORM_HD Doubles add_neighbours(const double* from, std::integer_sequence<int, i...>) {
  Doubles a, b;
  std::memcpy(&a, from, sizeof a);
  std::memcpy(&b, from + kWidth / 2, sizeof b);
  return __builtin_shufflevector(a, b, (2 * i)...) + __builtin_shufflevector(a, b, (2 * i + 1)...);
}

// The trees over the rows' lanes, for a whole block of rows: of those beyond `rows` nothing is read.
inline void short_row_trees(const float* lane, int rows, int lanes, std::int64_t width, float* sums) {
  alignas(64) double nodes[2][kShortRowLanes];
  const int present = static_cast<int>(divide_up(width, kLaneWidth));
  for (int l = 0; l < kShortRowLanes; ++l)  // the absent ones are -0: adding it changes nothing
    nodes[0][l] = (l & (lanes - 1)) < present ? static_cast<double>(lane[l]) : -0.0;
  int from = 0;
  for (int count = kShortRowLanes / 2; lanes > 1; lanes /= 2, count /= 2, from = 1 - from)
    for (int i = 0; i < count; i += kWidth / 2) {
      const Doubles sum = add_neighbours(nodes[from] + 2 * i, std::make_integer_sequence<int, kWidth / 2>{});
      std::memcpy(nodes[1 - from] + i, &sum, sizeof sum);
    }
  for (int r = 0; r < rows; ++r) sums[r] = static_cast<float>(nodes[from][r]);
}

template <Activation A, class X, class Y>
void short_row_sums(X x, Y dy, const Tile& tile, const Coefficients& k, float* dz, float* dz_normalized) {
  // A row narrower than a vector may write into its successor, before that is written.
  alignas(64) float dz_terms[kLeafBlock + kWidth], dz_normalized_terms[kLeafBlock + kWidth];
  alignas(64) float dz_lanes[kShortRowLanes] = {}, dz_normalized_lanes[kShortRowLanes] = {};
  const int width = static_cast<int>(tile.width), lanes = short_row_lanes(width);
  const int padded = lanes * kLaneWidth, most = kLeafBlock / padded;
  const int whole = width / kChunk * kChunk;
  for (std::int64_t first = 0; first < tile.rows; first += most) {
    const int rows = smaller(tile.rows - first, most);
    for (int r = 0; r < rows; ++r) {
      const Element element = row_element(k, first + r);
      const auto from = x + (tile.offset + (first + r) * tile.stride);
      const auto gradient = dy + (tile.offset + (first + r) * tile.stride);
      const auto put = [&](int j, const Terms& t) __attribute__((always_inline)) {
        store(dz_terms + r * padded + j, t.dz);
        store(dz_normalized_terms + r * padded + j, t.dz_normalized);
      };
      for (int j = 0; j < whole; j += kWidth) {
        prefetch(from + (j + kAhead));
        prefetch(gradient + (j + kAhead));
        put(j, terms<A>(load(from + j), load(gradient + j), element));
      }
      for (int j = whole; j < width; j += kChunk) {  // what the last lane lacks is +0
        for (int i = j; i < j + kChunk; i += kWidth) {
          const int count = smaller(width - i, kWidth);
          if (count <= 0) {
            put(i, Terms{});
            continue;
          }
          const Terms t = terms<A>(load(from + i, count), load(gradient + i, count), element);
          const Mask present = first_of(count);
          put(i, {present ? t.dz : Floats{}, present ? t.dz_normalized : Floats{}});
        }
      }
    }
    short_row_lane_sums(dz_terms, rows * lanes, dz_lanes);
    short_row_lane_sums(dz_normalized_terms, rows * lanes, dz_normalized_lanes);
    short_row_trees(dz_lanes, rows, lanes, width, dz + first);
    short_row_trees(dz_normalized_lanes, rows, lanes, width, dz_normalized + first);
  }
}

void row_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
              const Coefficients& k, float* dz, float* dz_normalized) {
  dispatch_kernel(activation, x, dy, [&](auto a, auto x, auto dy) {
    if (tile.width < kLeafRow) return short_row_sums<a.value>(x, dy, tile, k, dz, dz_normalized);
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      const Element element = row_element(k, r);
      RunningTree<ChannelSums> tree;
      for (std::int64_t leaf = 0; leaf < tile.width; leaf += leaf_positions) {
        const std::int64_t offset = tile.offset + r * tile.stride + leaf;
        const std::int64_t length = tile.width - leaf < leaf_positions ? tile.width - leaf : leaf_positions;
        tree.push(leaf_sums<a.value>(x + offset, dy + offset, length, element));
      }
      const ChannelSums sums = tree.root();
      dz[r] = static_cast<float>(sums.dz);
      dz_normalized[r] = static_cast<float>(sums.dz_normalized);
    }
  });
}

// The tree over up to 16 terms of a channel: lanes of 8 values, one a column.
inline float run_sum(const float* terms, int length) {
  double lanes[2];
  for (int l = 0; l * kLaneWidth < length; ++l) {
    float c[kLaneWidth] = {};
    for (int j = 0; j < smaller(length - l * kLaneWidth, kLaneWidth); ++j) c[j] = terms[l * kLaneWidth + j];
    const float sum = ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7]));
    lanes[l] = static_cast<double>(sum + 0.0f);
  }
  return static_cast<float>(length > kLaneWidth ? lanes[0] + lanes[1] : lanes[0]);
}

void run_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t length,
              const Coefficients& k, float* dz, float* dz_normalized) {
  alignas(64) float dz_terms[kPanel], dz_normalized_terms[kPanel];
  dispatch_kernel(activation, x, dy, [&](auto a, auto x, auto dy) {
    for (int j = 0; j < tile.width; j += kWidth) {
      const int count = smaller(tile.width - j, kWidth);
      const Terms t = terms<a.value>(load(x + (tile.offset + j), count), load(dy + (tile.offset + j), count),
                                     column_element(k, j));
      store(dz_terms + j, t.dz);
      store(dz_normalized_terms + j, t.dz_normalized);
    }
  });
  const int count = static_cast<int>(tile.width), n = static_cast<int>(length);
  if (n == 1) {  // one value and its missing partners
    for (int i = 0; i < count; ++i) dz[i] = dz_terms[i] + 0.0f;
    for (int i = 0; i < count; ++i) dz_normalized[i] = dz_normalized_terms[i] + 0.0f;
    return;
  }
  for (int i = 0; i < count / n; ++i) {
    dz[i] = run_sum(dz_terms + i * n, n);
    dz_normalized[i] = run_sum(dz_normalized_terms + i * n, n);
  }
}

// ---- columns ----

// Adds one micro-batch of each column to the ChannelSums in `leaf`, or starts them with it.
template <Activation A, class X, class Y>
void add_column_sums(X x, Y dy, std::int64_t stride, int rows, int width, const Coefficients& k, bool first,
                     ColumnNode& leaf) {
  for (int j = 0; j < width; j += kWidth) {
    const Element element = column_element(k, j);
    const int count = smaller(width - j, kWidth);
    const Terms sum = sum_rows<A, false>(x + j, dy + j, stride, rows, count, count, element);
    double* __restrict dz = leaf.first + j;
    double* __restrict dz_normalized = leaf.second + j;
    const auto add = [&](auto from_nothing) __attribute__((always_inline)) {
#pragma GCC unroll 1
      for (int i = 0; i < kWidth; ++i) {
        const ChannelSums batch{static_cast<double>(sum.dz[i]), static_cast<double>(sum.dz_normalized[i])};
        const ChannelSums both = from_nothing ? batch : merge(ChannelSums{dz[i], dz_normalized[i]}, batch);
        dz[i] = both.dz;
        dz_normalized[i] = both.dz_normalized;
      }
    };
    first ? add(std::true_type{}) : add(std::false_type{});
  }
}

void column_sums(Activation activation, Array x, Array dy, const Tile& tile, std::int64_t leaf_positions,
                 const Coefficients& k, float* dz, float* dz_normalized) {
  dispatch_kernel(activation, x, dy, [&](auto a, auto x, auto dy) {
    ColumnTree tree;
    const int width = static_cast<int>(tile.width);
    const ColumnNode& root = add_column_leaves(
        tree, tile, leaf_positions, [&](std::int64_t s, int rows, bool first, ColumnNode& leaf) {
          const std::int64_t offset = tile.offset + s * tile.stride;
          add_column_sums<a.value>(x + offset, dy + offset, tile.stride, rows, width, k, first, leaf);
        });
    for (int j = 0; j < width; ++j) dz[j] = static_cast<float>(root.first[j]);
    for (int j = 0; j < width; ++j) dz_normalized[j] = static_cast<float>(root.second[j]);
  });
}

// ---- dx ----

template <bool kRow>
void gradient_tile(Activation activation, Array x, Array dy, MutableArray dx, const Tile& tile,
                   const Coefficients& k) {
  dispatch_kernel(activation, x, dy, [&](auto a, auto x, auto dy) {
    dispatch_output(dx, like(x, dx), tile, [&](auto past, auto put) {
      for_elements<kRow, past.value>(tile, k, [&](std::int64_t i, int count, const Element& element) {
        const Floats from_mean = centred(load(x + i, count), element);
        const Floats dz = activate_backward<a.value>(load(dy + i, count), affine(from_mean, element));
        put(i, input_gradient(dz, from_mean, element), count);
      });
    });
  });
}

}  // namespace
}  // namespace steadynorm::cpu
