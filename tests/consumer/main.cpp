// SPDX-License-Identifier: Apache-2.0
// Normalises 1, 2, 3, 4 as one group: y is -1.34, -0.45, 0.45, 1.34.
#include <cmath>
#include <vector>

#include "steadynorm/cpu.h"

int main() {
  const steadynorm::Problem problem{.samples = 1, .channels = 2, .groups = 1, .positions = 2};
  const float x[] = {1, 2, 3, 4};
  float y[4], statistics[3];
  struct alignas(64) Block {
    char bytes[64];
  };
  std::vector<Block> workspace(steadynorm::cpu::forward_workspace(problem) / sizeof(Block) + 1);
  steadynorm::cpu::forward(problem,
                           {.x = x, .y = y, .statistics = statistics, .workspace = workspace.data()});
  for (int i = 0; i < 4; ++i) {
    if (std::fabs(y[i] - (x[i] - 2.5) / std::sqrt(1.25)) > 1e-2) return 1;
  }
}
