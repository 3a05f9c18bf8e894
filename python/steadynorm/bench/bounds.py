# SPDX-License-Identifier: Apache-2.0
"""GroupNorm by its definition in float64, and how far a result may be from it (docs/numerics.md).

The formulas are those of docs/numerics.md, "Bounds"; letters as there. Works on any device. A slice of whole
groups, x[:, c0:c1] with groups in proportion, is a problem of its own: large tensors can be checked by parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..eager import ACTIVATIONS

U = 2.0**-24  # one rounding of fp32

# Units of U in docs/numerics.md: of max(|weight·x̂|, |bias|), and of |weight|, for y.
FORWARD, FORWARD_RELU, FORWARD_ACTIVATED = (8, 2), (10, 2), (18, 2.3)
DBIAS, DWEIGHT, DX = 8, 16, 16
DWEIGHT_TYPICAL = 8  # of data whose roundings do not all agree
MEAN = 2  # the mean's own error, where the gradients feel it
UNDERFLOW = 2.0**-140  # products may fall among fp32's subnormals


@dataclass(frozen=True)
class Expected:
    """A right value in float64 and the error beyond half a unit of the stored dtype that is allowed."""

    value: torch.Tensor
    allowance: torch.Tensor
    size: torch.Tensor  # of the terms that enter it: without an activation 8 U of it are allowed (dx: 16)


def unit(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at each of the float64 `values`."""
    info = torch.finfo(dtype)
    digits = 1 - int(math.log2(info.eps))
    smallest = int(math.log2(info.tiny)) + int(math.log2(info.eps))  # exponent of the smallest subnormal
    exponent = torch.frexp(values).exponent - digits
    exponent = torch.where(values == 0, smallest, exponent.clamp(min=smallest))
    return torch.ldexp(torch.ones_like(values), exponent)


def activate(z: torch.Tensor, activation: str) -> torch.Tensor:
    function = ACTIVATIONS[activation]
    return z if function is None else function(z)


def slope(z: torch.Tensor, activation: str) -> torch.Tensor:
    """Derivative of the activation at z."""
    if activation == "none":
        return torch.ones_like(z)
    if activation == "relu":
        return ((z > 0) | z.isnan()).to(z.dtype)
    if activation == "silu":
        sigmoid = torch.sigmoid(z)
        return sigmoid * (1 + z * (1 - sigmoid))
    if activation == "gelu":
        return 0.5 * torch.special.erfc(-z / math.sqrt(2)) + z * torch.exp(-0.5 * z * z) / math.sqrt(
            2 * math.pi
        )
    root = math.sqrt(2 / math.pi)
    tanh = torch.tanh(root * (z + 0.044715 * z**3))
    return 0.5 * (1 + tanh) + 0.5 * z * (1 - tanh**2) * root * (1 + 3 * 0.044715 * z**2)


def expect(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "none",
    dy: torch.Tensor | None = None,
    typical: bool = False,
) -> dict[str, Expected]:
    """y, and with `dy` also dx, dweight, dbias, of x [N, C, *]; weight and bias missing, [C] or [N, C].

    `typical`: hold dweight to the bound of typical data.
    """
    samples, channels = x.shape[:2]

    def by_group(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(samples, groups, -1)

    def mean(t: torch.Tensor) -> torch.Tensor:
        """Mean over each group, spread over its elements again."""
        return by_group(t).mean(-1, keepdim=True).expand_as(by_group(t)).reshape(t.shape)

    def row(parameter: torch.Tensor | None, missing: float) -> torch.Tensor:
        if parameter is None:
            return torch.full((1, channels, 1), missing, dtype=torch.float64, device=x.device)
        return parameter.detach().double().reshape(-1, channels, 1)

    x64 = x.detach().double().reshape(samples, channels, -1)  # [N, C, S]
    # A shift changes nothing in exact arithmetic, and keeps float64 from losing what a far mean hides.
    centred = (by_group(x64) - by_group(x64)[:, :, :1]).reshape(x64.shape)
    centred = centred - mean(centred)
    rstd = by_group(centred).square().mean(-1, keepdim=True).add(eps).rsqrt()  # [N, G, 1]
    x_hat = (by_group(centred) * rstd).reshape(x64.shape)
    w, b = row(weight, 1.0), row(bias, 0.0)
    z = w * x_hat + b
    term = torch.maximum((w * x_hat).abs(), b.abs())
    of_term, of_weight = {"none": FORWARD, "relu": FORWARD_RELU}.get(activation, FORWARD_ACTIVATED)
    size = term + w.abs() * FORWARD[1] / FORWARD[0]
    allowance = U * (of_term * term + of_weight * w.abs()) + UNDERFLOW
    result = {"y": Expected(*(t.reshape(x.shape) for t in (activate(z, activation), allowance, size)))}
    if dy is None:
        return result

    dy64 = dy.detach().double().reshape(x64.shape)
    dz = dy64 * slope(z, activation)
    z_error = U * (FORWARD_RELU[0] * term + FORWARD_RELU[1] * w.abs())
    if activation == "none":
        dz_error = torch.zeros_like(dz)
    elif activation == "relu":  # where z is within its error of 0 the sign is open
        dz_error = dy64.abs() * (z.abs() <= z_error)
    else:
        dz_error = dy64.abs() * (U * (7 + 4 * z.abs()) + 0.8 * z_error)

    a, a_error = w * dz, w.abs() * dz_error
    spread = by_group(torch.ones_like(x64)) * rstd
    spread = spread.reshape(x64.shape)  # rstd of each element
    dx = spread * (a - mean(a) - x_hat * mean(a * x_hat))
    near, far = a.abs(), x_hat.abs()
    near_mean, far_mean = mean(near), mean(near * far)
    size = spread * (near + near_mean + far * far_mean + (far_mean + far * near_mean) * MEAN / DX)
    carried = spread * (a_error + mean(a_error) + far * mean(a_error * far) + UNDERFLOW)
    allowance = DX * U * size + carried + UNDERFLOW
    result["dx"] = Expected(*(t.reshape(x.shape) for t in (dx, allowance, size)))

    def gradient(parameter: torch.Tensor, terms: torch.Tensor, allowance: torch.Tensor) -> Expected:
        over = (2,) if parameter.dim() == 2 else (0, 2)
        allowance = (allowance + UNDERFLOW).sum(over)
        return Expected(terms.sum(over), allowance, terms.abs().sum(over))

    if weight is not None:
        terms = dz * x_hat
        factor = DWEIGHT_TYPICAL if typical else DWEIGHT
        allowance = U * (factor * terms.abs() + MEAN * dz.abs()) + dz_error * far
        result["dweight"] = gradient(weight, terms, allowance)
    if bias is not None:
        result["dbias"] = gradient(bias, dz, U * DBIAS * dz.abs() + dz_error)
    return result


def beyond_half_unit(got: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How far `got` is from the float64 `value` beyond half a unit of its dtype; Inf equals Inf, NaN NaN."""
    held = got.detach().double()
    near = torch.maximum(held.abs(), value.abs())
    beyond = ((held - value).abs() - unit(near, got.dtype) / 2).clamp(min=0)
    rounded = value.to(got.dtype).double()
    matches = (held == rounded) | (held.isnan() & rounded.isnan())
    return torch.where(matches, torch.zeros_like(beyond), beyond.nan_to_num(nan=math.inf))


def worst(got: torch.Tensor, value: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest error beyond half a unit over `scale`; infinite where a scale of 0 is exceeded."""
    beyond = beyond_half_unit(got, value)
    if beyond.numel() == 0:
        return 0.0
    return torch.where(beyond > 0, beyond / scale, torch.zeros_like(beyond)).max().item()
