# SPDX-License-Identifier: Apache-2.0
"""Every sentence that the operators raise, from the CPU and from the Meta kernels alike."""

import re

import pytest
import torch
import torch.nn.functional as F

import steadynorm  # noqa: F401  (loads the operators)
from operator_samples import apply, backward, forward, group_norm, stats

DEVICES = ("cpu", "meta")
DTYPES = "float32, bfloat16, float16 or float64"


def ones(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


# What is wrong, as keyword arguments of the differentiable operator, and the sentence after "group_norm: ".
WRONG = {
    "rank": ({"input": (6,)}, "input must have at least 2 dimensions, got 1"),
    "groups": ({"num_groups": 0}, "groups must be positive, got G=0"),
    "negative groups": ({"num_groups": -2}, "groups must be positive, got G=-2"),
    "divisible": ({"num_groups": 4}, "channels must be divisible by groups, got C=6, G=4"),
    "no channel": ({"input": (2, 0, 5)}, "channels must be positive, got C=0"),
    "no position": ({"input": (2, 6, 5, 0)}, "every spatial size must be positive, got S=0"),
    "input dtype": ({"input": ((2, 6, 5), torch.int64)}, f"input must be {DTYPES}, got int64"),
    "bool input": ({"input": ((2, 6, 5), torch.bool)}, f"input must be {DTYPES}, got bool"),
    "complex input": ({"input": ((2, 6, 5), torch.complex64)}, f"input must be {DTYPES}, got complex64"),
    "weight dtype": ({"weight": ((6,), torch.int32)}, f"weight must be {DTYPES}, got int32"),
    "bias dtype": ({"bias": ((6,), torch.float8_e5m2)}, f"bias must be {DTYPES}, got float8_e5m2"),
    "weight size": ({"weight": (5,)}, "weight must have shape [C] or [N, C] with N=2, C=6, got [5]"),
    "one row": ({"weight": (1, 6)}, "weight must have shape [C] or [N, C] with N=2, C=6, got [1, 6]"),
    "bias rank": ({"bias": (2, 6, 1)}, "bias must have shape [C] or [N, C] with N=2, C=6, got [2, 6, 1]"),
    "wide weight": (
        {"weight": ((6,), torch.float64)},
        "a float64 weight needs a float64 input, got input float32",
    ),
    "wide bias": (
        {"input": ((2, 6, 5), torch.bfloat16), "bias": ((6,), torch.float64)},
        "a float64 bias needs a float64 input, got input bfloat16",
    ),
    "eps": ({"eps": -1.0}, "eps must be finite and not negative, got eps=-1"),
    "eps is NaN": ({"eps": float("nan")}, "eps must be finite and not negative, got eps=nan"),
    "activation": (
        {"activation": "tanh"},
        "activation must be one of none, relu, silu, gelu, gelu_tanh, got 'tanh'",
    ),
    "out_dtype": ({"out_dtype": torch.int8}, f"out_dtype must be {DTYPES}, got int8"),
}


def build(changes, device):
    arguments = {"input": (2, 6, 5), "num_groups": 3, **changes}
    for name in ("input", "weight", "bias"):
        if name in arguments:
            shape = arguments[name]
            shape, dtype = shape if isinstance(shape[0], tuple) else (shape, torch.float32)
            arguments[name] = torch.empty(shape, dtype=dtype, device=device)
    return arguments


def raises(sentence):
    return pytest.raises(ValueError, match=f"^{re.escape('group_norm: ' + sentence)}$")


@pytest.mark.parametrize("tracked", (False, True))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WRONG)
def test_differentiable_operator(name, device, tracked):
    changes, sentence = WRONG[name]
    arguments = build(changes, device)
    if tracked and arguments["input"].is_floating_point():
        arguments["input"].requires_grad_()
    with raises(sentence):
        group_norm(**arguments)


@pytest.mark.parametrize("name", [n for n in WRONG if n not in ("groups", "negative groups", "divisible")])
@pytest.mark.parametrize("device", DEVICES)
def test_under_functorch(name, device):
    changes, sentence = WRONG[name]
    arguments = build(changes, device)
    if not arguments["input"].is_floating_point():
        pytest.skip("grad itself refuses it")
    x = arguments.pop("input")
    with raises(sentence):
        torch.func.grad(lambda x: group_norm(x, **arguments).sum())(x)


@pytest.mark.parametrize("device", DEVICES)
def test_inner_operators(device):
    x = ones(2, 6, 5, device=device)
    with raises("channels per group must be positive, got D=0"):
        forward(x, None, None, 0)
    with raises("channels must be divisible by channels per group, got C=6, D=4"):
        stats(x, 4)
    y, statistics = forward(x, None, None, 2)
    with raises("grad_output must have input's sizes [2, 6, 5], got [2, 6, 4]"):
        backward(y[..., :4], x, statistics, None, None, 2)
    with raises(f"grad_output must be {DTYPES}, got int64"):
        backward(y.long(), x, statistics, None, None, 2)
    with raises("statistics must be float32 [3, N, G] with sizes [3, 2, 3], got float32 [3, 2, 2]"):
        backward(y, x, statistics[..., :2], None, None, 2)
    with raises("statistics must be float32 [3, N, G] with sizes [3, 2, 3], got float64 [3, 2, 3]"):
        backward(y, x, statistics.double(), None, None, 2)
    with raises("moments must be float64 [N, G, 3] with sizes [2, 3, 3], got float32 [3, 2, 3]"):
        apply(x, statistics, None, None, 2)


def test_parameter_on_another_device():
    with raises("weight must be on input's device cpu, got meta"):
        group_norm(ones(2, 6, 5), 3, ones(6, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "groups"), [((1, 4, 1, 1), 4), ((1, 4), 4), ((1, 1, 1), 1)])
def test_one_value_per_group_in_the_whole_batch_is_stocks_error(shape, groups, device):
    x = ones(*shape, device=device)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as stock:
        F.group_norm(x, groups)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel") as ours:
        group_norm(x, groups)
    assert str(ours.value) == str(stock.value)


def test_error_from_backward_is_a_value_error():
    x = ones(2, 6, 5).requires_grad_()
    with raises("statistics must be float32 [3, N, G] with sizes [3, 2, 3], got float32 [1]"):

        class Wrong(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, dy):
                return backward(dy, dy, torch.ones(1), None, None, 2)[0]

        Wrong.apply(x).sum().backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ("forward", "stats"))
def test_inner_operators_refuse_to_be_differentiated(name):
    x = ones(2, 6, 5).requires_grad_()
    y = forward(x, None, None, 2)[0] if name == "forward" else stats(x, 2)
    with pytest.raises(RuntimeError, match="not implemented"):
        y.sum().backward()
