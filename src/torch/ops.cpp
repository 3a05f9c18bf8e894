// SPDX-License-Identifier: Apache-2.0
// The operators' schemas, their CPU kernels and their Meta kernels.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

#include "steadynorm/cpu.h"
#include "steadynorm/reference.h"
#include "torch/residual.h"

namespace steadynorm::binding {

namespace {

// Below this one thread does it all: the grain size of ATen's pointwise operators.
constexpr std::int64_t kParallelElements = 32768;

// at::parallel_for is a template over OpenMP: in a library built without -fopenmp it is silently serial, and
// with it a second OpenMP runtime may come in. The C function runs in libtorch's own pool, and obeys
// torch.set_num_threads.
void parallel(std::int64_t count, const cpu::ParallelBody& body) {
  const auto call = [](std::int64_t begin, std::int64_t end, void* context) {
    (*static_cast<const cpu::ParallelBody*>(context))(begin, end);
  };
  const AOTITorchError error =
      torch_parallel_for(0, count, 1, call, const_cast<void*>(static_cast<const void*>(&body)));
  TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "group_norm: a thread of the CPU backend failed");
}

// Fresh memory comes in pages of 4 KiB, and a fault for each of them costs more than the norm: 1x512x128x128
// fp32 channels_last took 12.7 ms instead of 3.1, 8193 faults instead of 530 (EPYC 9005, 2 cores, Linux 6.18,
// 2026-12). So large outputs ask for pages of 2 MiB, where the system gives them to who asks. A smaller block
// need not hold one.
constexpr std::size_t kHugePageBytes = 4 << 20;

void ask_for_huge_pages([[maybe_unused]] const Tensor& output) {
#if defined(MADV_HUGEPAGE)
  const std::size_t bytes = output.nbytes();
  if (bytes < kHugePageBytes) return;
  constexpr std::uintptr_t kPage = 4096;
  const auto data = reinterpret_cast<std::uintptr_t>(output.mutable_data_ptr());
  const std::uintptr_t begin = (data + kPage - 1) / kPage * kPage, end = (data + bytes) / kPage * kPage;
  // A request: where it is refused, the pages stay small.
  static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#endif
}

struct Cpu {
  struct Guard {
    explicit Guard(at::Device) {}
  };
  using ForwardArguments = cpu::ForwardArguments;
  using BackwardArguments = cpu::BackwardArguments;

  static Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format) {
    Tensor output(at::detail::empty_cpu(sizes, dtype, false, format));
    ask_for_huge_pages(output);
    return output;
  }

  static c10::Allocator* allocator() { return c10::GetCPUAllocator(); }

  static const cpu::ParallelFor& threads(const Problem& problem) {
    static const cpu::ParallelFor one = cpu::serial, many = parallel;
    return problem.elements() < kParallelElements ? one : many;
  }

  static std::size_t forward_workspace(const Problem& problem) { return cpu::forward_workspace(problem); }
  static std::size_t forward_workspace(const Problem& problem, const ForwardArguments&) {
    return cpu::forward_workspace(problem);
  }
  static std::size_t backward_workspace(const Problem& problem, const BackwardArguments&) {
    return cpu::backward_workspace(problem);
  }
  static void forward(const Problem& problem, const ForwardArguments& arguments) {
    cpu::forward(problem, arguments, threads(problem));
  }
  static void backward(const Problem& problem, const BackwardArguments& arguments) {
    cpu::backward(problem, arguments, threads(problem));
  }
  static void moments(const Problem& problem, const void* x, double* moments, void* workspace) {
    cpu::moments(problem, x, moments, workspace, threads(problem));
  }
  static void apply(const Problem& problem, const ForwardArguments& arguments, const double* moments) {
    cpu::apply(problem, arguments, moments, threads(problem));
  }

  static std::tuple<Tensor, Tensor> forward_double(const Arguments& a, const Operands& o) {
    const Problem& problem = o.problem;
    const auto widened = [](const Tensor& row) { return row.defined() ? row.to(at::kDouble) : row; };
    const Tensor weight = widened(*o.weight), bias = widened(*o.bias);
    const Tensor y = empty(a.input.sizes(), at::kDouble, o.format);
    const Tensor statistics = at::zeros({3, problem.samples, problem.groups}, at::kDouble);
    const std::int64_t rows = problem.samples * problem.groups;
    double* mean = static_cast<double*>(mutable_data(statistics));
    reference::forward(problem, static_cast<const double*>(data(*o.input)),
                       static_cast<const double*>(data(weight)), static_cast<const double*>(data(bias)),
                       static_cast<double*>(mutable_data(y)), mean, mean + 2 * rows);
    return {y, statistics};
  }
};

// The Meta kernels say the sizes, dtypes and strides that the others return, from sizes that may be symbols.

std::tuple<Tensor, Tensor> forward_meta(const Tensor& input, const OptionalTensor& weight,
                                        const OptionalTensor& bias, SymInt channels_per_group, double eps,
                                        std::string_view activation, OptionalDType out_dtype) {
  const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
  check(a);
  return {dense_like(input, output_dtype(a)), statistics_like(a)};
}

Gradients backward_meta(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                        const OptionalTensor& weight, const OptionalTensor& bias, SymInt channels_per_group,
                        std::string_view activation, OutputMask wanted) {
  const Arguments a{.input = input,
                    .weight = weight,
                    .bias = bias,
                    .channels_per_group = channels_per_group,
                    .activation = activation};
  check(a);
  check_gradient(input, grad_output);
  check_statistics(a, statistics);
  const auto row = [](bool want, const OptionalTensor& parameter) {
    return want && present(parameter) ? at::empty_symint(parameter->sym_sizes(), parameter->options())
                                      : Tensor();
  };
  return {wanted[0] ? dense_like(input, input.scalar_type()) : Tensor(), row(wanted[1], weight),
          row(wanted[2], bias)};
}

Tensor stats_meta(const Tensor& input, SymInt channels_per_group) {
  const OptionalTensor none;
  check({.input = input, .weight = none, .bias = none, .channels_per_group = channels_per_group});
  return at::empty_symint({input.sym_size(0), input.sym_size(1) / channels_per_group, SymInt(3)},
                          input.options().dtype(at::kDouble));
}

Tensor apply_meta(const Tensor& input, const Tensor& moments, const OptionalTensor& weight,
                  const OptionalTensor& bias, SymInt channels_per_group, double eps,
                  std::string_view activation, OptionalDType out_dtype) {
  const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
  check(a);
  check_moments(a, moments);
  return dense_like(input, output_dtype(a));
}

// Under vmap: compositions, whose operators PyTorch batches. Without these it would call the kernels once for
// each example, and refuse a batch of none.

std::tuple<Tensor, Tensor> forward_batched(const Tensor& input, const OptionalTensor& weight,
                                           const OptionalTensor& bias, SymInt channels_per_group, double eps,
                                           std::string_view activation, OptionalDType out_dtype) {
  const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
  check(a);
  Tensor statistics;
  const Tensor y = compose_apply(a, compose_moments(a), &statistics);
  return {y, statistics};
}

Gradients backward_batched(const Tensor& grad_output, const Tensor& input, const Tensor& statistics,
                           const OptionalTensor& weight, const OptionalTensor& bias,
                           SymInt channels_per_group, std::string_view activation, OutputMask wanted) {
  const Arguments a{.input = input,
                    .weight = weight,
                    .bias = bias,
                    .channels_per_group = channels_per_group,
                    .activation = activation};
  check(a);
  check_gradient(input, grad_output);
  check_statistics(a, statistics);
  return compose_backward(a, grad_output, statistics, wanted);
}

Tensor stats_batched(const Tensor& input, SymInt channels_per_group) {
  const OptionalTensor none;
  const Arguments a{.input = input, .weight = none, .bias = none, .channels_per_group = channels_per_group};
  check(a);
  return compose_moments(a);
}

Tensor apply_batched(const Tensor& input, const Tensor& moments, const OptionalTensor& weight,
                     const OptionalTensor& bias, SymInt channels_per_group, double eps,
                     std::string_view activation, OptionalDType out_dtype) {
  const Arguments a{input, weight, bias, channels_per_group, eps, activation, out_dtype};
  check(a);
  check_moments(a, moments);
  return compose_apply(a, moments);
}

}  // namespace

// By strides: at::empty_symint of a channels-last format returns what does not know that it is channels-last,
// and whoever asks next would copy (torch 2.11).
Tensor dense_like(const Tensor& input, at::ScalarType dtype) {
  const auto options = input.options().dtype(dtype);
  const auto sizes = input.sym_sizes();
  switch (format_of(input)) {
    case at::MemoryFormat::ChannelsLast:
      return at::empty_strided_symint(sizes, c10::get_channels_last_strides_2d(sizes), options);
    case at::MemoryFormat::ChannelsLast3d:
      return at::empty_strided_symint(sizes, c10::get_channels_last_strides_3d(sizes), options);
    default:
      return at::empty_symint(sizes, options);
  }
}

Tensor statistics_like(const Arguments& a) {
  return at::empty_symint({SymInt(3), a.input.sym_size(0), a.input.sym_size(1) / a.channels_per_group},
                          a.input.options().dtype(accumulate_dtype(a.input)));
}

TORCH_LIBRARY(steadynorm, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  library.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "str activation=\"none\", ScalarType? out_dtype=None) -> Tensor",
      tags);
  library.def(
      "group_norm_forward(Tensor input, Tensor? weight, Tensor? bias, SymInt channels_per_group, "
      "float eps=1e-05, str activation=\"none\", ScalarType? out_dtype=None) "
      "-> (Tensor output, Tensor statistics)",
      tags);
  library.def(
      "group_norm_backward(Tensor grad_output, Tensor input, Tensor statistics, Tensor? weight, Tensor? "
      "bias, "
      "SymInt channels_per_group, str activation=\"none\", bool[3] output_mask=[True, True, True]) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);
  library.def("group_norm_stats(Tensor input, SymInt channels_per_group) -> Tensor", tags);
  library.def(
      "group_norm_apply(Tensor input, Tensor moments, Tensor? weight, Tensor? bias, SymInt "
      "channels_per_group, "
      "float eps=1e-05, str activation=\"none\", ScalarType? out_dtype=None) -> Tensor",
      tags);
}

TORCH_LIBRARY_IMPL(steadynorm, CPU, library) {
  register_kernels<Cpu>(library);
  library.impl("group_norm_residual_forward", residual_forward<Cpu>);
}

TORCH_LIBRARY_IMPL(steadynorm, Meta, library) {
  library.impl("group_norm_forward", forward_meta);
  library.impl("group_norm_backward", backward_meta);
  library.impl("group_norm_stats", stats_meta);
  library.impl("group_norm_apply", apply_meta);
}

TORCH_LIBRARY_IMPL(steadynorm, FuncTorchBatched, library) {
  library.impl("group_norm_forward", forward_batched);
  library.impl("group_norm_backward", backward_batched);
  library.impl("group_norm_stats", stats_batched);
  library.impl("group_norm_apply", apply_batched);
}

}  // namespace steadynorm::binding
