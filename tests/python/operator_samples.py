# SPDX-License-Identifier: Apache-2.0
"""Inputs for the operators' tests, and GroupNorm written with PyTorch's own functions to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from helpers import ACTIVATIONS

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
PARAMETERS = ("both", "weight", "bias", "neither", "rows", "mixed")

group_norm = torch.ops.steadynorm.group_norm
forward = torch.ops.steadynorm.group_norm_forward
backward = torch.ops.steadynorm.group_norm_backward
stats = torch.ops.steadynorm.group_norm_stats
apply = torch.ops.steadynorm.group_norm_apply


@dataclass
class Sample:
    x: torch.Tensor
    groups: int
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def channels_per_group(self) -> int:
        return self.x.shape[1] // self.groups

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.x, self.weight, self.bias) if t is not None]

    def requires_grad(self) -> Sample:
        for tensor in self.tensors():
            tensor.requires_grad_()
        return self


def sample(
    shape=(2, 6, 4, 5),
    groups=3,
    parameters="both",
    dtype=torch.float64,
    parameter_dtype=None,
    last=False,
    device="cpu",
    seed=0,
) -> Sample:
    """Random x, with the weight and bias of `parameters`: [C] each, [N, C] each (rows), or one of each."""
    generator = torch.Generator().manual_seed(seed)

    def random(sizes, dtype, shift=0.0):
        return (torch.randn(sizes, generator=generator, dtype=torch.float64) + shift).to(device, dtype)

    N, C = shape[:2]
    wide, narrow = (N, C), (C,)
    sizes = {
        "both": (narrow, narrow),
        "weight": (narrow, None),
        "bias": (None, narrow),
        "neither": (None, None),
        "rows": (wide, wide),
        "mixed": (wide, narrow),
    }[parameters]
    x = random(shape, dtype, 0.5)
    if last:
        x = x.contiguous(memory_format=FORMATS[len(shape)])
    weight, bias = (None if s is None else random(s, parameter_dtype or dtype) for s in sizes)
    return Sample(x, groups, weight, bias)


def stock(x, groups, weight=None, bias=None, eps=1e-5, activation="none"):
    """F.group_norm, parameters applied afterwards, so that rows may come, and a bias without a weight."""
    z = F.group_norm(x, groups, eps=eps)

    def row(parameter):
        return parameter.reshape(*parameter.shape, *[1] * (x.dim() - 2))

    if weight is not None:
        z = z * row(weight)
    if bias is not None:
        z = z + row(bias)
    return ACTIVATIONS[activation](z)
