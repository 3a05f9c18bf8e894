// SPDX-License-Identifier: Apache-2.0
// Times of the CPU backend, without a framework: cpu/<pass>/<layout>/<dtype>/<activation>/<case>, and
// cpu/copy.
//
//   cpu_bench [threads=N] [Google Benchmark's options, such as --benchmark_filter=forward/contiguous]
//
// Bytes a second count the least traffic: x and y in forward, x, dy and dx in backward; a copy's are what it
// reads and writes. STEADYNORM_BENCH=ON builds it.
#include <benchmark/benchmark.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "steadynorm/cpu.h"
#include "support/cases.h"

namespace steadynorm {
namespace {

constexpr std::int64_t kMostBytes = 256 << 20;  // of an fp32 x

// Threads that each take an equal part of every call.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { work(t); });
  }
  ~Pool() {
    count_ = -1;
    start();
    for (std::thread& worker : workers_) worker.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void run(std::int64_t count, const cpu::ParallelBody& body) {
    if (workers_.empty()) return cpu::serial(count, body);
    count_ = count;
    body_ = &body;
    running_ = static_cast<int>(workers_.size());
    start();
    part(0);
    for (int left = running_; left > 0; left = running_) running_.wait(left);
  }

 private:
  void start() {
    ++call_;
    call_.notify_all();
  }
  void part(std::int64_t t) const {
    const auto threads = static_cast<std::int64_t>(workers_.size()) + 1;
    const std::int64_t begin = count_ * t / threads, end = count_ * (t + 1) / threads;
    if (begin < end) (*body_)(begin, end);
  }
  void work(int t) {
    for (int seen = 0;;) {
      call_.wait(seen);
      seen = call_;
      if (count_ < 0) return;
      part(t);
      if (--running_ == 0) running_.notify_one();
    }
  }

  std::atomic<int> call_{0}, running_{0};
  std::int64_t count_ = 0;
  const cpu::ParallelBody* body_ = nullptr;
  std::vector<std::thread> workers_;
};

struct Free {
  void operator()(void* p) const { ::operator delete (p, std::align_val_t{64}); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer buffer(std::size_t bytes) { return Buffer(::operator new (bytes + 64, std::align_val_t{64})); }

// Values in [-2, 2) of either storage type, in no pattern that matters.
Buffer values(std::int64_t count, DType dtype) {
  Buffer result = buffer(static_cast<std::size_t>(count) * size_of(dtype));
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = static_cast<float>(state >> 8) * 0x1p-22f - 2;
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    const auto half = static_cast<std::uint16_t>(bits >> 16);
    if (dtype == DType::float32)
      std::memcpy(static_cast<float*>(result.get()) + i, &value, sizeof value);
    else
      std::memcpy(static_cast<std::uint16_t*>(result.get()) + i, &half, sizeof half);
  }
  return result;
}

void time_problem(benchmark::State& state, const Problem& p, bool backward, Pool& pool) {
  const cpu::ParallelFor parallel = [&](std::int64_t count, const cpu::ParallelBody& body) {
    pool.run(count, body);
  };
  const Buffer x = values(p.elements(), p.x), dy = values(backward ? p.elements() : 0, p.y);
  const Buffer weight = values(p.channels, p.weight.dtype), bias = values(p.channels, p.bias.dtype);
  const Buffer y = values(p.elements(), p.y),
               statistics = buffer(static_cast<std::size_t>(12 * p.samples * p.groups));
  const Buffer dweight = values(p.channels, p.weight.dtype), dbias = values(p.channels, p.bias.dtype);
  const Buffer workspace = buffer(std::max(cpu::forward_workspace(p), cpu::backward_workspace(p)));
  const cpu::ForwardArguments f{
      x.get(), weight.get(), bias.get(), y.get(), static_cast<float*>(statistics.get()), workspace.get()};
  const cpu::BackwardArguments b{
      x.get(), dy.get(),      weight.get(), bias.get(),     static_cast<float*>(statistics.get()),
      y.get(), dweight.get(), dbias.get(),  workspace.get()};
  cpu::forward(p, f, parallel);
  for (auto _ : state) {
    if (backward)
      cpu::backward(p, b, parallel);
    else
      cpu::forward(p, f, parallel);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * (backward ? backward_bytes(p) : forward_bytes(p)));
}

void time_copy(benchmark::State& state, std::int64_t bytes, Pool& pool) {
  const Buffer from = values(bytes / 4, DType::float32), to = values(bytes / 4, DType::float32);
  for (auto _ : state) {
    pool.run(bytes / 4096, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(static_cast<char*>(to.get()) + begin * 4096,
                  static_cast<const char*>(from.get()) + begin * 4096,
                  static_cast<std::size_t>((end - begin) * 4096));
    });
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * 2 * bytes);
}

// The named cases, and small ones of classifiers and short rows.
std::vector<test::Case> cases() {
  std::vector<test::Case> list;
  for (const test::Case& named : test::named_cases())
    if (named.problem.elements() * 4 <= kMostBytes) list.push_back(named);
  const auto add = [&](const char* name, std::int64_t N, std::int64_t C, std::int64_t S, std::int64_t G) {
    for (const Layout layout : {Layout::contiguous, Layout::channels_last}) {
      if (S == 1 && layout == Layout::channels_last) continue;
      test::Case extra;
      extra.name = name;
      extra.problem.samples = N;
      extra.problem.channels = C;
      extra.problem.positions = S;
      extra.problem.groups = G;
      extra.problem.layout = layout;
      list.push_back(extra);
    }
  };
  add("resnet-64x56", 8, 64, 56 * 56, 32);
  add("resnet-256x14", 32, 256, 14 * 14, 32);
  add("one-320x64", 1, 320, 64 * 64, 32);
  add("rows-512", 64, 512, 1, 32);
  add("one-32x96", 1, 32, 96 * 96 * 96, 8);
  return list;
}

void register_all(Pool& pool) {
  for (const std::int64_t mib : {1, 16, 64, 256})
    benchmark::RegisterBenchmark(("cpu/copy/" + std::to_string(mib) + "MiB").c_str(), time_copy, mib << 20,
                                 std::ref(pool));
  for (const test::Case& c : cases())
    for (const bool backward : {false, true})
      for (const DType dtype : {DType::float32, DType::bfloat16})
        for (const Activation activation :
             {Activation::none, Activation::relu, Activation::silu, Activation::gelu}) {
          Problem p = c.problem;
          p.x = p.y = dtype;
          p.weight = p.bias = {ParameterShape::per_channel, dtype};
          p.activation = activation;
          const std::string name = std::string("cpu/") + (backward ? "backward/" : "forward/") +
                                   to_string(p.layout) + (dtype == DType::float32 ? "/fp32/" : "/bf16/") +
                                   to_string(activation) + "/" + c.name;
          benchmark::RegisterBenchmark(name.c_str(), time_problem, p, backward, std::ref(pool))
              ->UseRealTime();
        }
}

}  // namespace
}  // namespace steadynorm

int main(int argc, char** argv) {
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  if (argc > 1 && std::string_view(argv[1]).starts_with("threads=")) {
    threads = std::max(1, std::atoi(argv[1] + 8));
    argv[1] = argv[0];
    ++argv;
    --argc;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  steadynorm::Pool pool(threads);
  steadynorm::register_all(pool);
  benchmark::AddCustomContext("threads", std::to_string(threads));
  benchmark::RunSpecifiedBenchmarks();
}
