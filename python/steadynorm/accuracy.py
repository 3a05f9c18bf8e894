# SPDX-License-Identifier: Apache-2.0
"""Measures one call, forward and backward, against float64, by the bounds that are promised.

Letters: x^ = (x - mean) * rstd, z = weight * x^ + bias, dz = dy * activation'(z), u = 2^-24 (one rounding of fp32).
A result may be off by half a unit of its dtype and a slack:

    y        8u * m + 2u * |weight|, m = max(|weight * x^|, |bias|); 10u * m with relu, with another activation
             18u * m + 2.3u * |weight|
    dbias    8u * sum |dz| + sum e
    dweight  u * sum |dz| * (16 |x^| + 2) + sum e * |x^|
    dx       rstd * (16u * (a + mean a + |x^| * mean(a |x^|)) + 2u * (mean(a |x^|) + |x^| * mean a)
                     + f + mean f + |x^| * mean(f |x^|)), a = |weight * dz|, f = |weight| * e

where e is what an activation adds to the error of dz: with zeta = 10u * m + 2u * |weight|, the error of z, it is
|dy| * ((7 + 4|z|) * u + 0.8 * zeta); for relu 0, but |dy| where |z| <= zeta, since there the sign is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .eager import ACTIVATIONS

U = 2.0**-24
UNDERFLOW = 2.0**-140  # products may fall into fp32's subnormals, where a rounding is not relative

# Bits of the significand, and the exponent of the smallest number above 0.
_FORMATS = {
    torch.float64: (53, -1074),
    torch.float32: (24, -149),
    torch.bfloat16: (8, -133),
    torch.float16: (11, -24),
}


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


@dataclass(frozen=True)
class Expected:
    """An output in float64, the sizes that enter each element, and how far off it may be besides its rounding."""

    value: torch.Tensor
    size: torch.Tensor
    slack: torch.Tensor


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
    expected = reference(x, groups, weight, bias, eps, activation, dy)
    return [compare(name, got, expected[name]) for name, got in outputs.items()]


def reference(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dy: torch.Tensor | None,
) -> dict[str, Expected]:
    """Every output in float64 on the CPU, by stock PyTorch."""
    N, C = x.shape[:2]
    rows = (-1, C) + (1,) * (x.dim() - 2)
    X = x.detach().cpu().double().contiguous().requires_grad_()
    W = torch.ones(C, dtype=torch.float64) if weight is None else weight.detach().cpu().double()
    B = torch.zeros(C, dtype=torch.float64) if bias is None else bias.detach().cpu().double()
    W.requires_grad_()
    B.requires_grad_()

    # A shift changes nothing in exact arithmetic, and keeps float64 from losing what a far mean hides.
    grouped = X.detach().reshape(N, groups, -1)
    shifted = (X.reshape(grouped.shape) - grouped[:, :, :1]).reshape(X.shape)
    normalized = F.group_norm(shifted, groups, eps=eps)
    z = normalized * W.reshape(rows) + B.reshape(rows)
    function = ACTIVATIONS[activation]
    y = z if function is None else function(z)

    w = W.detach().abs().reshape(rows).expand(X.shape)
    b = B.detach().abs().reshape(rows).expand(X.shape)
    n = normalized.detach().abs()
    size = torch.maximum(w * n, b)
    of_size, of_weight = {"none": (8, 2), "relu": (10, 2)}.get(activation, (18, 2.3))
    found = {"y": Expected(y.detach(), size, U * (of_size * size + of_weight * w) + UNDERFLOW)}
    if dy is None:
        return found

    dY = dy.detach().cpu().double()
    dz, dX, dW, dB = torch.autograd.grad(y, [z, X, W, B], dY)
    dY, dz, z = dY.abs(), dz.abs(), z.detach().abs()
    zeta = U * (10 * size + 2 * w)
    if activation == "none":
        e = torch.zeros_like(dY)
    elif activation == "relu":
        e = torch.where(z <= zeta, dY, 0.0)
    else:
        e = dY * (U * (7 + 4 * z) + 0.8 * zeta)

    def summed(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        row = values.reshape(N, C, -1).sum(2)
        return row if parameter.dim() == 2 else row.sum(0)

    def mean(values: torch.Tensor) -> torch.Tensor:
        over = values.reshape(grouped.shape).mean(2, keepdim=True)
        return over.expand(grouped.shape).reshape(X.shape)

    bias_size, weight_size = summed(dz, B), summed(dz * n, W)
    bias_slack = 8 * U * bias_size + summed(e, B)
    weight_slack = U * summed(dz * (16 * n + 2), W) + summed(e * n, W)
    a, f = w * dz, w * e
    A, AN = mean(a), mean(a * n)
    variance = shifted.detach().reshape(grouped.shape).var(2, correction=0, keepdim=True)
    rstd = (1 / torch.sqrt(variance + eps)).expand(grouped.shape).reshape(X.shape)
    terms = a + A + n * AN
    slack = U * (16 * terms + 2 * (AN + n * A)) + f + mean(f) + n * mean(f * n)
    found["dx"] = Expected(dX, rstd * terms, rstd * (slack + UNDERFLOW) + UNDERFLOW)
    found["dweight"] = Expected(dW, weight_size, weight_slack + UNDERFLOW)
    found["dbias"] = Expected(dB, bias_size, bias_slack + UNDERFLOW)
    return found


def compare(output: str, got: torch.Tensor, expected: Expected) -> Measurement:
    """The element of `got` that is nearest to breaking its bound, or has broken it most."""
    if got.numel() == 0:
        return Measurement(output, 0.0)
    value, right = got.detach().cpu().double(), expected.value
    error = torch.where(value == right, 0.0, (value - right).abs())
    # What is rounded may be `slack` away from the expected value, and there lie in the next binade.
    half = unit(right.abs() + expected.slack, got.dtype) / 2
    share = error / (half + expected.slack)
    ulp = error / unit(torch.maximum(right.abs(), expected.size), got.dtype)
    flat = share.flatten().nan_to_num(nan=math.inf)
    position = int(flat.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(position), share.shape))
    return Measurement(
        output, float(share[index]), float(ulp.max()), index, float(value[index]), float(right[index])
    )


def unit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at each of the float64 `values`."""
    digits, smallest = _FORMATS[dtype]
    exponent = torch.frexp(values).exponent
    return torch.ldexp(torch.ones_like(values), (exponent - digits).clamp(min=smallest))
