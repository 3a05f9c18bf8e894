// SPDX-License-Identifier: Apache-2.0
#include "support/bits.h"

#include <cstring>
#include <iomanip>
#include <sstream>

namespace steadynorm::test {

namespace {

std::string coordinate(std::int64_t index, const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::size_t d = shape.size(); d-- > 0; index /= shape[d])
    text = std::to_string(index % shape[d]) + (text.empty() ? "" : ", ") + text;
  return "[" + text + "]";
}

// Most significant byte first, as one writes a number; storage is little-endian.
std::string pattern(const unsigned char* bytes, std::size_t size) {
  std::ostringstream text;
  text << "0x" << std::hex << std::setfill('0');
  for (std::size_t i = size; i-- > 0;) text << std::setw(2) << static_cast<int>(bytes[i]);
  return text.str();
}

}  // namespace

::testing::AssertionResult same_bits(const std::string& name, const void* actual, const void* expected,
                                     std::size_t element_size, const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  const std::size_t bytes = static_cast<std::size_t>(count) * element_size;
  if (bytes == 0 || std::memcmp(actual, expected, bytes) == 0) return ::testing::AssertionSuccess();
  const auto* a = static_cast<const unsigned char*>(actual);
  const auto* e = static_cast<const unsigned char*>(expected);
  std::int64_t first = -1, differing = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * element_size;
    if (std::memcmp(a + at, e + at, element_size) == 0) continue;
    if (first < 0) first = i;
    ++differing;
  }
  const std::size_t at = static_cast<std::size_t>(first) * element_size;
  return ::testing::AssertionFailure()
         << name << ": " << differing << " of " << count << " differ, first at " << coordinate(first, shape)
         << ": " << pattern(a + at, element_size) << " instead of " << pattern(e + at, element_size);
}

::testing::AssertionResult same_bits(const std::string& name, const Array& actual, const Array& expected,
                                     const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  if (actual.dtype != expected.dtype || actual.count() != count || expected.count() != count)
    return ::testing::AssertionFailure()
           << name << ": arrays of " << actual.count() << " " << to_string(actual.dtype) << " and "
           << expected.count() << " " << to_string(expected.dtype) << ", expected " << count
           << " of one dtype";
  return same_bits(name, actual.data(), expected.data(), size_of(actual.dtype), shape);
}

std::vector<std::int64_t> image_shape(const Problem& p) {
  if (p.layout == Layout::contiguous) return {p.samples, p.channels, p.positions};
  return {p.samples, p.positions, p.channels};
}

}  // namespace steadynorm::test
