// SPDX-License-Identifier: Apache-2.0
// Runs the CUDA entries on test data, on a GPU or emulated. Device arrays have exactly their size and hold
// rubbish; one can be put at an offset, so that no access wider than an element is aligned.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/run_cpu.h"
#include "cuda/planned.h"
#include "steadynorm/cuda.h"
#include "support/bits.h"

namespace steadynorm::test {

#if defined(STEADYNORM_EMULATED)
constexpr bool kEmulated = true;  // formulas are the host's: every activation has the CPU's bits
#else
constexpr bool kEmulated = false;
#endif

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

inline bool has_device() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::size_t bytes, std::size_t offset = 0) : bytes_(bytes), offset_(offset) {
    check(cudaMalloc(&base_, bytes + offset));
    check(cudaMemset(base_, 0xff, bytes + offset));
  }
  explicit DeviceArray(const Array& array, std::size_t offset = 0) : DeviceArray(array.bytes.size(), offset) {
    check(cudaMemcpy(get(), array.data(), bytes_, cudaMemcpyHostToDevice));
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(offset_, other.offset_);
    return *this;
  }
  ~DeviceArray() { cudaFree(base_); }

  void* get() const { return static_cast<unsigned char*>(base_) + offset_; }
  void* get_or_null() const { return bytes_ == 0 ? nullptr : get(); }
  std::size_t bytes() const { return bytes_; }
  void read(void* to) const { check(cudaMemcpy(to, get(), bytes_, cudaMemcpyDeviceToHost)); }
  Array read(DType dtype) const {
    Array array(dtype, static_cast<std::int64_t>(bytes_ / size_of(dtype)));
    read(array.data());
    return array;
  }

 private:
  void* base_ = nullptr;
  std::size_t bytes_ = 0, offset_ = 0;
};

struct DeviceInputs {
  DeviceArray x, dy, weight, bias;

  // `shift` elements beyond an aligned address.
  explicit DeviceInputs(const Inputs& in, std::size_t shift = 0)
      : x(in.x, shift * size_of(in.x.dtype)),
        dy(in.dy, shift * size_of(in.dy.dtype)),
        weight(in.weight, shift * size_of(in.weight.dtype)),
        bias(in.bias, shift * size_of(in.bias.dtype)) {}
};

inline std::size_t bytes_of(DType dtype, std::int64_t count) {
  return static_cast<std::size_t>(count) * size_of(dtype);
}

struct DeviceForward {
  DeviceArray y, statistics, workspace;
  cuda::ForwardArguments arguments;

  DeviceForward(const Problem& p, const DeviceInputs& in, std::size_t shift = 0)
      : y(bytes_of(p.y, p.elements()), shift * size_of(p.y)),
        statistics(static_cast<std::size_t>(3 * p.samples * p.groups) * sizeof(float)),
        workspace(cuda::forward_workspace(p)) {
    arguments = {in.x.get(),
                 in.weight.get_or_null(),
                 in.bias.get_or_null(),
                 y.get(),
                 static_cast<float*>(statistics.get()),
                 workspace.get()};
    arguments.cooperative = true;  // so that choose_plan() with all of the device's facts is what serves
  }
  Forward read(const Problem& p) const {
    Forward out{y.read(p.y), std::vector<float>(statistics.bytes() / sizeof(float))};
    statistics.read(out.statistics.data());
    return out;
  }
};

// Elements beyond an aligned address.
struct ResidualShifts {
  std::size_t x = 0, residual = 0, sum = 0;
};

struct DeviceResidual {
  DeviceArray residual, sum;

  DeviceResidual(const Problem& p, const Residual& with, const ResidualShifts& shifts = {})
      : residual(with.residual, shifts.residual * size_of(p.x)),
        sum(bytes_of(p.x, p.elements()), shifts.sum * size_of(p.x)) {}

  ResidualForward forward(const cuda::Plan& plan, const Problem& p, const DeviceInputs& in) const {
    DeviceForward f(p, in);
    f.arguments.residual = residual.get();
    f.arguments.sum = sum.get();
    cuda::forward(plan, p, f.arguments, nullptr);
    return {sum.read(p.x), f.read(p)};
  }
};

struct DeviceBackward {
  DeviceArray statistics, dx, dweight, dbias, workspace;
  cuda::BackwardArguments arguments;

  DeviceBackward(const Problem& p, const DeviceInputs& in, const std::vector<float>& saved,
                 const Wanted& wanted = {}, std::size_t shift = 0)
      : statistics(saved.size() * sizeof(float)),
        dx(wanted.dx ? bytes_of(p.x, p.elements()) : 0, shift * size_of(p.x)),
        dweight(wanted.dweight ? bytes_of(p.weight.dtype, parameter_count(p, p.weight)) : 0),
        dbias(wanted.dbias ? bytes_of(p.bias.dtype, parameter_count(p, p.bias)) : 0),
        workspace(cuda::backward_workspace(p)) {
    check(cudaMemcpy(statistics.get(), saved.data(), statistics.bytes(), cudaMemcpyHostToDevice));
    arguments.cooperative = true;
    arguments.x = in.x.get();
    arguments.dy = in.dy.get();
    arguments.weight = in.weight.get_or_null();
    arguments.bias = in.bias.get_or_null();
    arguments.statistics = static_cast<const float*>(statistics.get());
    arguments.dx = dx.get_or_null();
    arguments.dweight = dweight.get_or_null();
    arguments.dbias = dbias.get_or_null();
    arguments.workspace = workspace.get();
  }
  Backward read(const Problem& p) const {
    return {dx.read(p.x), dweight.read(p.weight.dtype), dbias.read(p.bias.dtype)};
  }
};

// The public entries, on the default stream. cudaMemcpy waits for it.
inline Forward cuda_forward(const Problem& p, const Inputs& in, std::size_t shift = 0) {
  const DeviceInputs inputs(in, shift);
  const DeviceForward f(p, inputs, shift);
  cuda::forward(p, f.arguments, nullptr);
  return f.read(p);
}

inline Backward cuda_backward(const Problem& p, const Inputs& in, const std::vector<float>& statistics,
                              const Wanted& wanted = {}, std::size_t shift = 0) {
  const DeviceInputs inputs(in, shift);
  const DeviceBackward b(p, inputs, statistics, wanted, shift);
  cuda::backward(p, b.arguments, nullptr);
  return b.read(p);
}

// A fixture that skips where there is no GPU.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "needs a CUDA device, found none";
  }
};

inline std::vector<std::int64_t> flat(const Array& array) { return {array.count()}; }

inline void expect_same(const std::string& name, const Problem& p, const Forward& a, const Forward& b) {
  EXPECT_TRUE(same_bits(name + ", y", a.y, b.y, image_shape(p)));
  EXPECT_TRUE(same_bits(name + ", statistics", a.statistics.data(), b.statistics.data(), sizeof(float),
                        {3, p.samples, p.groups}));
}

inline void expect_same(const std::string& name, const Backward& a, const Backward& b) {
  EXPECT_TRUE(same_bits(name + ", dx", a.dx, b.dx, flat(b.dx)));
  EXPECT_TRUE(same_bits(name + ", dweight", a.dweight, b.dweight, flat(b.dweight)));
  EXPECT_TRUE(same_bits(name + ", dbias", a.dbias, b.dbias, flat(b.dbias)));
}

inline Problem make_problem(std::int64_t N, std::int64_t C, std::int64_t G, std::int64_t S, Layout layout,
                            DType dtype = DType::float32) {
  Problem p;
  p.samples = N;
  p.channels = C;
  p.groups = G;
  p.positions = S;
  p.layout = layout;
  p.x = p.y = dtype;
  p.weight = p.bias = {ParameterShape::per_channel, DType::float32};
  return p;
}

}  // namespace steadynorm::test
