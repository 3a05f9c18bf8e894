// SPDX-License-Identifier: Apache-2.0
// All that is said to the device in its own words: instructions, shuffles, shared memory, launches. The tests
// put another file of this name in front of it, and run the kernels without a GPU.
#pragma once

#include <cooperative_groups.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/numeric.h"
#include "cuda/kernels.h"

namespace steadynorm::cuda {

// ---- programmatic dependent launch ----
// A kernel may start before the one in front of it has ended; what that one wrote is visible after
// wait_for_previous(). Every block of every kernel calls it, so the end of a kernel implies the end of all
// before it.

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), const Launch& shape, const Queue& queue,
                   const Arguments&... arguments) {
  if (shape.blocks == 0) return cudaSuccess;
  if (shape.shared_bytes > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[3]{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads_x), static_cast<unsigned>(shape.threads_y));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared_bytes);
  config.stream = queue.stream;
  config.attrs = attributes;
  if (queue.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.together) {
    cudaLaunchAttribute& together = attributes[config.numAttrs++];
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    if (shape.cluster > kPortableCluster) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

// The most blocks of `threads` threads, a power of two up to kMaxCluster, that the current device can run as
// one cluster.
template <class... Parameters>
int largest_cluster(void (*kernel)(Parameters...), int threads, int shared_bytes) {
  int blocks = kMaxCluster;
  for (; blocks > 1; blocks /= 2) {
    cudaLaunchConfig_t config{};
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (blocks > kPortableCluster)
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess && clusters > 0) break;
    cudaGetLastError();  // that it cannot is the answer
  }
  return blocks;
}

// ---- clusters of blocks ----
// Messages between the blocks of a cluster, written straight into the other block's dynamic shared memory,
// and counted there by their bytes. Slots and counter are at the same place in every block. A block that has
// got all of its messages may end, since nobody writes to it any more and what it wrote to others is theirs
// to wait for.

// By all threads of every block, before anything of its slots is used: `bytes` will come to each, at most
// 2^20 - 1.
__device__ __forceinline__ void open_mailbox(std::uint64_t& arrived, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(
                     static_cast<std::uint32_t>(__cvta_generic_to_shared(&arrived)))
                 : "memory");
  __syncwarp();  // racecheck takes init and arrive for those of two lanes
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     static_cast<std::uint32_t>(__cvta_generic_to_shared(&arrived))),
                 "r"(bytes)
                 : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");  // the fence is all that others must see
#endif
}

// By all threads of every block, before the first of them sends: every mailbox is open now.
__device__ __forceinline__ void await_mailboxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

// Two words to the slot of block `to`, by one thread.
__device__ __forceinline__ void send_pair(std::uint64_t& arrived, double* slot, int to, double a, double b) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t there = static_cast<std::uint32_t>(__cvta_generic_to_shared(slot));
  std::uint32_t count = static_cast<std::uint32_t>(__cvta_generic_to_shared(&arrived));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(there) : "r"(to));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(count) : "r"(to));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(there),
      "l"(__double_as_longlong(a)), "l"(__double_as_longlong(b)), "r"(count)
      : "memory");
#endif
}

// Until all of the bytes are there.
__device__ __forceinline__ void await_messages(std::uint64_t& arrived, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  const std::uint32_t count = static_cast<std::uint32_t>(__cvta_generic_to_shared(&arrived));
  std::uint32_t there = 0;
  while (!there)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, "
        "1, 0, p; }"
        : "=r"(there)
        : "r"(count)
        : "memory");
#endif
}

// One pair from each block of a cluster to all of them, itself included.
struct alignas(16) Mailbox {
  double slots[kMaxCluster][2];
  std::uint64_t arrived;
};

__device__ __forceinline__ void open_mailbox(Mailbox& box, int blocks) {
  open_mailbox(box.arrived, 16 * blocks);
}

__device__ __forceinline__ void await_messages(Mailbox& box, int blocks) {
  await_messages(box.arrived, 16 * blocks);
}

// From block `from` to block `to`, by one thread.
__device__ __forceinline__ void send_pair(Mailbox& box, int from, int to, double a, double b) {
  send_pair(box.arrived, box.slots[from], to, a, b);
}

// ---- all blocks of a launch ----

// Once by every thread, where the launch runs all blocks together: what any of them wrote before, all may
// load after it, by load_met().
__device__ __forceinline__ void meet_all_blocks() { cooperative_groups::this_grid().sync(); }

template <class T>
__device__ __forceinline__ T load_met(const T* p) {
  static_assert(sizeof(T) == sizeof(double2) || sizeof(T) == sizeof(float2));
  if constexpr (sizeof(T) == sizeof(double2)) {
    const double2 pair = __ldcg(reinterpret_cast<const double2*>(p));
    return {pair.x, pair.y};
  } else {
    const float2 pair = __ldcg(reinterpret_cast<const float2*>(p));
    return {pair.x, pair.y};
  }
}

// ---- threads of a block ----

// The block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

// blockIdx.x, read anew: what is made of it need not stay in registers.
__device__ __forceinline__ unsigned block_index() {
  unsigned index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// The value of the lane `step` above; every lane of the warp calls it.
__device__ __forceinline__ double shuffle_down(double value, int step) {
  return __shfl_down_sync(0xffffffffu, value, static_cast<unsigned>(step));
}

__device__ __forceinline__ int count_bits(unsigned value) { return __popc(value); }
// What the lanes of a warp wrote to shared memory, its other lanes may read after this; every lane calls it.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// ---- aligned loads and stores of 4, 8, 16 or 32 bytes ----
// L1 is bypassed, except where a lane's 32 bytes take two instructions: each touches every sector, and L1
// saves a trip.
// Every load asks L2 to evict it last. H200, 2026-11-30: plain sweeps of 512 MiB, x to y, took 273 us without
// and 250 us with it, and of 64 MiB 31.6 and 30.3, where the second sweep begins with what the first read
// last.

template <int kWords>
__device__ __forceinline__ void load_words(std::uint32_t (&w)[kWords], const void* p) {
  // What createpolicy.fractional makes of evict_last for all of an access; a constant needs no register.
  constexpr std::uint64_t kLast = 0x14f0000000000000u;
  if constexpr (kWords == 1) {
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(w[0]) : "l"(p), "l"(kLast));
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(w[0]), "=r"(w[1])
                 : "l"(p), "l"(kLast));
  } else if constexpr (kWords == 4) {
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(p), "l"(kLast));
  } else {
    static_assert(kWords == 8);
#pragma unroll
    for (int h = 0; h < 8; h += 4)
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(w[h]), "=r"(w[h + 1]), "=r"(w[h + 2]), "=r"(w[h + 3])
                   : "l"(static_cast<const char*>(p) + 4 * h), "l"(kLast));
  }
}

template <int kWords>
__device__ __forceinline__ void store_words(void* p, const std::uint32_t (&w)[kWords]) {
  if constexpr (kWords == 1) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(w[0]) : "memory");
  } else if constexpr (kWords == 2) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(w[0]), "r"(w[1]) : "memory");
  } else {
#pragma unroll
    for (int h = 0; h < kWords; h += 4)
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(static_cast<char*>(p) + 4 * h), "r"(w[h]),
                   "r"(w[h + 1]), "r"(w[h + 2]), "r"(w[h + 3])
                   : "memory");
  }
}

// The compiler no longer knows what it made of these words.
template <int kWords>
__device__ __forceinline__ void forget_words(std::uint32_t (&w)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(w[i]));
}

// `word` as it is, but not before `value` is there: nothing is 0, which the compiler does not know.
__device__ __forceinline__ void wait_for(std::uint32_t& word, float value, std::uint32_t nothing) {
  asm volatile("lop3.b32 %0, %0, %1, %2, 0xf8;" : "+r"(word) : "r"(__float_as_uint(value)), "r"(nothing));
}

// ---- conversions: exact one way, to nearest even the other; the hardware's, which are from_float's bits
// ----

__device__ __forceinline__ float to_fp32(float value) { return value; }
__device__ __forceinline__ float to_fp32(BFloat16 value) { return to_float(value); }
__device__ __forceinline__ float to_fp32(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

// Two of them in a word, `a` in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float a, float b);

template <>
__device__ __forceinline__ std::uint32_t pack_pair<BFloat16>(float a, float b) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

template <>
__device__ __forceinline__ std::uint32_t pack_pair<Float16>(float a, float b) {
  std::uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(b), "f"(a));
  return word;
}

}  // namespace steadynorm::cuda
