// SPDX-License-Identifier: Apache-2.0
// Where element (n, c, s) lies in a layout.
#pragma once

#include <cstdint>

#include "core/numeric.h"
#include "steadynorm/problem.h"

namespace steadynorm {

struct GroupView {
  std::int64_t sample_stride;
  std::int64_t channel_stride;
  std::int64_t position_stride;

  STEADYNORM_HD std::int64_t offset(std::int64_t n, std::int64_t c, std::int64_t s) const {
    return n * sample_stride + c * channel_stride + s * position_stride;
  }
};

inline GroupView group_view(const Problem& problem) {
  const std::int64_t C = problem.channels, S = problem.positions;
  return problem.layout == Layout::contiguous ? GroupView{C * S, S, 1} : GroupView{C * S, 1, C};
}

}  // namespace steadynorm
