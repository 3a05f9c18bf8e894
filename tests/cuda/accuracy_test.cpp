// SPDX-License-Identifier: Apache-2.0
// Every output within the bounds of docs/numerics.md of the double reference, at the ends of every range and
// in between; and a small set that reaches every kernel, for compute-sanitizer.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/run_cuda.h"
#include "support/bounds.h"
#include "support/cases.h"

namespace steadynorm::test {
namespace {

class CudaAccuracy : public CudaTest {};
class CudaEdges : public CudaTest {};
class CudaErrors : public CudaTest {};
class CudaSanitizer : public CudaTest {};

constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu,
                                       Activation::gelu_tanh};
constexpr DType kTypes[] = {DType::float32, DType::bfloat16, DType::float16};
constexpr Layout kLayouts[] = {Layout::contiguous, Layout::channels_last};

std::vector<std::int64_t> parameter_shape(const Problem& p, const Parameter& parameter) {
  if (parameter.shape == ParameterShape::per_sample) return {p.samples, p.channels};
  return {parameter_count(p, parameter)};
}

void expect_accurate(const Problem& p, Kind kind, std::uint64_t seed) {
  const Data data = make_data(p, kind, seed);
  const Inputs in(p, data);
  const std::string name = describe(p) + ", " + to_string(kind) + ", seed " + std::to_string(seed) + ", ";
  const ExpectedForward forward_expected = expect_forward(p, data);
  const Forward forward = cuda_forward(p, in);
  EXPECT_TRUE(within_bounds(name + "y", forward.y, forward_expected.y, image_shape(p)));
  EXPECT_TRUE(statistics_within_bounds(name + "statistics", p, forward.statistics.data(), forward_expected));
  const ExpectedBackward expected = expect_backward(p, data);
  const Backward backward = cuda_backward(p, in, forward.statistics);
  EXPECT_TRUE(within_bounds(name + "dx", backward.dx, expected.dx, image_shape(p)));
  EXPECT_TRUE(
      within_bounds(name + "dweight", backward.dweight, expected.dweight, parameter_shape(p, p.weight)));
  EXPECT_TRUE(within_bounds(name + "dbias", backward.dbias, expected.dbias, parameter_shape(p, p.bias)));
}

TEST_F(CudaAccuracy, RandomProblemsOfEveryKindStayWithinBounds) {
  Random random(1);
  for (int i = 0; i < (kEmulated ? 8 : 40); ++i) {
    const Problem p = random_problem(random, 40000);
    for (const Kind kind : kFiniteKinds) expect_accurate(p, kind, static_cast<std::uint64_t>(i));
    if (HasFailure()) return;
  }
}

TEST_F(CudaAccuracy, RaggedSizesStayWithinBounds) {
  for (const Layout layout : kLayouts) {
    for (const std::int64_t S :
         {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 2047, 2048, 2049, 5000})
      for (const std::int64_t D : {1, 3, 5})
        expect_accurate(make_problem(2, 3 * D, 3, S, layout), Kind::offset_1e3, 2);
    for (const std::int64_t D : {31, 255, 256, 257, 300, 513})
      for (const std::int64_t S : {1, 9, 70})
        expect_accurate(make_problem(1, 2 * D, 2, S, layout), Kind::normal, 3);
  }
}

TEST_F(CudaAccuracy, LongChannelsStayWithinBounds) {
  for (const Kind kind : {Kind::normal, Kind::offset_1e5, Kind::two_valued}) {
    expect_accurate(make_problem(1, 2, 1, 300001, Layout::contiguous), kind, 4);
    expect_accurate(make_problem(1, 6, 2, 70003, Layout::channels_last), kind, 4);
  }
}

TEST_F(CudaAccuracy, EveryActivationAndStorageTypeStaysWithinBounds) {
  for (const Layout layout : kLayouts)
    for (const Activation activation : kActivations)
      for (const DType x : kTypes)
        for (const DType y : kTypes) {
          Problem p = make_problem(2, 24, 4, 143, layout, x);
          p.y = y;
          p.activation = activation;
          expect_accurate(p, Kind::normal, 5);
        }
}

TEST_F(CudaEdges, NoSamplesGiveZeroParameterGradients) {
  for (const Layout layout : kLayouts)
    for (const DType dtype : kTypes) {
      Problem p = make_problem(0, 70, 7, 100, layout);
      p.weight.dtype = p.bias.dtype = dtype;
      const Inputs in(p, make_data(p, Kind::normal, 20));
      const Backward backward = cuda_backward(p, in, cuda_forward(p, in).statistics);
      for (const Array& gradient : {backward.dweight, backward.dbias}) {
        EXPECT_EQ(gradient.count(), 70);
        for (const unsigned char byte : gradient.bytes) EXPECT_EQ(byte, 0);
      }
    }
}

TEST_F(CudaEdges, OneValueAGroupGivesBiasAndExactlyZeroDx) {
  for (const Layout layout : kLayouts)
    for (const Kind kind : {Kind::normal, Kind::huge, Kind::tiny}) {
      const Problem p = make_problem(3, 300, 300, 1, layout);
      const Data data = make_data(p, kind, 23);
      const Inputs in(p, data);
      const Forward forward = cuda_forward(p, in);
      const std::vector<double> y = load(forward.y), dx = load(cuda_backward(p, in, forward.statistics).dx);
      for (std::size_t i = 0; i < y.size(); ++i) {
        EXPECT_EQ(y[i], data.bias[i % 300]);
        EXPECT_EQ(dx[i], 0);
      }
    }
}

TEST_F(CudaEdges, ANanMakesItsGroupNanAndNoOther) {
  for (const Layout layout : kLayouts)
    for (const Activation activation : kActivations) {
      Problem p = make_problem(2, 12, 3, 2500, layout);
      p.activation = activation;
      const Data data = make_data(p, Kind::nan_in_first_group, 24);
      const Inputs in(p, data);
      const Forward forward = cuda_forward(p, in);
      EXPECT_TRUE(within_bounds(describe(p), forward.y, expect_forward(p, data).y, image_shape(p)));
    }
}

TEST_F(CudaErrors, AreThrownBeforeAnyWork) {
  Problem p = make_problem(1, 30, 4, 10, Layout::contiguous);
  try {
    cuda::forward(p, {}, nullptr);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "group_norm: channels must be divisible by groups, got C=30, G=4");
  }
  p.groups = 3;
  p.x = DType::float64;
  try {
    cuda::forward(p, {}, nullptr);
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_STREQ(error.what(),
                 "group_norm: the CUDA backend serves float32, bfloat16 and float16, got float64");
  }
}

// Small shapes that reach every kernel: short and long leaves, several leaves a run, folds, ragged slabs,
// split groups.
TEST_F(CudaSanitizer, ForwardAndBackwardReachEveryKernel) {
  for (const Layout layout : kLayouts)
    for (const Activation activation : kActivations)
      for (const DType x : kTypes)
        for (const DType y : kTypes) {
          for (const std::int64_t S : {9, 300}) {
            Problem p = make_problem(2, 24, 4, S, layout, x);
            p.y = y;
            p.activation = activation;
            p.bias.shape = ParameterShape::per_sample;
            const Inputs in(p, make_data(p, Kind::normal, 6));
            const Forward forward = cuda_forward(p, in, S == 9);
            const Backward backward = cuda_backward(p, in, forward.statistics, {}, S == 9);
            EXPECT_TRUE(std::isfinite(load(backward.dx)[0]));
          }
        }
}

TEST_F(CudaSanitizer, FullLeavesAndGivenMoments) {
  for (const DType x : kTypes) {
    const Problem p = make_problem(2, 6, 3, 4096, Layout::contiguous, x);
    const Inputs in(p, make_data(p, Kind::normal, 8));
    const Forward forward = cuda_forward(p, in);
    expect_same(describe(p), p, forward, run_forward(p, in));
    const DeviceInputs inputs(in);
    DeviceForward applied(p, inputs);
    const DeviceArray moments(static_cast<std::size_t>(3 * p.samples * p.groups) * sizeof(double));
    cuda::moments(p, inputs.x.get(), static_cast<double*>(moments.get()), applied.workspace.get(), nullptr);
    cuda::apply(p, applied.arguments, static_cast<const double*>(moments.get()), nullptr);
    expect_same(describe(p) + ", moments given", p, applied.read(p), forward);
  }
}

TEST_F(CudaSanitizer, SumsReachEveryStatisticsKernel) {
  const std::int64_t sizes[][4] = {{2, 12, 3, 65}, {1, 16, 2, 4096}, {1, 8, 1, 9000}, {2, 10, 2, 100}};
  for (const auto& size : sizes)
    for (const Layout layout : kLayouts)
      for (const DType x : kTypes) {
        const Problem p = make_problem(size[0], size[1], size[2], size[3], layout, x);
        for (const Kind kind : {Kind::normal, Kind::tiny}) {
          const Inputs in(p, make_data(p, kind, 9));
          const Residual with(p, in, kind, 10);
          const cuda::Plan plan = cuda::choose_plan(p, cuda::current_device());
          const ResidualForward found = DeviceResidual(p, with).forward(plan, p, DeviceInputs(in));
          EXPECT_TRUE(same_bits(describe(p) + ", sum", found.sum, with.sum, image_shape(p)));
          expect_same(describe(p), p, found.forward, run_forward(p, with.stored(in)));
        }
      }
}

// Only channels this long have units of several leaves.
TEST_F(CudaSanitizer, GroupsOnChip) {
  const std::int64_t sizes[][4] = {{2, 8, 2, 4096}, {1, 4, 1, 16384}, {1, 4, 1, 65536}};
  for (const auto& size : sizes)
    for (const DType x : kTypes)
      for (const DType y : kTypes) {
        Problem p = make_problem(size[0], size[1], size[2], size[3], Layout::contiguous, x);
        p.y = y;
        const Inputs in(p, make_data(p, Kind::normal, 5));
        const Forward forward = cuda_forward(p, in);
        cuda_backward(p, in, forward.statistics);
      }
}

TEST_F(CudaSanitizer, UnitsOfSeveralLeaves) {
  const Problem p = make_problem(1, 1, 1, 4300001, Layout::contiguous, DType::bfloat16);
  ASSERT_GT(cuda::choose_plan(p, cuda::current_device()).runs.leaves_per_unit, 1);
  const Inputs in(p, make_data(p, Kind::normal, 7));
  const Forward forward = cuda_forward(p, in);
  expect_same(describe(p), p, forward, run_forward(p, in));
  expect_same(describe(p), cuda_backward(p, in, forward.statistics), run_backward(p, in, forward.statistics));
}

TEST_F(CudaSanitizer, TreesOfEveryDepth) {
  for (const Layout layout : kLayouts) {
    const std::int64_t sizes[][4] = {
        {1, 2, 1, 270001}, {1, 600, 2, 65}, {1, 600, 2, 300}, {2, 1200, 1, 8}, {1, 40, 4, 2050}};
    for (const auto& size : sizes) {
      const Problem p = make_problem(size[0], size[1], size[2], size[3], layout, DType::bfloat16);
      const Inputs in(p, make_data(p, Kind::normal, 7));
      const Forward forward = cuda_forward(p, in);
      expect_same(describe(p), p, forward, run_forward(p, in));
      cuda_backward(p, in, forward.statistics);
    }
  }
}

}  // namespace
}  // namespace steadynorm::test
