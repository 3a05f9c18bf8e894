// SPDX-License-Identifier: Apache-2.0
// The entry of the CUDA backend: validate, plan, launch.
#include "steadynorm/cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>

#include "core/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/planned.h"

namespace steadynorm::cuda {

namespace {

constexpr int kMaxDevices = 64;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a launch error that is reported here must not be reported to the next caller again
  const std::string name = cudaGetErrorName(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
      error == cudaErrorUnsupportedPtxVersion) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    throw Unsupported("group_norm: this build has code for compute capability " + built_architectures() +
                      ", got a device of " + std::to_string(major) + "." + std::to_string(minor));
  }
  throw DeviceError(
      std::string("group_norm: ") + what + " failed with " + name + ": " + cudaGetErrorString(error), name);
}

DeviceInfo query(int device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "reading the device's attributes");
    return value;
  };
  DeviceInfo info;
  info.name = "device " + std::to_string(device);
  info.major = attribute(cudaDevAttrComputeCapabilityMajor);
  info.minor = attribute(cudaDevAttrComputeCapabilityMinor);
  info.sms = attribute(cudaDevAttrMultiProcessorCount);
  info.max_threads_per_sm = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  info.registers_per_sm = attribute(cudaDevAttrMaxRegistersPerMultiprocessor);
  info.shared_per_sm = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  info.shared_per_block_optin = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  info.l2_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  info.largest_cluster = info.major >= 9 ? largest_cluster_on_chip() : 1;
  return info;
}

ParameterView view(const void* data, const Parameter& parameter, std::int64_t channels) {
  if (!parameter.present()) return {};
  return {data, parameter.dtype, parameter.shape == ParameterShape::per_sample ? channels : 0};
}

void describe(Call& call, const Problem& p, const void* x, const void* weight, const void* bias) {
  call.d = dimensions_of(p);
  call.weight = view(weight, p.weight, p.channels);
  call.bias = view(bias, p.bias, p.channels);
  call.x_type = p.x;
  call.y_type = p.y;
  call.activation = p.activation;
  call.eps = p.eps;
  call.x = x;
}

template <class T>
T* at(void* workspace, std::size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

bool vectors_are_aligned(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; });
}

// Validates, and says where kernels go: the first waits for all that is on the stream, the next overlap the
// one in front.
struct Prepared {
  const Plan& plan;
  Queue first, next;
};

Prepared prepare(const Plan& plan, Stream stream) {
  require_legal(plan, current_device());
  return {
      plan, {static_cast<cudaStream_t>(stream), false}, {static_cast<cudaStream_t>(stream), plan.overlap}};
}

void require(const Problem& problem) {
  validate(problem);
  for (const DType dtype : {problem.x, problem.y})
    if (dtype == DType::float64)
      throw Unsupported("group_norm: the CUDA backend serves float32, bfloat16 and float16, got float64");
}

void reduce(const ForwardCall& call, const Problem& problem, const Prepared& p) {
  check(problem.layout == Layout::contiguous ? launch_statistics_contiguous(call, p.plan, p.first)
                                             : launch_statistics_channels_last(call, p.plan, p.first),
        "the statistics kernel");
  if (!call.merge_roots) check(launch_finalize(call, p.plan, p.next), "the merging kernel");
}

void write(const ForwardCall& call, const Problem& problem, const Prepared& p) {
  // The apply kernels load x before they wait for the kernel in front, which is what makes it where it is a
  // sum.
  const Queue& queue = call.sum != nullptr ? p.first : p.next;
  check(problem.layout == Layout::contiguous ? launch_apply_contiguous(call, p.plan, queue)
                                             : launch_apply_channels_last(call, p.plan, queue),
        "the apply kernel");
}

}  // namespace

// A device's facts never change, so they are read once.
const DeviceInfo& current_device() {
  static std::array<std::unique_ptr<const DeviceInfo>, kMaxDevices> known;
  static std::mutex mutex;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices)
    throw Unsupported("group_norm: at most " + std::to_string(kMaxDevices) + " devices, got device " +
                      std::to_string(device));
  const std::lock_guard lock(mutex);
  auto& entry = known[static_cast<std::size_t>(device)];
  if (!entry) entry = std::make_unique<const DeviceInfo>(query(device));
  return *entry;
}

std::size_t forward_workspace(const Problem& problem) { return forward_layout(problem).bytes; }
std::size_t backward_workspace(const Problem& problem) { return backward_layout(problem).bytes; }

void forward(const Problem& problem, const ForwardArguments& a, Stream stream) {
  require(problem);
  if (problem.samples > 0) forward(choose_plan(problem, current_device()), problem, a, stream);
}

void forward(const Plan& plan, const Problem& problem, const ForwardArguments& a, Stream stream) {
  const Prepared p = prepare(plan, stream);
  const ForwardWorkspace w = forward_layout(problem);
  ForwardCall call{};
  describe(call, problem, a.x, a.weight, a.bias);
  call.y = a.y;
  call.statistics = call.statistics_out = a.statistics;
  const bool sums = a.residual != nullptr;
  if (sums) {
    call.x = call.sum = a.sum;
    call.addends[0] = a.x;
    call.addends[1] = a.residual;
  }
  if (plan.forward_on_chip.cluster > 0 && !sums && vectors_are_aligned({a.x, a.y})) {
    check(problem.layout == Layout::contiguous ? launch_forward_on_chip(call, plan, p.first)
                                               : launch_forward_slabs(call, plan, p.first),
          "the forward kernel");
    return;
  }
  call.roots = at<Node>(a.workspace, w.roots);
  call.folded = at<Moments>(a.workspace, w.folded);
  call.merge_roots = problem.layout == Layout::contiguous && apply_merges_contiguous(call);
  reduce(call, problem, p);
  write(call, problem, p);
}

void moments(const Problem& problem, const void* x, double* moments, void* workspace, Stream stream) {
  require(problem);
  if (problem.samples == 0) return;
  const Plan plan = choose_plan(problem, current_device());
  const Prepared p = prepare(plan, stream);
  const ForwardWorkspace w = forward_layout(problem);
  ForwardCall call{};
  describe(call, problem, x, nullptr, nullptr);
  call.moments_out = moments;
  call.roots = at<Node>(workspace, w.roots);
  call.folded = at<Moments>(workspace, w.folded);
  reduce(call, problem, p);
}

void apply(const Problem& problem, const ForwardArguments& a, const double* moments, Stream stream) {
  require(problem);
  if (problem.samples == 0) return;
  const Plan plan = choose_plan(problem, current_device());
  const Prepared p = prepare(plan, stream);
  ForwardCall call{};
  describe(call, problem, a.x, a.weight, a.bias);
  call.y = a.y;
  float* statistics =
      a.statistics != nullptr ? a.statistics : at<float>(a.workspace, forward_layout(problem).statistics);
  call.statistics = statistics;
  check(launch_statistics_of_moments(call, moments, statistics, p.first), "the merging kernel");
  write(call, problem, p);
}

void backward(const Problem& problem, const BackwardArguments& a, Stream stream) {
  require(problem);
  backward(choose_plan(problem, current_device()), problem, a, stream);
}

void backward(const Plan& plan, const Problem& problem, const BackwardArguments& a, Stream stream) {
  const bool contiguous = problem.layout == Layout::contiguous;
  const Prepared p = prepare(plan, stream);
  const BackwardWorkspace w = backward_layout(problem);
  BackwardCall call{};
  describe(call, problem, a.x, a.weight, a.bias);
  call.statistics = a.statistics;
  call.dy = a.dy;
  call.dx = a.dx;
  call.dweight = problem.weight.present() ? a.dweight : nullptr;
  call.dbias = problem.bias.present() ? a.dbias : nullptr;
  call.partials = at<float2>(a.workspace, w.partials);
  call.rows = at<float2>(a.workspace, w.rows);
  call.means = at<float2>(a.workspace, w.means);
  const bool parameters = call.dweight != nullptr || call.dbias != nullptr;
  if (plan.backward_on_chip.cluster > 0 && a.dx != nullptr && vectors_are_aligned({a.x, a.dy, a.dx})) {
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? backward_on_chip_of<a()>(call, p.plan, p.first)
                                       : backward_slabs_of<a()>(call, p.plan, p.first);
                   }),
          "the backward kernel");
    if (problem.samples > 1) check(launch_parameters(call, p.next), "the kernel of the parameters");
    return;
  }
  if (problem.samples > 0) {
    if (call.dx == nullptr && !parameters) return;
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? sums_contiguous_of<a()>(call, p.plan, p.first)
                                       : sums_channels_last_of<a()>(call, p.plan, p.first);
                   }),
          "the sums kernel");
  }
  check(launch_channels(call, p.plan, problem.layout, problem.samples > 0 ? p.next : p.first),
        "the kernels of the channels");
  if (problem.samples > 0 && call.dx != nullptr)
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? input_gradient_contiguous_of<a()>(call, p.plan, p.next)
                                       : input_gradient_channels_last_of<a()>(call, p.plan, p.next);
                   }),
          "the input gradient kernel");
}

}  // namespace steadynorm::cuda
