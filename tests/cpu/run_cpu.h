// SPDX-License-Identifier: Apache-2.0
// Runs the CPU entries on test data. Workspaces have the stated size exactly and hold rubbish; so do outputs.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "steadynorm/cpu.h"
#include "support/data.h"

namespace steadynorm::test {

struct Inputs {
  Array x, dy, weight, bias;

  Inputs(const Problem& p, const Data& data)
      : x(store(data.x, p.x)),
        dy(store(data.dy, p.y)),
        weight(store(data.weight, p.weight.dtype)),
        bias(store(data.bias, p.bias.dtype)) {}
};

struct Forward {
  Array y;
  std::vector<float> statistics;
};

// Empty arrays: not asked for.
struct Backward {
  Array dx, dweight, dbias;
};

struct Wanted {
  bool dx = true, dweight = true, dbias = true;
};

class Workspace {
 public:
  explicit Workspace(std::size_t bytes)
      : data_(static_cast<unsigned char*>(::operator new (bytes, std::align_val_t{64}))) {
    std::fill_n(data_.get(), bytes, static_cast<unsigned char>(0xff));
  }
  void* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  std::unique_ptr<unsigned char, Free> data_;
};

inline Array rubbish(DType dtype, std::int64_t count) {
  Array array(dtype, count);
  std::fill(array.bytes.begin(), array.bytes.end(), static_cast<unsigned char>(0xff));
  return array;
}

inline const void* pointer(const Array& array) { return array.bytes.empty() ? nullptr : array.data(); }

inline cpu::ForwardArguments forward_arguments(const Inputs& in, Forward& out) {
  cpu::ForwardArguments a;
  a.x = in.x.data();
  a.weight = pointer(in.weight);
  a.bias = pointer(in.bias);
  a.y = out.y.data();
  a.statistics = out.statistics.data();
  return a;
}

inline Forward run_forward(const Problem& p, const Inputs& in,
                           const cpu::ParallelFor& parallel = cpu::serial) {
  Forward out{rubbish(p.y, p.elements()),
              std::vector<float>(static_cast<std::size_t>(3 * p.samples * p.groups))};
  const Workspace workspace(cpu::forward_workspace(p));
  cpu::ForwardArguments a = forward_arguments(in, out);
  a.workspace = workspace.get();
  cpu::forward(p, a, parallel);
  return out;
}

// A residual for inputs of this kind, and what its sum with x is: fp32 addition, rounded to x's dtype. In
// double the sum of two fp32 values rounds to fp32 as their fp32 sum does (53 >= 2 * 24 + 2 bits).
struct Residual {
  Array residual, sum;

  Residual(const Problem& p, const Inputs& in, Kind kind, std::uint64_t seed) {
    const bool alike = kind == Kind::tiny || kind == Kind::constant;
    residual = store(make_data(p, alike ? kind : Kind::normal, seed).x, p.x);
    std::vector<double> values = load(in.x);
    const std::vector<double> addends = load(residual);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += addends[i];
    sum = store(values, p.x);
  }

  // The inputs whose x is the sum.
  Inputs stored(Inputs in) const {
    in.x = sum;
    return in;
  }
};

struct ResidualForward {
  Array sum;
  Forward forward;
};

inline ResidualForward run_forward(const Problem& p, const Inputs& in, const Residual& with,
                                   const cpu::ParallelFor& parallel = cpu::serial) {
  ResidualForward out{
      rubbish(p.x, p.elements()),
      {rubbish(p.y, p.elements()), std::vector<float>(static_cast<std::size_t>(3 * p.samples * p.groups))}};
  const Workspace workspace(cpu::forward_workspace(p));
  cpu::ForwardArguments a = forward_arguments(in, out.forward);
  a.residual = with.residual.data();
  a.sum = out.sum.data();
  a.workspace = workspace.get();
  cpu::forward(p, a, parallel);
  return out;
}

inline Backward run_backward(const Problem& p, const Inputs& in, const std::vector<float>& statistics,
                             const Wanted& wanted = {}, const cpu::ParallelFor& parallel = cpu::serial) {
  Backward out;
  if (wanted.dx) out.dx = rubbish(p.x, p.elements());
  if (wanted.dweight) out.dweight = rubbish(p.weight.dtype, parameter_count(p, p.weight));
  if (wanted.dbias) out.dbias = rubbish(p.bias.dtype, parameter_count(p, p.bias));
  const Workspace workspace(cpu::backward_workspace(p));
  cpu::BackwardArguments a;
  a.x = in.x.data();
  a.dy = in.dy.data();
  a.weight = pointer(in.weight);
  a.bias = pointer(in.bias);
  a.statistics = statistics.data();
  a.workspace = workspace.get();
  if (wanted.dx) a.dx = out.dx.data();
  if (!out.dweight.bytes.empty()) a.dweight = out.dweight.data();
  if (!out.dbias.bytes.empty()) a.dbias = out.dbias.data();
  cpu::backward(p, a, parallel);
  return out;
}

// `threads` threads that take random ranges, in random order.
inline cpu::ParallelFor random_ranges(int threads, std::uint64_t seed) {
  return [threads, seed](std::int64_t count, const cpu::ParallelBody& body) {
    Random random(seed);
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    for (std::int64_t begin = 0; begin < count;) {
      const std::int64_t end =
          begin + random.integer(1, std::max<std::int64_t>(1, 2 * count / (3 * threads)));
      ranges.emplace_back(begin, std::min(end, count));
      begin = ranges.back().second;
    }
    for (std::size_t i = ranges.size(); i > 1; --i)
      std::swap(ranges[i - 1],
                ranges[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t)
      workers.emplace_back([&, t] {
        for (std::size_t i = static_cast<std::size_t>(t); i < ranges.size();
             i += static_cast<std::size_t>(threads))
          body(ranges[i].first, ranges[i].second);
      });
    for (std::thread& worker : workers) worker.join();
  };
}

}  // namespace steadynorm::test
