# SPDX-License-Identifier: Apache-2.0
"""What is compared: ours, and peers with the same observable result (dtype and memory format)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from .. import functional
from .bounds import activate

EPS = 1e-5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PEERS = ("eager", "inductor", "liger")
ARMS = ("ours", *PEERS)


class Case(Protocol):
    """A named shape: [N, C, *], groups, and `contiguous` or `channels_last`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def groups(self) -> int: ...
    @property
    def layout(self) -> str: ...


@dataclass
class Operands:
    """Random tensors of one case. x and dy are [N, C, *] in the case's layout; weight and bias are [C]."""

    x: torch.Tensor
    dy: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    groups: int
    activation: str
    memory_format: torch.memory_format

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [self.x, self.weight, self.bias]


def memory_format(layout: str, rank: int) -> torch.memory_format:
    if layout == "contiguous":
        return torch.contiguous_format
    return {4: torch.channels_last, 5: torch.channels_last_3d}[rank]


def operands(
    case: Case, dtype: str, activation: str, device: str = "cuda", gradients: bool = True
) -> Operands:
    generator = torch.Generator(device).manual_seed(0)
    options = {"dtype": DTYPES[dtype], "device": device}
    layout = memory_format(case.layout, len(case.shape))

    def normal(shape: tuple[int, ...], layout: torch.memory_format) -> torch.Tensor:
        return torch.empty(shape, memory_format=layout, **options).normal_(generator=generator)

    row = (case.shape[1],)
    weight, bias = (normal(row, torch.contiguous_format).requires_grad_(gradients) for _ in range(2))
    x = normal(case.shape, layout).requires_grad_(gradients)
    return Operands(x, normal(case.shape, layout), weight, bias, case.groups, activation, layout)


def stock(x, groups, weight, bias, activation, layout):
    """PyTorch's own, with the activation after it and x's memory format restored."""
    return activate(F.group_norm(x, groups, weight, bias, EPS), activation).contiguous(memory_format=layout)


def _stock(o: Operands) -> torch.Tensor:
    return stock(o.x, o.groups, o.weight, o.bias, o.activation, o.memory_format)


def _ours(o: Operands) -> torch.Tensor:
    return functional.group_norm(o.x, o.groups, o.weight, o.bias, EPS, activation=o.activation)


def _inductor() -> Callable[[Operands], torch.Tensor]:
    compiled = torch.compile(stock, dynamic=False, fullgraph=True)
    return lambda o: compiled(o.x, o.groups, o.weight, o.bias, o.activation, o.memory_format)


def _liger(o: Operands) -> torch.Tensor:
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    flat = o.x.reshape(*o.x.shape[:2], -1)  # [N, C, S]
    y = LigerGroupNormFunction.apply(flat, o.weight, o.bias, o.x.shape[1], o.groups, EPS)
    return activate(y.reshape(o.x.shape), o.activation)


def missing(peer: str, device: str = "cuda") -> str | None:
    """What a peer needs that this environment lacks; None: it is there."""
    if peer == "liger":
        if device != "cuda":
            return "a CUDA device"
        return None if importlib.util.find_spec("liger_kernel") else "liger-kernel"
    if peer == "inductor":
        if device == "cuda":
            return None if importlib.util.find_spec("triton") else "triton"
        compilers = (os.environ.get("CXX") or "g++", "clang++")
        return None if any(map(shutil.which, compilers)) else "a C++ compiler"
    return None


def available(peers: Sequence[str], device: str = "cuda") -> list[str]:
    """The peers that this environment has."""
    return [peer for peer in peers if missing(peer, device) is None]


def arms_of(case: Case, peers: Sequence[str]) -> dict[str, Callable[[Operands], torch.Tensor]]:
    """What is timed for a case: ours first. Liger serves contiguous tensors only."""
    makers = {"eager": lambda: _stock, "inductor": _inductor, "liger": lambda: _liger}
    serving = [peer for peer in peers if peer != "liger" or case.layout == "contiguous"]
    return {"ours": _ours, **{peer: makers[peer]() for peer in serving}}


def training_step(function: Callable[[Operands], torch.Tensor], o: Operands) -> tuple[torch.Tensor, ...]:
    """(y, dx, dweight, dbias) of one forward and backward."""
    y = function(o)
    return (y, *torch.autograd.grad(y, o.inputs, o.dy))
