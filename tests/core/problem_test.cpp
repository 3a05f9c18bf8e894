// SPDX-License-Identifier: Apache-2.0
#include "steadynorm/problem.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace steadynorm {
namespace {

Problem valid() {
  Problem p;
  p.samples = 2;
  p.channels = 30;
  p.groups = 5;
  p.positions = 7;
  p.weight = {ParameterShape::per_channel, DType::bfloat16};
  p.bias = {ParameterShape::per_sample, DType::float16};
  return p;
}

template <class F>
std::string sentence(F&& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

template <class Change>
std::string rejection(Change&& change) {
  Problem p = valid();
  change(p);
  return sentence([&] { validate(p); });
}

TEST(ProblemValidation, AValidProblemPasses) { EXPECT_NO_THROW(validate(valid())); }

TEST(ProblemValidation, NoSamplesAreValid) {
  EXPECT_EQ(rejection([](Problem& p) { p.samples = 0; }), "nothing was thrown");
}

TEST(ProblemValidation, ZeroEpsIsValid) {
  EXPECT_EQ(rejection([](Problem& p) { p.eps = 0; }), "nothing was thrown");
}

TEST(ProblemValidation, NegativeSamplesAreRejected) {
  EXPECT_EQ(rejection([](Problem& p) { p.samples = -1; }),
            "group_norm: samples must not be negative, got N=-1");
}

TEST(ProblemValidation, NoChannelsAreRejected) {
  EXPECT_EQ(rejection([](Problem& p) { p.channels = 0; }), "group_norm: channels must be positive, got C=0");
  EXPECT_EQ(rejection([](Problem& p) { p.channels = -3; }),
            "group_norm: channels must be positive, got C=-3");
}

TEST(ProblemValidation, AnEmptySpatialSizeIsRejected) {
  EXPECT_EQ(rejection([](Problem& p) { p.positions = 0; }),
            "group_norm: every spatial size must be positive, got S=0");
}

TEST(ProblemValidation, NoGroupsAreRejectedBeforeDividingByThem) {
  EXPECT_EQ(rejection([](Problem& p) { p.groups = 0; }), "group_norm: groups must be positive, got G=0");
  EXPECT_EQ(rejection([](Problem& p) { p.groups = -5; }), "group_norm: groups must be positive, got G=-5");
}

TEST(ProblemValidation, GroupsThatDoNotDivideTheChannelsAreRejected) {
  EXPECT_EQ(rejection([](Problem& p) { p.groups = 4; }),
            "group_norm: channels must be divisible by groups, got C=30, G=4");
  EXPECT_EQ(rejection([](Problem& p) { p.groups = 60; }),
            "group_norm: channels must be divisible by groups, got C=30, G=60");
}

TEST(ProblemValidation, NegativeInfiniteOrNanEpsIsRejected) {
  EXPECT_EQ(rejection([](Problem& p) { p.eps = -0.5; }),
            "group_norm: eps must be finite and not negative, got eps=-0.5");
  EXPECT_EQ(rejection([](Problem& p) { p.eps = std::numeric_limits<double>::infinity(); }),
            "group_norm: eps must be finite and not negative, got eps=inf");
  EXPECT_EQ(rejection([](Problem& p) { p.eps = std::numeric_limits<double>::quiet_NaN(); }),
            "group_norm: eps must be finite and not negative, got eps=nan");
}

TEST(ProblemValidation, Float64ParametersNeedFloat64Input) {
  EXPECT_EQ(rejection([](Problem& p) { p.weight.dtype = DType::float64; }),
            "group_norm: a float64 weight needs a float64 input, got input float32");
  EXPECT_EQ(rejection([](Problem& p) {
              p.x = DType::bfloat16;
              p.bias.dtype = DType::float64;
            }),
            "group_norm: a float64 bias needs a float64 input, got input bfloat16");
  EXPECT_EQ(rejection([](Problem& p) { p.x = p.weight.dtype = p.bias.dtype = DType::float64; }),
            "nothing was thrown");
}

TEST(ProblemValidation, AMissingParameterHasNoDtype) {
  EXPECT_EQ(rejection([](Problem& p) {
              p.weight = {ParameterShape::missing, DType::float64};
            }),
            "nothing was thrown");
}

TEST(ActivationNames, EveryNameIsReadBackAsItself) {
  EXPECT_EQ(activation_from("none"), Activation::none);
  EXPECT_EQ(activation_from("relu"), Activation::relu);
  EXPECT_EQ(activation_from("silu"), Activation::silu);
  EXPECT_EQ(activation_from("gelu"), Activation::gelu);
  EXPECT_EQ(activation_from("gelu_tanh"), Activation::gelu_tanh);
  for (const char* name : {"none", "relu", "silu", "gelu", "gelu_tanh"})
    EXPECT_STREQ(to_string(activation_from(name)), name);
}

TEST(ActivationNames, AnUnknownNameIsRejectedWithTheKnownOnes) {
  EXPECT_EQ(sentence([] { activation_from("swish"); }),
            "group_norm: activation must be one of none, relu, silu, gelu, gelu_tanh, got 'swish'");
  EXPECT_EQ(sentence([] { activation_from(""); }),
            "group_norm: activation must be one of none, relu, silu, gelu, gelu_tanh, got ''");
}

TEST(Words, DtypesAndLayoutsAreNamedAsUsersKnowThem) {
  EXPECT_STREQ(to_string(DType::float32), "float32");
  EXPECT_STREQ(to_string(DType::bfloat16), "bfloat16");
  EXPECT_STREQ(to_string(DType::float16), "float16");
  EXPECT_STREQ(to_string(DType::float64), "float64");
  EXPECT_STREQ(to_string(Layout::contiguous), "contiguous");
  EXPECT_STREQ(to_string(Layout::channels_last), "channels_last");
}

TEST(Words, SizesAreInBytes) {
  EXPECT_EQ(size_of(DType::float64), 8u);
  EXPECT_EQ(size_of(DType::float32), 4u);
  EXPECT_EQ(size_of(DType::bfloat16), 2u);
  EXPECT_EQ(size_of(DType::float16), 2u);
}

TEST(ProblemSizes, GroupsAndElementsAreCounted) {
  const Problem p = valid();
  EXPECT_EQ(p.channels_per_group(), 6);
  EXPECT_EQ(p.group_size(), 42);
  EXPECT_EQ(p.elements(), 420);
}

TEST(ProblemBytes, ForwardReadsXAndWritesY) {
  Problem p = valid();
  p.y = DType::bfloat16;
  EXPECT_EQ(forward_bytes(p), 420 * (4 + 2));
}

TEST(ProblemBytes, BackwardReadsXAndDyAndWritesDx) {
  Problem p = valid();
  p.x = DType::float16;
  p.y = DType::float32;
  EXPECT_EQ(backward_bytes(p), 420 * (2 + 4 + 2));
}

TEST(ProblemBytes, MoreThanTwoToThe31ElementsDoNotWrap) {
  Problem p = valid();
  p.samples = 1;
  p.channels = 64;
  p.groups = 8;
  p.positions = std::int64_t{1} << 32;
  EXPECT_EQ(p.elements(), std::int64_t{1} << 38);
  EXPECT_EQ(forward_bytes(p), std::int64_t{1} << 41);
}

TEST(Errors, EachKindIsWhatItsCatcherExpects) {
  EXPECT_THROW(throw InvalidArgument("x"), std::invalid_argument);
  EXPECT_THROW(throw Unsupported("x"), std::runtime_error);
  try {
    throw DeviceError("group_norm: the launch failed", "cudaErrorInvalidValue");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "group_norm: the launch failed");
    EXPECT_EQ(dynamic_cast<const DeviceError&>(error).name(), "cudaErrorInvalidValue");
  }
}

}  // namespace
}  // namespace steadynorm
