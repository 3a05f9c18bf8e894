// SPDX-License-Identifier: Apache-2.0
#include "cuda/plan_cache.h"

#include <array>
#include <bit>
#include <memory>

namespace steadynorm::cuda {

namespace {

// Everything that a Problem and a device's address are, as words.
using Key = std::array<std::uint64_t, 7>;

Key key_of(const Problem& p, const DeviceInfo& device) {
  const auto words = [](const Parameter& parameter) {
    return static_cast<std::uint64_t>(parameter.shape) << 8 | static_cast<std::uint64_t>(parameter.dtype);
  };
  return {static_cast<std::uint64_t>(p.samples),
          static_cast<std::uint64_t>(p.channels),
          static_cast<std::uint64_t>(p.groups),
          static_cast<std::uint64_t>(p.positions),
          static_cast<std::uint64_t>(p.layout) << 56 | static_cast<std::uint64_t>(p.x) << 48 |
              static_cast<std::uint64_t>(p.y) << 40 | static_cast<std::uint64_t>(p.activation) << 32 |
              words(p.weight) << 16 | words(p.bias),
          std::bit_cast<std::uint64_t>(p.eps),
          static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(&device))};
}

std::size_t slot_of(const Key& key) {
  std::uint64_t hash = 0;
  for (const std::uint64_t word : key) hash = (std::rotl(hash, 29) ^ word) * 0x9e3779b97f4a7c15u;
  return static_cast<std::size_t>(hash >> 32) % kKeptPlans;
}

struct Entry {
  Key key;
  Planned planned;
};

void require(const Problem& problem) {
  validate(problem);
  for (const DType dtype : {problem.x, problem.y})
    if (dtype == DType::float64)
      throw Unsupported("group_norm: the CUDA backend serves float32, bfloat16 and float16, got float64");
}

}  // namespace

Planned::Planned(const Problem& problem, const Plan& chosen, const DeviceInfo& device)
    : plan(chosen),
      d(dimensions_of(problem)),
      forward(forward_layout(problem)),
      backward(backward_layout(problem)) {
  require_legal(plan, device);
}

// A problem has one place, and whoever comes there later takes it: nothing to look for, no lock, no order.
const Planned& planned(const Problem& problem, const DeviceInfo& device) {
  thread_local std::array<std::unique_ptr<const Entry>, kKeptPlans> kept;
  const Key key = key_of(problem, device);
  std::unique_ptr<const Entry>& entry = kept[slot_of(key)];
  if (!entry || entry->key != key) {
    require(problem);
    entry.reset(new Entry{key, Planned(problem, choose_plan(problem, device), device)});
  }
  return entry->planned;
}

}  // namespace steadynorm::cuda
