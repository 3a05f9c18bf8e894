# SPDX-License-Identifier: Apache-2.0
"""Derivatives of steadynorm::group_norm: any order, both modes, functorch, checkpoints, what is saved."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import steadynorm  # noqa: F401  (loads the operators)
from operator_samples import ACTIVATIONS, PARAMETERS, group_norm, sample, stock


def away_from_kink(s, activation):
    """Another x, if some z is within 1e-3 of relu's kink, where finite differences mean nothing."""
    if activation != "relu":
        return s
    for seed in range(100):
        if stock(s.x, s.groups, s.weight, s.bias).abs().min() > 1e-3:
            return s
        s.x = sample(s.x.shape, s.groups, "neither", seed=1000 + seed, last=not s.x.is_contiguous()).x
    raise AssertionError("no sample away from the kink")


def closure(s, activation):
    """group_norm as a function of its tensors alone, and those tensors."""

    def call(*tensors):
        rest = list(tensors[1:])
        weight = rest.pop(0) if s.weight is not None else None
        bias = rest.pop(0) if s.bias is not None else None
        return group_norm(tensors[0], s.groups, weight, bias, 1e-3, activation)

    return call, tuple(s.requires_grad().tensors())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("last", (False, True))
def test_gradcheck(activation, parameters, last):
    s = away_from_kink(sample((2, 4, 2, 2), 2, parameters, last=last), activation)
    call, tensors = closure(s, activation)
    assert gradcheck(call, tensors, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, tensors)


@pytest.mark.parametrize("wanted", range(1, 8))
@pytest.mark.parametrize("activation", ("none", "silu"))
def test_gradcheck_of_some(wanted, activation):
    s = sample((2, 4, 3), 2)
    for bit, tensor in enumerate(s.tensors()):
        tensor.requires_grad_(bool(wanted >> bit & 1))
    assert gradcheck(lambda *t: group_norm(t[0], 2, t[1], t[2], 1e-3, activation), tuple(s.tensors()))
    y = group_norm(s.x, 2, s.weight, s.bias, 1e-3, activation)
    y.sum().backward()
    assert [t.grad is not None for t in s.tensors()] == [bool(wanted >> bit & 1) for bit in range(3)]


def test_third_derivative():
    x = sample((1, 2, 3), 1).x.requires_grad_()

    def third(f):
        value = f(x).pow(3).sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return value

    torch.testing.assert_close(
        third(lambda x: group_norm(x, 1, activation="gelu")), third(lambda x: stock(x, 1, activation="gelu"))
    )


def test_double_backward_in_float32_keeps_dtypes_and_format():
    s = sample(dtype=torch.bfloat16, parameter_dtype=torch.float32, last=True).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias, activation="silu")
    first = torch.autograd.grad(y.float().square().sum(), s.tensors(), create_graph=True)
    assert [g.dtype for g in first] == [t.dtype for t in s.tensors()]
    assert first[0].stride() == s.x.stride()
    second = torch.autograd.grad(sum(g.float().square().sum() for g in first), s.tensors())
    assert all(g.isfinite().all() for g in second)


def test_create_graph_gives_the_gradients_of_the_kernels():
    for parameters in PARAMETERS:
        for activation in ACTIVATIONS:
            s = sample((2, 8, 5), 2, parameters, torch.float32).requires_grad()
            y = group_norm(s.x, s.groups, s.weight, s.bias, activation=activation)
            dy = torch.randn_like(y)
            kernel = torch.autograd.grad(y, s.tensors(), dy, retain_graph=True)
            composed = torch.autograd.grad(y, s.tensors(), dy, create_graph=True)
            for a, b in zip(kernel, composed, strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "eps"), [(1e19, 1e-5), (1e30, 1e-5), (1e-22, 0.0)])
def test_fp32_squares_out_of_range_do_not_reach_the_composition(scale, eps):
    x = (torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)) * scale).requires_grad_()

    def cubes(x):
        return group_norm(x, 3, eps=eps).pow(3).sum()

    (kernel,) = torch.autograd.grad(cubes(x), x)
    (composed,) = torch.autograd.grad(cubes(x), x, create_graph=True)
    largest = kernel.abs().max()
    for other in (composed.detach(), torch.func.grad(cubes)(x.detach())):
        assert ((kernel - other).abs().max() / largest).item() < 1e-5


# --- functorch and forward mode


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_functorch_agrees_with_stock(activation):
    s = sample((2, 4, 3), 2)
    tensors = tuple(s.tensors())

    def ours(x, w, b):
        return group_norm(x, 2, w, b, 1e-3, activation)

    def theirs(x, w, b):
        return stock(x, 2, w, b, 1e-3, activation)

    def loss(f):
        return lambda *t: f(*t).square().sum()

    tangents = tuple(torch.randn_like(t) for t in tensors)
    transforms = {
        "grad": lambda f: grad(loss(f), argnums=(0, 1, 2))(*tensors),
        "vjp": lambda f: vjp(f, *tensors)[1](torch.ones_like(s.x)),
        "jvp": lambda f: jvp(f, tensors, tangents),
        "jacrev": lambda f: jacrev(f, argnums=(0, 1, 2))(*tensors),
        "jacfwd": lambda f: jacfwd(f, argnums=(0, 1, 2))(*tensors),
        "hessian": lambda f: hessian(loss(f), argnums=(0, 1, 2))(*tensors),
        "grad of grad": lambda f: grad(lambda x: grad(loss(f))(x, *tensors[1:]).square().sum())(tensors[0]),
        "per-sample gradients": lambda f: vmap(
            lambda x, w, b: grad(loss(f), argnums=(1, 2))(x.unsqueeze(0), w, b), in_dims=(0, None, None)
        )(*tensors),
    }
    for name, run in transforms.items():
        torch.testing.assert_close(run(ours), run(theirs), msg=lambda m, name=name: f"{name}: {m}")


def test_dual_number_of_other_strides_gives_contiguous_y():
    x = torch.randn(2, 4, 5, 3).transpose(2, 3)
    with forward_ad.dual_level():
        y = group_norm(forward_ad.make_dual(x, torch.ones_like(x)), 2)
        assert y.is_contiguous() and forward_ad.unpack_dual(y).tangent is not None


@pytest.mark.parametrize("which", range(3))
def test_dual_numbers_outside_functorch(which):
    s = sample((2, 4, 3, 3), 2, last=True)
    tensors = s.tensors()
    tangent = torch.randn_like(tensors[which])
    outputs = []
    for f, format in ((group_norm, torch.channels_last), (stock, torch.contiguous_format)):
        # Stock's forward mode raises for channels_last.
        with forward_ad.dual_level():
            duals = [tensors[0].contiguous(memory_format=format), *tensors[1:]]
            duals[which] = forward_ad.make_dual(duals[which], tangent)
            y = forward_ad.unpack_dual(f(duals[0], 2, duals[1], duals[2]))
            assert y.primal.is_contiguous(memory_format=format)
            outputs.append(y)
    torch.testing.assert_close(tuple(outputs[0]), tuple(outputs[1]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tangent_that_meets_the_graph_in_backward(activation):
    s = sample((2, 4, 3, 3), 2, last=True).requires_grad()
    cubes = group_norm(s.x, 2, s.weight, s.bias, activation=activation).pow(3).sum()
    with forward_ad.dual_level():
        scale = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(3.0))
        gradients = torch.autograd.grad(cubes * scale, s.tensors())
        for gradient in gradients:  # of scale * cubes: linear in the scale
            primal, tangent = forward_ad.unpack_dual(gradient)
            torch.testing.assert_close(tangent, 1.5 * primal)
        assert gradients[0].stride() == s.x.stride()


def test_tangent_of_a_saved_tensor_meets_backward():
    x = sample((2, 4, 3, 3), 2).x.requires_grad_()
    direction, dy = torch.randn_like(x), torch.randn_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        with forward_ad._set_fwd_grad_enabled(False):
            y = group_norm(dual, 2)
        (gradient,) = torch.autograd.grad(y, x, dy)
        got = forward_ad.unpack_dual(gradient).tangent
    (gradient,) = torch.autograd.grad(group_norm(x, 2), x, dy, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(gradient, x, direction)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_mode_over_reverse(activation):
    s = away_from_kink(sample((2, 4, 3, 3), 2), activation)
    direction = torch.randn_like(s.x)

    def energy(x):
        return group_norm(x, 2, s.weight, s.bias, activation=activation).pow(3).sum()

    x = s.x.requires_grad_()
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(energy(forward_ad.make_dual(x, direction)), x)
        got = forward_ad.unpack_dual(gradient).tangent
    (gradient,) = torch.autograd.grad(energy(x), x, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(gradient, x, direction)[0])


# --- the engine


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("parameters", ("both", "neither", "bias"))
def test_checkpoint_gives_equal_bits(reentrant, parameters):
    s = sample((2, 8, 6, 6), 2, parameters, torch.float32).requires_grad()

    def block(x):
        return group_norm(x, s.groups, s.weight, s.bias, activation="silu")

    plain = torch.autograd.grad(block(s.x).square().sum(), s.tensors())
    checkpoint(block, s.x, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(s.tensors(), plain, strict=True))


@pytest.mark.parametrize("changed", ("x", "weight"))
def test_change_in_place_before_backward_is_caught(changed):
    s = sample(dtype=torch.float32).requires_grad()
    x, weight = s.x * 1, s.weight * 1
    y = group_norm(x, s.groups, weight, s.bias)
    {"x": x, "weight": weight}[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("activation", "caught"), (("none", False), ("silu", True)))
def test_bias_may_change_before_backward_unless_an_activation_reads_it(activation, caught):
    s = sample(dtype=torch.float32).requires_grad()
    bias = s.bias * 1
    y = group_norm(s.x, s.groups, s.weight, bias, activation=activation)
    bias.add_(1)
    if caught:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()
        torch.testing.assert_close(s.bias.grad, torch.full_like(s.bias, 2 * 4 * 5))


def test_saved_tensors_are_x_statistics_and_parameters():
    s = sample((2, 8, 16, 16), 2, dtype=torch.bfloat16).requires_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        group_norm(s.x, s.groups, s.weight, s.bias, activation="silu")
    assert sorted(t.numel() for t in saved) == [8, 8, 3 * 2 * 2, s.x.numel()]
    assert any(t.data_ptr() == s.x.data_ptr() for t in saved)


def test_freed_graph_is_reported():
    s = sample(dtype=torch.float32).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiled_autograd(backend):
    s = sample((2, 6, 4), 3, dtype=torch.float32).requires_grad()
    y = group_norm(s.x, s.groups, s.weight, s.bias, activation="silu")
    plain = torch.autograd.grad(y.square().sum(), s.tensors(), retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        y.square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(s.tensors(), plain, strict=True))


class Cut(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx, y):
        return y * 2

    @staticmethod
    def backward(ctx, dy):
        return None


@pytest.mark.parametrize("f", (group_norm, F.group_norm))
@pytest.mark.parametrize("create_graph", (False, True))
def test_no_gradient_of_y_gives_none_of_the_arguments(f, create_graph):
    s = sample((2, 6, 4), 3).requires_grad()
    y = Cut.apply(f(s.x, s.groups, s.weight, s.bias)).sum()
    y.backward(create_graph=create_graph)
    assert [t.grad for t in s.tensors()] == [None, None, None]


def test_expanded_gradient_of_a_sum():
    s = sample((2, 6, 4), 3, "neither", torch.float32).requires_grad()
    group_norm(s.x, s.groups).sum().backward()
    torch.testing.assert_close(s.x.grad, torch.zeros_like(s.x), rtol=0, atol=1e-5)
