// SPDX-License-Identifier: Apache-2.0
#include "torch/composition.h"

#include <ATen/ATen.h>

namespace steadynorm::binding {

namespace {

using Sizes = c10::SmallVector<SymInt, 6>;

// Double whatever the input: fp32 squares of 1e20 overflow, and derivatives of rsqrt of tiny variances do.
// Autocast leaves double alone, so that the operator's dtypes are those of its arguments.
constexpr at::ScalarType kComposed = at::kDouble;

// Tensors as [N, G, D, *]. Splitting C is a view in both memory formats, and pointwise operators keep the
// order of strides, so that channels-last data stay so.
class Groups {
 public:
  explicit Groups(const Arguments& a)
      : input_(a.input),
        N_(a.input.sym_size(0)),
        D_(a.channels_per_group),
        G_(a.input.sym_size(1) / a.channels_per_group) {
    for (std::int64_t i = 2; i <= input_.dim(); ++i) within_.push_back(i);
  }

  at::IntArrayRef within() const { return within_; }  // the dimensions of one group

  Tensor split(const Tensor& t) const {  // [N, C, *]
    Sizes sizes{N_, G_, D_};
    for (std::int64_t i = 2; i < t.dim(); ++i) sizes.push_back(t.sym_size(i));
    return t.to(kComposed).reshape_symint(sizes);
  }

  Tensor join(const Tensor& t) const { return t.reshape_symint(input_.sym_sizes()); }

  // Of [C] or [N, C]. Once for each call: the gradients of two casts would be added in the parameter's dtype.
  Tensor row(const OptionalTensor& parameter) const {
    if (!present(parameter)) return {};
    return parameter->to(kComposed).reshape_symint(shape(parameter->dim() == 2 ? N_ : SymInt(1), D_));
  }

  Tensor value(const Tensor& per_group) const {  // [N, G]
    return per_group.to(kComposed).reshape_symint(shape(N_, 1));
  }

  Tensor row_gradient(const Tensor& terms, const Tensor& parameter) const {
    c10::SmallVector<std::int64_t, 4> over;
    if (parameter.dim() == 1) over.push_back(0);
    for (std::int64_t i = 3; i < terms.dim(); ++i) over.push_back(i);
    const Tensor sum = over.empty() ? terms : terms.sum(over);
    return sum.reshape_symint(parameter.sym_sizes()).to(parameter.scalar_type());
  }

 private:
  Sizes shape(const SymInt& samples, const SymInt& channels) const {
    Sizes sizes{samples, G_, channels};
    for (std::int64_t i = 2; i < input_.dim(); ++i) sizes.emplace_back(1);
    return sizes;
  }

  const Tensor& input_;
  SymInt N_, D_, G_;
  c10::SmallVector<std::int64_t, 4> within_;
};

struct Normalised {
  Tensor xhat, rstd;
};

Normalised normalise(const Groups& groups, const Tensor& x, double eps) {
  const Tensor centred = x - x.mean(groups.within(), true);
  const Tensor rstd = ((centred * centred).mean(groups.within(), true) + eps).rsqrt();
  return {centred * rstd, rstd};
}

Normalised normalise(const Groups& groups, const Tensor& x, const Tensor& statistics) {
  const Tensor rstd = groups.value(statistics.select(0, 2));
  return {((x - groups.value(statistics.select(0, 0))) - groups.value(statistics.select(0, 1))) * rstd, rstd};
}

Tensor affine(const Tensor& xhat, const Tensor& weight, const Tensor& bias) {
  const Tensor scaled = weight.defined() ? xhat * weight : xhat;
  return bias.defined() ? scaled + bias : scaled;
}

Tensor activate(const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::none:
      return z;
    case Activation::relu:
      return at::relu(z);
    case Activation::silu:  // the backward of at::silu has no forward mode
      return z * at::sigmoid(z);
    case Activation::gelu:
      return at::gelu(z, "none");
    case Activation::gelu_tanh:
      return at::gelu(z, "tanh");
  }
  return z;
}

Tensor activate_backward(const Tensor& dy, const Tensor& z, Activation activation) {
  switch (activation) {
    case Activation::none:
      return dy;
    case Activation::relu:
      return at::threshold_backward(dy, z, 0);
    case Activation::silu: {  // at::silu_backward has no derivative of its own
      const Tensor sigmoid = at::sigmoid(z);
      return dy * (sigmoid * (1 + z * (1 - sigmoid)));
    }
    case Activation::gelu:
      return at::gelu_backward(dy, z, "none");
    case Activation::gelu_tanh:
      return at::gelu_backward(dy, z, "tanh");
  }
  return dy;
}

Tensor output(const Groups& groups, const Tensor& xhat, const Arguments& a) {
  const Tensor z = affine(xhat, groups.row(a.weight), groups.row(a.bias));
  const Tensor y = activate(z, activation_from(std::string(a.activation)));
  return groups.join(y).to(output_dtype(a));
}

}  // namespace

Tensor compose(const Arguments& a) {
  const Groups groups(a);
  return output(groups, normalise(groups, groups.split(a.input), a.eps).xhat, a);
}

Gradients compose_backward(const Arguments& a, const Tensor& grad_output, const Tensor& statistics,
                           const OutputMask& wanted) {
  const Groups groups(a);
  const Activation activation = activation_from(std::string(a.activation));
  const Tensor x = groups.split(a.input);
  const auto [xhat, rstd] =
      statistics.defined() ? normalise(groups, x, statistics) : normalise(groups, x, a.eps);
  const Tensor weight = groups.row(a.weight);
  Tensor dz = groups.split(grad_output);
  if (activation != Activation::none)
    dz = activate_backward(dz, affine(xhat, weight, groups.row(a.bias)), activation);

  Tensor dx, dweight, dbias;
  if (wanted[1] && present(a.weight)) dweight = groups.row_gradient(dz * xhat, *a.weight);
  if (wanted[2] && present(a.bias)) dbias = groups.row_gradient(dz, *a.bias);
  if (wanted[0]) {
    const Tensor dxhat = weight.defined() ? dz * weight : dz;
    const Tensor mean = dxhat.mean(groups.within(), true);
    const Tensor slope = (dxhat * xhat).mean(groups.within(), true);
    dx = groups.join(rstd * ((dxhat - mean) - xhat * slope)).to(a.input.scalar_type());
  }
  return {dx, dweight, dbias};
}

Tensor compose_moments(const Arguments& a) {
  const Groups groups(a);
  const Tensor x = groups.split(a.input);
  const Tensor mean = x.mean(groups.within(), true);
  const Tensor centred = x - mean;
  const Tensor m2 = (centred * centred).sum(groups.within());
  SymInt L = 1;
  for (const std::int64_t dim : groups.within()) L *= x.sym_size(dim);
  return at::stack({at::full_like(m2, L), mean.view_as(m2), m2}, 2).contiguous();
}

Tensor compose_apply(const Arguments& a, const Tensor& moments, Tensor* statistics) {
  const Groups groups(a);
  const Tensor mean = moments.select(2, 1);
  const Tensor rstd = (moments.select(2, 2) / moments.select(2, 0) + a.eps).rsqrt();
  if (statistics) {
    const at::ScalarType dtype = accumulate_dtype(a.input);
    const Tensor hi = mean.to(dtype);
    *statistics = at::stack({hi, (mean - hi).to(dtype), rstd.to(dtype)});
  }
  const Tensor three = at::stack({mean, at::zeros_like(mean), rstd});
  return output(groups, normalise(groups, groups.split(a.input), three).xhat, a);
}

}  // namespace steadynorm::binding
