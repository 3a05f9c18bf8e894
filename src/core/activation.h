// SPDX-License-Identifier: Apache-2.0
// Activations and their derivatives in fp32. The formulas are the same for every backend; the two primitives
// under them, the exponential and the reciprocal, are the host's or the device's. Errors: docs/numerics.md,
// "Activations".
#pragma once

#include <limits>

#include "core/numeric.h"
#include "steadynorm/types.h"

namespace steadynorm {

// e^t, flushed to 0 below 2^-125 and infinite from 2^127 on; NaN passes.
STEADYNORM_HD float exponential(float t) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(t * 1.44269504088896341f));
  return r;
#else
  // t = k ln2 + r, |r| <= ln2 / 2, with ln2 in two parts so that r is exact; 1.5 * 2^23 rounds to the nearest
  // integer.
  const float shifted = t * 1.44269504088896341f + 12582912.0f;
  const float k = shifted - 12582912.0f;
  const float r = (t - k * 0.693359375f) - k * -2.12194440e-4f;
  // e^r = 1 + r + r^2 p(r); minimax fit, 0.05 * 2^-24 relative before rounding.
  float p = 0.0013814466074109077f;
  p = p * r + 0.008368780836462975f;
  p = p * r + 0.04166839271783829f;
  p = p * r + 0.1666651964187622f;
  p = p * r + 0.4999999403953552f;
  const float e = (p * (r * r) + r) + 1.0f;
  // shifted holds k in its low bits, so moving them up to the exponent multiplies by 2^k.
  const float power = e * float_of((bits_of(shifted) << 23) + 0x3f800000u);
  return t < -86.0f ? 0.0f : (t > 88.0f ? std::numeric_limits<float>::infinity() : power);
#endif
}

STEADYNORM_HD float reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#else
  return 1.0f / x;
#endif
}

// 1 / (1 + e^-z) and its complement, each to its own relative precision. Where the value is 0, the complement
// is 0 instead of 1: it is only ever multiplied by the value, and may be there by an infinity.
struct Sigmoid {
  float value;
  float complement;
};

STEADYNORM_HD Sigmoid sigmoid(float z) {
  const float e = exponential(-z);
  const float value = reciprocal(1.0f + e);
  return {value, (e < 1e38f ? e : 1e38f) * value};
}

// The normal distribution: its integral to z, and its density at z.
struct Normal {
  float integral;
  float density;
};

STEADYNORM_HD Normal normal(float z) {
  const float a = z > 0 ? -z : z;
  const float e = exponential(a * a * -0.5f);
  // integral(-|z|) = e^(-z^2/2) p(1 / (1 + 0.35 |z|)); minimax fit over |z| <= 14, 0.45 * 2^-24 relative
  // before rounding.
  const float t = reciprocal(1.0f - 0.35f * a);
  float p = -0.028045475482940674f;
  p = p * t + 0.13825730979442596f;
  p = p * t + -0.24294352531433105f;
  p = p * t + 0.14310121536254883f;
  p = p * t + -0.010595455765724182f;
  p = p * t + 0.09927767515182495f;
  p = p * t + 0.12180976569652557f;
  p = p * t + 0.13947750627994537f;
  p = p * t + 0.13966286182403564f;
  p = p * t + -1.8868765891966177e-06f;
  const float tail = e * p;
  return {z > 0 ? 1.0f - tail : tail, e * 0.3989422804014327f};
}

// gelu_tanh(z) = z sigmoid(2 sqrt(2/pi) (z + 0.044715 z^3)): tanh without its cancellation near -1.
constexpr float kTanhScale = 1.5957691216057308f;  // 2 sqrt(2/pi)
constexpr float kTanhCubic = 0.044715f;

struct TanhGate {
  Sigmoid sigmoid;
  float slope;  // of the sigmoid's argument
};

STEADYNORM_HD TanhGate tanh_gate(float z) {
  const float c =
      z > 30 ? 30.0f : (z < -30 ? -30.0f : z);  // saturated long before; keeps c^3 finite, and a NaN
  return {sigmoid(kTanhScale * (c + kTanhCubic * (c * c * c))),
          kTanhScale * (1.0f + 3.0f * kTanhCubic * (c * c))};
}

// A NaN passes through every activation, and lets its gradient pass.
template <Activation A>
STEADYNORM_HD float activate(float z) {
  if constexpr (A == Activation::relu) {
    return z <= 0 ? 0.0f : z;
  } else if constexpr (A == Activation::silu) {
    return z * sigmoid(z).value;
  } else if constexpr (A == Activation::gelu) {
    return z * normal(z).integral;
  } else if constexpr (A == Activation::gelu_tanh) {
    return z * tanh_gate(z).sigmoid.value;
  } else {
    return z;
  }
}

// dz = dy * activate'(z).
template <Activation A>
STEADYNORM_HD float activate_backward(float dy, float z) {
  if constexpr (A == Activation::relu) {
    return z <= 0 ? 0.0f : dy;
  } else if constexpr (A == Activation::silu) {
    const Sigmoid s = sigmoid(z);
    return dy * (s.value * (1.0f + z * s.complement));
  } else if constexpr (A == Activation::gelu) {
    const Normal n = normal(z);
    return dy * (n.integral + z * n.density);
  } else if constexpr (A == Activation::gelu_tanh) {
    const TanhGate g = tanh_gate(z);
    // z times the value first: where the value is 0, z * slope may overflow.
    return dy * (g.sigmoid.value + z * g.sigmoid.value * (g.sigmoid.complement * g.slope));
  } else {
    return dy;
  }
}

}  // namespace steadynorm
