# SPDX-License-Identifier: Apache-2.0
"""vmap without a loop over the examples, mixed orders of transforms, second derivatives in every dtype."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vjp, vmap

import steadynorm
from helpers import assert_same_bits, layout_of
from operator_samples import ACTIVATIONS, apply, backward, forward, group_norm, sample, stats, stock

LOW = (torch.float32, torch.bfloat16, torch.float16)


def rounded_from(actual, exact, scale=None):
    """`actual` is `exact` rounded once to its dtype: half a unit, and what float64 sums may differ by."""
    info = torch.finfo(actual.dtype)
    loose = 2.0**-40 * (float(exact.abs().max()) if scale is None else scale)
    error = (actual.double() - exact).abs() - loose - info.smallest_normal * info.eps / 2
    assert bool((error <= exact.abs() * info.eps / 2).all()), float(error.max())


# --- vmap


@pytest.mark.parametrize("size", (3, 0))
@pytest.mark.parametrize(
    ("x_dim", "weight_dim", "bias_dim", "rows"),
    [
        (0, None, None, False),
        (0, None, None, True),
        (3, None, None, False),
        (None, 0, None, False),
        (None, None, 1, False),
        (0, 0, 0, False),
        (1, 0, 1, True),
        (None, 2, 0, True),
    ],
)
def test_vmap_is_the_call_of_each_example(no_loop, size, x_dim, weight_dim, bias_dim, rows):
    generator = torch.Generator().manual_seed(0)

    def argument(dim, *shape):
        tensor = torch.randn(size, *shape, generator=generator) if dim is not None else None
        return torch.randn(shape, generator=generator) if dim is None else tensor.movedim(0, dim)

    row = (2, 4) if rows else (4,)
    dims = (x_dim, weight_dim, bias_dim)
    arguments = [argument(d, *s) for d, s in zip(dims, ((2, 4, 3, 5), row, row), strict=True)]

    def call(x, w, b):
        return steadynorm.group_norm(x, 2, w, b, activation="silu")

    got = vmap(call, dims)(*arguments)
    assert got.shape == (size, 2, 4, 3, 5)
    for i in range(size):
        one = [t if d is None else t.select(d, i) for t, d in zip(arguments, dims, strict=True)]
        torch.testing.assert_close(got[i], call(*one), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("out_dtype", (None, torch.float32))
def test_vmap_has_the_kernels_bits_dtypes_and_memory_format(no_loop, dtype, out_dtype):
    x = sample((6, 8, 4, 5), dtype=dtype, last=True).x.unflatten(0, (3, 2))
    w = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def call(x, w):
        return group_norm(x, 2, w, None, 1e-5, "silu", out_dtype)

    for dims, arguments in {(0, None): (x, w[0]), (None, 0): (x[0], w), (0, 0): (x, w)}.items():
        got = vmap(call, dims)(*arguments)
        for i in range(3):
            one = [t if d is None else t[i] for t, d in zip(arguments, dims, strict=True)]
            assert_same_bits(got[i], call(*one), f"{dims}, call {i}: ")
            assert layout_of(got[i]) == "channels_last"


def test_vmap_of_vmap(no_loop):
    x, w = torch.randn(2, 3, 2, 4, 5), torch.randn(3, 4)
    got = vmap(vmap(lambda x, w: group_norm(x, 2, w)), (0, None))(x, w)
    want = torch.stack([torch.stack([group_norm(x[i, j], 2, w[j]) for j in range(3)]) for i in range(2)])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    # An input of the outer vmap alone: nothing is batched at the level that serves the call.
    other = vmap(lambda x: vmap(lambda w: group_norm(x, 2) * w[:, None])(w))(x[:, 0])
    torch.testing.assert_close(other[1, 2], group_norm(x[1, 0], 2) * w[2][:, None], rtol=1e-6, atol=1e-6)


def test_inner_operators_under_vmap(no_loop):
    s = sample((2, 6, 4, 5), 3, "mixed", torch.float32)
    xs = torch.stack([s.x, s.x + 3, -s.x])
    dys = torch.randn(3, 2, 6, 4, 5, generator=torch.Generator().manual_seed(1))
    y, statistics = (torch.stack(t) for t in zip(*(forward(x, s.weight, s.bias, 2) for x in xs), strict=True))
    moments = torch.stack([stats(x, 2) for x in xs])
    mask = [True, False, True]

    def close(got, want):
        assert got.dtype == want[0].dtype
        torch.testing.assert_close(got, torch.stack(list(want)), rtol=1e-5, atol=1e-5)

    got = vmap(lambda x: forward(x, s.weight, s.bias, 2))(xs)
    close(got[0], y)
    close(got[1][:, 0::2], statistics[:, 0::2])
    # hi + lo is the mean, to more than fp32's digits.
    mean, exact = got[1][:, 0].double() + got[1][:, 1], xs.double().reshape(3, 2, 3, -1).mean(-1)
    torch.testing.assert_close(mean, exact, rtol=2.0**-46, atol=2.0**-50)
    close(vmap(lambda x: stats(x, 2))(xs), moments)
    close(vmap(lambda x, m: apply(x, m, s.weight, s.bias, 2))(xs, moments), y)
    each = [
        backward(dy, x, t, s.weight, s.bias, 2, "silu", mask)
        for dy, x, t in zip(dys, xs, statistics, strict=True)
    ]
    dx, dbias = vmap(lambda dy, x, t: backward(dy, x, t, s.weight, s.bias, 2, "silu", mask)[::2])(
        dys, xs, statistics
    )
    close(dx, [e[0] for e in each])
    close(dbias, [e[2] for e in each])


@pytest.mark.parametrize("parameters", ("both", "mixed"))
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_vmap_over_a_vjp(no_loop, dtype, parameters):
    s = sample((2, 4, 5), 2, parameters, dtype).requires_grad()
    dys = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = group_norm(s.x, 2, s.weight, s.bias, activation="gelu")
    got = torch.autograd.grad(y, s.tensors(), dys, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, s.tensors(), dy, retain_graph=True) for dy in dys]
    tolerance = 4 * torch.finfo(dtype).eps  # two roundings of each, and sums of fp32 in the kernels
    for ours, want in zip(got, zip(*each, strict=True), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, torch.stack(want), rtol=tolerance, atol=4 * tolerance)
    pullback = vjp(
        lambda *t: group_norm(t[0], 2, t[1], t[2], activation="gelu"), *map(torch.detach, s.tensors())
    )
    for ours, want in zip(vmap(pullback[1])(dys), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(want), rtol=tolerance, atol=4 * tolerance)


def test_autograd_goes_through_vmap(no_loop):
    s = sample((3, 2, 4, 5), parameters="neither")
    x, w = s.x.requires_grad_(), torch.randn(3, 4, dtype=torch.float64).requires_grad_()

    def mapped(x, w):
        return vmap(lambda x, w: group_norm(x, 2, w, activation="silu"))(x, w)

    assert torch.autograd.gradcheck(mapped, (x, w))
    assert torch.autograd.gradgradcheck(mapped, (x, w))

    def energy(x, w):
        return mapped(x, w).pow(3).sum()

    expected = torch.autograd.grad(energy(x, w), (x, w))
    for ours, right in zip(grad(energy, (0, 1))(x.detach(), w.detach()), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


def test_vmap_says_what_is_wrong_with_an_example(no_loop):
    with pytest.raises(
        ValueError, match=r"weight must have shape \[C\] or \[N, C\] with N=2, C=4, got \[3, 4\]"
    ):
        vmap(lambda x, w: group_norm(x, 2, w))(torch.randn(5, 2, 4, 6), torch.randn(5, 3, 4))
    with pytest.raises(ValueError, match=r"^Expected more than 1 value per channel"):
        vmap(lambda x: group_norm(x, 4))(torch.randn(5, 1, 4))  # 5 samples, folded
    with pytest.raises(ValueError, match=r"^group_norm: weight must have shape .*, got \[8\]"):
        vmap(lambda x, w: group_norm(x, 2, w), (0, None))(torch.randn(0, 2, 4, 6), torch.randn(8))


def test_ensemble_of_modules_trains_as_its_members(no_loop):
    norms = [steadynorm.GroupNorm(2, 4, activation="relu") for _ in range(3)]
    for i, norm in enumerate(norms):
        torch.nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(i))
    parameters, buffers = stack_module_state(norms)
    x = sample((2, 4, 5), dtype=torch.float32).x

    def loss(p, b):
        return functional_call(norms[0], (p, b), (x,)).pow(3).sum()

    got = vmap(grad(loss))(parameters, buffers)
    for i, norm in enumerate(norms):
        norm(x).pow(3).sum().backward()
        torch.testing.assert_close(got["weight"][i], norm.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got["bias"][i], norm.bias.grad, rtol=1e-5, atol=1e-5)


# --- second derivatives


@pytest.mark.parametrize("parameters", ("both", "rows"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", (torch.float64, *LOW))
def test_gradient_penalty_is_rounded_once(dtype, activation, parameters):
    s = sample((2, 6, 5), 3, parameters, dtype).requires_grad()
    wide = [t.detach().double().requires_grad_() for t in s.tensors()]
    scale = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)

    def first(f, tensors, dy):
        y = f(tensors[0], 3, tensors[1], tensors[2], 1e-5, activation)
        return torch.autograd.grad(y, tensors, dy, create_graph=True)

    ours, exact = first(group_norm, s.tensors(), scale), first(stock, wide, scale.double())
    for a, b in zip(ours, exact, strict=True):
        b = b.detach()
        rounded_from(a, b, 1.0 + float(b.abs().max()))
    # d/dx of sum g^2 with the rounded g: its own gradient 2g is exact.
    penalty = sum(g.double().square().sum() for g in ours)
    second = torch.autograd.grad(penalty, s.tensors(), allow_unused=True, materialize_grads=True)
    # (Without an activation that of the bias is constant.)
    exact, cotangents = zip(
        *((e, 2 * g.detach().double()) for e, g in zip(exact, ours, strict=True) if e.requires_grad),
        strict=True,
    )
    want = torch.autograd.grad(exact, wide, cotangents, allow_unused=True, materialize_grads=True)
    assert second[0].any() and second[1].any()
    for a, b in zip(second, want, strict=True):
        rounded_from(a, b, 100.0 + float(b.abs().max()))


@pytest.mark.parametrize("parameters", ("both", "rows"))
def test_hessian_and_hessian_vector_product(parameters):
    s = sample((2, 4, 3), 2, parameters)
    v = torch.randn(s.x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def energy(f):
        return lambda x: f(x, 2, s.weight, s.bias, 1e-3, "gelu").pow(3).sum()

    for name, run in {
        "hessian": lambda f: hessian(energy(f))(s.x),
        "forward over reverse": lambda f: jvp(grad(energy(f)), (s.x,), (v,))[1],
        "reverse over reverse": lambda f: vjp(grad(energy(f)), s.x)[1](v)[0],
        "reverse over forward": lambda f: grad(lambda x: jvp(energy(f), (x,), (v,))[1])(s.x),
    }.items():
        torch.testing.assert_close(run(group_norm), run(stock), msg=lambda m, name=name: f"{name}: {m}")
