// SPDX-License-Identifier: Apache-2.0
// Bits on the device: the CPU's, and each clause of docs/numerics.md, "What the bits depend on", by memcmp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "cuda/run_cuda.h"

namespace steadynorm::test {
namespace {

class CudaBits : public CudaTest {};

constexpr int kProblems = kEmulated ? 12 : 40;  // fibers are slow

// Problems that cross the borders of leaf, run, unit, slab, vector and fold, and random ones.
std::vector<Problem> problems(std::uint64_t seed) {
  Random random(seed);
  std::vector<Problem> list;
  for (int i = 0; i < kProblems; ++i) list.push_back(random_problem(random, 30000));
  const std::int64_t sizes[][4] = {{1, 2, 1, 270001}, {2, 6, 2, 40003},  {3, 600, 2, 65},  {1, 40, 40, 3000},
                                   {70, 24, 3, 1},    {5, 514, 1, 7},    {33, 8, 4, 49},   {1, 64, 8, 4096},
                                   {2, 320, 32, 256}, {1, 16, 2, 66000}, {1, 1300, 1, 64}, {2, 20, 2, 2048},
                                   {2, 24, 2, 7000},  {1, 80, 2, 1728},  {3, 96, 3, 72},   {1, 4, 1, 65536}};
  for (const auto& size : sizes)
    for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
      Problem p = random_problem(random, 10);
      p.samples = size[0];
      p.channels = size[1];
      p.groups = size[2];
      p.positions = size[3];
      p.layout = layout;
      list.push_back(p);
    }
  return list;
}

Array part(const Array& array, std::int64_t begin, std::int64_t count) {
  Array result(array.dtype, count);
  const std::size_t size = size_of(array.dtype);
  std::memcpy(result.data(), array.bytes.data() + static_cast<std::size_t>(begin) * size,
              result.bytes.size());
  return result;
}

// Statistics, none and relu use IEEE operations in one order everywhere; the other activations differ by the
// device's exponential and reciprocal.
TEST_F(CudaBits, AreTheCpusWithoutAnActivationAndWithRelu) {
  std::uint64_t seed = 0;
  for (Problem p : problems(21)) {
    if (!kEmulated && p.activation != Activation::none) p.activation = Activation::relu;
    for (const Kind kind : {Kind::normal, Kind::offset_1e5, Kind::huge, Kind::tiny, Kind::constant}) {
      const Inputs in(p, make_data(p, kind, ++seed));
      const std::string name = describe(p) + ", " + to_string(kind);
      const Forward expected = run_forward(p, in);
      expect_same(name, p, cuda_forward(p, in), expected);
      if (kind == Kind::huge)
        continue;  // sums that overflow to NaN, whose sign and payload are the machine's
      expect_same(name, cuda_backward(p, in, expected.statistics), run_backward(p, in, expected.statistics));
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, DoNotDependOnThePlan) {
  std::uint64_t seed = 50;
  const cuda::DeviceInfo device = cuda::current_device();
  for (const Problem& p : problems(22)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    const DeviceInputs inputs(in);
    for (const cuda::Plan& plan : cuda::legal_plans(p, device)) {
      std::ostringstream name;
      name << describe(p) << ", " << plan;
      const DeviceForward f(p, inputs);
      cuda::forward(plan, p, f.arguments, nullptr);
      expect_same(name.str(), p, f.read(p), forward);
      const DeviceBackward b(p, inputs, forward.statistics);
      cuda::backward(plan, p, b.arguments, nullptr);
      expect_same(name.str(), b.read(p), backward);
    }
    if (HasFailure()) return;
  }
}

// Units of several leaves, and tensors of full leaves whose last warp has fewer of them.
TEST_F(CudaBits, OfManyLeavesAWarpAreTheCpus) {
  const std::int64_t sizes[][4] = {
      {1, 1, 1, 1100001}, {1, 1, 1, 524288}, {1, 7, 1, 2048}, {3, 10, 2, 4096}, {1, 72, 3, 256}};
  std::uint64_t seed = 90;
  for (const auto& size : sizes) {
    const Problem p = make_problem(size[0], size[1], size[2], size[3], Layout::contiguous, DType::bfloat16);
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward expected = run_forward(p, in);
    const DeviceInputs inputs(in);
    for (const cuda::Plan& plan : cuda::legal_plans(p, cuda::current_device())) {
      std::ostringstream name;
      name << describe(p) << ", " << plan;
      const DeviceForward f(p, inputs);
      cuda::forward(plan, p, f.arguments, nullptr);
      expect_same(name.str(), p, f.read(p), expected);
    }
  }
}

// channels_last groups that stay on chip: one unit and several, by one block and by a cluster, groups that
// share a vector, that are a vector, and that several warps merge; ragged leaves, and units with few.
TEST_F(CudaBits, OfSlabsOnChipAreTheCpus) {
  const std::int64_t sizes[][4] = {{2, 160, 16, 64}, {1, 80, 8, 300},  {2, 80, 2, 261},  {1, 256, 1, 130},
                                   {1, 64, 64, 129}, {1, 60, 1, 2001}, {2, 64, 1, 1024}, {1, 8, 2, 8192},
                                   {3, 96, 8, 35},   {3, 80, 8, 700},  {5, 64, 2, 270}};
  const DType types[][2] = {{DType::bfloat16, DType::bfloat16},
                            {DType::float16, DType::float32},
                            {DType::float32, DType::float32},
                            {DType::float32, DType::bfloat16}};
  const Kind kinds[] = {Kind::normal, Kind::offset_1e5, Kind::huge, Kind::tiny, Kind::constant};
  std::uint64_t seed = 700;
  int on_chip = 0, meeting = 0;
  for (const auto& size : sizes)
    for (const auto& type : types) {
      Problem p = make_problem(size[0], size[1], size[2], size[3], Layout::channels_last, type[0]);
      p.y = type[1];
      p.activation = seed % 2 == 0 ? Activation::none : Activation::relu;
      const Kind kind = kinds[seed % 5];
      const Inputs in(p, make_data(p, kind, ++seed));
      const Forward expected = run_forward(p, in);
      const Backward gradients = run_backward(p, in, expected.statistics);
      const DeviceInputs inputs(in);
      for (const cuda::Plan& plan : cuda::legal_plans(p, cuda::current_device())) {
        if (plan.forward_on_chip.blocks == 0) continue;
        std::ostringstream name;
        name << describe(p) << ", " << to_string(kind) << ", " << plan;
        const DeviceForward f(p, inputs);
        cuda::forward(plan, p, f.arguments, nullptr);
        expect_same(name.str(), p, f.read(p), expected);
        ++on_chip;
        meeting += plan.forward_on_chip.together + plan.backward_on_chip.together;
        if (plan.backward_on_chip.blocks == 0 || kind == Kind::huge) continue;  // NaN, as above
        const DeviceBackward b(p, inputs, expected.statistics);
        cuda::backward(plan, p, b.arguments, nullptr);
        expect_same(name.str(), b.read(p), gradients);
      }
      if (HasFailure()) return;
    }
  EXPECT_GE(on_chip, 30);
  EXPECT_GE(meeting, 30);
}

// A call that may not wait for the whole device is served in another way, with the same bits.
TEST_F(CudaBits, DoNotDependOnCooperativeLaunches) {
  const cuda::DeviceInfo& device = cuda::current_device();
  cuda::DeviceInfo shared = device;
  shared.runs_together = false;
  for (const auto& [positions, channels] : {std::pair{2056, 80}, {1030, 160}}) {
    const Problem p = make_problem(2, channels, 2, positions, Layout::channels_last, DType::bfloat16);
    if (!cuda::choose_plan(p, device).group_gradient.together)
      GTEST_SKIP() << "needs a device that can run all blocks of a launch together";
    const cuda::Plan plan = cuda::choose_plan(p, shared);
    ASSERT_FALSE(plan.group.together || plan.group_gradient.together);
    const Inputs in(p, make_data(p, Kind::offset_1e3, 37));
    const Forward expected = run_forward(p, in);
    const Backward gradients = run_backward(p, in, expected.statistics);
    const DeviceInputs inputs(in);
    for (const bool cooperative : {true, false}) {
      DeviceForward f(p, inputs);
      DeviceBackward b(p, inputs, expected.statistics);
      f.arguments.cooperative = b.arguments.cooperative = cooperative;
      // Exactly what is asked for: less than that plan needs would be seen.
      const DeviceArray forward(cuda::forward_workspace(p, f.arguments));
      const DeviceArray backward(cuda::backward_workspace(p, b.arguments));
      f.arguments.workspace = forward.get_or_null();
      b.arguments.workspace = backward.get_or_null();
      cuda::forward(p, f.arguments, nullptr);
      cuda::backward(p, b.arguments, nullptr);
      expect_same(describe(p), p, f.read(p), expected);
      expect_same(describe(p), b.read(p), gradients);
    }
  }
}

// What is absent from a tree is not added: a sum of -0 stays -0. Leaves, units, blocks and channels that are
// not there, all of them padded on chip.
TEST_F(CudaBits, OfNegativeZerosOnChipAreTheCpus) {
  const std::int64_t sizes[][2] = {{2, 72}, {2, 328}, {1, 2200}};
  for (const auto& [groups, positions] : sizes) {
    Problem p = make_problem(1, 80, groups, positions, Layout::channels_last, DType::bfloat16);
    p.weight.shape = p.bias.shape = ParameterShape::per_sample;
    Data data = make_data(p, Kind::normal, 800);
    std::fill(data.dy.begin(), data.dy.end(), -0.0);
    std::fill(data.weight.begin(), data.weight.end(), 1.0);
    const Inputs in(p, data);
    const Forward forward = run_forward(p, in);
    const Backward expected = run_backward(p, in, forward.statistics);
    ASSERT_TRUE(std::signbit(load(expected.dbias)[0])) << describe(p);
    const DeviceInputs inputs(in);
    for (const cuda::Plan& plan : cuda::legal_plans(p, cuda::current_device())) {
      std::ostringstream name;
      name << describe(p) << ", " << plan;
      const DeviceBackward b(p, inputs, forward.statistics);
      cuda::backward(plan, p, b.arguments, nullptr);
      expect_same(name.str(), b.read(p), expected);
    }
  }
}

TEST_F(CudaBits, DoNotDependOnTheAlignment) {
  std::uint64_t seed = 100;
  for (const Problem& p : problems(23)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    for (const std::size_t shift : {std::size_t{1}, std::size_t{2}, std::size_t{4}}) {
      const std::string name = describe(p) + ", shifted by " + std::to_string(shift);
      expect_same(name, p, cuda_forward(p, in, shift), forward);
      expect_same(name, cuda_backward(p, in, forward.statistics, {}, shift), backward);
    }
    if (HasFailure()) return;
  }
}

void expect_same(const std::string& name, const Problem& p, const ResidualForward& found,
                 const Residual& with, const Forward& expected) {
  EXPECT_TRUE(same_bits(name + ", sum", found.sum, with.sum, image_shape(p)));
  expect_same(name, p, found.forward, expected);
}

TEST_F(CudaBits, OfASumAreTheCpusOfTheSumStored) {
  std::uint64_t seed = 400;
  const cuda::DeviceInfo device = cuda::current_device();
  for (Problem p : problems(27)) {
    if (!kEmulated && p.activation != Activation::none) p.activation = Activation::relu;
    for (const Kind kind : {Kind::normal, Kind::offset_1e5, Kind::huge, Kind::tiny, Kind::constant}) {
      const Inputs in(p, make_data(p, kind, ++seed));
      const Residual with(p, in, kind, seed + 10000);
      const Forward expected = run_forward(p, with.stored(in));
      const DeviceInputs inputs(in);
      const std::string name = describe(p) + ", " + to_string(kind) + ", ";
      std::vector<cuda::Plan> plans{cuda::choose_plan(p, device)};
      if (kind == Kind::normal) plans = cuda::legal_plans(p, device);
      for (const cuda::Plan& plan : plans) {
        std::ostringstream text;
        text << plan;
        expect_same(name + text.str(), p, DeviceResidual(p, with).forward(plan, p, inputs), with, expected);
      }
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, OfASumDoNotDependOnTheAlignment) {
  std::uint64_t seed = 500;
  for (const Problem& p : problems(28)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Residual with(p, in, Kind::normal, seed + 10000);
    const cuda::Plan plan = cuda::choose_plan(p, cuda::current_device());
    const ResidualForward found = DeviceResidual(p, with).forward(plan, p, DeviceInputs(in));
    for (const ResidualShifts& s : {ResidualShifts{1, 0, 0}, {0, 1, 0}, {0, 0, 1}, {2, 4, 1}, {4, 4, 4}})
      expect_same(describe(p) + ", shifted by " + std::to_string(s.x) + ", " + std::to_string(s.residual) +
                      ", " + std::to_string(s.sum),
                  p, DeviceResidual(p, with, s).forward(plan, p, DeviceInputs(in, s.x)), with, found.forward);
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, OfASampleDoNotDependOnItsBatch) {
  std::uint64_t seed = 150;
  for (Problem p : problems(24)) {
    p.weight.shape = p.bias.shape = ParameterShape::per_channel;
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    const std::int64_t size = p.channels * p.positions;
    Problem one = p;
    one.samples = 1;
    for (std::int64_t n = 0; n < std::min<std::int64_t>(p.samples, 5); ++n) {
      Inputs alone = in;
      alone.x = part(in.x, n * size, size);
      alone.dy = part(in.dy, n * size, size);
      const std::string name = describe(p) + ", sample " + std::to_string(n);
      const Forward f = cuda_forward(one, alone);
      EXPECT_TRUE(same_bits(name + ", y", f.y, part(forward.y, n * size, size), image_shape(one)));
      const Backward b = cuda_backward(one, alone, f.statistics);
      EXPECT_TRUE(same_bits(name + ", dx", b.dx, part(backward.dx, n * size, size), image_shape(one)));
    }
    if (HasFailure()) return;
  }
}

// The same values stored in fp32: equal statistics, and equal results once they are rounded to the narrow
// type.
TEST_F(CudaBits, DoNotDependOnTheStorageType) {
  std::uint64_t seed = 200;
  for (const Problem& narrow : problems(25)) {
    const Data data = make_data(narrow, Kind::normal, ++seed);
    Problem wide = narrow;
    wide.x = wide.y = wide.weight.dtype = wide.bias.dtype = DType::float32;
    const Inputs narrow_in(narrow, data), wide_in(wide, data);
    const Forward f = cuda_forward(narrow, narrow_in);
    Forward g = cuda_forward(wide, wide_in);
    g.y = store(load(g.y), narrow.y);
    expect_same(describe(narrow), narrow, f, g);
    Backward c = cuda_backward(wide, wide_in, f.statistics);
    c.dx = store(load(c.dx), narrow.x);
    c.dweight = store(load(c.dweight), narrow.weight.dtype);
    c.dbias = store(load(c.dbias), narrow.bias.dtype);
    expect_same(describe(narrow), cuda_backward(narrow, narrow_in, f.statistics), c);
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, DoNotDependOnWhichGradientsAreWanted) {
  std::uint64_t seed = 300;
  for (const Problem& p : problems(26)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = cuda_forward(p, in);
    const Backward all = cuda_backward(p, in, forward.statistics);
    for (int subset = 0; subset < 7; ++subset) {
      const Wanted wanted{(subset & 1) != 0, (subset & 2) != 0, (subset & 4) != 0};
      const Backward some = cuda_backward(p, in, forward.statistics, wanted);
      const std::string name = describe(p) + ", subset " + std::to_string(subset);
      if (wanted.dx) EXPECT_TRUE(same_bits(name + ", dx", some.dx, all.dx, image_shape(p)));
      if (wanted.dweight)
        EXPECT_TRUE(same_bits(name + ", dweight", some.dweight, all.dweight, flat(all.dweight)));
      if (wanted.dbias) EXPECT_TRUE(same_bits(name + ", dbias", some.dbias, all.dbias, flat(all.dbias)));
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, MomentsThenApplyIsForwardAndTheMomentsAreTheCpus) {
  std::uint64_t seed = 500;
  for (const Problem& p : problems(27)) {
    const Inputs in(p, make_data(p, Kind::offset_1e3, ++seed));
    const Forward forward = cuda_forward(p, in);
    const DeviceInputs inputs(in);
    DeviceForward applied(p, inputs);
    const DeviceArray moments(static_cast<std::size_t>(3 * p.samples * p.groups) * sizeof(double));
    cuda::moments(p, inputs.x.get(), static_cast<double*>(moments.get()), applied.workspace.get(), nullptr);
    cuda::apply(p, applied.arguments, static_cast<const double*>(moments.get()), nullptr);
    expect_same(describe(p), p, applied.read(p), forward);
    applied.arguments.statistics = nullptr;
    cuda::apply(p, applied.arguments, static_cast<const double*>(moments.get()), nullptr);
    expect_same(describe(p) + ", no statistics", p, applied.read(p), forward);

    std::vector<double> actual(static_cast<std::size_t>(3 * p.samples * p.groups)), expected(actual);
    moments.read(actual.data());
    const Workspace workspace(cpu::forward_workspace(p));
    cpu::moments(p, in.x.data(), expected.data(), workspace.get());
    EXPECT_TRUE(same_bits(describe(p) + ", moments", actual.data(), expected.data(), sizeof(double),
                          {p.samples, p.groups, 3}));
    if (HasFailure()) return;
  }
}

TEST_F(CudaBits, FusedReluIsReluOfTheUnfused) {
  std::uint64_t seed = 600;
  for (Problem p : problems(28)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    p.activation = Activation::relu;
    const Forward fused = cuda_forward(p, in);
    p.activation = Activation::none;
    std::vector<double> y = load(cuda_forward(p, in).y);
    for (double& value : y) value = value <= 0 ? 0 : value;
    EXPECT_TRUE(same_bits(describe(p), fused.y, store(y, p.y), image_shape(p)));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace steadynorm::test
