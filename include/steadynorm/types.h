// SPDX-License-Identifier: Apache-2.0
// The words of the interface: dtypes, layouts, activations, and the three kinds of error.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace steadynorm {

// Storage types. float64 is served by the reference loops on the CPU only.
enum class DType { float32, bfloat16, float16, float64 };

// contiguous: x[n][c][s]. channels_last: x[n][s][c].
enum class Layout { contiguous, channels_last };

enum class Activation { none, relu, silu, gelu, gelu_tanh };

// How a weight or a bias comes: not at all, one row [C] for every sample, or one row per sample [N, C].
enum class ParameterShape { missing, per_channel, per_sample };

// The caller's values are wrong. Thrown before any work.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The values are fine; this build or this device cannot serve them.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The device reported an error; `name` is the device runtime's own name for it.
class DeviceError : public std::runtime_error {
 public:
  DeviceError(const std::string& what, std::string name) : std::runtime_error(what), name_(std::move(name)) {}
  const std::string& name() const noexcept { return name_; }

 private:
  std::string name_;
};

const char* to_string(DType);
const char* to_string(Layout);
const char* to_string(Activation);
std::size_t size_of(DType);

// The activation that users call `name`; InvalidArgument lists the known ones.
Activation activation_from(const std::string& name);

}  // namespace steadynorm
