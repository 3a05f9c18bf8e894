# SPDX-License-Identifier: Apache-2.0
"""The fused residual under PyTorch: derivatives, transforms, the compiler, rungs, errors."""

import copy

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

import steadynorm
from helpers import (
    FLOATS,
    LAUNCH_FAILED,
    LAYOUTS,
    RUNGS,
    assert_same_bits,
    layout_of,
    normal,
    use_rung,
    warnings_of,
)
from residual_helpers import fused, fused_operator, inner, operands, results, unfused
from steadynorm import GroupNorm, group_norm, rungs

# Derivatives and transforms.


@pytest.fixture
def double(native):
    return [t.requires_grad_() for t in operands((2, 4, 3, 2), torch.float64)]


def test_gradcheck_of_both_orders(double):
    def call(x, r, weight, bias):
        return fused(x, r, 2, weight, bias, activation="silu")

    assert torch.autograd.gradcheck(call, double)
    assert torch.autograd.gradgradcheck(call, double)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_gradient_penalty_is_that_of_the_two_calls(native, dtype):
    found = []
    for call in (fused, unfused):
        x, r, weight, bias = (t.requires_grad_() for t in operands((2, 6, 5, 7), dtype))
        y, s = call(x, r, 3, weight, bias, activation="gelu")
        loss = (y.float().pow(3) + s.float().pow(3)).sum()
        first = torch.autograd.grad(loss, (x, r), create_graph=True)
        found.append(torch.autograd.grad(sum(g.float().square().sum() for g in first), (x, r, weight)))
    for got, expected in zip(*found, strict=True):
        assert_same_bits(got, expected, "")


def test_forward_mode(native):
    x, r, *_ = operands((2, 6, 5, 7))
    tangents = normal(*x.shape, seed=3), normal(*x.shape, seed=4)
    for dual in ((0,), (1,), (0, 1)):
        found = []
        for call in (fused, unfused):
            with forward_ad.dual_level():
                pair = [
                    forward_ad.make_dual(t, tangents[i]) if i in dual else t for i, t in enumerate((x, r))
                ]
                found.append([forward_ad.unpack_dual(t).tangent for t in call(*pair, 3)])
        for got, expected in zip(*found, strict=True):
            assert_same_bits(got, expected, f"{dual}")


def test_functorch(native):
    x, r, weight, bias = operands((2, 6, 5, 7))

    def loss(call):
        def of(x, r, weight):
            y, s = call(x, r, 3, weight, bias, activation="silu")
            return (y.pow(3) + s.pow(2)).sum()

        return of

    def of_both(transform):
        return transform(fused), transform(unfused)

    def first(call):
        return torch.func.grad(loss(call), (0, 1, 2))(x, r, weight)

    def forward(call):
        return torch.func.jvp(lambda x, r: call(x, r, 3), (x, r), (r, x))[1]

    def each(call):
        return torch.func.vmap(torch.func.grad(loss(call), (0, 1, 2)), (0, 0, None))(
            x[:, None], r[:, None], weight
        )

    for transform in (first, forward, each):
        for got, expected in zip(*of_both(transform), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("size", (3, 0))
@pytest.mark.parametrize("dims", ((0, 0, None), (1, 0, None), (0, None, None), (None, 2, 0), (None, None, 0)))
def test_vmap_is_the_call_of_each_example(native, no_loop, size, dims):
    def argument(dim, *shape, seed):
        return normal(*shape, seed=seed) if dim is None else normal(size, *shape, seed=seed).movedim(0, dim)

    shapes = ((2, 4, 3, 5), (2, 4, 3, 5), (4,))
    arguments = [argument(d, *s, seed=i) for i, (d, s) in enumerate(zip(dims, shapes, strict=True))]

    def call(x, r, weight):
        return fused(x, r, 2, weight, activation="silu")

    got = torch.func.vmap(call, dims)(*arguments)
    assert [t.shape for t in got] == [(size, 2, 4, 3, 5)] * 2
    for i in range(size):
        one = [t if d is None else t.select(d, i) for t, d in zip(arguments, dims, strict=True)]
        expected = call(*(t.contiguous() for t in one))
        for tensor, right in zip(got, expected, strict=True):
            assert_same_bits(tensor[i], right, f"call {i}")


def test_vmap_says_what_is_wrong_with_an_example(native):
    x = normal(3, 2, 4, 5)
    for r, sentence in (
        (normal(3, 2, 4), r"sizes \[2, 4, 5\], got \[2, 4\]"),
        (normal(3, 2, 4, 5).half(), "dtype float32, got float16"),
    ):
        with pytest.raises(ValueError, match=f"^group_norm: residual must have input's {sentence}$"):
            torch.func.vmap(lambda x, r: fused_operator(x, r, 2))(x, r)


def test_the_inner_operator_under_vmap(native, no_loop):
    x, r = normal(3, 2, 4, 5), normal(3, 2, 4, 5, seed=1)
    got = torch.func.vmap(lambda x, r: inner(x, r, None, None, 2, 1e-5, "silu"))(x, r)
    for i in range(3):
        for tensor, right in zip(got, inner(x[i], r[i], None, None, 2, 1e-5, "silu"), strict=True):
            torch.testing.assert_close(tensor[i], right, rtol=1e-6, atol=1e-6)


def test_the_inner_operator_has_no_derivative(native):
    x, r, *_ = operands((2, 6, 5, 7))
    y, s, _ = inner(x.requires_grad_(), r, None, None, 2)
    for output in (y, s):
        with pytest.raises(RuntimeError, match="is not implemented"):
            output.sum().backward()


# The compiler, and the framework's own checks.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_opcheck(native, dtype, layout):
    for shape, parameters in (((2, 6, 4, 5), "both"), ((1, 6, 1, 5), "rows")):
        x, r, weight, bias = operands(shape, dtype, parameters, layout)
        opcheck(inner, (x, r, weight, bias, 2, 1e-5, "silu", torch.float32))
        tracked = [t.requires_grad_() for t in (x, r, weight, bias)]
        opcheck(fused_operator, (*tracked[:2], 3, *tracked[2:], 1e-5, "silu"))


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", (rungs.NATIVE, rungs.EAGER))
@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_without_a_break_to_the_same_bits(ladder, fresh_dynamo, dynamic, name):
    use_rung(name, ladder)
    block = torch.nn.ModuleList([GroupNorm(3, 6, activation="silu"), GroupNorm(2, 6)])

    def run(x, r):
        y, s = block[0](x, residual=r)
        return block[1](y, residual=s)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for size in (5, 8) if dynamic else (5,):
        found = []
        for call in (run, compiled):
            x, r = (t.requires_grad_() for t in operands((2, 6, size, 7), layout="channels_last")[:2])
            block.zero_grad()
            y, s = call(x, r)
            (y.square().sum() + s.sum()).backward()
            found.append([y, s, x.grad, r.grad, *(p.grad.clone() for p in block.parameters())])
        for got, expected in zip(*found, strict=True):
            assert_same_bits(got, expected, f"{size}")
            assert layout_of(got) == layout_of(expected)


def test_export_keeps_the_operator(native):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = GroupNorm(3, 6)

        def forward(self, x, r):
            return self.norm(x, r)

    block, (x, r, *_) = Block().eval(), operands((2, 6, 5, 7))
    program = torch.export.export(block, (x, r))
    assert "steadynorm.group_norm_residual.default" in str(program.graph)
    for got, expected in zip(program.module()(x, r), block(x, r), strict=True):
        assert torch.equal(got, expected)


def test_fx_records_one_node_and_without_a_residual_what_it_did(native):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = GroupNorm(3, 6, activation="relu")

        def forward(self, x, r):
            y, s = self.norm(x, residual=r)
            return self.norm(y) + s

    block, (x, r, *_) = Block(), operands((2, 6, 5, 7))
    traced = torch.fx.symbolic_trace(block)
    nodes = [n for n in traced.graph.nodes if n.target is group_norm]
    assert ["residual" in n.kwargs for n in nodes] == [True, False]
    assert torch.equal(traced(x, r), block(x, r))

    forward = GroupNorm(3, 6, affine=False).forward
    for call in (lambda r: forward(x, r)[0], lambda r: fused(x, r, 3)[0]):  # the residual alone is a proxy
        traced = torch.fx.symbolic_trace(call)
        assert group_norm in [n.target for n in traced.graph.nodes]
        assert torch.equal(traced(r), fused(x, r, 3)[0])


# The module, the rungs, and errors.


def test_the_module_is_the_function_in_the_inputs_dtype(rung):
    norm = GroupNorm(3, 6, activation="silu")
    x, r, *_ = operands((2, 6, 5, 7), torch.bfloat16, layout="channels_last")
    expected = fused(x, r, 3, norm.weight, norm.bias, activation="silu", out_dtype=None)
    for outputs in (norm(x, r), norm(x, residual=r), copy.deepcopy(norm)(x, r)):
        for got, right in zip(outputs, expected, strict=True):
            assert_same_bits(got, right, "")
    assert torch.equal(norm(x), norm(x, residual=None))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rungs_agree_in_format_and_dtype(ladder, dtype, layout):
    tensors = operands((2, 6, 5, 7), dtype, layout=layout)
    found = {}
    for name in RUNGS:
        use_rung(name, ladder)
        found[name] = results(fused, tensors, 3, activation="silu", out_dtype=torch.float32)
        assert steadynorm.last_rung() == name
    for name in RUNGS[1:]:
        assert_same_bits(found[name]["sum"], found[rungs.NATIVE]["sum"], name)
        for key, tensor in found[name].items():
            native = found[rungs.NATIVE][key]
            assert tensor.dtype == native.dtype and layout_of(tensor) == layout_of(native), f"{name}: {key}"
            torch.testing.assert_close(tensor, native, rtol=2e-2, atol=2e-2)


def test_a_launch_failure_is_served_by_the_next_rung(ladder):
    def fails(*_):
        raise RuntimeError(LAUNCH_FAILED)

    ladder.setattr(rungs.native, "residual_operator", fails)
    x, r, *_ = operands((2, 6, 5, 7))
    for call in (GroupNorm(3, 6), lambda x, r: fused(x, r, 3)):
        steadynorm.set_rung("native", True)
        with pytest.warns(RuntimeWarning) as caught:
            y, s = call(x, r)
        assert len(warnings_of(caught)) == 1 and rungs.native_rung.failure is not None
        assert steadynorm.last_rung() == rungs.COMPILED
        assert torch.equal(s, x + r)
        torch.testing.assert_close(y, torch.nn.functional.group_norm(s, 3))


def test_other_errors_pass(ladder):
    def fails(*_):
        raise torch.OutOfMemoryError("no memory")

    ladder.setattr(rungs.native, "residual_operator", fails)
    x, r, *_ = operands((2, 6, 5, 7))
    with pytest.raises(torch.OutOfMemoryError):
        fused(x, r, 3)
    assert rungs.native_rung.failure is None


X = torch.zeros(2, 6, 5, 7)
WRONG = {
    "residual must have input's sizes [2, 6, 5, 7], got [2, 6, 5, 1]": (X, X[..., :1]),
    "residual must have input's sizes [2, 6, 5, 7], got [6, 5, 7]": (X, X[0]),
    "residual must have input's dtype float32, got bfloat16": (X, X.bfloat16()),
    "residual must have input's dtype bfloat16, got float32": (X.bfloat16(), X),
    "residual must be on input's device cpu, got meta": (X, X.to("meta")),
    "residual must be a Tensor or None, got float": (X, 1.0),
    "residual must be a dense tensor, got layout sparse_coo": (X, X.to_sparse()),
    "input must have at least 2 dimensions, got 1": (X[0, 0, 0], X[0, 0, 0]),
    "channels must be divisible by groups, got C=5, G=3": (X[:, :5], X[:, :5]),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_errors_are_one_sentence_on_every_rung(ladder, sentence):
    x, r = WRONG[sentence]
    for name in RUNGS:
        use_rung(name, ladder)
        with pytest.raises(ValueError) as error:
            fused(x, r, 3)
        assert str(error.value) == f"group_norm: {sentence}"


def test_the_modules_own_errors(ladder):
    for name in RUNGS:
        use_rung(name, ladder)
        with pytest.raises(
            ValueError, match=r"^group_norm: input must have the module's 12 channels, got C=6$"
        ):
            GroupNorm(3, 12)(X, X)
        with pytest.raises(ValueError, match=r"^group_norm: residual must be a Tensor or None, got list$"):
            GroupNorm(3, 6)(X, [X])


@pytest.mark.parametrize("operator", (fused_operator, inner))
def test_the_operators_own_errors(native, operator):
    for r, sentence in (
        (X[..., :1], r"sizes \[2, 6, 5, 7\], got \[2, 6, 5, 1\]"),
        (X.half(), "dtype float32, got float16"),
    ):
        for mode in ("cpu", "meta"):
            options = (3,) if operator is fused_operator else (None, None, 2)
            with pytest.raises(ValueError, match=rf"^group_norm: residual must have input's {sentence}"):
                operator(X.to(mode), r.to(mode), *options)
    with pytest.raises(ValueError, match=r"^group_norm: residual must be on input's device cpu, got meta"):
        operator(X, X.to("meta"), *options)
