# SPDX-License-Identifier: Apache-2.0
"""The compiled rung: the eager rung's formula through torch.compile, forward and backward.

An autograd function of its own rather than torch.compile's: it saves input, weight and bias alone, computes
in backward what it needs again, and its gradients have gradients, which those of compiled code have not.

How much is compiled is bounded: sizes are symbols, everything else that shapes the code is a *kind* with a
code object of its own, on which Dynamo keeps to its `recompile_limit`; beyond it the formula runs uncompiled.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import eager
from .latch import Rung, sentence

BACKEND = "inductor"
MAX_KINDS = 64

rung = Rung("compiled", "eager PyTorch serves instead of compiled PyTorch")
_kinds: dict[tuple, Callable[..., Any]] = {}
_lock = threading.Lock()


class CompileUnavailable(RuntimeError):
    """torch.compile itself refuses, before it has seen any tensor: this Python, this platform."""


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether torch.compile can be trusted with these tensors in this context; what it can't is eager's."""
    return (
        all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
        and not any(t is not None and (t.is_meta or t.numel() == 0) for t in tensors)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _get_current_dispatch_mode() is None
    )


def failure(error: Exception) -> str | None:
    """What an error says about this rung; None: nothing, it is somebody else's."""
    if not isinstance(error, (CompileUnavailable, TorchDynamoException)):
        return None
    cause = getattr(error, "inner_exception", error)  # of a failed backend
    return None if isinstance(cause, (torch.OutOfMemoryError, MemoryError)) else sentence(cause)


def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    eager.check(input, num_groups, weight, bias, eps, activation, out_dtype)
    options = (num_groups, eps, activation, out_dtype or input.dtype)
    return _GroupNorm.apply(input, weight, bias, options)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, options) -> torch.Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.options = options
        format = eager.memory_format(input)
        x = input.detach().contiguous(memory_format=format)
        y = _run(eager.formula, x, _detached(weight), _detached(bias), *options, format)
        return y.contiguous(memory_format=format)

    @staticmethod
    def backward(ctx, dy) -> tuple:
        input, weight, bias = ctx.saved_tensors
        format = eager.memory_format(input)
        arguments = (input, weight, bias, *ctx.options, format)
        if torch.is_grad_enabled() or not takes(dy, input, weight, bias):
            return (*_gradients(dy, *arguments), None)
        arguments = (input.detach().contiguous(memory_format=format), *arguments[1:])
        dy = dy.contiguous(memory_format=format)
        try:
            found = _run(_gradients, dy, *arguments)
        except Exception as error:
            reason = failure(error)
            if reason is None:
                raise
            rung.latch(reason)
            found = _gradients(dy, *arguments)
        return (*found, None)


def _gradients(dy, input, weight, bias, num_groups, eps, activation, out_dtype, format) -> tuple:
    """dx in `format`, dweight and dbias; None for what is missing."""
    given = [t for t in (input, weight, bias) if t is not None]

    def call(*tensors):
        left = list(tensors)
        x, w, b = (None if t is None else left.pop(0) for t in (input, weight, bias))
        return eager.formula(x, w, b, num_groups, eps, activation, out_dtype, format)

    found = list(torch.func.vjp(call, *given)[1](dy))
    dx, dweight, dbias = (None if t is None else found.pop(0) for t in (input, weight, bias))
    return dx.contiguous(memory_format=format), dweight, dbias


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, compiled. Autocast, which chooses no dtype in it, would be one more kind."""
    tensors = [a for a in arguments if isinstance(a, torch.Tensor)]
    device = tensors[0].device.type
    available = torch.amp.is_autocast_available(device)
    with torch.autocast(device, enabled=False) if available else contextlib.nullcontext():
        return _compiled(function, _kind(function, arguments))(*arguments)


def _kind(function: Callable[..., Any], arguments: tuple) -> tuple:
    def of(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return a.dim(), a.dtype, a.device, a.is_inference()
        return None if isinstance(a, (int, float)) else a

    return BACKEND, function, *map(of, arguments)


def _compiled(function: Callable[..., Any], kind: tuple) -> Callable[..., Any]:
    with _lock:
        if kind not in _kinds:
            if len(_kinds) >= MAX_KINDS:
                return function
            # Dynamo counts by code object.
            own = types.FunctionType(function.__code__.replace(), function.__globals__)
            try:
                _kinds[kind] = torch.compile(own, dynamic=True, backend=BACKEND)
            except RuntimeError as error:
                raise CompileUnavailable(str(error)) from error
        return _kinds[kind]


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
