// SPDX-License-Identifier: Apache-2.0
// In the place of src/cuda/device.cuh: the same words, said to the host. Kernels run one block, one cluster
// of blocks, or all that meet, at a time, each thread a fiber, so that barriers and shuffles meet as on a
// GPU; a barrier that not all reach is an error here. Timing, caches and memory ordering are not emulated.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>

#include "core/numeric.h"
#include "cuda/kernels.h"

#undef __global__
#undef __device__
#undef __forceinline__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __constant__
#define __launch_bounds__(...)

namespace steadynorm::cuda::emulation {

struct Index {
  unsigned x = 0, y = 0;
};

extern Index thread, block, block_size, grid_size;
extern unsigned char* dynamic_memory;

void barrier();                               // __syncthreads
double shuffle_down(double value, int step);  // of the whole warp
void wait_until(const std::function<bool()>& condition);
void meet_all_blocks();
unsigned char* memory_of(int block_of_cluster);  // the dynamic memory of another block of the cluster
void run(const Launch&, const std::function<void()>& kernel);

}  // namespace steadynorm::cuda::emulation

#define threadIdx ::steadynorm::cuda::emulation::thread
#define blockIdx ::steadynorm::cuda::emulation::block
#define blockDim ::steadynorm::cuda::emulation::block_size
#define gridDim ::steadynorm::cuda::emulation::grid_size
#define __syncthreads() ::steadynorm::cuda::emulation::barrier()

namespace steadynorm::cuda {

inline void wait_for_previous() {}
inline void release_next() {}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Launch& shape, const Queue&,
                   const Arguments&... arguments) {
  emulation::run(shape, [&] { kernel(Parameters(arguments)...); });
  return cudaSuccess;
}

template <class... Parameters>
int largest_cluster(void (*)(Parameters...), int, int) {
  return kMaxCluster;
}

// What lies in the dynamic memory of this block, in that of another one of the cluster.
template <class T>
T& in_block(T& own, int block) {
  const auto offset = reinterpret_cast<unsigned char*>(&own) - emulation::dynamic_memory;
  return *reinterpret_cast<T*>(emulation::memory_of(block) + offset);
}

inline void open_mailbox(std::uint64_t& arrived, int) {
  if (threadIdx.x == 0) arrived = 0;
}

inline void await_mailboxes() {}  // no thread of a cluster goes on before all have opened theirs

inline void send_pair(std::uint64_t& arrived, double* slot, int to, double a, double b) {
  (&in_block(*slot, to))[0] = a;
  (&in_block(*slot, to))[1] = b;
  in_block(arrived, to) += 2 * sizeof(double);
}

inline void await_messages(std::uint64_t& arrived, int bytes) {
  emulation::wait_until([&arrived, bytes] { return arrived == static_cast<std::uint64_t>(bytes); });
}

struct alignas(16) Mailbox {
  double slots[kMaxCluster][2];
  std::uint64_t arrived;
};

inline void open_mailbox(Mailbox& box, int blocks) { open_mailbox(box.arrived, 16 * blocks); }

inline void await_messages(Mailbox& box, int blocks) { await_messages(box.arrived, 16 * blocks); }

inline void send_pair(Mailbox& box, int from, int to, double a, double b) {
  send_pair(box.arrived, box.slots[from], to, a, b);
}

inline void meet_all_blocks() { emulation::meet_all_blocks(); }

template <class T>
T load_met(const T* p) {
  return *p;
}

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulation::dynamic_memory);
}

inline unsigned block_index() { return blockIdx.x; }

inline int count_bits(unsigned value) { return std::popcount(value); }

inline double shuffle_down(double value, int step) { return emulation::shuffle_down(value, step); }
inline void warp_barrier() { emulation::shuffle_down(0, 0); }

void require_aligned(const void* p, int bytes);

template <int kWords>
void load_words(std::uint32_t (&w)[kWords], const void* p) {
  require_aligned(p, sizeof w < 16 ? sizeof w : 16);
  std::memcpy(w, p, sizeof w);
}

template <int kWords>
void store_words(void* p, const std::uint32_t (&w)[kWords]) {
  require_aligned(p, sizeof w < 16 ? sizeof w : 16);
  std::memcpy(p, w, sizeof w);
}

template <int kWords>
void forget_words(std::uint32_t (&)[kWords]) {}

inline void wait_for(std::uint32_t& word, float value, std::uint32_t nothing) {
  word |= bits_of(value) & nothing;
}

template <class T>
float to_fp32(T value) {
  return to_float(value);
}

template <class T>
std::uint32_t pack_pair(float a, float b) {
  return from_float<T>(a).bits | static_cast<std::uint32_t>(from_float<T>(b).bits) << 16;
}

}  // namespace steadynorm::cuda
