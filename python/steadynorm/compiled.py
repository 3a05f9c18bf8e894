# SPDX-License-Identifier: Apache-2.0
"""The compiled rung: the eager rung's formula through torch.compile, forward and backward.

An autograd function of its own rather than torch.compile's: it saves input, weight and bias alone, computes
in backward what it needs again, and its gradients have gradients, which those of compiled code have not.

How much is compiled is bounded: sizes are symbols, and every other argument belongs to the *kind* of call. A
kind has a code object of its own, on which Dynamo keeps to its `recompile_limit` (sizes of 1 make new code).
Beyond that and beyond MAX_KINDS the formula runs uncompiled.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from . import eager
from .latch import Rung, sentence

BACKEND = "inductor"
MAX_KINDS = 64

rung = Rung("compiled", "eager PyTorch serves instead of compiled PyTorch")
_kinds: dict[tuple, Callable[..., torch.Tensor]] = {}
_lock = threading.RLock()  # while one thread compiles, Dynamo refuses compiled code to all others


class CompileUnavailable(RuntimeError):
    """torch.compile itself refuses, before it has seen any tensor: this Python, this platform."""


def takes(*tensors: torch.Tensor | None) -> bool:
    """Whether torch.compile can be trusted with these tensors in this context; what it can't is eager's."""
    # torch 2.11 crashes the process when its first compilation was in a thread that has ended since.
    first_in_main = bool(_kinds) or threading.current_thread() is threading.main_thread()
    return (
        first_in_main
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _get_current_dispatch_mode() is None
        and all(t is None or type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
        and not any(t is not None and (t.is_meta or t.numel() == 0) for t in tensors)
    )


def declines(error: Exception) -> bool:
    """Whether an error says no more than: not now. Somebody else's code is being compiled."""
    return isinstance(error, RuntimeError) and "symbolically trace a dynamo-optimized function" in str(error)


def failure(error: Exception) -> str | None:
    """What an error says about this rung; None: nothing, it is somebody else's."""
    from torch._dynamo.exc import TorchDynamoException  # a second or two, for those who need it

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
        detached = (None if t is None else t.detach() for t in (input, weight, bias))
        return _formula(*detached, *options, eager.memory_format(input))

    @staticmethod
    def backward(ctx, dy) -> tuple:
        saved = ctx.saved_tensors  # once: checkpointing allows no second look
        if torch.is_grad_enabled() or not takes(dy, *saved):
            return (*_gradients(eager.formula, dy, *saved, ctx.options), None)
        try:
            found = _gradients(_formula, dy, *saved, ctx.options)
        except Exception as error:
            reason = failure(error)
            if reason is not None:
                rung.latch(reason)
            elif not declines(error):
                raise
            found = _gradients(eager.formula, dy, *saved, ctx.options)
        return (*found, None)


def _gradients(formula: Callable[..., torch.Tensor], dy, input, weight, bias, options) -> list:
    """dx in input's memory format, dweight and dbias; None where not wanted. `formula` runs once more."""
    again = torch.is_grad_enabled()  # the gradients will be differentiated
    format = eager.memory_format(input)

    def own(t: torch.Tensor | None) -> torch.Tensor | None:
        # A view where the history is needed: a weight made from input must not bring its part of dx along.
        return None if t is None else t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad)

    with torch.enable_grad():
        tensors = [own(t) for t in (input, weight, bias)]
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        y = formula(*tensors, *options, format)
        found = list(torch.autograd.grad(y, wanted, dy, create_graph=again))
    dx, *rest = (found.pop(0) if t is not None and t.requires_grad else None for t in tensors)
    return [None if dx is None else dx.contiguous(memory_format=format), *rest]


def _formula(input: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`eager.formula`, compiled. Strides and autocast do not matter to it, and shall make no new code."""
    device = input.device.type
    arguments = (input.contiguous(memory_format=rest[-1]), *rest)
    available = torch.amp.is_autocast_available(device)
    with _lock, torch.autocast(device, enabled=False) if available else contextlib.nullcontext():
        return _code(arguments)(*arguments)


def _code(arguments: tuple) -> Callable[..., torch.Tensor]:
    """What Dynamo compiles for this kind of call, or has compiled."""

    def of(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return a.dim(), a.dtype, a.device, a.requires_grad, a.is_inference()
        return a

    kind = (BACKEND, torch.is_grad_enabled(), *map(of, arguments))
    if kind not in _kinds:
        if len(_kinds) >= MAX_KINDS:
            return eager.formula
        formula = eager.formula
        own = types.FunctionType(
            formula.__code__.replace(), formula.__globals__
        )  # Dynamo counts by code object
        try:
            _kinds[kind] = torch.compile(own, dynamic=True, backend=BACKEND)
        except Exception as error:
            raise CompileUnavailable(sentence(error)) from error
    return _kinds[kind]
