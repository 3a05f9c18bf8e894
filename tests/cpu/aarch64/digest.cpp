// SPDX-License-Identifier: Apache-2.0
// Prints a digest of all outputs over problems of every kind. What it prints must not depend on the machine.
#include <cinttypes>
#include <cstdio>
#include <span>

#include "cpu/run_cpu.h"

namespace steadynorm::test {
namespace {

constexpr int kProblems = 200;

class Digest {  // FNV-1a, 64 bits
 public:
  void add(std::span<const unsigned char> bytes) {
    for (const unsigned char byte : bytes) value_ = (value_ ^ byte) * 0x100000001b3u;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

// Without libm, whose digits differ between machines.
std::vector<double> values(Random& random, std::int64_t count, DType dtype) {
  std::vector<double> result(static_cast<std::size_t>(count));
  for (double& value : result) value = round_to(dtype, 3 * (random.uniform() + random.uniform() - 1));
  return result;
}

std::uint64_t digest() {
  Digest total;
  Random random(1);
  for (int i = 0; i < kProblems; ++i) {
    const Problem p = random_problem(random, i % 20 == 0 ? 100000 : 5000);
    Data data;
    data.x = values(random, p.elements(), p.x);
    data.dy = values(random, p.elements(), p.y);
    data.weight = values(random, parameter_count(p, p.weight), p.weight.dtype);
    data.bias = values(random, parameter_count(p, p.bias), p.bias.dtype);
    const Inputs in(p, data);
    const Forward forward = run_forward(p, in);
    const Backward backward = run_backward(p, in, forward.statistics);
    for (const Array* array : {&forward.y, &backward.dx, &backward.dweight, &backward.dbias})
      total.add(array->bytes);
    total.add({reinterpret_cast<const unsigned char*>(forward.statistics.data()),
               forward.statistics.size() * sizeof(float)});
  }
  return total.value();
}

}  // namespace
}  // namespace steadynorm::test

int main() { std::printf("%016" PRIx64 "\n", steadynorm::test::digest()); }
