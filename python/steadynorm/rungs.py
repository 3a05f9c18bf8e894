# SPDX-License-Identifier: Apache-2.0
"""Which implementation serves a call: the native operator, or stock PyTorch made to agree with it."""

from __future__ import annotations

import threading
import warnings

import torch

from . import _native, eager

NATIVE = "native"
EAGER = "eager"

native = _native.Native(reason="not loaded yet")
_refused: dict[torch.device, str | None] = {}  # why the native rung does not serve a device; None: it does
_last = threading.local()


def start(search_path: list[str]) -> None:
    """Loads the native library; warns once when it can't be."""
    global native
    native = _native.load(search_path)
    if native.reason is not None:
        _warn(native.reason)


def serve(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """One call, on the first rung that can serve it. `out_dtype` None means the input's."""
    operator = native.operator
    if operator is not None and (input.is_cpu or why_not_native(input.device) is None):
        rung = NATIVE
        output = operator(input, num_groups, weight, bias, eps, activation, out_dtype)
    else:
        rung = EAGER
        output = eager.group_norm(input, num_groups, weight, bias, eps, activation, out_dtype)
    if not torch.compiler.is_compiling():
        _last.rung = rung
    return output


def last_rung() -> str | None:
    """The rung that served this thread's last call: "native" or "eager"; None before the first.

    "native" is the library's own kernel, "eager" is stock PyTorch. Calls inside `torch.compile`d code are not recorded.
    """
    return getattr(_last, "rung", None)


def why_not_native(device: torch.device) -> str | None:
    """Why the native rung does not serve tensors of `device`; None: it does."""
    if native.reason is not None:
        return native.reason
    if device not in _refused:
        reason = _native.why_not_on(native, device)
        if torch.compiler.is_compiling():
            return reason
        _refused[device] = reason
        if reason is not None:
            _warn(reason)
    return _refused[device]


def _warn(reason: str) -> None:
    # Level 4: the line outside the package that imported it, or that called it.
    warnings.warn(
        f"steadynorm: stock PyTorch serves instead of the native kernels: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
