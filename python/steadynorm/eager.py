# SPDX-License-Identifier: Apache-2.0
"""The eager rung: stock PyTorch with the casts, relayouts and errors that make it agree with the operator.

Statistics are fp32 also for bf16 and fp16 input: it is widened first, as a full-size copy, and the result is
rounded once. That copy and a slower kernel are the price of this rung, and stock's error where the mean is
far above the deviation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin

ACTIVATIONS = {
    "none": None,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    check(input, num_groups, weight, bias, eps, activation, out_dtype)
    format = memory_format(input)
    x = input
    if x.requires_grad and format != torch.contiguous_format and not _has_tangent(x):
        x = _GradientInFormat.apply(x, format)
    return formula(x, weight, bias, num_groups, eps, activation, out_dtype or input.dtype, format)


def formula(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    activation: str,
    out_dtype: torch.dtype,
    format: torch.memory_format,
) -> torch.Tensor:
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    # Stock's forward mode fails for channels_last: "view size is not compatible".
    within = format if forward_ad._current_level < 0 else torch.contiguous_format
    x = input.to(dtype).contiguous(memory_format=within)
    w = None if weight is None else weight.to(dtype)
    b = None if bias is None else bias.to(dtype)
    if (w is None or w.dim() == 1) and (b is None or b.dim() == 1):
        if w is None and b is not None:
            # Stock's backward fails for a bias without a weight: "tensor does not have a device".
            w = torch.ones_like(b)
        y = F.group_norm(x, num_groups, w, b, eps)
    else:
        y = F.group_norm(x, num_groups, None, None, eps)
        rows = (-1, input.size(1)) + (1,) * (input.dim() - 2)
        if w is not None:
            y = y * w.reshape(rows)
        if b is not None:
            y = y + b.reshape(rows)
    function = ACTIVATIONS[activation]
    if function is not None:
        y = function(y)
    return y.to(out_dtype).contiguous(memory_format=format)


def memory_format(x: torch.Tensor) -> torch.memory_format:
    """The format of y and dx: the input's, contiguous for any other strides and for what is both."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if last is None or x.is_contiguous():
        return torch.contiguous_format
    # With symbolic sizes is_contiguous(channels_last) is false for what is (torch 2.11).
    dense = _is_channels_last(x) if torch.compiler.is_compiling() else x.is_contiguous(memory_format=last)
    return last if dense else torch.contiguous_format


def _is_channels_last(x: torch.Tensor) -> bool:
    expected = 1
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.stride(dim) != expected and x.size(dim) != 1:
            return False
        expected = expected * x.size(dim)
    return True


def check(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> None:
    """The operator's own checks, in its order and words, and those of the types that it takes."""
    check_input(input)
    if input.dim() < 2:
        _reject(f"input must have at least 2 dimensions, got {input.dim()}")
    N, C = input.shape[:2]
    check_groups(num_groups)
    if C % num_groups != 0:
        _reject(f"channels must be divisible by groups, got C={C}, G={num_groups}")
    if input.numel() == num_groups:
        # In torch.nn.functional.group_norm's own words.
        sizes = [1, num_groups, *input.shape[2:]]
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {sizes}")
    _check_dtype("input", input.dtype)
    if C == 0:
        _reject(f"channels must be positive, got C={C}")
    if 0 in input.shape[2:]:
        _reject("every spatial size must be positive, got S=0")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, torch.Tensor):
            _reject(f"{name} must be a Tensor or None, got {type(parameter).__name__}")
        _check_dense(name, parameter)
        shared = parameter.dim() == 1 and parameter.size(0) == C
        if not shared and not (parameter.dim() == 2 and parameter.size(0) == N and parameter.size(1) == C):
            sizes = list(parameter.shape)
            _reject(f"{name} must have shape [C] or [N, C] with N={N}, C={C}, got {sizes}")
        if parameter.device != input.device:
            _reject(f"{name} must be on input's device {input.device}, got {parameter.device}")
        _check_dtype(name, parameter.dtype)
    check_activation(activation)
    if out_dtype is not None:
        _check_dtype("out_dtype", out_dtype)
    check_eps(eps)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dtype == torch.float64 != input.dtype:
            _reject(f"a float64 {name} needs a float64 input, got input {_name(input.dtype)}")


def check_residual(input: torch.Tensor, residual: torch.Tensor) -> None:
    if not isinstance(residual, torch.Tensor):
        _reject(f"residual must be a Tensor or None, got {type(residual).__name__}")
    _check_dense("residual", residual)
    if residual.shape != input.shape:
        _reject(f"residual must have input's sizes {list(input.shape)}, got {list(residual.shape)}")
    if residual.dtype != input.dtype:
        _reject(f"residual must have input's dtype {_name(input.dtype)}, got {_name(residual.dtype)}")
    if residual.device != input.device:
        _reject(f"residual must be on input's device {input.device}, got {residual.device}")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        _reject(f"{name} must be float32, bfloat16, float16 or float64, got {_name(dtype)}")


def check_input(input: torch.Tensor) -> None:
    if not isinstance(input, torch.Tensor):
        _reject(f"input must be a Tensor, got {type(input).__name__}")
    _check_dense("input", input)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedTensorMixin):
        _reject(f"{name} must be initialized, got an {type(tensor).__name__}")
    if tensor.is_nested:
        _reject(f"{name} must be a dense tensor, got a nested one")
    if tensor.layout is not torch.strided:
        _reject(f"{name} must be a dense tensor, got layout {_name(tensor.layout)}")


def check_channels(input: torch.Tensor, channels: int) -> None:
    """A module's own: what does not fit its parameters is the input."""
    check_input(input)
    if input.dim() >= 2 and input.size(1) != channels:
        _reject(f"input must have the module's {channels} channels, got C={input.size(1)}")


def plain(num_groups: int, eps: float, activation: str) -> tuple[int, float]:
    """`num_groups` and `eps` of the types that the operator's schema names; all three are checked."""
    check_activation(activation)
    return check_groups(num_groups), check_eps(eps)


def check_groups(num_groups: int) -> int:
    """An int, or what Python takes for an index: neither a bool nor a tensor, which may be on a GPU."""
    groups = _converted(num_groups, operator.index)
    if groups is None:
        _reject(f"num_groups must be an int, got {_shown(num_groups)}")
    if groups <= 0:
        _reject(f"groups must be positive, got G={groups}")
    return groups


def check_eps(eps: float) -> float:
    """A float, or what becomes one: neither a bool nor a tensor, whose gradient would be lost."""
    number = _converted(eps, float)
    if number is None:
        _reject(f"eps must be a number, got {_shown(eps)}")
    if not 0 <= number < math.inf:
        _reject(f"eps must be finite and not negative, got eps={number:g}")
    return number


def check_activation(name: str) -> None:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        _reject(f"activation must be one of {', '.join(ACTIVATIONS)}, got {_shown(name)}")


def _converted(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, (bool, str, bytes, bytearray, torch.Tensor)):  # float() would read the texts
        return None
    try:
        return convert(value)
    except OverflowError:  # an int beyond every float
        return math.inf
    except (TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    return "a Tensor" if isinstance(value, torch.Tensor) else repr(value)


def _has_tangent(x: torch.Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


class _GradientInFormat(torch.autograd.Function):
    """Passes its input through; its gradient comes back in the input's memory format.

    Without a forward mode: torch.compile refuses a function that has one (torch 2.11).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: torch.Tensor, format: torch.memory_format) -> torch.Tensor:
        return input.view_as(input)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.format = inputs[1]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.contiguous(memory_format=ctx.format), None


def _name(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def _reject(what: str) -> None:
    raise ValueError(f"group_norm: {what}")
