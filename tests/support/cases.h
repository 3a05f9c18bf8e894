// SPDX-License-Identifier: Apache-2.0
// The named shapes of cases/cases.csv, the one list that tests and benchmarks share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "steadynorm/problem.h"

namespace steadynorm::test {

struct Case {
  std::string name;
  std::vector<std::int64_t> shape;  // N, C and the spatial sizes
  Problem problem;                  // fp32, no parameters, no activation: what a test varies
};

// Throws std::runtime_error that names the line when the file is missing or malformed.
std::vector<Case> read_cases(const std::string& path);

// The file that the build names (STEADYNORM_CASES), or cases/cases.csv of the working directory.
std::vector<Case> named_cases();

}  // namespace steadynorm::test
