// SPDX-License-Identifier: Apache-2.0
// The ends of the ranges of N, C, G and S.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cpu/run_cpu.h"
#include "support/bits.h"
#include "support/bounds.h"

namespace steadynorm::test {
namespace {

Problem problem(std::int64_t N, std::int64_t C, std::int64_t G, std::int64_t S, Layout layout) {
  Problem p;
  p.samples = N;
  p.channels = C;
  p.groups = G;
  p.positions = S;
  p.layout = layout;
  p.weight = p.bias = {ParameterShape::per_channel, DType::float32};
  return p;
}

void expect_accurate(const Problem& p, Kind kind = Kind::normal) {
  const Data data = make_data(p, kind, 21);
  const Inputs in(p, data);
  const Forward forward = run_forward(p, in, random_ranges(2, 21));
  EXPECT_TRUE(within_bounds(describe(p) + ", y", forward.y, expect_forward(p, data).y, image_shape(p)));
  const ExpectedBackward expected = expect_backward(p, data);
  const Backward backward = run_backward(p, in, forward.statistics, {}, random_ranges(2, 22));
  EXPECT_TRUE(within_bounds(describe(p) + ", dx", backward.dx, expected.dx, image_shape(p)));
  EXPECT_TRUE(within_bounds(describe(p) + ", dweight", backward.dweight, expected.dweight, {p.channels}));
  EXPECT_TRUE(within_bounds(describe(p) + ", dbias", backward.dbias, expected.dbias, {p.channels}));
}

TEST(CpuEdges, NoSamplesGiveZeroParameterGradients) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
      Problem p = problem(0, 70, 7, 100, layout);
      p.weight.dtype = p.bias.dtype = dtype;
      const Inputs in(p, make_data(p, Kind::normal, 20));
      const Forward forward = run_forward(p, in);
      EXPECT_EQ(forward.y.count(), 0);
      const Backward backward = run_backward(p, in, forward.statistics);
      for (const Array& gradient : {backward.dweight, backward.dbias}) {
        EXPECT_EQ(gradient.count(), 70);
        for (const unsigned char byte : gradient.bytes) EXPECT_EQ(byte, 0);
      }
      p.weight.shape = p.bias.shape = ParameterShape::per_sample;
      const Backward rows = run_backward(p, in, forward.statistics);
      EXPECT_EQ(rows.dweight.count(), 0);
      std::vector<double> moments;
      cpu::moments(p, nullptr, moments.data(), nullptr);
      cpu::apply(p, {}, moments.data());
    }
}

TEST(CpuEdges, OneValueAGroupGivesBiasAndExactlyZeroDx) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const Kind kind : {Kind::normal, Kind::huge, Kind::tiny}) {
      const Problem p = problem(3, 300, 300, 1, layout);
      const Data data = make_data(p, kind, 23);
      const Inputs in(p, data);
      const Forward forward = run_forward(p, in);
      const std::vector<double> y = load(forward.y), dx = load(run_backward(p, in, forward.statistics).dx);
      for (std::size_t i = 0; i < y.size(); ++i) {
        EXPECT_EQ(y[i], data.bias[i % 300]);
        EXPECT_EQ(dx[i], 0);
      }
    }
}

TEST(CpuEdges, OneGroupAndOneChannelAGroup) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const std::int64_t S : {1, 5, 130, 2500})
      for (const std::int64_t C : {1, 7, 64}) {
        expect_accurate(problem(2, C, 1, S, layout));
        expect_accurate(problem(2, C, C, S, layout));
      }
}

TEST(CpuEdges, ManyChannels) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    expect_accurate(problem(1, 1000003, 1, 1, layout));
    expect_accurate(problem(1, 1000000, 1000000, 1, layout));
    expect_accurate(problem(2, 200000, 40000, 3, layout));
  }
}

TEST(CpuEdges, ManySamples) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    expect_accurate(problem(20000, 6, 2, 1, layout));
    expect_accurate(problem(3000, 33, 3, 5, layout));
  }
}

// Squares of these overflow fp32, and above 1.7e38 so does x - mean.
TEST(CpuEdges, HugeFiniteValuesGiveFiniteResults) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const double size : {1e38, 3e38}) {
      const Problem p = problem(1, 6, 2, 3000, layout);
      Data data = make_data(p, Kind::normal, 24);
      for (std::size_t i = 0; i < data.x.size(); ++i)
        data.x[i] = round_to(DType::float32, i % 3 == 0 ? -size : size);
      const Forward forward = run_forward(p, Inputs(p, data));
      for (const float statistic : forward.statistics) EXPECT_TRUE(std::isfinite(statistic));
      if (size > 1.7e38) continue;
      for (const double y : load(forward.y)) ASSERT_TRUE(std::isfinite(y));
    }
}

// Bytes of x and y that lie on no vector's boundary.
TEST(CpuEdges, MisalignedArraysGiveTheSameBits) {
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    Problem p = problem(2, 30, 3, 333, layout);
    p.x = p.y = DType::bfloat16;
    const Inputs in(p, make_data(p, Kind::normal, 25));
    const Forward aligned = run_forward(p, in);
    for (const std::int64_t shift : {1, 3}) {
      Array x(p.x, p.elements() + shift), y(p.y, p.elements() + shift);
      std::memcpy(x.bytes.data() + 2 * shift, in.x.data(), in.x.bytes.size());
      Forward out{Array(), aligned.statistics};
      cpu::ForwardArguments a = forward_arguments(in, out);
      const Workspace workspace(cpu::forward_workspace(p));
      a.x = x.bytes.data() + 2 * shift;
      a.y = y.bytes.data() + 2 * shift;
      a.workspace = workspace.get();
      cpu::forward(p, a);
      EXPECT_TRUE(same_bits("y", a.y, aligned.y.data(), 2, image_shape(p)));
    }
  }
}

// Offsets beyond 2^31, forward alone: 4.3 GB of x, and y in place of it. Two equal samples, one on either
// side.
TEST(CpuEdges, OffsetsBeyond32Bits) {
  std::vector<std::uint16_t> pattern(70001);
  for (std::size_t i = 0; i < pattern.size(); ++i)
    pattern[i] = static_cast<std::uint16_t>(0x3f00 + (i * 2654435761u >> 20) % 256);
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    Problem p = problem(2, 32, 4, (std::int64_t{1} << 25) + 5, layout);
    p.x = p.y = DType::bfloat16;
    const std::int64_t size = p.channels * p.positions, step = static_cast<std::int64_t>(pattern.size());
    std::vector<std::uint16_t> x(static_cast<std::size_t>(2 * size));
    for (const std::int64_t sample : {std::int64_t{0}, size})
      for (std::int64_t i = 0; i < size; i += step)
        std::copy_n(pattern.data(), std::min(step, size - i), x.data() + sample + i);
    const std::vector<float> weight(32, 1.5f), bias(32, 0.25f);
    std::vector<float> statistics(3 * 2 * 4);
    const Workspace workspace(cpu::forward_workspace(p));
    cpu::forward(p, {x.data(), weight.data(), bias.data(), x.data(), statistics.data(), workspace.get()},
                 random_ranges(2, 26));
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(same_bits("statistics", &statistics[8 * i + 4], &statistics[8 * i], sizeof(float), {4}));
    EXPECT_TRUE(same_bits("y", x.data() + size, x.data(), 2, {size}));
  }
}

}  // namespace
}  // namespace steadynorm::test
