// SPDX-License-Identifier: Apache-2.0
// What is per channel: coefficients before the sweeps over x, and rows and parameter gradients after them.
#include <algorithm>

#include "core/dispatch.h"
#include "cpu/running_tree.h"
#include "cpu/sweeps.h"

namespace steadynorm::cpu {

namespace {

constexpr std::int64_t kChannels = 64;  // of an item of the sweeps below; a power of two

void store(float value, const Parameter& parameter, void* to, std::int64_t i) {
  dispatch(parameter.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    static_cast<T*>(to)[i] = from_float<T>(value);
  });
}

// Into [3, N, G].
void store(const Statistics& s, const Problem& p, std::int64_t group, float* to) {
  const std::int64_t NG = p.samples * p.groups;
  to[group] = s.mean_hi;
  to[NG + group] = s.mean_lo;
  to[2 * NG + group] = s.rstd;
}

void parameter_gradient(const Problem& p, const Parameter& parameter, const float* rows, void* to,
                        const ParallelFor& parallel) {
  const std::int64_t N = p.samples, C = p.channels;
  if (parameter.shape == ParameterShape::per_sample) {
    parallel(divide_up(N * C, kChannels), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin * kChannels; i < std::min(end * kChannels, N * C); ++i)
        store(rows[i], parameter, to, i);
    });
    return;
  }
  parallel(divide_up(C, kChannels), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t c = begin * kChannels; c < std::min(end * kChannels, C); c += kChannels) {
      const std::int64_t count = std::min(kChannels, C - c);
      double total[kChannels] = {};
      for (std::int64_t block = 0; block < N; block += kSampleBlock) {
        double sum[kChannels] = {};
        for (std::int64_t n = block; n < std::min(block + kSampleBlock, N); ++n)
          for (std::int64_t i = 0; i < count; ++i) sum[i] += static_cast<double>(rows[n * C + c + i]);
        for (std::int64_t i = 0; i < count; ++i) total[i] += sum[i];
      }
      for (std::int64_t i = 0; i < count; ++i) store(static_cast<float>(total[i]), parameter, to, c + i);
    }
  });
}

}  // namespace

ChannelSource::ChannelSource(const Problem& problem, const void* weight, const void* bias)
    : problem_(problem), weight_(weight), bias_(bias) {}

Statistics ChannelSource::group_statistics(std::int64_t group) const {
  if (statistics == nullptr)
    return statistics_of({moments[3 * group], moments[3 * group + 1], moments[3 * group + 2]}, problem_.eps);
  const std::int64_t NG = problem_.samples * problem_.groups;
  return {statistics[group], statistics[NG + group], statistics[2 * NG + group]};
}

void ChannelSource::write_statistics(std::int64_t group, float* to) const {
  store(statistics_of({moments[3 * group], moments[3 * group + 1], moments[3 * group + 2]}, problem_.eps),
        problem_, group, to);
}

void finish_statistics(const Problem& p, const Tree& tree, Moments* roots, const GroupRange& groups,
                       float* statistics) {
  for (std::int64_t group = groups.first; group < groups.end; ++group)
    store(statistics_of(merge_roots(tree, roots + group * tree.roots()), p.eps), p, group, statistics);
}

void ChannelSource::parameter(const Parameter& parameter, const void* data, float missing, std::int64_t n,
                              std::int64_t c, std::int64_t count, float* to) const {
  if (!parameter.present()) {
    std::fill_n(to, count, missing);
    return;
  }
  const std::int64_t row = parameter.shape == ParameterShape::per_sample ? n * problem_.channels : 0;
  kernels().widen({data, parameter.dtype}, row + c, count, to);
}

void ChannelSource::weights(std::int64_t first, std::int64_t count, float* to) const {
  const std::int64_t C = problem_.channels;
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t n = (first + done) / C, c = (first + done) % C, here = std::min(count - done, C - c);
    parameter(problem_.weight, weight_, 1.0f, n, c, here, to + done);
    done += here;
  }
}

template <bool kBackward>
void ChannelSource::fill(std::int64_t first, std::int64_t count, Coefficients& k) const {
  const std::int64_t C = problem_.channels, D = problem_.channels_per_group();
  weights(first, count, k.weight);
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t n = (first + done) / C, c = (first + done) % C, here = std::min(count - done, C - c);
    parameter(problem_.bias, bias_, 0.0f, n, c, here, k.bias + done);
    done += here;
  }
  // D divides C, so that groups follow each other across samples as well.
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t group = (first + i) / D, end = std::min(count, (group + 1) * D - first);
    const Statistics s = group_statistics(group);
    const GroupMeans m = kBackward && means != nullptr ? means[group] : GroupMeans{0, 0};
    for (; i < end; ++i) {
      k.mean_hi[i] = s.mean_hi;
      k.mean_lo[i] = s.mean_lo;
      k.scale[i] = k.weight[i] * s.rstd;
      if constexpr (kBackward) {
        k.rstd[i] = s.rstd;
        k.mean_dz[i] = m.dz;
        k.mean_dz_normalized[i] = m.dz_normalized;
      }
    }
  }
}

void ChannelSource::forward_coefficients(std::int64_t first, std::int64_t count, Coefficients& k) const {
  fill<false>(first, count, k);
}

void ChannelSource::backward_coefficients(std::int64_t first, std::int64_t count, Coefficients& k) const {
  fill<true>(first, count, k);
}

void merge_unit_sums(const Problem& p, const Tree& tree, ChannelPlanes units, ChannelPlanes rows,
                     std::int64_t begin, std::int64_t end) {
  const std::int64_t C = p.channels, U = tree.spatial_units;
  for (std::int64_t channel = begin; channel < end; ++channel) {
    const std::int64_t first = channel / C * U * C + channel % C;
    RunningTree<ChannelSums> sums;
    for (std::int64_t unit = 0; unit < U; ++unit)
      sums.push({static_cast<double>(units.dz[first + unit * C]),
                 static_cast<double>(units.dz_normalized[first + unit * C])});
    const ChannelSums row = sums.root();
    rows.dz[channel] = static_cast<float>(row.dz);
    rows.dz_normalized[channel] = static_cast<float>(row.dz_normalized);
  }
}

void parameter_gradients(const Problem& p, ChannelPlanes rows, void* dweight, void* dbias,
                         const ParallelFor& parallel) {
  if (dweight != nullptr && p.weight.present())
    parameter_gradient(p, p.weight, rows.dz_normalized, dweight, parallel);
  if (dbias != nullptr && p.bias.present()) parameter_gradient(p, p.bias, rows.dz, dbias, parallel);
}

void find_group_means(const Problem& p, const ChannelSource& source, ChannelPlanes rows,
                      const GroupRange& groups, GroupMeans* means) {
  const std::int64_t D = p.channels_per_group();
  float weight[kChannels];
  ChannelSums block[kChannels];
  for (std::int64_t group = groups.first; group < groups.end; ++group) {
    RunningTree<ChannelSums> sums;  // of blocks, which are aligned subtrees
    for (std::int64_t d = 0; d < D; d += kChannels) {
      const std::int64_t first = group * D + d, count = std::min(kChannels, D - d);
      source.weights(first, count, weight);
      for (std::int64_t i = 0; i < count; ++i)
        block[i] = weighted(weight[i], rows.dz[first + i], rows.dz_normalized[first + i]);
      reduce_tree(block, count);
      sums.push(block[0]);
    }
    means[group] = group_means(sums.root(), static_cast<double>(p.group_size()));
  }
}

}  // namespace steadynorm::cpu
