// SPDX-License-Identifier: Apache-2.0
#include "support/data.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/numeric.h"

namespace steadynorm {

std::string describe(const Problem& p) {
  const auto parameter = [](const Parameter& q) {
    if (!q.present()) return std::string("none");
    return std::string(q.shape == ParameterShape::per_sample ? "[N, C] " : "[C] ") + to_string(q.dtype);
  };
  return "N=" + std::to_string(p.samples) + " C=" + std::to_string(p.channels) +
         " G=" + std::to_string(p.groups) + " S=" + std::to_string(p.positions) + " " + to_string(p.layout) +
         " " + to_string(p.x) + "->" + to_string(p.y) + " weight " + parameter(p.weight) + ", bias " +
         parameter(p.bias) + ", " + to_string(p.activation) + ", eps " + std::to_string(p.eps);
}

}  // namespace steadynorm

namespace steadynorm::test {

double Random::uniform() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }

double Random::normal() {
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(6.283185307179586477 * uniform());
}

std::int64_t Random::integer(std::int64_t first, std::int64_t last) {
  return first + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(last - first + 1));
}

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::normal:
      return "normal";
    case Kind::offset_1e3:
      return "offset_1e3";
    case Kind::offset_1e4:
      return "offset_1e4";
    case Kind::offset_1e5:
      return "offset_1e5";
    case Kind::offset_1e6:
      return "offset_1e6";
    case Kind::huge:
      return "huge";
    case Kind::tiny:
      return "tiny";
    case Kind::constant:
      return "constant";
    case Kind::two_valued:
      return "two_valued";
    case Kind::nan_in_first_group:
      return "nan_in_first_group";
  }
  return "unknown kind";
}

Array store(const std::vector<double>& values, DType dtype) {
  Array array(dtype, static_cast<std::int64_t>(values.size()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    unsigned char* out = array.bytes.data() + i * size_of(dtype);
    const float single = static_cast<float>(values[i]);
    if (dtype == DType::float64) {
      std::memcpy(out, &values[i], 8);
    } else if (dtype == DType::float32) {
      std::memcpy(out, &single, 4);
    } else {
      const std::uint16_t half =
          dtype == DType::bfloat16 ? from_float<BFloat16>(single).bits : from_float<Float16>(single).bits;
      std::memcpy(out, &half, 2);
    }
  }
  return array;
}

std::vector<double> load(const Array& array) {
  std::vector<double> values(static_cast<std::size_t>(array.count()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const unsigned char* in = array.bytes.data() + i * size_of(array.dtype);
    if (array.dtype == DType::float64) {
      std::memcpy(&values[i], in, 8);
    } else if (array.dtype == DType::float32) {
      float single;
      std::memcpy(&single, in, 4);
      values[i] = single;
    } else {
      std::uint16_t half;
      std::memcpy(&half, in, 2);
      values[i] = array.dtype == DType::bfloat16 ? to_float(BFloat16{half}) : to_float(Float16{half});
    }
  }
  return values;
}

double round_to(DType dtype, double value) {
  if (dtype == DType::float64) return value;
  const float single = static_cast<float>(value);
  if (dtype == DType::bfloat16) return to_float(from_float<BFloat16>(single));
  if (dtype == DType::float16) return to_float(from_float<Float16>(single));
  return single;
}

std::int64_t parameter_count(const Problem& p, const Parameter& parameter) {
  if (!parameter.present()) return 0;
  return parameter.shape == ParameterShape::per_sample ? p.samples * p.channels : p.channels;
}

namespace {

// How the values of one group are drawn.
struct GroupSource {
  Kind kind;
  double scale;  // 1e30, 1e-30, 1, or what keeps the values finite
  double first;  // constant, two_valued
  double second;
  double share;  // of the first value

  GroupSource(Kind k, DType dtype, Random& random) : kind(k), scale(1) {
    if (kind == Kind::huge) scale = dtype == DType::float16 ? 1e4 : 1e29;
    if (kind == Kind::tiny) scale = dtype == DType::float16 ? 1e-5 : 1e-30;
    if (dtype == DType::float16 && (kind == Kind::offset_1e5 || kind == Kind::offset_1e6)) scale = 0.05;
    first = random.normal();
    second = first + random.normal();
    share = 0.05 + 0.9 * random.uniform();
  }

  double next(Random& random) const {
    switch (kind) {
      case Kind::offset_1e3:
        return first + (first < 0 ? -1e3 : 1e3) + random.normal();
      case Kind::offset_1e4:
        return first + 1e4 + random.normal();
      case Kind::offset_1e5:
        return scale * (first - 1e5 + random.normal());
      case Kind::offset_1e6:
        return scale * (first + 1e6 + random.normal());
      case Kind::constant:
        return first;
      case Kind::two_valued:
        return random.uniform() < share ? first : second;
      case Kind::huge:
      case Kind::tiny:
      case Kind::normal:
      case Kind::nan_in_first_group:
        break;
    }
    return scale * (random.normal() + 0.25);
  }
};

std::vector<double> draw(std::int64_t count, DType dtype, double mean, double deviation, Random& random) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (double& value : values) value = round_to(dtype, mean + deviation * random.normal());
  return values;
}

}  // namespace

Data make_data(const Problem& p, Kind kind, std::uint64_t seed) {
  Random random(seed);
  Data data;
  data.x.resize(static_cast<std::size_t>(p.elements()));
  const std::int64_t N = p.samples, C = p.channels, S = p.positions, D = p.channels_per_group();
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t g = 0; g < p.groups; ++g) {
      const GroupSource source(kind, p.x, random);
      for (std::int64_t c = g * D; c < (g + 1) * D; ++c)
        for (std::int64_t s = 0; s < S; ++s) {
          const std::int64_t i = p.layout == Layout::contiguous ? (n * C + c) * S + s : (n * S + s) * C + c;
          data.x[static_cast<std::size_t>(i)] = round_to(p.x, source.next(random));
        }
    }
  if (kind == Kind::nan_in_first_group && N > 0) data.x[0] = std::numeric_limits<double>::quiet_NaN();
  data.dy = draw(p.elements(), p.y, 0.1, 1, random);
  data.weight = draw(parameter_count(p, p.weight), p.weight.dtype, 1, 0.5, random);
  data.bias = draw(parameter_count(p, p.bias), p.bias.dtype, 0, 0.5, random);
  return data;
}

Problem random_problem(Random& random, std::int64_t max_elements) {
  const auto dtype = [&] { return random.pick({DType::float32, DType::bfloat16, DType::float16}); };
  const auto shape = [&] {
    return random.pick({ParameterShape::missing, ParameterShape::per_channel, ParameterShape::per_sample});
  };
  // Sizes are drawn as 2^uniform, so that small, middling and large ones are equally likely.
  const auto size = [&](std::int64_t limit) {
    const double exponent = random.uniform() * std::log2(static_cast<double>(limit < 1 ? 1 : limit) + 1);
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::exp2(exponent)));
  };
  Problem p;
  p.samples = random.integer(1, 3);
  const std::int64_t D = size(std::min<std::int64_t>(600, max_elements / p.samples));
  p.groups = size(std::min<std::int64_t>(32, max_elements / (p.samples * D)));
  p.channels = D * p.groups;
  p.positions = size(max_elements / (p.samples * p.channels));
  p.layout = random.pick({Layout::contiguous, Layout::channels_last});
  p.x = dtype();
  p.y = dtype();
  p.weight = {shape(), dtype()};
  p.bias = {shape(), dtype()};
  p.activation = random.pick(
      {Activation::none, Activation::relu, Activation::silu, Activation::gelu, Activation::gelu_tanh});
  p.eps = random.pick({1e-5, 1e-6, 1e-3});
  return p;
}

}  // namespace steadynorm::test
