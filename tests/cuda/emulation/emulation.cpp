// SPDX-License-Identifier: Apache-2.0
// Fibers for the threads of a block, and the few calls of the CUDA runtime that the library and its tests
// make.
#include "cuda/device.cuh"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace steadynorm::cuda::emulation {

Index thread, block, block_size, grid_size;
unsigned char* dynamic_memory = nullptr;

namespace {

constexpr std::size_t kStackBytes = 64 * 1024;
constexpr int kWarp = 32;

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
  Index index;
  bool done = false;
  bool at_barrier = false;
  bool at_shuffle = false;
  bool at_meeting = false;
  std::function<bool()> condition;  // that it waits for
  int block = 0;                    // of the cluster
  int step = 0;
  double value = 0, result = 0;
};

std::vector<std::unique_ptr<Fiber>> fibers;  // kept from block to block
ucontext_t scheduler;
Fiber* current = nullptr;
std::vector<unsigned char*> memories;  // of the blocks of the cluster
const std::function<void()>* body = nullptr;
bool runs_together = false;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::abort();
}

void enter() {
  (*body)();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

void suspend() { swapcontext(&current->context, &scheduler); }

// A warp whose living lanes all wait at a shuffle goes on together.
bool resolve_shuffles(std::size_t block_begin, int threads) {
  bool any = false;
  for (int warp = 0; warp < threads; warp += kWarp) {
    const int lanes = threads - warp < kWarp ? threads - warp : kWarp;
    const std::size_t first = block_begin + static_cast<std::size_t>(warp);
    int waiting = 0, done = 0;
    for (int l = 0; l < lanes; ++l) {
      waiting += fibers[first + static_cast<std::size_t>(l)]->at_shuffle;
      done += fibers[first + static_cast<std::size_t>(l)]->done;
    }
    if (waiting == 0) continue;
    if (done > 0 || lanes < kWarp) fail("a shuffle names lanes that have ended or do not exist");
    if (waiting < lanes) continue;
    for (int l = 0; l < lanes; ++l) {
      Fiber& f = *fibers[first + static_cast<std::size_t>(l)];
      if (f.step != fibers[first]->step) fail("the lanes of a warp meet at different shuffles");
      const int from = l + f.step < lanes ? l + f.step : l;
      f.result = fibers[first + static_cast<std::size_t>(from)]->value;
    }
    for (int l = 0; l < lanes; ++l) fibers[first + static_cast<std::size_t>(l)]->at_shuffle = false;
    any = true;
  }
  return any;
}

// The blocks of a cluster, or of a launch that runs all together, whose fibers are those of one block after
// the other.
void run_cluster(int first_block, int blocks, int threads) {
  const int all = blocks * threads;
  for (int t = 0; t < all; ++t) {
    Fiber& f = *fibers[static_cast<std::size_t>(t)];
    f.done = f.at_barrier = f.at_shuffle = f.at_meeting = false;
    f.condition = nullptr;
    const unsigned place = static_cast<unsigned>(t % threads);
    f.index = {place % block_size.x, place / block_size.x};
    f.block = t / threads;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  for (;;) {
    int done = 0;
    bool moved = false;
    for (int t = 0; t < all; ++t) {
      Fiber& f = *fibers[static_cast<std::size_t>(t)];
      if (!f.done && !f.at_barrier && !f.at_shuffle && !f.at_meeting && (!f.condition || f.condition())) {
        f.condition = nullptr;
        current = &f;
        thread = f.index;
        block = {static_cast<unsigned>(first_block + f.block), 0};
        dynamic_memory = memories[static_cast<std::size_t>(f.block)];
        swapcontext(&scheduler, &f.context);
        moved = true;
      }
      done += f.done;
    }
    if (done == all) return;
    for (int b = 0; b < blocks; ++b) {
      const std::size_t first = static_cast<std::size_t>(b * threads);
      moved |= resolve_shuffles(first, threads);
      int waiting = 0, ended = 0;
      for (int t = 0; t < threads; ++t) {
        waiting += fibers[first + static_cast<std::size_t>(t)]->at_barrier;
        ended += fibers[first + static_cast<std::size_t>(t)]->done;
      }
      if (waiting == 0 || waiting + ended < threads) continue;
      for (int t = 0; t < threads; ++t) fibers[first + static_cast<std::size_t>(t)]->at_barrier = false;
      moved = true;
    }
    int meeting = 0;
    for (int t = 0; t < all; ++t) meeting += fibers[static_cast<std::size_t>(t)]->at_meeting;
    if (meeting == all) {
      if (!runs_together) fail("blocks meet where the launch does not run all of them together");
      for (int t = 0; t < all; ++t) fibers[static_cast<std::size_t>(t)]->at_meeting = false;
      moved = true;
    }
    if (!moved) fail("all threads wait: at barriers, shuffles and messages that not all reach");
  }
}

}  // namespace

void barrier() {
  current->at_barrier = true;
  suspend();
}

double shuffle_down(double value, int step) {
  current->value = value;
  current->step = step;
  current->at_shuffle = true;
  suspend();
  return current->result;
}

void meet_all_blocks() {
  current->at_meeting = true;
  suspend();
}

void wait_until(const std::function<bool()>& condition) {
  current->condition = condition;
  suspend();
}

unsigned char* memory_of(int block_of_cluster) {
  return memories.at(static_cast<std::size_t>(block_of_cluster));
}

void run(const Launch& shape, const std::function<void()>& kernel) {
  const int threads = shape.threads();
  if (threads < 1 || threads > 1024) fail("a block has 1 to 1024 threads");
  if (shape.cluster < 1 || shape.blocks % shape.cluster != 0) fail("clusters divide the grid");
  if (shape.together && shape.cluster != 1) fail("blocks that run together are no clusters");
  runs_together = shape.together;
  const int at_once = runs_together ? static_cast<int>(shape.blocks) : shape.cluster;
  while (fibers.size() < static_cast<std::size_t>(at_once * threads))
    fibers.push_back(std::make_unique<Fiber>());
  // Exactly as large as asked for, so that an address sanitizer sees what lies beyond; filled with NaN.
  const std::size_t bytes = static_cast<std::size_t>(shape.shared_bytes);
  memories.clear();
  for (int b = 0; b < at_once; ++b)
    memories.push_back(static_cast<unsigned char*>(std::aligned_alloc(16, (bytes + 15) / 16 * 16)));
  body = &kernel;
  block_size = {static_cast<unsigned>(shape.threads_x), static_cast<unsigned>(shape.threads_y)};
  grid_size = {static_cast<unsigned>(shape.blocks), 1};
  for (std::int64_t b = 0; b < shape.blocks; b += at_once) {
    for (unsigned char* memory : memories) std::memset(memory, 0xff, bytes);
    run_cluster(static_cast<int>(b), at_once, threads);
  }
  for (unsigned char* memory : memories) std::free(memory);
}

}  // namespace steadynorm::cuda::emulation

namespace steadynorm::cuda {

void require_aligned(const void* p, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(p) % static_cast<unsigned>(bytes) != 0)
    emulation::fail("a misaligned access");
}

}  // namespace steadynorm::cuda

// ---- the runtime: one device, an H200 by its numbers, whose memory is the host's ----

extern "C" {

cudaError_t CUDARTAPI cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }
const char* CUDARTAPI cudaGetErrorName(cudaError_t) { return "cudaErrorUnknown"; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "unknown error"; }
cudaError_t CUDARTAPI cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t CUDARTAPI cudaMalloc(void** p, std::size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFree(void* p) { return std::free(p), cudaSuccess; }
cudaError_t CUDARTAPI cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes != 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset(void* p, int value, std::size_t bytes) {
  return std::memset(p, value, bytes), cudaSuccess;
}

cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 233472;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 62914560;
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

}  // extern "C"
