# SPDX-License-Identifier: Apache-2.0
"""GroupNorm: the constructor, dtype under autocast, repr."""

import pytest
import torch
from torch import nn

import steadynorm
from helpers import ACTIVATIONS, FLOATS, LAYOUTS, laid_out, layout_of, normal
from steadynorm import GroupNorm, group_norm


def test_is_a_stock_group_norm():
    assert isinstance(GroupNorm(2, 4), nn.GroupNorm)


def test_constructor_takes_stocks_arguments():
    norm = GroupNorm(2, 4, 1e-3, False, "cpu", torch.float64)
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (2, 4, 1e-3, False)
    assert norm.weight is None
    assert norm.bias is None
    assert GroupNorm(2, 4, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert GroupNorm(2, 4, device="meta").bias.device.type == "meta"


def test_parameters_start_at_one_and_zero():
    norm = GroupNorm(2, 4)
    assert torch.equal(norm.weight, torch.ones(4))
    assert torch.equal(norm.bias, torch.zeros(4))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_computes_the_function(rung, activation):
    norm = GroupNorm(3, 6, eps=0.25, activation=activation)
    with torch.no_grad():
        norm.weight.copy_(normal(6, seed=1))
        norm.bias.copy_(normal(6, seed=2))
    x = normal(2, 6, 5)
    expected = group_norm(x, 3, norm.weight, norm.bias, 0.25, activation=activation)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_returns_its_inputs_dtype_and_format_also_under_autocast(rung, dtype, autocast, layout):
    norm = GroupNorm(3, 6, activation="relu")
    if dtype == torch.float64:
        norm = norm.double()
    x = laid_out(normal(2, 6, 5, 4, dtype=dtype), layout)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        y = norm(x)
    assert y.dtype == dtype
    assert layout_of(y) == layout
    assert steadynorm.last_rung() == rung


def test_half_input_with_fp32_parameters_works(rung):
    # Raises in libraries that want one dtype for all.
    assert GroupNorm(10, 10)(normal(1, 10, 20, 20, dtype=torch.float16)).dtype == torch.float16


def test_repr_shows_the_activation_when_there_is_one():
    assert repr(GroupNorm(2, 4)) == "GroupNorm(2, 4, eps=1e-05, affine=True)"
    assert repr(GroupNorm(2, 4, activation="none")) == "GroupNorm(2, 4, eps=1e-05, affine=True)"
    assert (
        repr(GroupNorm(2, 4, activation="silu")) == "GroupNorm(2, 4, eps=1e-05, affine=True, activation=silu)"
    )


def test_unknown_activation_is_refused_at_once():
    sentence = "group_norm: activation must be one of none, relu, silu, gelu, gelu_tanh, got 'x'"
    with pytest.raises(ValueError) as raised:
        GroupNorm(2, 4, activation="x")
    assert str(raised.value) == sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"activation": ""}, "activation must be one of none, relu, silu, gelu, gelu_tanh, got ''"),
        ({"activation": False}, "activation must be one of none, relu, silu, gelu, gelu_tanh, got False"),
        ({"num_groups": 2.0}, "num_groups must be an int, got 2.0"),
        ({"num_groups": True}, "num_groups must be an int, got True"),
        ({"eps": None}, "eps must be a number, got None"),
        ({"eps": -1e-10}, "eps must be finite and not negative, got eps=-1e-10"),
    ],
)
def test_the_constructor_says_what_is_wrong(arguments, sentence):
    with pytest.raises(ValueError) as raised:
        GroupNorm(**({"num_groups": 2, "num_channels": 4} | arguments))
    assert str(raised.value) == f"group_norm: {sentence}"


@pytest.mark.parametrize("groups", [0, -1])
def test_groups_must_be_positive(groups):
    with pytest.raises(ValueError, match=f"^group_norm: groups must be positive, got G={groups}$"):
        GroupNorm(groups, 4)


def test_groups_must_divide_channels():
    with pytest.raises(ValueError, match="divisible"):
        GroupNorm(3, 4)


def test_input_with_other_channels_is_refused(rung):
    norm = GroupNorm(4, 32)
    for shape in [(2, 16, 8), (16, 8, 8)]:
        sentence = f"^group_norm: input must have the module's 32 channels, got C={shape[1]}$"
        with pytest.raises(ValueError, match=sentence):
            norm(torch.zeros(shape))


@pytest.mark.parametrize("bad", [None, [1.0]])
def test_what_is_no_tensor_is_refused(rung, bad):
    with pytest.raises(ValueError) as raised:
        GroupNorm(2, 4)(bad)
    assert str(raised.value) == f"group_norm: input must be a Tensor, got {type(bad).__name__}"


def test_activation_is_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        GroupNorm(2, 4, 1e-5, True, None, None, "relu")
