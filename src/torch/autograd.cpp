// SPDX-License-Identifier: Apache-2.0
// The differentiable operators. The one source file that needs torch's autograd headers.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/library.h>

#include <utility>

#include "torch/composition.h"
#include "torch/tensor_args.h"

namespace steadynorm::binding {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

const auto& forward_operator() {
  using Signature = std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                                               SymInt, double, std::string_view, OptionalDType);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("steadynorm::group_norm_forward", "").typed<Signature>();
  return op;
}

const auto& residual_operator() {
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&,
                                                       const OptionalTensor&, SymInt, double,
                                                       std::string_view, OptionalDType);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("steadynorm::group_norm_residual_forward", "")
                             .typed<Signature>();
  return op;
}

const auto& backward_operator() {
  using Signature = Gradients(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                              const OptionalTensor&, SymInt, std::string_view, OutputMask);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("steadynorm::group_norm_backward", "")
                             .typed<Signature>();
  return op;
}

const auto& differentiable_operator() {
  using Signature = Tensor(const Tensor&, std::int64_t, const OptionalTensor&, const OptionalTensor&, double,
                           std::string_view, OptionalDType);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("steadynorm::group_norm", "").typed<Signature>();
  return op;
}

bool requires_grad(const OptionalTensor& tensor) { return present(tensor) && tensor->requires_grad(); }

bool has_tangent(const Tensor& tensor) { return tensor.defined() && tensor._fw_grad(/*level=*/0).defined(); }
bool has_tangent(const OptionalTensor& tensor) { return tensor && has_tangent(*tensor); }

// Outside of forward mode no tensor has a tangent, which one question settles for all of them: each takes a
// lock.
template <class... Tensors>
bool have_tangent(const Tensors&... tensors) {
  return torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr && (has_tangent(tensors) || ...);
}

// Without an activation backward reads of the bias its shape and dtype alone. A weight that has both stands
// in, so that the bias may change in place before backward, as with torch.nn.functional.group_norm.
bool stands_in(const OptionalTensor& weight, const OptionalTensor& bias) {
  return present(weight) && weight->scalar_type() == bias->scalar_type() && weight->dim() == bias->dim();
}

// What group_norm_forward returns.
using Computed = std::tuple<Tensor, Tensor>;

struct GroupNormFunction : torch::autograd::Function<GroupNormFunction> {
  static constexpr bool is_traceable = true;

  static constexpr std::size_t kArguments = 8;  // of forward
  static constexpr const char *kKept = "kept", *kEps = "eps";

  enum BiasFrom : std::int64_t { absent, unread, saved, weight_stands_in };

  // What saved_data keeps but for eps, as one number: every entry costs the allocation of a key and a node.
  // Channels per group are input's over those of the statistics.
  static std::int64_t packed(Activation activation, BiasFrom from) {
    return static_cast<std::int64_t>(activation) << 2 | from;
  }
  static std::pair<Activation, BiasFrom> unpacked(std::int64_t kept) {
    return {static_cast<Activation>(kept >> 2), static_cast<BiasFrom>(kept & 3)};
  }

  // `computed`: null, or already at hand.
  static Tensor forward(AutogradContext* context, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& bias, const SymInt& channels_per_group, double eps,
                        std::string_view activation, OptionalDType out_dtype, const Computed* computed) {
    context->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [y, statistics] = computed ? *computed
                                    : forward_operator().call(input, weight, bias, channels_per_group, eps,
                                                              activation, out_dtype);
    const bool activated = activation != "none";
    BiasFrom from = present(bias) ? unread : absent;
    if (present(bias) && (activated || bias->requires_grad()))
      from = !activated && stands_in(weight, bias) ? weight_stands_in : saved;
    variable_list kept;
    kept.reserve(4);
    kept.push_back(input);
    kept.push_back(std::move(statistics));
    kept.push_back(present(weight) ? *weight : Tensor());
    kept.push_back(from == saved ? *bias : Tensor());
    context->save_for_backward(std::move(kept));
    context->saved_data[kKept] = packed(activation_from(std::string(activation)), from);
    context->saved_data[kEps] = eps;
    return std::move(y);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    if (!grads[0].defined()) return variable_list(kArguments);  // nothing flowed back
    const variable_list kept = context->get_saved_variables();
    const Tensor &input = kept[0], &statistics = kept[1];
    const auto optional = [](const Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    const auto [activation, from] = unpacked(context->saved_data[kKept].toInt());
    const OptionalTensor weight = optional(kept[2]);
    const OptionalTensor bias = from == weight_stands_in ? weight : optional(kept[3]);

    // needs_input_grad counts the tensors that were given, not the arguments.
    std::size_t edge = 0;
    OutputMask wanted;
    wanted[0] = context->needs_input_grad(edge++);
    wanted[1] = weight && context->needs_input_grad(edge++);
    wanted[2] = from != absent && context->needs_input_grad(edge++);

    const SymInt channels_per_group = input.sym_size(1) / statistics.sym_size(2);
    const std::string_view name = to_string(activation);
    Tensor dx, dweight, dbias;
    // The kernels have neither a gradient nor a tangent to give.
    if (at::GradMode::is_enabled() || have_tangent(grads[0], kept[0], kept[1], kept[2], kept[3])) {
      const Arguments a{input, weight, bias, channels_per_group, context->saved_data[kEps].toDouble(), name};
      std::tie(dx, dweight, dbias) = compose_backward(a, grads[0], Tensor(), wanted);
      if (dx.defined()) dx = dx.contiguous(format_of(input));
    } else {
      const at::AutoDispatchBelowADInplaceOrView below;
      std::tie(dx, dweight, dbias) = backward_operator().call(grads[0], input, statistics, weight, bias,
                                                              channels_per_group, name, wanted);
    }
    variable_list result(kArguments);
    result[0] = std::move(dx);
    result[1] = std::move(dweight);
    result[2] = std::move(dbias);
    return result;
  }
};

// The sum's place in the graph: with it group_norm_residual has the nodes, and so the gradients, of a sum and
// a norm one after the other.
struct SumFunction : torch::autograd::Function<SumFunction> {
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* context, const Tensor&, const Tensor&, const Tensor* sum) {
    context->set_materialize_grads(false);
    return *sum;
  }

  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], grads[0], Tensor()};
  }
};

}  // namespace

}  // namespace steadynorm::binding

// As PyTorch has them, but for the name, which is for a message that a wrong number of gradients would get:
// to demangle it in every backward pass takes 0.5 us.
namespace torch::autograd {

template <>
variable_list CppNode<steadynorm::binding::GroupNormFunction>::apply(variable_list&& inputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return CppNode_apply_functional<steadynorm::binding::GroupNormFunction>(
      std::move(inputs), ctx_, is_variable_input_, output_info_, "GroupNorm");
}

template <>
variable_list CppNode<steadynorm::binding::SumFunction>::apply(variable_list&& inputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return CppNode_apply_functional<steadynorm::binding::SumFunction>(std::move(inputs), ctx_,
                                                                    is_variable_input_, output_info_, "Sum");
}

}  // namespace torch::autograd

namespace steadynorm::binding {

namespace {

// torch::autograd::Function refuses to run under functorch, and has no forward mode.
bool under_functorch() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

Tensor group_norm(const Tensor& input, std::int64_t num_groups, const OptionalTensor& weight,
                  const OptionalTensor& bias, double eps, std::string_view activation,
                  OptionalDType out_dtype) {
  const SymInt per_group = channels_per_group(input, num_groups);
  const bool functorch = under_functorch();
  if (functorch || have_tangent(input, weight, bias)) {
    const Arguments a{input, weight, bias, per_group, eps, activation, out_dtype};
    check(a);
    const Tensor y = compose(a);
    return functorch ? y : y.contiguous(format_of(input));  // vmap knows no memory formats
  }
  if (at::GradMode::is_enabled() && (input.requires_grad() || requires_grad(weight) || requires_grad(bias)))
    return GroupNormFunction::apply(input, weight, bias, per_group, eps, activation, out_dtype, nullptr);
  const at::AutoDispatchBelowADInplaceOrView below;
  return std::get<0>(forward_operator().call(input, weight, bias, per_group, eps, activation, out_dtype));
}

std::tuple<Tensor, Tensor> group_norm_residual(const Tensor& input, const Tensor& residual,
                                               std::int64_t num_groups, const OptionalTensor& weight,
                                               const OptionalTensor& bias, double eps,
                                               std::string_view activation, OptionalDType out_dtype) {
  const SymInt per_group = channels_per_group(input, num_groups);
  const at::MemoryFormat format = format_of(input);
  // Strides that the kernels would copy, PyTorch's sum reads as they are.
  const bool one_by_one = under_functorch() || have_tangent(input, residual, weight, bias) ||
                          !is_dense(input, format) || !is_dense(residual, format);
  if (one_by_one) {
    check({input, weight, bias, per_group, eps, activation, out_dtype});
    check_residual(input, residual);
    const Tensor sum = input + residual;
    return {differentiable_operator().call(sum, num_groups, weight, bias, eps, activation, out_dtype), sum};
  }
  const auto [y, sum, statistics] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return residual_operator().call(input, residual, weight, bias, per_group, eps, activation, out_dtype);
  }();
  if (!at::GradMode::is_enabled()) return {y, sum};
  Tensor s = sum;
  if (input.requires_grad() || residual.requires_grad()) s = SumFunction::apply(input, residual, &sum);
  if (!s.requires_grad() && !requires_grad(weight) && !requires_grad(bias)) return {y, s};
  const Computed computed{y, statistics};
  return {GroupNormFunction::apply(s, weight, bias, per_group, eps, activation, out_dtype, &computed), s};
}

}  // namespace

// CompositeImplicitAutograd rather than Autograd, so that tensor subclasses meet the inner operators in
// inference mode too.
TORCH_LIBRARY_IMPL(steadynorm, CompositeImplicitAutograd, library) {
  library.impl("group_norm", group_norm);
  library.impl("group_norm_residual", group_norm_residual);
}

// The inner operators have no gradient. Without these torch would only warn in backward, and torch.func would
// return zeros.
TORCH_LIBRARY_IMPL(steadynorm, Autograd, library) {
  for (const char* name : {"group_norm_forward", "group_norm_backward", "group_norm_stats",
                           "group_norm_apply", "group_norm_residual_forward"})
    library.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace steadynorm::binding
