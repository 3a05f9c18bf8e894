# SPDX-License-Identifier: Apache-2.0
"""What serves the GroupNorm sites of the step: PyTorch's own in three forms, ours in two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import group_norm

# (x [N, C, *], groups, weight [C], bias [C], eps) -> y: GroupNorm, then ReLU.
Function = Callable[[Tensor, int, Tensor, Tensor, float], Tensor]


def stock(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.relu(F.group_norm(x, groups, weight, bias, eps), inplace=True)


def restored(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return stock(x, groups, weight, bias, eps).contiguous(memory_format=torch.channels_last_3d)


def compiled() -> Function:
    """A function a shape. A graph break or one shape more than Dynamo keeps is an error, never eager."""

    def normalise(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.relu(F.group_norm(x, groups, weight, bias, eps))

    return torch.compile(normalise, dynamic=False, fullgraph=True)


def ours(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return group_norm(x, groups, weight, bias, eps, activation="relu", out_dtype=None)


def ours_fp32(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return group_norm(x, groups, weight, bias, eps, activation="relu", out_dtype=torch.float32)


@dataclass(frozen=True)
class Arm:
    """`held_bytes`: what a step holds at its peak for each value of a level's tensor, all of them summed,
    parameters not counted: as measured at scale 8 (NVIDIA H200, 2026-12-01); at 7 it was up to 8 % less.
    """

    letter: str
    told: str
    make: Callable[[], Function]
    held_bytes: float


OURS, OURS_FP32 = "ours", "ours_fp32"
ARMS = {
    "stock": Arm("a", "nn.GroupNorm and ReLU", lambda: stock, 52),
    "restored": Arm("b", "the same, its result brought back to channels_last_3d", lambda: restored, 60),
    "compiled": Arm("c", "torch.compile of F.group_norm and ReLU, a function a shape", compiled, 38),
    OURS_FP32: Arm("d", "ours, its result in stock's dtype under autocast, fp32", lambda: ours_fp32, 34),
    OURS: Arm("e", "ours", lambda: ours, 23),
}
