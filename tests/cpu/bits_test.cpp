// SPDX-License-Identifier: Apache-2.0
// Each clause of docs/numerics.md, "What the bits depend on", by memcmp.
#include <gtest/gtest.h>

#include "cpu/kernels.h"
#include "cpu/run_cpu.h"
#include "support/bits.h"

namespace steadynorm::test {
namespace {

constexpr int kProblems = 60;
constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::silu, Activation::gelu,
                                       Activation::gelu_tanh};

std::vector<std::int64_t> flat(const Array& array) { return {array.count()}; }

void expect_same(const std::string& name, const Problem& p, const Forward& a, const Forward& b) {
  EXPECT_TRUE(same_bits(name + ", y", a.y, b.y, image_shape(p)));
  EXPECT_TRUE(same_bits(name + ", statistics", a.statistics.data(), b.statistics.data(), sizeof(float),
                        {3, p.samples, p.groups}));
}

void expect_same(const std::string& name, const Backward& a, const Backward& b) {
  EXPECT_TRUE(same_bits(name + ", dx", a.dx, b.dx, flat(b.dx)));
  EXPECT_TRUE(same_bits(name + ", dweight", a.dweight, b.dweight, flat(b.dweight)));
  EXPECT_TRUE(same_bits(name + ", dbias", a.dbias, b.dbias, flat(b.dbias)));
}

Array part(const Array& array, std::int64_t begin, std::int64_t count) {
  Array result(array.dtype, count);
  const std::size_t size = size_of(array.dtype);
  std::memcpy(result.data(), array.bytes.data() + static_cast<std::size_t>(begin) * size,
              result.bytes.size());
  return result;
}

// Problems that cross the boundaries of leaf, unit, panel and item as well as random ones. The last is taken
// in blocks as a batch, and by sweeps as a sample.
std::vector<Problem> problems(std::uint64_t seed) {
  Random random(seed);
  std::vector<Problem> list;
  for (int i = 0; i < kProblems; ++i) list.push_back(random_problem(random, 30000));
  const std::int64_t sizes[][4] = {{1, 2, 1, 270001}, {2, 6, 2, 40003}, {3, 600, 2, 65}, {1, 40, 40, 3000},
                                   {70, 24, 3, 1},    {5, 514, 1, 7},   {33, 8, 4, 49},  {9, 24, 3, 1500}};
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

// Rows of a parameter that sample n has.
Array sample_rows(const Problem& p, const Parameter& parameter, const Array& values, std::int64_t n) {
  return parameter.shape == ParameterShape::per_sample ? part(values, n * p.channels, p.channels) : values;
}

Inputs sample_inputs(const Problem& p, const Inputs& in, std::int64_t n) {
  const std::int64_t size = p.channels * p.positions;
  Inputs one = in;
  one.x = part(in.x, n * size, size);
  one.dy = part(in.dy, n * size, size);
  one.weight = sample_rows(p, p.weight, in.weight, n);
  one.bias = sample_rows(p, p.bias, in.bias, n);
  return one;
}

Array narrowed(const Array& array, DType dtype) { return store(load(array), dtype); }

// Everything that may evaluate a problem, crossed: instruction sets, threads, the whole batch or one sample
// at a time, bf16 or fp32 storage of the same values; all against fp32, whole, one thread.
TEST(CpuBits, AreTheSameForEveryWayToEvaluateThem) {
  Random random(11);
  std::vector<Problem> list = problems(11);
  while (list.size() < 200) list.push_back(random_problem(random, 3000));
  std::uint64_t seed = 0;
  for (Problem p : list) {
    p.x = p.y = p.weight.dtype = p.bias.dtype = DType::bfloat16;
    p.activation = kActivations[seed % 5];
    const Data data = make_data(p, Kind::normal, ++seed);
    Problem wide = p;
    wide.x = wide.y = wide.weight.dtype = wide.bias.dtype = DType::float32;
    const Inputs wide_inputs(wide, data), narrow_inputs(p, data);
    const Forward forward = run_forward(wide, wide_inputs);
    const Backward backward = run_backward(wide, wide_inputs, forward.statistics);
    for (const cpu::Kernels* const* k = cpu::available_kernels(); *k != nullptr; ++k) {
      cpu::use_kernels(*k);
      for (const int threads : {1, 2, 3, 7})
        for (const DType storage : {DType::float32, DType::bfloat16}) {
          if (p.elements() > 30000 && threads != 3) continue;  // large ones are for sweeps over several items
          const std::string name = describe(p) + ", " + (*k)->name + ", threads " + std::to_string(threads) +
                                   ", " + to_string(storage);
          const cpu::ParallelFor parallel = random_ranges(threads, seed);
          const Problem& stored = storage == DType::float32 ? wide : p;
          const Inputs& in = storage == DType::float32 ? wide_inputs : narrow_inputs;
          const Forward f{narrowed(forward.y, storage), forward.statistics};
          const Backward b{narrowed(backward.dx, storage), narrowed(backward.dweight, storage),
                           narrowed(backward.dbias, storage)};
          expect_same(name, p, run_forward(stored, in, parallel), f);
          expect_same(name, run_backward(stored, in, forward.statistics, {}, parallel), b);
          Problem one = stored;
          one.samples = 1;
          const std::int64_t size = p.channels * p.positions;
          for (const std::int64_t n : {std::int64_t{0}, p.samples - 1}) {
            const Inputs alone = sample_inputs(p, in, n);
            const Forward g = run_forward(one, alone, parallel);
            const Backward c = run_backward(one, alone, g.statistics, {}, parallel);
            const std::string sample = name + ", sample " + std::to_string(n);
            EXPECT_TRUE(same_bits(sample + ", y", g.y, part(f.y, n * size, size), image_shape(one)));
            EXPECT_TRUE(same_bits(sample + ", dx", c.dx, part(b.dx, n * size, size), image_shape(one)));
          }
          if (HasFailure()) return cpu::use_kernels(nullptr);
        }
    }
    cpu::use_kernels(nullptr);
  }
}

TEST(CpuBits, DoNotDependOnTheInstructionSet) {
  std::uint64_t seed = 50;
  for (const Problem& p : problems(20)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = run_forward(p, in);
    const Backward backward = run_backward(p, in, forward.statistics);
    for (const cpu::Kernels* const* k = cpu::available_kernels(); *k != nullptr; ++k) {
      cpu::use_kernels(*k);
      expect_same(describe(p) + ", " + (*k)->name, p, run_forward(p, in), forward);
      expect_same(describe(p) + ", " + (*k)->name, run_backward(p, in, forward.statistics), backward);
    }
    cpu::use_kernels(nullptr);
    if (HasFailure()) return;
  }
}

TEST(CpuBits, OfASumAreThoseOfTheSumStored) {
  std::uint64_t seed = 400;
  for (const Problem& p : problems(30))
    for (const Kind kind : {Kind::normal, Kind::offset_1e5, Kind::huge, Kind::tiny, Kind::constant}) {
      const Inputs in(p, make_data(p, kind, ++seed));
      const Residual with(p, in, kind, seed + 10000);
      const Forward expected = run_forward(p, with.stored(in));
      for (const cpu::Kernels* const* k = cpu::available_kernels(); *k != nullptr; ++k) {
        cpu::use_kernels(*k);
        const std::string name = describe(p) + ", " + to_string(kind) + ", " + (*k)->name;
        const ResidualForward found = run_forward(p, in, with, random_ranges(3, seed));
        EXPECT_TRUE(same_bits(name + ", sum", found.sum, with.sum, image_shape(p)));
        expect_same(name, p, found.forward, expected);
      }
      cpu::use_kernels(nullptr);
      if (HasFailure()) return;
    }
}

TEST(CpuBits, OfASampleDoNotDependOnItsBatch) {
  std::uint64_t seed = 100;
  for (const Problem& p : problems(12)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = run_forward(p, in);
    const Backward backward = run_backward(p, in, forward.statistics);
    const std::int64_t size = p.channels * p.positions;
    Problem one = p;
    one.samples = 1;
    for (std::int64_t n = 0; n < p.samples; ++n) {
      const Inputs alone = sample_inputs(p, in, n);
      const std::string name = describe(p) + ", sample " + std::to_string(n);
      const Forward f = run_forward(one, alone);
      EXPECT_TRUE(same_bits(name + ", y", f.y, part(forward.y, n * size, size), image_shape(one)));
      const Backward b = run_backward(one, alone, f.statistics);
      EXPECT_TRUE(same_bits(name + ", dx", b.dx, part(backward.dx, n * size, size), image_shape(one)));
      if (p.weight.shape == ParameterShape::per_sample) {
        EXPECT_TRUE(same_bits(name + ", dweight", b.dweight, sample_rows(p, p.weight, backward.dweight, n),
                              {p.channels}));
      }
      if (p.bias.shape == ParameterShape::per_sample) {
        EXPECT_TRUE(
            same_bits(name + ", dbias", b.dbias, sample_rows(p, p.bias, backward.dbias, n), {p.channels}));
      }
    }
    if (HasFailure()) return;
  }
}

// The same values stored in fp32: equal statistics, and equal results once they are rounded to the narrow
// type.
TEST(CpuBits, DoNotDependOnTheStorageType) {
  std::uint64_t seed = 200;
  for (const Problem& narrow : problems(13)) {
    const Data data = make_data(narrow, Kind::normal, ++seed);
    Problem wide = narrow;
    wide.x = wide.y = wide.weight.dtype = wide.bias.dtype = DType::float32;
    const Inputs narrow_in(narrow, data), wide_in(wide, data);
    const Forward f = run_forward(narrow, narrow_in), g = run_forward(wide, wide_in);
    const std::string name = describe(narrow);
    EXPECT_TRUE(same_bits(name + ", statistics", f.statistics.data(), g.statistics.data(), sizeof(float),
                          {3, narrow.samples, narrow.groups}));
    EXPECT_TRUE(same_bits(name + ", y", f.y, store(load(g.y), narrow.y), image_shape(narrow)));
    Backward b = run_backward(narrow, narrow_in, f.statistics), c = run_backward(wide, wide_in, f.statistics);
    c.dx = store(load(c.dx), narrow.x);
    c.dweight = store(load(c.dweight), narrow.weight.dtype);
    c.dbias = store(load(c.dbias), narrow.bias.dtype);
    expect_same(name, b, c);
    if (HasFailure()) return;
  }
}

TEST(CpuBits, DoNotDependOnWhichGradientsAreWanted) {
  std::uint64_t seed = 300;
  for (const Problem& p : problems(14)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward forward = run_forward(p, in);
    const Backward all = run_backward(p, in, forward.statistics);
    for (int subset = 0; subset < 7; ++subset) {
      const Wanted wanted{(subset & 1) != 0, (subset & 2) != 0, (subset & 4) != 0};
      const Backward some = run_backward(p, in, forward.statistics, wanted);
      const std::string name = describe(p) + ", subset " + std::to_string(subset);
      if (wanted.dx) {
        EXPECT_TRUE(same_bits(name + ", dx", some.dx, all.dx, image_shape(p)));
      }
      if (wanted.dweight) {
        EXPECT_TRUE(same_bits(name + ", dweight", some.dweight, all.dweight, flat(all.dweight)));
      }
      if (wanted.dbias) {
        EXPECT_TRUE(same_bits(name + ", dbias", some.dbias, all.dbias, flat(all.dbias)));
      }
    }
    if (HasFailure()) return;
  }
}

TEST(CpuBits, PerSampleRowsThatAgreeGiveWhatOneRowGives) {
  std::uint64_t seed = 400;
  for (Problem p : problems(15)) {
    p.weight.shape = p.bias.shape = ParameterShape::per_channel;
    Data data = make_data(p, Kind::normal, ++seed);
    const Inputs in(p, data);
    const Forward forward = run_forward(p, in);
    const Backward backward = run_backward(p, in, forward.statistics);
    p.weight.shape = p.bias.shape = ParameterShape::per_sample;
    for (std::vector<double>* rows : {&data.weight, &data.bias}) {
      const std::vector<double> row = *rows;
      for (std::int64_t n = 1; n < p.samples; ++n) rows->insert(rows->end(), row.begin(), row.end());
    }
    const Inputs repeated(p, data);
    expect_same(describe(p), p, run_forward(p, repeated), forward);
    EXPECT_TRUE(same_bits(describe(p) + ", dx", run_backward(p, repeated, forward.statistics).dx, backward.dx,
                          image_shape(p)));
    if (HasFailure()) return;
  }
}

TEST(CpuBits, MomentsThenApplyIsForward) {
  std::uint64_t seed = 500;
  for (const Problem& p : problems(16)) {
    const Inputs in(p, make_data(p, Kind::offset_1e3, ++seed));
    const Forward forward = run_forward(p, in);
    const Workspace workspace(cpu::forward_workspace(p));
    std::vector<double> moments(static_cast<std::size_t>(3 * p.samples * p.groups));
    cpu::moments(p, in.x.data(), moments.data(), workspace.get(), random_ranges(3, seed));
    EXPECT_EQ(moments[0], static_cast<double>(p.group_size()));
    Forward applied = forward;
    applied.y = rubbish(p.y, p.elements());
    applied.statistics.assign(forward.statistics.size(), -1);
    cpu::ForwardArguments a = forward_arguments(in, applied);
    cpu::apply(p, a, moments.data(), random_ranges(2, seed));
    expect_same(describe(p), p, applied, forward);
    applied.y = rubbish(p.y, p.elements());
    a.y = applied.y.data();
    a.statistics = nullptr;
    cpu::apply(p, a, moments.data());
    expect_same(describe(p) + ", no statistics", p, applied, forward);
    if (HasFailure()) return;
  }
}

TEST(CpuBits, FusedReluIsReluOfTheUnfused) {
  std::uint64_t seed = 600;
  for (Problem p : problems(17)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    p.activation = Activation::relu;
    const Forward fused = run_forward(p, in);
    p.activation = Activation::none;
    std::vector<double> y = load(run_forward(p, in).y);
    for (double& value : y) value = value <= 0 ? 0 : value;
    EXPECT_TRUE(same_bits(describe(p), fused.y, store(y, p.y), image_shape(p)));
  }
}

// A group that holds values too small to square is computed again in double; its
// neighbours, in the same vectors and panels, are not.
TEST(CpuBits, OfAGroupDoNotDependOnItsNeighbours) {
  std::uint64_t seed = 800;
  for (const Problem& p : problems(21)) {
    if (p.groups == 1) continue;
    Data data = make_data(p, Kind::normal, ++seed);
    const Inputs in(p, data);
    const Forward forward = run_forward(p, in);
    const std::int64_t last = p.groups - 1, from = last * p.channels_per_group();
    const auto channel_of = [&](std::int64_t i) {
      return p.layout == Layout::contiguous ? i / p.positions % p.channels : i % p.channels;
    };
    for (std::int64_t i = 0; i < p.elements(); ++i)
      if (channel_of(i) >= from) data.x[static_cast<std::size_t>(i)] *= 0x1p-70;
    const Forward other = run_forward(p, Inputs(p, data));
    for (std::int64_t g = 0; g < 3 * p.samples * p.groups; ++g)
      if (g % p.groups != last) {
        EXPECT_EQ(std::memcmp(&forward.statistics[static_cast<std::size_t>(g)],
                              &other.statistics[static_cast<std::size_t>(g)], sizeof(float)),
                  0)
            << describe(p) << ", statistic " << g;
      }
    const std::size_t size = size_of(p.y);
    for (std::int64_t i = 0; i < p.elements(); ++i)
      if (channel_of(i) < from) {
        const std::size_t at = static_cast<std::size_t>(i) * size;
        ASSERT_EQ(std::memcmp(forward.y.bytes.data() + at, other.y.bytes.data() + at, size), 0)
            << describe(p) << ", y " << i;
      }
    if (HasFailure()) return;
  }
}

TEST(CpuBits, RepeatAndIgnoreWhatTheWorkspaceHeld) {
  std::uint64_t seed = 700;
  for (const Problem& p : problems(18)) {
    const Inputs in(p, make_data(p, Kind::normal, ++seed));
    const Forward first = run_forward(p, in);
    expect_same(describe(p), p, run_forward(p, in), first);
    expect_same(describe(p), run_backward(p, in, first.statistics), run_backward(p, in, first.statistics));
  }
}

// Vectors have tails; a value's bits must not depend on whether it falls into one. x shifted by a few places
// within channels that all hold the same values gives the same y, whatever the activation.
TEST(CpuBits, OfAValueDoNotDependOnItsPlaceInAVector) {
  for (const Activation activation : kActivations) {
    Problem p;
    p.samples = 1;
    p.channels = p.groups = 37;
    p.positions = 67;
    p.activation = activation;
    const Data data = make_data(p, Kind::normal, 19);
    Data same = data;
    for (std::size_t i = 0; i < same.x.size(); ++i) {
      same.x[i] = data.x[i % 67];
      same.dy[i] = data.dy[i % 67];
    }
    const Inputs in(p, same);
    const Forward forward = run_forward(p, in);
    const Backward backward = run_backward(p, in, forward.statistics);
    for (std::int64_t c = 1; c < p.channels; ++c) {
      EXPECT_TRUE(same_bits("y", part(forward.y, c * 67, 67), part(forward.y, 0, 67), {67}));
      EXPECT_TRUE(same_bits("dx", part(backward.dx, c * 67, 67), part(backward.dx, 0, 67), {67}));
    }
  }
}

}  // namespace
}  // namespace steadynorm::test
