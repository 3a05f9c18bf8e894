// SPDX-License-Identifier: Apache-2.0
// The coefficients that every kernel makes of weight, bias and statistics, and what it does with them to one
// element.
#pragma once

#include "core/formulas.h"
#include "cuda/kernels.h"
#include "cuda/memory.cuh"

namespace steadynorm::cuda {

__device__ __forceinline__ float load_parameter(const ParameterView& p, std::int64_t n, std::int64_t c,
                                                float missing) {
  if (p.data == nullptr) return missing;
  const std::int64_t i = n * p.sample_stride + c;
  if (p.dtype == DType::float32) return static_cast<const float*>(p.data)[i];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(p.data)[i];
  return p.dtype == DType::bfloat16 ? to_fp32(BFloat16{bits}) : to_fp32(Float16{bits});
}

__device__ __forceinline__ Statistics load_statistics(const Call& call, std::int64_t group) {
  const std::int64_t plane = call.d.N * call.d.G;
  return {call.statistics[group], call.statistics[plane + group], call.statistics[2 * plane + group]};
}

__device__ __forceinline__ void store_statistics(const ForwardCall& call, std::int64_t group,
                                                 const Statistics& s) {
  const std::int64_t plane = call.d.N * call.d.G;
  call.statistics_out[group] = s.mean_hi;
  call.statistics_out[plane + group] = s.mean_lo;
  call.statistics_out[2 * plane + group] = s.rstd;
}

__device__ __forceinline__ GroupMeans load_means(const BackwardCall& call, std::int64_t group) {
  const float2 means = call.means[group];
  return {means.x, means.y};
}

__device__ __forceinline__ void store_parameter(void* to, DType dtype, std::int64_t i, float value) {
  const float values[1] = {value};
  store<1>(to, dtype, i, values, false, 1);
}

// What one channel of one sample needs to make z of x.
struct Coefficients {
  Statistics statistics;
  float weight, scale, bias;  // scale = weight * rstd
};

__device__ __forceinline__ Coefficients load_coefficients(const Call& call, const Statistics& statistics,
                                                          std::int64_t n, std::int64_t c) {
  Coefficients r;
  r.statistics = statistics;
  r.weight = load_parameter(call.weight, n, c, 1.0f);
  r.bias = load_parameter(call.bias, n, c, 0.0f);
  r.scale = r.weight * r.statistics.rstd;
  return r;
}

__device__ __forceinline__ Coefficients load_coefficients(const Call& call, std::int64_t n, std::int64_t c,
                                                          std::int64_t group) {
  return load_coefficients(call, load_statistics(call, group), n, c);
}

// Of W channels in a row. A thread of a channels_last kernel keeps them over all its rows. `each(j, group)`
// may load more.
template <int W, class Each>
__device__ __forceinline__ void load_coefficients(const Call& call, std::int64_t n, std::int64_t c,
                                                  std::int64_t c_end, Coefficients (&r)[W],
                                                  const Each& each) {
  const Split first = split(c, call.d.D);
  std::int64_t group = n * call.d.G + first.quotient, rest = call.d.D - first.remainder;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    if (rest == 0) ++group, rest = call.d.D;
    --rest;
    if (c + j < c_end) {
      r[j] = load_coefficients(call, n, c + j, group);
      each(j, group);
    } else {
      r[j] = {};
    }
  }
}

template <Activation A>
__device__ __forceinline__ float forward_value(float x, const Coefficients& c) {
  return activate<A>(affine(centred(x, c.statistics), c.scale, c.bias));
}

// dz and the normalized x of one element.
struct Gradient {
  float dz, normalized;
};

template <Activation A>
__device__ __forceinline__ Gradient backward_value(float x, float dy, const Coefficients& c) {
  const float centred_x = centred(x, c.statistics);
  const float dz = A == Activation::none ? dy : activate_backward<A>(dy, affine(centred_x, c.scale, c.bias));
  return {dz, centred_x * c.statistics.rstd};
}

}  // namespace steadynorm::cuda
