# SPDX-License-Identifier: Apache-2.0
"""group_norm: dtype, memory format, activation, errors; on each rung."""

import doctest
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import steadynorm
from helpers import (
    ACTIVATIONS,
    FLOATS,
    LAYOUTS,
    assert_within_bounds,
    channels_last,
    laid_out,
    layout_of,
    normal,
)
from steadynorm import MATCH_STOCK_DTYPE, functional, group_norm, module, rungs


def test_the_docstrings_examples_run(rung):
    for documented in (functional, module):
        result = doctest.testmod(documented)
        assert result.attempted > 0
        assert result.failed == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_equals_stock_followed_by_the_activation(rung, dtype, layout, activation):
    x = laid_out(normal(2, 12, 5, 3, dtype=dtype), layout)
    weight, bias = 1 + normal(12, seed=1) / 4, normal(12, seed=2) / 4
    y = group_norm(x, 4, weight, bias, 1e-3, activation=activation)
    expected = ACTIVATIONS[activation](F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-3))
    assert y.dtype == dtype
    assert layout_of(y) == layout
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(y.double(), expected, atol=tolerance, rtol=tolerance, check_stride=False)


@pytest.mark.parametrize("rank", [2, 3, 4, 5, 6])
def test_serves_every_rank(rung, rank):
    x = normal(3, 6, *(2, 3, 4, 2)[: rank - 2])
    if rung == "native":
        assert_within_bounds(x, 3)
    else:  # stock itself, whose error grows with |mean| / deviation
        assert torch.equal(group_norm(x, 3), F.group_norm(x, 3))


def test_activation_none_is_no_activation(rung):
    x = normal(2, 6, 4)
    assert torch.equal(group_norm(x, 3, activation=None), group_norm(x, 3, activation="none"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out_dtype", [*FLOATS, torch.float64, None])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_out_dtype_is_honoured(rung, dtype, out_dtype, layout):
    x = laid_out(normal(2, 6, 4, 3, dtype=dtype), layout)
    x.requires_grad_()
    y = group_norm(x, 3, activation="silu", out_dtype=out_dtype)
    assert y.dtype == (out_dtype or dtype)
    assert layout_of(y) == layout
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.dtype == dtype
    assert layout_of(dx) == layout


def test_out_dtype_is_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        group_norm(normal(2, 6, 4), 3, None, None, 1e-5, "none", torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_narrow_output_is_the_fp32_answer_rounded_once(rung, activation, dtype):
    x = normal(2, 12, 9, 7, dtype=dtype)
    weight, bias = normal(12, seed=1), normal(12, seed=2)
    wide = group_norm(x, 4, weight, bias, activation=activation, out_dtype=torch.float32)
    narrow = group_norm(x, 4, weight, bias, activation=activation)
    assert torch.equal(narrow, wide.to(dtype))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("dtype", "parameter_dtype"),
    [
        *((dtype, parameter) for dtype in (*FLOATS, torch.float64) for parameter in (None, *FLOATS)),
        (torch.float64, torch.float64),
    ],
)
def test_default_dtype_is_stocks_on_the_cpu(rung, dtype, parameter_dtype, autocast):
    x = normal(2, 6, 4, dtype=dtype)
    weight = None if parameter_dtype is None else torch.ones(6, dtype=parameter_dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        try:
            expected = F.group_norm(x, 3, weight, weight).dtype
        except RuntimeError as error:
            assert "mixed dtype" in str(error)
            expected = dtype
        assert group_norm(x, 3, weight, weight).dtype == expected


@pytest.fixture
def cuda_autocast():
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def turn(dtype: torch.dtype | None) -> None:  # torch.autocast("cuda") turns itself off without a GPU
        torch.set_autocast_enabled("cuda", dtype is not None)
        torch.set_autocast_dtype("cuda", dtype or torch.float16)

    yield turn
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_dtypes_on_cuda(rung, monkeypatch, cuda_autocast, dtype, layout, autocast):
    """The function's default is stock's, the module's is its input's: fake tensors of a GPU need none."""
    monkeypatch.setattr(rungs, "_refused", {torch.device("cuda", 0): None})
    norm = module.GroupNorm(3, 6, affine=False, activation="relu")
    cuda_autocast(autocast)
    with FakeTensorMode():
        x = laid_out(torch.empty(2, 6, 4, 5, device="cuda:0", dtype=dtype), layout)
        stock, ours, modules = F.group_norm(x, 3), group_norm(x, 3, activation="relu"), norm(x)
        narrow = group_norm(x, 3, out_dtype=torch.float16)
    assert stock.dtype == (torch.float32 if autocast and dtype != torch.float64 else dtype)
    assert ours.dtype == stock.dtype
    assert modules.dtype == dtype
    assert narrow.dtype == torch.float16
    assert layout_of(ours) == layout_of(modules) == layout
    assert steadynorm.last_rung() == rung


def test_match_stock_dtype_prints_its_name():
    assert repr(MATCH_STOCK_DTYPE) == "MATCH_STOCK_DTYPE"
    assert steadynorm.MATCH_STOCK_DTYPE is functional.MATCH_STOCK_DTYPE


@pytest.mark.parametrize("shape", [(2, 6, 4, 3), (2, 6, 4, 3, 2)])
def test_channels_last_is_kept_by_y_and_dx(rung, shape):
    x = channels_last(normal(*shape)).requires_grad_()
    weight = torch.ones(shape[1], requires_grad=True)
    for dy in (normal(*shape), channels_last(normal(*shape))):
        y = group_norm(x, 3, weight)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert layout_of(y) == layout_of(dx) == "channels_last"


@pytest.mark.parametrize("shape", [(2, 1, 4, 3), (2, 6, 1, 1)])
def test_what_is_both_formats_is_contiguous(rung, shape):
    x = channels_last(normal(*shape)).requires_grad_()
    y = group_norm(x, 1)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert layout_of(y) == layout_of(dx) == "contiguous"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, ::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[..., 1:],
        lambda x: x[:1].expand(3, -1, -1, -1),
        lambda x: channels_last(x)[:, :, 1:],
        lambda x: channels_last(x)[:, 3:9],
    ],
    ids=[
        "every second channel",
        "transposed",
        "sliced",
        "expanded",
        "channels_last sliced",
        "channels of CL",
    ],
)
def test_other_strides_give_contiguous_results(rung, view):
    x = view(normal(3, 12, 5, 4)).requires_grad_()
    y = group_norm(x, 3)
    dense = x.detach().contiguous().requires_grad_()
    dy = normal(*y.shape, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert layout_of(y) == layout_of(dx) == "contiguous"
    expected = group_norm(dense, 3)
    assert torch.equal(y, expected)
    assert torch.equal(dx, torch.autograd.grad(expected, dense, dy)[0])


def test_an_empty_batch_gives_empty_y_and_zero_gradients(rung):
    x = torch.empty(0, 6, 10, 10, requires_grad=True)
    weight, bias = torch.ones(6, requires_grad=True), torch.zeros(6, requires_grad=True)
    y = group_norm(x, 3, weight, bias, activation="silu")
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 6, 10, 10)
    assert torch.equal(weight.grad, torch.zeros(6))
    assert torch.equal(bias.grad, torch.zeros(6))


def test_a_trainable_bias_needs_no_weight(rung):
    # Stock: "tensor does not have a device" in backward.
    x, bias = normal(2, 6, 4).requires_grad_(), torch.zeros(6, requires_grad=True)
    group_norm(x, 3, None, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((6,), 8.0))


@pytest.mark.parametrize("parameters", ["[C]", "[N, C]", "weight [C], bias [N, C]"])
def test_gradients_have_their_tensors_shape_and_dtype(rung, parameters):
    x = normal(3, 6, 5, dtype=torch.float16).requires_grad_()
    weight = torch.ones((3, 6) if parameters == "[N, C]" else 6, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(6 if parameters == "[C]" else (3, 6), dtype=torch.float32, requires_grad=True)
    group_norm(x, 3, weight, bias, activation="gelu").sum().backward()
    for leaf in (x, weight, bias):
        assert leaf.grad.dtype == leaf.dtype
        assert leaf.grad.shape == leaf.shape


X = torch.zeros(2, 12, 3)
W = torch.ones(12)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # nested tensors and CSR are prototypes
    CSR = X[0].to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.zeros(12, 3), torch.zeros(12, 2)])
    JAGGED = torch.nested.nested_tensor([torch.zeros(12, 3), torch.zeros(9, 3)], layout=torch.jagged)
LAZY = torch.nn.UninitializedParameter()
ERRORS = [
    ((torch.zeros(12), 3), {}, "group_norm: input must have at least 2 dimensions, got 1"),
    ((None, 3), {}, "group_norm: input must be a Tensor, got NoneType"),
    (([1.0, 2.0], 3), {}, "group_norm: input must be a Tensor, got list"),
    ((X.numpy(), 3), {}, "group_norm: input must be a Tensor, got ndarray"),
    ((X.to_sparse(), 3), {}, "group_norm: input must be a dense tensor, got layout sparse_coo"),
    ((CSR, 3), {}, "group_norm: input must be a dense tensor, got layout sparse_csr"),
    ((X.unsqueeze(3).to_mkldnn(), 3), {}, "group_norm: input must be a dense tensor, got layout _mkldnn"),
    ((NESTED, 3), {}, "group_norm: input must be a dense tensor, got a nested one"),
    ((JAGGED, 3), {}, "group_norm: input must be a dense tensor, got a nested one"),
    (
        (torch.quantize_per_tensor(X, 0.1, 0, torch.quint8), 3),
        {},
        "group_norm: input must be float32, bfloat16, float16 or float64, got quint8",
    ),
    ((X, 3.0), {}, "group_norm: num_groups must be an int, got 3.0"),
    ((X, True), {}, "group_norm: num_groups must be an int, got True"),
    ((X, False), {}, "group_norm: num_groups must be an int, got False"),
    ((X, "3"), {}, "group_norm: num_groups must be an int, got '3'"),
    ((X, None), {}, "group_norm: num_groups must be an int, got None"),
    ((X, np.bool_(True)), {}, f"group_norm: num_groups must be an int, got {np.bool_(True)!r}"),
    ((X, np.float64(3)), {}, f"group_norm: num_groups must be an int, got {np.float64(3)!r}"),
    *(
        ((X, torch.tensor(bad)), {}, "group_norm: num_groups must be an int, got a Tensor")
        for bad in (3, 2.5, [2.9], True, [2, 2])
    ),
    ((X, 10**30), {}, f"group_norm: channels must be divisible by groups, got C=12, G={10**30}"),
    ((X, 0), {}, "group_norm: groups must be positive, got G=0"),
    ((X, -2), {}, "group_norm: groups must be positive, got G=-2"),
    ((X, 5), {}, "group_norm: channels must be divisible by groups, got C=12, G=5"),
    ((torch.zeros(2, 0, 3), 2), {}, "group_norm: channels must be positive, got C=0"),
    ((torch.zeros(2, 12, 3, 0), 2), {}, "group_norm: every spatial size must be positive, got S=0"),
    (
        (torch.zeros(1, 12, 1), 12),
        {},
        "Expected more than 1 value per channel when training, got input size [1, 12, 1]",
    ),
    ((X.int(), 3), {}, "group_norm: input must be float32, bfloat16, float16 or float64, got int32"),
    (
        (X.to(torch.complex64), 3),
        {},
        "group_norm: input must be float32, bfloat16, float16 or float64, got complex64",
    ),
    (
        (X, 3, torch.ones(11)),
        {},
        "group_norm: weight must have shape [C] or [N, C] with N=2, C=12, got [11]",
    ),
    (
        (X, 3, None, torch.ones(12, 2)),
        {},
        "group_norm: bias must have shape [C] or [N, C] with N=2, C=12, got [12, 2]",
    ),
    (
        (X, 3, torch.ones(1, 12)),
        {},
        "group_norm: weight must have shape [C] or [N, C] with N=2, C=12, got [1, 12]",
    ),
    (
        (X, 3, torch.ones(12, device="meta")),
        {},
        "group_norm: weight must be on input's device cpu, got meta",
    ),
    (
        (X, 3, W.int()),
        {},
        "group_norm: weight must be float32, bfloat16, float16 or float64, got int32",
    ),
    ((X, 3, W.double()), {}, "group_norm: a float64 weight needs a float64 input, got input float32"),
    (
        (X.half(), 3, W, W.double()),
        {},
        "group_norm: a float64 bias needs a float64 input, got input float16",
    ),
    ((X, 3, None, None, -1.0), {}, "group_norm: eps must be finite and not negative, got eps=-1"),
    ((X, 3, None, None, -1e-10), {}, "group_norm: eps must be finite and not negative, got eps=-1e-10"),
    ((X, 3, None, None, None), {}, "group_norm: eps must be a number, got None"),
    ((X, 3, None, None, "1e-5"), {}, "group_norm: eps must be a number, got '1e-5'"),
    ((X, 3, None, None, b"1e-5"), {}, "group_norm: eps must be a number, got b'1e-5'"),
    ((X, 3, None, None, True), {}, "group_norm: eps must be a number, got True"),
    ((X, 3, None, None, 1j), {}, "group_norm: eps must be a number, got 1j"),
    (
        (X, 3, None, None, torch.tensor(1e-2, requires_grad=True)),
        {},
        "group_norm: eps must be a number, got a Tensor",
    ),
    ((X, 3, None, None, 10**400), {}, "group_norm: eps must be finite and not negative, got eps=inf"),
    ((X, 3, None, None, -1), {}, "group_norm: eps must be finite and not negative, got eps=-1"),
    ((X, 3, None, None, float("inf")), {}, "group_norm: eps must be finite and not negative, got eps=inf"),
    ((X, 3, None, None, float("nan")), {}, "group_norm: eps must be finite and not negative, got eps=nan"),
    ((X, 3, [1.0] * 12), {}, "group_norm: weight must be a Tensor or None, got list"),
    ((X, 3, W.to_sparse()), {}, "group_norm: weight must be a dense tensor, got layout sparse_coo"),
    ((X, 3, W, W.to_sparse()), {}, "group_norm: bias must be a dense tensor, got layout sparse_coo"),
    ((X, 3, W.to_mkldnn()), {}, "group_norm: weight must be a dense tensor, got layout _mkldnn"),
    ((X, 3, NESTED), {}, "group_norm: weight must be a dense tensor, got a nested one"),
    ((X, 3, W, JAGGED), {}, "group_norm: bias must be a dense tensor, got a nested one"),
    *(
        (arguments, {}, f"group_norm: {name} must be initialized, got an UninitializedParameter")
        for name, arguments in (("input", (LAZY, 3)), ("weight", (X, 3, LAZY)), ("bias", (X, 3, None, LAZY)))
    ),
    ((X, 3, None, 0.0), {}, "group_norm: bias must be a Tensor or None, got float"),
    *(
        (
            (X, 3),
            {"activation": bad},
            f"group_norm: activation must be one of none, relu, silu, gelu, gelu_tanh, got {bad!r}",
        )
        for bad in ("", False, 0, ["relu"], b"relu")
    ),
    (
        (X, 3),
        {"activation": "swish"},
        "group_norm: activation must be one of none, relu, silu, gelu, gelu_tanh, got 'swish'",
    ),
    (
        (X, 3),
        {"out_dtype": torch.int32},
        "group_norm: out_dtype must be a floating dtype or None, got torch.int32",
    ),
    (
        (X, 3),
        {"out_dtype": torch.complex64},
        "group_norm: out_dtype must be a floating dtype or None, got torch.complex64",
    ),
    (
        (X, 3),
        {"out_dtype": "float32"},
        "group_norm: out_dtype must be a floating dtype or None, got 'float32'",
    ),
    (
        (X, 3),
        {"out_dtype": torch.float8_e4m3fn},
        "group_norm: out_dtype must be float32, bfloat16, float16 or float64, got float8_e4m3fn",
    ),
]


@pytest.mark.parametrize(("arguments", "options", "sentence"), ERRORS, ids=[e[2] for e in ERRORS])
def test_bad_input_is_one_sentence(rung, arguments, options, sentence):
    with pytest.raises(ValueError) as raised:
        group_norm(*arguments, **options)
    assert str(raised.value) == sentence
    assert raised.value.__context__ is None or raised.value.__suppress_context__  # one sentence, not two


def test_a_module_refuses_what_was_set_after_it_was_made(rung):
    for name, bad, rule in (("num_groups", True, "an int"), ("eps", torch.tensor(1e-2), "a number")):
        norm = module.GroupNorm(3, 12)
        setattr(norm, name, bad)
        with pytest.raises(ValueError, match=f"^group_norm: {name} must be {rule}, got "):
            norm(X)


def test_other_types_of_numbers_are_the_number(rung):
    x = normal(2, 12, 3)
    expected = group_norm(x, 3, eps=2.0)
    for groups, eps in ((np.int64(3), 2.0), (np.array(3), 2), (3, np.float32(2)), (3, Fraction(2))):
        assert torch.equal(group_norm(x, groups, eps=eps), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tracked", (False, True))
def test_forward_mode(rung, layout, tracked):
    x, direction = normal(2, 6, 4, 5, dtype=torch.float64), normal(2, 6, 4, 5, seed=1, dtype=torch.float64)
    expected = torch.func.jvp(lambda x: F.silu(F.group_norm(x, 3)), (x,), (direction,))

    def call(x):
        return group_norm(x, 3, activation="silu")

    laid = laid_out(x, layout).requires_grad_(tracked)
    with forward_ad.dual_level():
        y = forward_ad.unpack_dual(call(forward_ad.make_dual(laid, laid_out(direction, layout))))
        assert layout_of(y.primal) == layout
        torch.testing.assert_close(tuple(y), expected, check_stride=False)
    got = torch.func.jvp(call, (laid,), (direction,))
    torch.testing.assert_close(got, expected, check_stride=False)


def test_one_value_per_group_raises_what_stock_raises(rung):
    for shape, groups in (((1, 4), 4), ((1, 4, 1, 1), 4)):
        with pytest.raises(ValueError) as stock:
            F.group_norm(torch.zeros(shape), groups)
        with pytest.raises(ValueError) as ours:
            group_norm(torch.zeros(shape), groups)
        assert str(ours.value) == str(stock.value)


def test_one_value_per_group_and_more_samples_is_fine(rung):
    x = normal(3, 4).requires_grad_()
    bias = torch.arange(4.0)
    y = group_norm(x, 4, None, bias)
    dy = normal(3, 4, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    if rung == "native":
        assert torch.equal(y, bias.expand(3, 4))
        assert torch.equal(dx, torch.zeros(3, 4))
    else:  # stock's x * scale + shift, with 1 / sqrt(eps) in the scale, is not exact
        expected = F.group_norm(x, 4, torch.ones(4), bias)
        assert torch.equal(y, expected)
        assert torch.equal(dx, torch.autograd.grad(expected, x, dy)[0])


def test_last_rung_tells_who_served(rung):
    group_norm(normal(2, 6, 4), 3)
    assert steadynorm.last_rung() == rung
