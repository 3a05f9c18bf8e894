// SPDX-License-Identifier: Apache-2.0
#include "steadynorm/problem.h"

#include <cmath>
#include <cstdio>
#include <string>

namespace steadynorm {

namespace {

constexpr const char* kActivations[] = {"none", "relu", "silu", "gelu", "gelu_tanh"};

[[noreturn]] void reject(const std::string& what) { throw InvalidArgument("group_norm: " + what); }

std::string shortest(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

void require_parameter(const char* name, const Parameter& parameter, DType x) {
  if (parameter.present() && parameter.dtype == DType::float64 && x != DType::float64)
    reject(std::string("a float64 ") + name + " needs a float64 input, got input " + to_string(x));
}

}  // namespace

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
    case DType::float64:
      return "float64";
  }
  return "unknown dtype";
}

const char* to_string(Layout layout) { return layout == Layout::contiguous ? "contiguous" : "channels_last"; }

const char* to_string(Activation activation) { return kActivations[static_cast<int>(activation)]; }

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    case DType::bfloat16:
    case DType::float16:
      return 2;
  }
  return 0;
}

Activation activation_from(const std::string& name) {
  for (int i = 0; i < 5; ++i)
    if (name == kActivations[i]) return static_cast<Activation>(i);
  reject("activation must be one of none, relu, silu, gelu, gelu_tanh, got '" + name + "'");
}

void validate(const Problem& p) {
  const auto text = [](std::int64_t value) { return std::to_string(value); };
  if (p.samples < 0) reject("samples must not be negative, got N=" + text(p.samples));
  if (p.channels <= 0) reject("channels must be positive, got C=" + text(p.channels));
  if (p.positions <= 0) reject("every spatial size must be positive, got S=" + text(p.positions));
  if (p.groups <= 0) reject("groups must be positive, got G=" + text(p.groups));
  if (p.channels % p.groups != 0)
    reject("channels must be divisible by groups, got C=" + text(p.channels) + ", G=" + text(p.groups));
  if (!(std::isfinite(p.eps) && p.eps >= 0))
    reject("eps must be finite and not negative, got eps=" + shortest(p.eps));
  require_parameter("weight", p.weight, p.x);
  require_parameter("bias", p.bias, p.x);
}

std::int64_t forward_bytes(const Problem& p) {
  return p.elements() * static_cast<std::int64_t>(size_of(p.x) + size_of(p.y));
}

std::int64_t backward_bytes(const Problem& p) {
  return p.elements() * static_cast<std::int64_t>(2 * size_of(p.x) + size_of(p.y));
}

}  // namespace steadynorm
