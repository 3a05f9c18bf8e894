// SPDX-License-Identifier: Apache-2.0
// The entry of the CUDA backend: validate, plan, launch.
#include "steadynorm/cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>

#include "core/dispatch.h"
#include "cuda/kernels.h"
#include "cuda/plan_cache.h"
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
  info.runs_together = attribute(cudaDevAttrCooperativeLaunch) != 0;
  info.largest_cluster = info.major >= 9 ? largest_cluster_on_chip() : 1;
  return info;
}

ParameterView view(const void* data, const Parameter& parameter, std::int64_t channels) {
  if (!parameter.present()) return {};
  return {data, parameter.dtype, parameter.shape == ParameterShape::per_sample ? channels : 0};
}

void describe(Call& call, const Dimensions& d, const Problem& p, const void* x, const void* weight,
              const void* bias) {
  call.d = d;
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

// Where kernels go: the first waits for all that is on the stream, the next overlap the one in front.
struct Queues {
  Queue first, next;

  Queues(const Plan& plan, Stream stream)
      : first{static_cast<cudaStream_t>(stream), false},
        next{static_cast<cudaStream_t>(stream), plan.overlap} {}
};

// The current device's facts; and the same of a device that must not wait until all of it is free.
struct KnownDevice {
  DeviceInfo info, shared;

  explicit KnownDevice(const DeviceInfo& found) : info(found), shared(found) { shared.runs_together = false; }
};

const KnownDevice& known_device();

const Planned& planned(const Problem& problem, bool cooperative) {
  const KnownDevice& device = known_device();
  return planned(problem, cooperative ? device.info : device.shared);
}

bool stays_on_chip(const Plan& plan, const ForwardArguments& a) {
  return plan.forward_on_chip.blocks > 0 && a.residual == nullptr && vectors_are_aligned({a.x, a.y});
}

bool stays_on_chip(const Plan& plan, const BackwardArguments& a) {
  return plan.backward_on_chip.blocks > 0 && a.dx != nullptr && vectors_are_aligned({a.x, a.dy, a.dx});
}

// Whether on chip the kernel leaves rows, of which launch_parameters makes gradients.
bool leaves_rows(const Plan& plan, const Problem& p, const BackwardArguments& a) {
  return p.samples > 1 && !sums_samples(plan.backward_on_chip, p.samples) &&
         ((a.dweight != nullptr && p.weight.shape == ParameterShape::per_channel) ||
          (a.dbias != nullptr && p.bias.shape == ParameterShape::per_channel));
}

void reduce(const ForwardCall& call, const Problem& problem, const Plan& plan, const Queues& queues) {
  check(problem.layout == Layout::contiguous ? launch_statistics_contiguous(call, plan, queues.first)
                                             : launch_statistics_channels_last(call, plan, queues.first),
        "the statistics kernel");
  if (!call.merge_roots) check(launch_finalize(call, plan, queues.next), "the merging kernel");
}

void write(const ForwardCall& call, const Problem& problem, const Plan& plan, const Queues& queues) {
  // The apply kernels load x before they wait for the kernel in front, which is what makes it where it is a
  // sum.
  const Queue& queue = call.sum != nullptr ? queues.first : queues.next;
  check(problem.layout == Layout::contiguous ? launch_apply_contiguous(call, plan, queue)
                                             : launch_apply_channels_last(call, plan, queue),
        "the apply kernel");
}

void run(const Planned& planned, const Problem& problem, const ForwardArguments& a, Stream stream) {
  const Plan& plan = planned.plan;
  const ForwardWorkspace& w = planned.forward;
  const Queues queues(plan, stream);
  ForwardCall call{};
  describe(call, planned.d, problem, a.x, a.weight, a.bias);
  call.y = a.y;
  call.statistics = call.statistics_out = a.statistics;
  if (a.residual != nullptr) {
    call.x = call.sum = a.sum;
    call.addends[0] = a.x;
    call.addends[1] = a.residual;
  }
  call.roots = at<Node>(a.workspace, w.roots);
  if (stays_on_chip(plan, a)) {
    check(problem.layout == Layout::contiguous ? launch_forward_on_chip(call, plan, queues.first)
                                               : launch_forward_slabs(call, plan, queues.first),
          "the forward kernel");
    return;
  }
  call.folded = at<Moments>(a.workspace, w.folded);
  call.merge_roots = problem.layout == Layout::contiguous && apply_merges_contiguous(call);
  reduce(call, problem, plan, queues);
  write(call, problem, plan, queues);
}

void run(const Planned& planned, const Problem& problem, const BackwardArguments& a, Stream stream) {
  const Plan& plan = planned.plan;
  const BackwardWorkspace& w = planned.backward;
  const bool contiguous = problem.layout == Layout::contiguous;
  const Queues queues(plan, stream);
  BackwardCall call{};
  describe(call, planned.d, problem, a.x, a.weight, a.bias);
  call.statistics = a.statistics;
  call.dy = a.dy;
  call.dx = a.dx;
  call.dweight = problem.weight.present() ? a.dweight : nullptr;
  call.dbias = problem.bias.present() ? a.dbias : nullptr;
  const bool on_chip = stays_on_chip(plan, a), rows = leaves_rows(plan, problem, a);
  if (!on_chip || plan.backward_on_chip.together) call.partials = at<float2>(a.workspace, w.partials);
  if (!on_chip || rows) call.rows = at<float2>(a.workspace, w.rows);
  if (on_chip) {
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? backward_on_chip_of<a()>(call, plan, queues.first)
                                       : backward_slabs_of<a()>(call, plan, queues.first);
                   }),
          "the backward kernel");
    if (rows) check(launch_parameters(call, queues.next), "the kernel of the parameters");
    return;
  }
  call.means = at<float2>(a.workspace, w.means);
  const bool parameters = call.dweight != nullptr || call.dbias != nullptr;
  if (problem.samples > 0) {
    if (call.dx == nullptr && !parameters) return;
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? sums_contiguous_of<a()>(call, plan, queues.first)
                                       : sums_channels_last_of<a()>(call, plan, queues.first);
                   }),
          "the sums kernel");
  }
  check(launch_channels(call, plan, problem.layout, problem.samples > 0 ? queues.next : queues.first),
        "the kernels of the channels");
  if (problem.samples > 0 && call.dx != nullptr)
    check(dispatch(problem.activation,
                   [&](auto a) {
                     return contiguous ? input_gradient_contiguous_of<a()>(call, plan, queues.next)
                                       : input_gradient_channels_last_of<a()>(call, plan, queues.next);
                   }),
          "the input gradient kernel");
}

// A device's facts never change, so they are read once.
const KnownDevice& known_device() {
  static std::array<std::atomic<const KnownDevice*>, kMaxDevices> known;
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices)
    throw Unsupported("group_norm: at most " + std::to_string(kMaxDevices) + " devices, got device " +
                      std::to_string(device));
  auto& entry = known[static_cast<std::size_t>(device)];
  if (const KnownDevice* one = entry.load(std::memory_order_acquire)) return *one;
  static std::array<std::unique_ptr<const KnownDevice>, kMaxDevices> owned;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& one = owned[static_cast<std::size_t>(device)];
  if (!one) one = std::make_unique<const KnownDevice>(query(device));
  entry.store(one.get(), std::memory_order_release);
  return *one;
}

}  // namespace

const DeviceInfo& current_device() { return known_device().info; }

std::size_t forward_workspace(const Problem& problem) { return forward_layout(problem).bytes; }
std::size_t backward_workspace(const Problem& problem) { return backward_layout(problem).bytes; }

std::size_t forward_workspace(const Problem& problem, const ForwardArguments& a) {
  const Planned& p = planned(problem, a.cooperative);
  return stays_on_chip(p.plan, a) && !p.plan.forward_on_chip.together ? 0 : p.forward.bytes;
}

std::size_t backward_workspace(const Problem& problem, const BackwardArguments& a) {
  const Planned& p = planned(problem, a.cooperative);
  const bool none =
      stays_on_chip(p.plan, a) && !p.plan.backward_on_chip.together && !leaves_rows(p.plan, problem, a);
  return none ? 0 : p.backward.bytes;
}

void forward(const Problem& problem, const ForwardArguments& a, Stream stream) {
  const Planned& p = planned(problem, a.cooperative);
  if (problem.samples > 0) run(p, problem, a, stream);
}

void forward(const Plan& plan, const Problem& problem, const ForwardArguments& a, Stream stream) {
  run(Planned(problem, plan, current_device()), problem, a, stream);
}

void backward(const Problem& problem, const BackwardArguments& a, Stream stream) {
  run(planned(problem, a.cooperative), problem, a, stream);
}

void backward(const Plan& plan, const Problem& problem, const BackwardArguments& a, Stream stream) {
  run(Planned(problem, plan, current_device()), problem, a, stream);
}

void moments(const Problem& problem, const void* x, double* moments, void* workspace, Stream stream) {
  const Planned& p = planned(problem, false);
  if (problem.samples == 0) return;
  ForwardCall call{};
  describe(call, p.d, problem, x, nullptr, nullptr);
  call.moments_out = moments;
  call.roots = at<Node>(workspace, p.forward.roots);
  call.folded = at<Moments>(workspace, p.forward.folded);
  reduce(call, problem, p.plan, Queues(p.plan, stream));
}

void apply(const Problem& problem, const ForwardArguments& a, const double* moments, Stream stream) {
  const Planned& p = planned(problem, false);
  if (problem.samples == 0) return;
  const Queues queues(p.plan, stream);
  ForwardCall call{};
  describe(call, p.d, problem, a.x, a.weight, a.bias);
  call.y = a.y;
  float* statistics = a.statistics != nullptr ? a.statistics : at<float>(a.workspace, p.forward.statistics);
  call.statistics = statistics;
  check(launch_statistics_of_moments(call, moments, statistics, queues.first), "the merging kernel");
  write(call, problem, p.plan, queues);
}

}  // namespace steadynorm::cuda
