# SPDX-License-Identifier: Apache-2.0
"""Measures one call, forward and backward, against float64, by the bounds that are promised."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .bench.bounds import Expected, expect, unit


@dataclass(frozen=True)
class Measurement:
    """The worst element of one output."""

    output: str
    share: float  # its error in units of its bound: above 1, or NaN, the bound is broken
    ulp: float = 0.0  # the worst error in units of the last place of the sizes that enter the element
    index: tuple[int, ...] = ()
    got: float = math.nan
    expected: float = math.nan

    @property
    def ok(self) -> bool:
        return self.share <= 1

    def __str__(self) -> str:
        where = f"{self.output}{list(self.index)}"
        return f"{where}: {self.got!r}, in float64 {self.expected!r}: {self.share:.3g} of the bound"


def measure(
    norm: Callable[..., torch.Tensor],
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    dy: torch.Tensor | None = None,
) -> list[Measurement]:
    """Calls `norm` with these arguments and measures y and, with `dy`, the gradients of all tensors given."""
    given = {"dx": x, "dweight": weight, "dbias": bias}
    leaves = {name: t.detach().requires_grad_(dy is not None) for name, t in given.items() if t is not None}
    y = norm(
        leaves["dx"],
        groups,
        leaves.get("dweight"),
        leaves.get("dbias"),
        eps,
        activation=activation,
        out_dtype=out_dtype,
    )
    outputs = {"y": y.detach()}
    if dy is not None:
        outputs.update(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))
    # On the CPU, whatever device is measured.
    x, weight, bias, dy = (None if t is None else t.detach().cpu() for t in (x, weight, bias, dy))
    expected = expect(x, groups, weight, bias, eps, activation, dy)
    return [compare(name, got, expected[name]) for name, got in outputs.items()]


def compare(output: str, got: torch.Tensor, expected: Expected) -> Measurement:
    """The element of `got` that is nearest to breaking its bound, or has broken it most."""
    if got.numel() == 0:
        return Measurement(output, 0.0)
    value, right = got.detach().cpu().double(), expected.value
    error = torch.where(value == right, 0.0, (value - right).abs())
    half = unit(torch.maximum(value.abs(), right.abs()), got.dtype) / 2
    share = error / (half + expected.allowance)
    ulp = error / unit(torch.maximum(right.abs(), expected.size), got.dtype)
    flat = share.flatten().nan_to_num(nan=math.inf)
    position = int(flat.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), share.shape))
    return Measurement(
        output, float(share[index]), float(ulp.max()), index, float(value[index]), float(right[index])
    )
