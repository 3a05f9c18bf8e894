// SPDX-License-Identifier: Apache-2.0
// Every entry refuses what it cannot do, before any work, in one sentence.
#include <gtest/gtest.h>

#include <functional>

#include "steadynorm/cpu.h"

namespace steadynorm::test {
namespace {

Problem valid() {
  Problem p;
  p.samples = 2;
  p.channels = 8;
  p.groups = 4;
  p.positions = 3;
  p.weight = p.bias = {ParameterShape::per_channel, DType::float32};
  return p;
}

// All entries with null pointers: reading one before the checks would crash.
std::vector<std::function<void(const Problem&)>> entries() {
  return {[](const Problem& p) { cpu::forward_workspace(p); },
          [](const Problem& p) { cpu::backward_workspace(p); },
          [](const Problem& p) { cpu::forward(p, {}); },
          [](const Problem& p) { cpu::backward(p, {}); },
          [](const Problem& p) { cpu::moments(p, nullptr, nullptr, nullptr); },
          [](const Problem& p) { cpu::apply(p, {}, nullptr); }};
}

template <class Error>
void expect_error(const Problem& p, const std::string& sentence) {
  for (const auto& entry : entries()) {
    try {
      entry(p);
      ADD_FAILURE() << "no error: " << sentence;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), sentence);
    }
  }
}

TEST(CpuErrors, NameRuleAndValue) {
  Problem p = valid();
  p.samples = -1;
  expect_error<InvalidArgument>(p, "group_norm: samples must not be negative, got N=-1");
  p = valid();
  p.channels = 0;
  expect_error<InvalidArgument>(p, "group_norm: channels must be positive, got C=0");
  p = valid();
  p.positions = 0;
  expect_error<InvalidArgument>(p, "group_norm: every spatial size must be positive, got S=0");
  p = valid();
  p.groups = 0;
  expect_error<InvalidArgument>(p, "group_norm: groups must be positive, got G=0");
  p = valid();
  p.groups = 3;
  expect_error<InvalidArgument>(p, "group_norm: channels must be divisible by groups, got C=8, G=3");
  p = valid();
  p.eps = -1;
  expect_error<InvalidArgument>(p, "group_norm: eps must be finite and not negative, got eps=-1");
  p = valid();
  p.weight.dtype = DType::float64;
  expect_error<InvalidArgument>(p, "group_norm: a float64 weight needs a float64 input, got input float32");
  p = valid();
  p.bias.dtype = DType::float64;
  expect_error<InvalidArgument>(p, "group_norm: a float64 bias needs a float64 input, got input float32");
}

TEST(CpuErrors, Float64IsUnsupported) {
  const std::string sentence = "group_norm: this backend serves float32, bfloat16 and float16, got float64";
  Problem p = valid();
  p.x = DType::float64;
  expect_error<Unsupported>(p, sentence);
  p.weight.dtype = p.bias.dtype = DType::float64;
  expect_error<Unsupported>(p, sentence);
  p = valid();
  p.y = DType::float64;
  expect_error<Unsupported>(p, sentence);
}

}  // namespace
}  // namespace steadynorm::test
