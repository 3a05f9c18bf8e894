// SPDX-License-Identifier: Apache-2.0
// Problems and data for tests. The generator is fixed (std::mt19937_64 and the mappings here), so that a
// failure's case can be repeated anywhere. Every value is one that its storage type holds: the double
// reference sees what a backend sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "steadynorm/problem.h"

namespace steadynorm {

std::string describe(const Problem&);
inline void PrintTo(const Problem& problem, std::ostream* out) { *out << describe(problem); }

}  // namespace steadynorm

namespace steadynorm::test {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  std::uint64_t bits() { return engine_(); }
  double uniform();                                             // [0, 1)
  double normal();                                              // mean 0, deviation 1
  std::int64_t integer(std::int64_t first, std::int64_t last);  // both included
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[integer(0, static_cast<std::int64_t>(choices.size()) - 1)];
  }

 private:
  std::mt19937_64 engine_;  // its sequence is fixed by the standard; std::normal_distribution's is not
};

// What x looks like. huge and tiny are 1e30 and 1e-30, or what fp16 has in their place.
enum class Kind {
  normal,
  offset_1e3,  // mean / deviation
  offset_1e4,
  offset_1e5,
  offset_1e6,
  huge,
  tiny,
  constant,    // one value a group
  two_valued,  // two values a group, so that all roundings of a kind agree
  nan_in_first_group,
};
constexpr Kind kFiniteKinds[] = {Kind::normal,     Kind::offset_1e3, Kind::offset_1e4,
                                 Kind::offset_1e5, Kind::offset_1e6, Kind::huge,
                                 Kind::tiny,       Kind::constant,   Kind::two_valued};
const char* to_string(Kind);

// Values in a storage type, as a backend reads them.
struct Array {
  DType dtype = DType::float32;
  std::vector<unsigned char> bytes;

  Array() = default;
  Array(DType type, std::int64_t count)
      : dtype(type), bytes(static_cast<std::size_t>(count) * size_of(type)) {}
  std::int64_t count() const { return static_cast<std::int64_t>(bytes.size() / size_of(dtype)); }
  void* data() { return bytes.data(); }
  const void* data() const { return bytes.data(); }
};

Array store(const std::vector<double>& values, DType);  // to nearest even
std::vector<double> load(const Array&);                 // exact
double round_to(DType, double value);

// The elements of a parameter: 0, C or N * C.
std::int64_t parameter_count(const Problem&, const Parameter&);

struct Data {
  std::vector<double> x, dy, weight, bias;
};

Data make_data(const Problem&, Kind, std::uint64_t seed);

// A problem of at most max_elements elements, of any shape, layout, dtypes (none fp64), parameters and
// activation.
Problem random_problem(Random&, std::int64_t max_elements);

}  // namespace steadynorm::test
