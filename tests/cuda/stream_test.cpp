// SPDX-License-Identifier: Apache-2.0
// What only a GPU has: streams, graphs, more than 2^31 elements.
#include <gtest/gtest.h>

#include "cuda/run_cuda.h"

namespace steadynorm::test {
namespace {

class CudaStreams : public CudaTest {};

std::vector<Problem> problems() {
  std::vector<Problem> list;
  for (const Layout layout : {Layout::contiguous, Layout::channels_last})
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
      list.push_back(make_problem(2, 64, 8, 4096, layout, dtype));
      list.push_back(make_problem(3, 40, 4, 49, layout, dtype));
      list.push_back(make_problem(1, 32, 2, 70000, layout, dtype));
    }
  return list;
}

void run_both(const Problem& p, const DeviceForward& f, const DeviceBackward& b, cudaStream_t stream) {
  cuda::forward(p, f.arguments, stream);
  cuda::backward(p, b.arguments, stream);
}

TEST_F(CudaStreams, TwoAtOnceGiveTheBitsOfOneAlone) {
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const Problem& p : problems()) {
    const Inputs in(p, make_data(p, Kind::normal, 31));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    const DeviceInputs inputs(in);
    const DeviceForward f[2] = {DeviceForward(p, inputs), DeviceForward(p, inputs)};
    const DeviceBackward b[2] = {DeviceBackward(p, inputs, forward.statistics),
                                 DeviceBackward(p, inputs, forward.statistics)};
    check(cudaDeviceSynchronize());
    for (int repeat = 0; repeat < 20; ++repeat)
      for (int s = 0; s < 2; ++s) run_both(p, f[s], b[s], streams[s]);
    check(cudaDeviceSynchronize());
    for (int s = 0; s < 2; ++s) {
      expect_same(describe(p), p, f[s].read(p), forward);
      expect_same(describe(p), b[s].read(p), backward);
    }
  }
  for (const cudaStream_t stream : streams) check(cudaStreamDestroy(stream));
}

// Blocks of a cluster wait for each other's messages, and blocks that meet for all: neither may get lost,
// whatever runs beside them. The result of every launch is compared.
TEST_F(CudaStreams, TenThousandLaunchesOfBlocksThatWaitOnTwoStreamsGiveTheBitsOfOne) {
  constexpr int kAtOnce = 25, kRounds = 200;  // of each stream
  cudaStream_t streams[2];
  for (cudaStream_t& stream : streams) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int clusters = 0, meetings = 0;
  for (const Problem& p : {make_problem(1, 64, 8, 2048, Layout::contiguous, DType::bfloat16),
                           make_problem(1, 64, 8, 512, Layout::channels_last, DType::bfloat16),
                           make_problem(1, 80, 2, 2056, Layout::channels_last, DType::bfloat16)}) {
    const cuda::Plan plan = cuda::choose_plan(p, cuda::current_device());
    const auto wait = [](const cuda::Launch& l) { return l.cluster > 1 || l.together; };
    if (!wait(plan.group) || !wait(plan.group_gradient))
      GTEST_SKIP() << "needs a device whose plans have blocks that wait for each other";
    clusters += (plan.group.cluster > 1) + (plan.group_gradient.cluster > 1);
    meetings += plan.group.together + plan.group_gradient.together;
    const Inputs in(p, make_data(p, Kind::normal, 34));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    const DeviceInputs inputs(in);
    std::vector<DeviceForward> f;
    std::vector<DeviceBackward> b;
    for (int i = 0; i < 2 * kAtOnce; ++i) {
      f.emplace_back(p, inputs);
      b.emplace_back(p, inputs, forward.statistics);
    }
    for (int round = 0; round < kRounds && !HasFailure(); ++round) {
      for (std::size_t i = 0; i < f.size(); ++i) {
        check(cudaMemsetAsync(f[i].y.get(), 0xff, f[i].y.bytes(), streams[i % 2]));
        check(cudaMemsetAsync(b[i].dx.get(), 0xff, b[i].dx.bytes(), streams[i % 2]));
      }
      for (std::size_t i = 0; i < f.size(); ++i) run_both(p, f[i], b[i], streams[i % 2]);
      check(cudaDeviceSynchronize());
      for (std::size_t i = 0; i < f.size(); ++i) {
        expect_same(describe(p), p, f[i].read(p), forward);
        expect_same(describe(p), b[i].read(p), backward);
      }
    }
  }
  EXPECT_GE(clusters, 4);
  EXPECT_EQ(meetings, 2);
  for (const cudaStream_t stream : streams) check(cudaStreamDestroy(stream));
}

// Blocks that meet, as many as the device has places for, beside kernels that hold all of it.
TEST_F(CudaStreams, BlocksThatMeetEndOnABusyDevice) {
  const Problem p = make_problem(2, 640, 32, 4096, Layout::channels_last, DType::bfloat16);
  const cuda::Plan plan = cuda::choose_plan(p, cuda::current_device());
  if (!plan.group.together || !plan.group_gradient.together)
    GTEST_SKIP() << "needs a device that has places for all blocks of this problem";
  const Problem large = make_problem(1, 64, 8, 1 << 18, Layout::channels_last, DType::bfloat16);
  const Inputs in(p, make_data(p, Kind::normal, 35)), beside(large, make_data(large, Kind::normal, 36));
  const Forward forward = cuda_forward(p, in);
  const Backward backward = cuda_backward(p, in, forward.statistics);
  const DeviceInputs inputs(in), large_inputs(beside);
  const DeviceForward f(p, inputs), other(large, large_inputs);
  const DeviceBackward b(p, inputs, forward.statistics);
  cudaStream_t streams[3];
  for (cudaStream_t& stream : streams) check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int repeat = 0; repeat < 50; ++repeat) {
    for (int i = 0; i < 4; ++i) cuda::forward(large, other.arguments, streams[0]);
    cuda::forward(p, f.arguments, streams[1]);
    cuda::backward(p, b.arguments, streams[2]);
  }
  check(cudaDeviceSynchronize());
  expect_same(describe(p), p, f.read(p), forward);
  expect_same(describe(p), b.read(p), backward);
  for (const cudaStream_t stream : streams) check(cudaStreamDestroy(stream));
}

TEST_F(CudaStreams, AGraphReplaysTheBits) {
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const Problem& p : problems()) {
    const Inputs in(p, make_data(p, Kind::normal, 32));
    const Forward forward = cuda_forward(p, in);
    const Backward backward = cuda_backward(p, in, forward.statistics);
    const DeviceInputs inputs(in);
    const DeviceForward f(p, inputs);
    const DeviceBackward b(p, inputs, forward.statistics);
    check(cudaDeviceSynchronize());
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    run_both(p, f, b, stream);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&executable, graph, 0));
    for (int repeat = 0; repeat < 3; ++repeat) {
      check(cudaMemsetAsync(f.y.get(), 0xff, f.y.bytes(), stream));
      check(cudaMemsetAsync(b.dx.get(), 0xff, b.dx.bytes(), stream));
      check(cudaGraphLaunch(executable, stream));
      check(cudaStreamSynchronize(stream));
      expect_same(describe(p), p, f.read(p), forward);
      expect_same(describe(p), b.read(p), backward);
    }
    check(cudaGraphExecDestroy(executable));
    check(cudaGraphDestroy(graph));
  }
  check(cudaStreamDestroy(stream));
}

// Both samples are beyond 2^31 elements together; each must have the bits that it has alone.
TEST_F(CudaStreams, MoreThanTwoToThe31ElementsAreRightOnBothSamples) {
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total));
  for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
    const Problem p = make_problem(2, 64, 8, std::int64_t{256} * 256 * 257, layout, DType::bfloat16);
    Problem one = p;
    one.samples = 1;
    const std::size_t bytes = bytes_of(p.x, p.elements()), half = bytes / 2;
    if (free < 3 * bytes + (std::size_t{1} << 30)) GTEST_SKIP() << "needs 14 GB of device memory";
    const Problem small = make_problem(1, 64, 8, 1 << 16, layout, DType::bfloat16);
    const Inputs tile(small, make_data(small, Kind::offset_1e3, 33));
    DeviceInputs in(tile);
    in.x = DeviceArray(bytes);
    for (std::size_t at = 0; at < bytes; at += tile.x.bytes.size())
      check(cudaMemcpy(static_cast<unsigned char*>(in.x.get()) + at, tile.x.data(),
                       std::min(tile.x.bytes.size(), bytes - at), cudaMemcpyHostToDevice));
    const DeviceForward both(p, in);
    cuda::forward(p, both.arguments, nullptr);
    const Forward all = both.read(p);
    for (std::size_t n = 0; n < 2; ++n) {
      DeviceForward alone(one, in);
      alone.arguments.x = static_cast<const unsigned char*>(in.x.get()) + n * half;
      cuda::forward(one, alone.arguments, nullptr);
      const Forward f = alone.read(one);
      EXPECT_TRUE(same_bits(describe(p) + ", sample " + std::to_string(n), f.y.data(),
                            all.y.bytes.data() + n * half, 2, image_shape(one)));
    }
  }
}

}  // namespace
}  // namespace steadynorm::test
