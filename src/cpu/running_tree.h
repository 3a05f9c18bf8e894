// SPDX-License-Identifier: Apache-2.0
// The aligned binary tree of core/tree.h over a stream of items: what reduce_tree gives, in logarithmic
// memory. A binary counter: bit k of the number of items says whether a finished node of 2^k items waits at
// level k.
#pragma once

#include <cstdint>

#include "core/numeric.h"

namespace steadynorm::cpu {

constexpr int kTreeLevels = 40;

template <class Node>
class RunningTree {
 public:
  STEADYNORM_HD void push(Node node) {
    int level = 0;
    for (; items_ >> level & 1; ++level) node = merge(waiting_[level].node, node);
    waiting_[level].node = node;
    ++items_;
  }

  // The root; an empty node when nothing was pushed.
  STEADYNORM_HD Node root() const {
    Node node{};
    bool empty = true;
    for (int level = 0; items_ >> level; ++level) {
      if (!(items_ >> level & 1)) continue;
      node = empty ? waiting_[level].node : merge(waiting_[level].node, node);
      empty = false;
    }
    return node;
  }

 private:
  union Slot {  // left uninitialised: clearing a kilobyte costs more than most trees
    STEADYNORM_HD Slot() {}
    Node node;
  };

  std::int64_t items_ = 0;
  Slot waiting_[kTreeLevels];
};

}  // namespace steadynorm::cpu
