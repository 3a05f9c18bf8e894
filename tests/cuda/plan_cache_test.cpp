// SPDX-License-Identifier: Apache-2.0
// Kept plans are those that would be chosen again, for every problem, device and thread.
#include "cuda/plan_cache.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "support/data.h"

namespace steadynorm::test {
namespace {

using namespace cuda;

DeviceInfo device(int major, int sms, std::size_t shared) {
  return {"device",          major, 0, sms, 2048, 65536, shared + 1024, shared, std::size_t{50} << 20,
          major < 9 ? 1 : 16};
}

const DeviceInfo kDevices[] = {device(8, 108, 166912), device(9, 132, 232448)};

// More than are kept, and each beside others that differ from it in one thing.
std::vector<Problem> problems() {
  std::vector<Problem> list;
  Random random(7);
  for (int i = 0; i < kKeptPlans / 4; ++i) {
    const Problem p = random_problem(random, 300000);
    for (int what = 0; what < 8; ++what) {
      Problem other = p;
      if (what == 1) other.samples += 1;
      if (what == 2) other.channels += p.groups;
      if (what == 3) other.groups = 1;
      if (what == 4) other.positions += 2048;
      if (what == 5)
        other.layout = p.layout == Layout::contiguous ? Layout::channels_last : Layout::contiguous;
      if (what == 6) other.x = p.x == DType::float32 ? DType::bfloat16 : DType::float32;
      if (what == 7) other.y = p.y == DType::float32 ? DType::bfloat16 : DType::float32;
      list.push_back(other);
    }
  }
  return list;
}

void expect_chosen(const Problem& p, const DeviceInfo& d) {
  const Planned& kept = planned(p, d);
  EXPECT_EQ(kept.plan, choose_plan(p, d)) << describe(p);
  EXPECT_EQ(kept.d.N, p.samples);
  EXPECT_EQ(kept.d.S, p.positions);
  EXPECT_EQ(kept.forward.bytes, forward_layout(p).bytes) << describe(p);
  EXPECT_EQ(kept.backward.bytes, backward_layout(p).bytes) << describe(p);
}

TEST(CudaPlanCache, GivesTheChosenPlan) {
  for (int round = 0; round < 2; ++round)
    for (const Problem& p : problems())
      for (const DeviceInfo& d : kDevices) expect_chosen(p, d);
}

// Parameters, activation and eps too, should a plan ever depend on them.
TEST(CudaPlanCache, KeepsProblemsApartThatDifferInAnything) {
  Problem p;
  p.samples = p.channels = p.groups = 2;
  p.positions = 64;
  std::vector<Problem> others(6, p);
  others[0].weight = {ParameterShape::per_channel, DType::float32};
  others[1].weight = {ParameterShape::per_sample, DType::float32};
  others[2].weight = {ParameterShape::per_channel, DType::bfloat16};
  others[3].bias = {ParameterShape::per_channel, DType::float32};
  others[4].activation = Activation::relu;
  others[5].eps = 0.5;
  for (const Problem& other : others) {
    const Planned* kept = &planned(p, kDevices[0]);  // is there until another has been made
    EXPECT_NE(&planned(other, kDevices[0]), kept);
  }
  const Planned* kept = &planned(p, kDevices[0]);
  EXPECT_NE(&planned(p, kDevices[1]), kept);
}

TEST(CudaPlanCache, ChoosesOnce) {
  Problem p;
  p.samples = p.channels = p.groups = 2;
  p.positions = 640;
  const Planned* first = &planned(p, kDevices[0]);
  EXPECT_EQ(&planned(p, kDevices[0]), first);
}

TEST(CudaPlanCache, KeepsNothingOfWhatIsRefused) {
  Problem p;
  p.samples = p.channels = p.groups = 2;
  p.positions = 6400;
  const DeviceInfo small = device(9, 132, 16);
  Problem wide = p, nan = p;
  wide.y = DType::float64;
  nan.eps = std::numeric_limits<double>::quiet_NaN();
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(planned(p, small), Unsupported);
    EXPECT_THROW(planned(wide, kDevices[0]), Unsupported);
    EXPECT_THROW(planned(nan, kDevices[0]), InvalidArgument);
    expect_chosen(p, kDevices[0]);
  }
}

TEST(CudaPlanCache, ServesThreads) {
  const std::vector<Problem> list = problems();
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&list, t] {
      for (std::size_t i = 0; i < list.size(); ++i)
        expect_chosen(list[(i + t * 100) % list.size()], kDevices[t % 2]);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace steadynorm::test
