# SPDX-License-Identifier: Apache-2.0
"""Measures one call, forward and backward, against float64, in units of the bounds that are promised.

Letters: x^ = (x - mean) * rstd, z = weight * x^ + bias, dz = dy * activation'(z), u = 2^-24 (one rounding of fp32).
Each bound is half a unit of the result's dtype plus limit * u * terms, where

    y        terms = max(|weight * x^|, |bias|)                                                  limit 8
    dbias    terms = sum |dz|                                                                    limit 8
    dweight  terms = sum |dz * x^|                                                               limit 16
    dx       terms = rstd * (a + mean a + |x^| * mean(a * |x^|)), a = |weight * dz|              limit 16

and with an activation 18, 16, 24 and 24, where |dz| is joined by what z's own error does to the slope.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .eager import ACTIVATIONS

U = 2.0**-24
LIMITS = {"y": 8, "dx": 16, "dweight": 16, "dbias": 8}
LIMITS_WITH_ACTIVATION = {"y": 18, "dx": 24, "dweight": 24, "dbias": 16}

# Bits of the significand, and the exponent of the smallest number above 0.
_FORMATS = {
    torch.float64: (53, -1074),
    torch.float32: (24, -149),
    torch.bfloat16: (8, -133),
    torch.float16: (11, -24),
}


@dataclass(frozen=True)
class Measurement:
    """The worst element of one output: its error beyond half a unit, in u of its terms, and what is allowed."""

    output: str
    worst: float
    limit: float
    index: tuple[int, ...] = ()
    got: float = math.nan
    expected: float = math.nan

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.output}{list(self.index)}: {self.got!r}, in float64 {self.expected!r}: "
            f"{self.worst:.3g}u beyond half a unit, {self.limit:g}u allowed"
        )


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
    expected, terms = reference(x, groups, weight, bias, eps, activation, dy)
    limits = LIMITS if activation == "none" else LIMITS_WITH_ACTIVATION
    return [_compare(name, got, expected[name], terms[name], limits[name]) for name, got in outputs.items()]


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dy: torch.Tensor | None,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The outputs in float64 on the CPU, by stock PyTorch, and the terms of their bounds."""
    rows = (-1, x.size(1)) + (1,) * (x.dim() - 2)
    X = x.detach().cpu().double().contiguous().requires_grad_()
    W = torch.ones(1, x.size(1), dtype=torch.float64) if weight is None else weight.detach().cpu().double()
    B = torch.zeros(1, x.size(1), dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    W.requires_grad_()
    B.requires_grad_()
    # A shift changes nothing in exact arithmetic, is exact here, and keeps float64 from losing what a far mean hides.
    shift = _by_group(X.detach(), groups)[:, :, :1].expand(-1, -1, X[:1, : X.size(1) // groups].numel())
    xhat = F.group_norm(X - shift.reshape(X.shape), groups, eps=eps)
    z = xhat * W.reshape(rows) + B.reshape(rows)
    function = ACTIVATIONS[activation]
    y = z if function is None else function(z)

    w, b = W.detach().reshape(rows), B.detach().reshape(rows)
    scale = torch.maximum((w * xhat.detach()).abs(), b.abs().expand_as(X))
    expected = {"y": y.detach()}
    terms = {"y": scale}
    if dy is None:
        return expected, terms

    dY = dy.detach().cpu().double()
    dz, *gradients = torch.autograd.grad(y, [z, X, W, B], dY)
    expected.update(zip(("dx", "dweight", "dbias"), gradients, strict=True))

    # What z's error (at most 10u of its scale) does to dz; all activations have |activation''| <= 1.2 but relu, whose
    # slope jumps at 0.
    size = torch.maximum(scale, z.detach().abs())
    if activation == "none":
        slope = torch.zeros_like(dY)
    elif activation == "relu":
        slope = torch.where(z.detach().abs() <= 10 * U * size, dY.abs() / U, 0.0)
    else:
        slope = 10 * dY.abs() * size
    limits = LIMITS if activation == "none" else LIMITS_WITH_ACTIVATION
    magnitude = xhat.detach().abs()

    def over(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        per_channel = values.flatten(2).sum(2) if values.dim() > 2 else values
        return per_channel if parameter.dim() == 2 and parameter.size(0) == x.size(0) else per_channel.sum(0)

    terms["dbias"] = over(dz.abs() + slope / limits["dbias"], B)
    terms["dweight"] = over((dz.abs() + slope / limits["dweight"]) * magnitude, W)
    a = w.abs() * (dz.abs() + slope / limits["dx"])
    variance = _by_group(X.detach(), groups).var(2, correction=0, keepdim=True)
    rstd = 1 / torch.sqrt(variance + eps)
    grouped, size = _by_group(a, groups), _by_group(magnitude, groups)
    dx_terms = grouped + grouped.mean(2, keepdim=True) + size * (grouped * size).mean(2, keepdim=True)
    terms["dx"] = (rstd * dx_terms).reshape(x.shape)
    return expected, terms


def unit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at each of the float64 `values`."""
    bits, smallest = _FORMATS[dtype]
    exponent = torch.frexp(values).exponent
    return torch.ldexp(torch.ones_like(values), (exponent - bits).clamp(min=smallest))


def _by_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    return values.reshape(values.size(0), groups, -1)


def _compare(
    name: str, got: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor, limit: float
) -> Measurement:
    if got.numel() == 0:
        return Measurement(name, 0.0, limit)
    value = got.cpu().double()
    half = unit(torch.maximum(value.abs(), expected.abs()), got.dtype) / 2
    beyond = ((value - expected).abs() - half).clamp(min=0)
    error = torch.where(beyond == 0, 0.0, beyond / (U * terms))
    flat = error.flatten()
    bad = flat.isnan().nonzero()
    position = int(bad[0]) if len(bad) else int(flat.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), error.shape))
    return Measurement(name, float(flat[position]), limit, index, float(value[index]), float(expected[index]))
