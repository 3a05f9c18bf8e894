// SPDX-License-Identifier: Apache-2.0
// Equality of bits. A failure names the case, the first differing element's coordinate, and both patterns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/data.h"

namespace steadynorm::test {

// `shape` as the array lies in memory, its last size fastest; for a Problem's own arrays use image_shape.
::testing::AssertionResult same_bits(const std::string& name, const void* actual, const void* expected,
                                     std::size_t element_size, const std::vector<std::int64_t>& shape);

::testing::AssertionResult same_bits(const std::string& name, const Array& actual, const Array& expected,
                                     const std::vector<std::int64_t>& shape);

// Of x, y, dx, dy in memory: N, C, S or N, S, C.
std::vector<std::int64_t> image_shape(const Problem&);

}  // namespace steadynorm::test
