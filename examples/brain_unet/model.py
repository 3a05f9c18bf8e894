# SPDX-License-Identifier: Apache-2.0
"""The demo's network: the U-Net of the package's benchmark, and what it needs to know of it."""

from __future__ import annotations

from torch import Tensor

from steadynorm.bench.unet import UNet, norm_sites, steady_norm, stock_norm

__all__ = ["UNet", "channels_last_input", "norm_sites", "receptive_field", "steady_norm", "stock_norm"]


def receptive_field(depth: int) -> int:
    """Width in voxels of the input that one output voxel sees through the convolutions.

    The deepest path is the widest. It is followed backwards from an output voxel, for every
    alignment to the pooling grid: two 3-wide convolutions widen an interval by 2 on each side,
    a rise maps a voxel to its parent, a pooling maps a voxel to its two children.
    """
    widest = 0
    for start in range(2 ** (depth - 1)):
        low = high = start
        for _ in range(depth - 1):
            low, high = (low - 2) // 2, (high + 2) // 2
        low, high = low - 2, high + 2
        for _ in range(depth - 1):
            low, high = 2 * low - 2, 2 * high + 1 + 2
        widest = max(widest, high - low + 1)
    return widest


def channels_last_input(volume: Tensor) -> Tensor:
    """`Tensor[N, X, Y, Z, 2]` seen as `Tensor[N, 2, X, Y, Z]` in channels_last_3d; no copy."""
    return volume.movedim(-1, 1)
