// SPDX-License-Identifier: Apache-2.0
// What stays on chip needs no workspace; what does not has the one that it asks for.
#include <gtest/gtest.h>

#include "cuda/run_cuda.h"

namespace steadynorm::test {
namespace {

using CudaWorkspace = CudaTest;

struct Sizes {
  std::int64_t N, C, G, S;
  Layout layout;
};

// On chip where the device has clusters, of one sample and of several; and never.
constexpr Sizes kSizes[] = {{1, 4, 2, 2048, Layout::contiguous},     {3, 4, 4, 4096, Layout::contiguous},
                            {1, 80, 2, 261, Layout::channels_last},  {2, 160, 16, 64, Layout::channels_last},
                            {2, 80, 2, 2048, Layout::channels_last}, {2, 40, 2, 64, Layout::contiguous}};

// A call with a workspace of just the bytes that its arguments ask for.
template <class Arguments, class Ask, class Call>
std::size_t run_with_asked(Arguments arguments, const Ask& ask, const Call& call) {
  arguments.workspace = nullptr;
  const std::size_t bytes = ask(arguments);
  const DeviceArray workspace(bytes);
  arguments.workspace = workspace.get_or_null();
  call(arguments);
  return bytes;
}

TEST_F(CudaWorkspace, OfTheArgumentsIsEnough) {
  const cuda::DeviceInfo device = cuda::current_device();
  std::uint64_t seed = 300;
  int without = 0;
  for (const Sizes& s : kSizes)
    for (const ParameterShape shape : {ParameterShape::per_channel, ParameterShape::per_sample})
      for (const std::size_t shift : {0, 1}) {
        Problem p = make_problem(s.N, s.C, s.G, s.S, s.layout, DType::bfloat16);
        p.weight.shape = p.bias.shape = shape;
        const Inputs in(p, make_data(p, Kind::normal, ++seed));
        const std::string name = describe(p) + (shift ? ", misaligned" : "");
        const DeviceInputs inputs(in, shift);
        const Forward expected = cuda_forward(p, in, shift);
        const cuda::Plan plan = cuda::choose_plan(p, device);

        const DeviceForward f(p, inputs, shift);
        const std::size_t forward = run_with_asked(
            f.arguments, [&](const auto& a) { return cuda::forward_workspace(p, a); },
            [&](const auto& a) { cuda::forward(p, a, nullptr); });
        const auto alone = [&](const cuda::OnChip& chip) {
          return chip.blocks > 0 && !chip.together && shift == 0;
        };
        EXPECT_EQ(forward == 0, alone(plan.forward_on_chip)) << name;
        EXPECT_LE(forward, cuda::forward_workspace(p)) << name;
        expect_same(name, p, f.read(p), expected);

        const Backward gradients = cuda_backward(p, in, expected.statistics, {}, shift);
        const Wanted wishes[] = {
            {true, true, true}, {true, false, true}, {true, false, false}, {false, true, true}};
        for (const Wanted& wanted : wishes) {
          const DeviceBackward b(p, inputs, expected.statistics, wanted, shift);
          const std::size_t backward = run_with_asked(
              b.arguments, [&](const auto& a) { return cuda::backward_workspace(p, a); },
              [&](const auto& a) { cuda::backward(p, a, nullptr); });
          const bool sums =
              s.N > 1 && shape == ParameterShape::per_channel && (wanted.dweight || wanted.dbias);
          const bool on_chip = alone(plan.backward_on_chip) && wanted.dx;
          EXPECT_EQ(backward == 0, on_chip && !sums) << name;
          EXPECT_LE(backward, cuda::backward_workspace(p)) << name;
          without += backward == 0;
          Backward same = gradients;
          const Backward read = b.read(p);
          if (!wanted.dx) same.dx = read.dx;
          if (!wanted.dweight) same.dweight = read.dweight;
          if (!wanted.dbias) same.dbias = read.dbias;
          expect_same(name, read, same);
        }
      }
  if (device.major >= 9) EXPECT_GE(without, 16);
}

}  // namespace
}  // namespace steadynorm::test
