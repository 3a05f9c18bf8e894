// SPDX-License-Identifier: Apache-2.0
// Groups that fit the cache are read from memory once: a block of them passes through everything before the
// next one starts.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/sweeps.h"

namespace steadynorm::cpu {

// How a problem divides into blocks of whole groups: of one sample (channels_last), or adjacent (contiguous).
class Blocks {
 public:
  // `element_bytes`: what the first pass reads for an element. None when groups do not fit or are too few.
  Blocks(const Problem&, std::size_t element_bytes);

  std::int64_t count() const { return count_; }
  GroupRange operator[](std::int64_t i) const;

 private:
  const Problem& problem_;
  std::int64_t groups_ = 0;  // of a block
  std::int64_t count_ = 0;
};

// Moments, statistics and y. `source` reads the statistics that are written here.
void forward_blocks(const Problem&, const Tree&, const Blocks&, const ChannelSource& source, const Input& x,
                    void* y, Moments* roots, float* statistics, const ParallelFor&);

// Sums, means and dx. `gradient` reads the means that are written here.
void backward_blocks(const Problem&, const Tree&, const Blocks&, const ChannelSource& sums,
                     const ChannelSource& gradient, const void* x, const void* dy, void* dx,
                     ChannelPlanes units, ChannelPlanes rows, GroupMeans* means, const ParallelFor&);

}  // namespace steadynorm::cpu
