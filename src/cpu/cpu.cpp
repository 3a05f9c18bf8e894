// SPDX-License-Identifier: Apache-2.0
// The entries: validate, then sweeps of independent work items. An item's result is a function of the item,
// so that ranges and threads cannot change a bit.
#include "steadynorm/cpu.h"

#include "core/dispatch.h"
#include "cpu/blocks.h"
#include "cpu/sweeps.h"

namespace steadynorm::cpu {

namespace {

constexpr std::size_t kAlignment = 64;

std::size_t align_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void require(const Problem& problem) {
  validate(problem);
  const auto serve = [](DType dtype) { dispatch(dtype, [](auto) {}); };
  serve(problem.x);
  serve(problem.y);
  if (problem.weight.present()) serve(problem.weight.dtype);
  if (problem.bias.present()) serve(problem.bias.dtype);
}

Tree tree_of(const Problem& p) { return make_tree(p.channels_per_group(), p.positions, p.layout); }

// Hands out aligned pieces of the caller's workspace; with a null base it only measures.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up(static_cast<std::size_t>(count) * sizeof(T));
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

struct BackwardWorkspace {
  ChannelPlanes units;  // [N, spatial unit, C]
  ChannelPlanes rows;   // [N, C]; with one spatial unit these are the units
  GroupMeans* means;    // [N, G]

  BackwardWorkspace(const Problem& p, Pieces& pieces) {
    const std::int64_t spatial_units = tree_of(p).spatial_units, NC = p.samples * p.channels;
    units = {pieces.take<float>(NC * spatial_units), pieces.take<float>(NC * spatial_units)};
    rows = spatial_units == 1 ? units : ChannelPlanes{pieces.take<float>(NC), pieces.take<float>(NC)};
    means = pieces.take<GroupMeans>(p.samples * p.groups);
  }
};

}  // namespace

void serial(std::int64_t count, const ParallelBody& body) {
  if (count > 0) body(0, count);
}

std::size_t forward_workspace(const Problem& problem) {
  require(problem);
  return align_up(sizeof(Moments) *
                  static_cast<std::size_t>(problem.samples * problem.groups * tree_of(problem).roots()));
}

std::size_t backward_workspace(const Problem& problem) {
  require(problem);
  Pieces pieces(nullptr);
  BackwardWorkspace(problem, pieces);
  return pieces.used();
}

void moments(const Problem& problem, const void* x, double* moments, void* workspace,
             const ParallelFor& parallel) {
  require(problem);
  if (problem.samples == 0) return;
  const Tree tree = tree_of(problem);
  Moments* roots = static_cast<Moments*>(workspace);
  unit_moments(problem, tree, {x}, roots, parallel);
  parallel(problem.samples * problem.groups, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t group = begin; group < end; ++group) {
      const Moments m = merge_roots(tree, roots + group * tree.roots());
      moments[3 * group] = m.count;
      moments[3 * group + 1] = m.mean;
      moments[3 * group + 2] = m.m2;
    }
  });
}

void apply(const Problem& problem, const ForwardArguments& arguments, const double* moments,
           const ParallelFor& parallel) {
  require(problem);
  if (problem.samples == 0) return;
  ChannelSource source(problem, arguments.weight, arguments.bias);
  source.moments = moments;
  if (arguments.statistics != nullptr) {
    const std::int64_t NG = problem.samples * problem.groups;
    parallel(NG, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t group = begin; group < end; ++group)
        source.write_statistics(group, arguments.statistics);
    });
    source.statistics = arguments.statistics;
  }
  apply_sweep(problem, source, arguments.x, arguments.y, parallel);
}

void forward(const Problem& problem, const ForwardArguments& arguments, const ParallelFor& parallel) {
  require(problem);
  if (problem.samples == 0) return;
  const Tree tree = tree_of(problem);
  Moments* roots = static_cast<Moments*>(arguments.workspace);
  ChannelSource source(problem, arguments.weight, arguments.bias);
  source.statistics = arguments.statistics;
  const Input x{arguments.x, arguments.residual, arguments.sum};
  const Blocks blocks(problem, size_of(problem.x));
  if (blocks.count() > 0)
    return forward_blocks(problem, tree, blocks, source, x, arguments.y, roots, arguments.statistics,
                          parallel);
  unit_moments(problem, tree, x, roots, parallel);
  parallel(problem.samples * problem.groups, [&](std::int64_t begin, std::int64_t end) {
    finish_statistics(problem, tree, roots, {begin, end}, arguments.statistics);
  });
  apply_sweep(problem, source, x.data(), arguments.y, parallel);
}

void backward(const Problem& problem, const BackwardArguments& arguments, const ParallelFor& parallel) {
  require(problem);
  const bool wants_dx = arguments.dx != nullptr;
  const bool wants_parameters = arguments.dweight != nullptr || arguments.dbias != nullptr;
  ChannelPlanes rows;
  if (problem.samples > 0 && (wants_dx || wants_parameters)) {
    const Tree tree = tree_of(problem);
    Pieces pieces(arguments.workspace);
    const BackwardWorkspace workspace(problem, pieces);
    rows = workspace.rows;
    ChannelSource sums(problem, arguments.weight, arguments.bias), gradient = sums;
    sums.statistics = gradient.statistics = arguments.statistics;
    gradient.means = workspace.means;
    const Blocks blocks(problem, size_of(problem.x) + size_of(problem.y));
    if (wants_dx && blocks.count() > 0) {
      backward_blocks(problem, tree, blocks, sums, gradient, arguments.x, arguments.dy, arguments.dx,
                      workspace.units, rows, workspace.means, parallel);
    } else {
      unit_sums(problem, tree, sums, arguments.x, arguments.dy, workspace.units, parallel);
      if (tree.spatial_units > 1)
        parallel(problem.samples * problem.channels, [&](std::int64_t begin, std::int64_t end) {
          merge_unit_sums(problem, tree, workspace.units, rows, begin, end);
        });
      if (wants_dx) {
        parallel(problem.samples * problem.groups, [&](std::int64_t begin, std::int64_t end) {
          find_group_means(problem, sums, rows, {begin, end}, workspace.means);
        });
        gradient_sweep(problem, gradient, arguments.x, arguments.dy, arguments.dx, parallel);
      }
    }
  }
  if (wants_parameters) parameter_gradients(problem, rows, arguments.dweight, arguments.dbias, parallel);
}

}  // namespace steadynorm::cpu
