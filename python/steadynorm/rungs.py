# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves a call: the native operator, or stock PyTorch made to agree with it.

The ladder: native, compiled, eager. A rung that fails is latched off for the process, but for the modules
that it has served: those keep it, so that a module does not change its rounding for good because of one call.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from . import _native, compiled, eager
from .latch import Rung, warn

if TYPE_CHECKING:
    from .module import GroupNorm

NATIVE = "native"
COMPILED = compiled.rung.name
EAGER = "eager"
INSTEAD = "stock PyTorch serves instead of the native kernels"

native = _native.Native(reason="not loaded yet")
native_rung = Rung(NATIVE, INSTEAD)
ladder = {rung.name: rung for rung in (native_rung, compiled.rung)}
_search_path: list[str] = []
_refused: dict[torch.device, str | None] = {}  # why the native rung does not serve a device; None: it does
_function_served: tuple[str, ...] = ()  # as a module's `_served_by`, of the function
_BY_NATIVE = (NATIVE,)
_last = threading.local()


def start(search_path: list[str]) -> None:
    """Reads the environment and loads the native library; warns once when it can't be."""
    _search_path[:] = search_path
    for rung in ladder.values():
        variable = f"STEADYNORM_{'COMPILE' if rung is compiled.rung else 'NATIVE'}"
        value = os.environ.get(variable, "")
        if value not in ("", "0", "1"):
            raise ValueError(f"steadynorm: {variable} must be 0 (off) or 1 (on), got '{value}'")
        rung.turn(value != "0", by=f"{variable}=0")
    if native_rung.off is None:
        _load()
        if native.reason is not None:
            warn(f"{INSTEAD}: {native.reason}")
    else:
        native.reason = native_rung.off


def _load() -> None:
    global native
    native = _native.load(_search_path)
    native_rung.off = native.reason


def set_rung(name: str, on: bool) -> None:
    """Turns a rung of the ladder on or off, in this process, for every call from now on.

    A call is served by the first rung that can: "native", the library's kernels; "compiled", stock PyTorch
    through `torch.compile`; "eager", stock PyTorch, which is always on. The environment variables
    `STEADYNORM_NATIVE` and `STEADYNORM_COMPILE` (0 is off, 1 on) do the same at import.

    Args:
        name (str): "native" or "compiled".
        on (bool): turning a rung on also clears the latch that a failure has left.

    Raises:
        ValueError: another name, or `on` is no bool.
        RuntimeError: "native" is to be turned on, and its library can't be loaded.

    Example:
        >>> import torch, steadynorm
        >>> steadynorm.set_rung("compiled", False)
        >>> steadynorm.set_rung("native", False)
        >>> y = steadynorm.group_norm(torch.zeros(2, 6, 4), 3)
        >>> steadynorm.last_rung()
        'eager'
        >>> steadynorm.set_rung("native", True)
        >>> steadynorm.set_rung("compiled", True)
    """
    if not isinstance(name, str) or name not in ladder:
        raise ValueError(f"set_rung: name must be one of {', '.join(ladder)}, got {name!r}")
    if not isinstance(on, bool):
        raise ValueError(f"set_rung: on must be True or False, got {on!r}")
    if name == NATIVE and on:
        _refused.clear()
        if native.operator is None:
            _load()
            if native.reason is not None:
                raise RuntimeError(f"set_rung: the native rung can't be turned on: {native.reason}")
    ladder[name].turn(on, by="set_rung")


def last_rung() -> str | None:
    """The rung that served this thread's last call: "native", "compiled" or "eager"; None before the first.

    "native" is the library's own kernel, the others are stock PyTorch. Calls in code that the user compiles
    are not recorded.
    """
    return getattr(_last, "rung", None)


def serve(
    module: GroupNorm | None,
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """One call, of a module or (None) of the function. `out_dtype` None means the input's."""
    # The operator would take 2.9 in a tensor for 2, True for 1 and bytes for a str.
    if type(num_groups) is not int or type(eps) is not float or type(activation) is not str:
        num_groups, eps = eager.plain(num_groups, eps, activation)
    if is_compiling():
        return _inlined(input, num_groups, weight, bias, eps, activation, out_dtype)
    # Where only this rung has ever served and none has failed, there is nothing to weigh and nothing to note.
    served = _function_served if module is None else module._served_by
    settled = served == _BY_NATIVE and native_rung.off is None and native_rung.failure is None
    if (settled or _may_serve(native_rung, module)) and (
        _refused.get(input.device, "") is None or input.is_cpu or why_not_native(input.device) is None
    ):
        try:
            output = native.operator(input, num_groups, weight, bias, eps, activation, out_dtype)
        except Exception as error:
            arguments = (input, num_groups, weight, bias, eps, activation, out_dtype)
            if not _next_serves(native_rung, module, error, arguments):
                raise
        else:
            if settled:
                _last.rung = NATIVE
                return output
            return _served(NATIVE, module, output)
    arguments = (input, num_groups, weight, bias, eps, activation, out_dtype)
    if _may_serve(compiled.rung, module) and compiled.takes(input, weight, bias):
        try:
            output = compiled.group_norm(*arguments)
        except Exception as error:
            if not _next_serves(compiled.rung, module, error, arguments):
                raise
        else:
            return _served(COMPILED, module, output)
    try:
        output = eager.group_norm(*arguments)
    except ValueError:
        _check(module, arguments)
        raise
    return _served(EAGER, module, output)


def serve_residual(
    module: GroupNorm | None,
    input: torch.Tensor,
    residual: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`serve` of input + residual, and that sum: both at once on the native rung, on others one by one."""
    if type(num_groups) is not int or type(eps) is not float or type(activation) is not str:
        num_groups, eps = eager.plain(num_groups, eps, activation)
    options = (num_groups, weight, bias, eps, activation, out_dtype)
    if torch.compiler.is_compiling():
        if _inlines_native(input.device):
            return native.traced_residual(input, residual, *options)
    elif _may_serve(native_rung, module) and (input.is_cpu or why_not_native(input.device) is None):
        try:
            outputs = native.residual_operator(input, residual, *options)
        except Exception as error:
            if not _next_serves(native_rung, module, error, (input, *options), residual):
                raise
        else:
            return _served(NATIVE, module, outputs)
    _check(module, (input, *options), residual)
    sum = input + residual
    return serve(module, sum, *options), sum


def _inlined(input: torch.Tensor, *options: Any) -> torch.Tensor:
    """In a trace of the user's: by the process's state alone, and nothing is caught or recorded."""
    if _inlines_native(input.device):
        return native.traced(input, *options)
    return eager.group_norm(input, *options)


def _inlines_native(device: torch.device) -> bool:
    return native_rung.off is None and native_rung.failure is None and why_not_native(device) is None


def _may_serve(rung: Rung, module: GroupNorm | None) -> bool:
    if rung.off is not None:
        return False
    if module is None:
        return rung.failure is None
    served = module._served_by
    if rung.failure is not None and rung.name not in served:
        return False
    # A replay is served by the rung that served its forward, which may have fallen back.
    return not served or served[-1] == rung.name or not _in_backward()


def _next_serves(
    rung: Rung,
    module: GroupNorm | None,
    error: Exception,
    arguments: tuple[Any, ...],
    residual: torch.Tensor | None = None,
) -> bool:
    """After an error of `rung`: whether the call goes on to the next one, rather than up to the caller."""
    _check(module, arguments, residual)
    implementation = _native if rung is native_rung else compiled
    if implementation.declines(error):
        return True
    reason = implementation.failure(error)
    if reason is None:
        return False
    rung.latch(reason)
    served = _function_served if module is None else module._served_by
    return not (rung.name in served and _in_backward())


def _check(
    module: GroupNorm | None, arguments: tuple[Any, ...], residual: torch.Tensor | None = None
) -> None:
    try:
        if module is not None and module.weight is not None:
            eager.check_channels(arguments[0], module.num_channels)
        eager.check(*arguments)
        if residual is not None:
            eager.check_residual(arguments[0], residual)
    except ValueError as error:
        raise error from None


def _served(name: str, module: GroupNorm | None, output: Any) -> Any:
    global _function_served
    _last.rung = name
    served = _function_served if module is None else module._served_by
    if not served or served[-1] != name:
        served = (*(n for n in served if n != name), name)
        if module is None:
            _function_served = served
        else:
            module._served_by = served
    return output


def _in_backward() -> bool:
    """Whether autograd's engine is running in this thread: what calls us then is a replay of a forward."""
    return torch._C._current_graph_task_id() != -1


def why_not_native(device: torch.device) -> str | None:
    """Why the native library does not serve tensors of `device`; None: it does."""
    if native.reason is not None:
        return native.reason
    if device not in _refused:
        reason = _native.why_not_on(native, device)
        if is_compiling():
            return reason
        _refused[device] = reason
        if reason is not None:
            warn(f"{INSTEAD}: {reason}")
    return _refused[device]
