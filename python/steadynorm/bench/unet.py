# SPDX-License-Identifier: Apache-2.0
"""A 3-D U-Net whose GroupNorm is chosen by a factory, so that two arms share every other line."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..module import GroupNorm

GROUPS = 8

Norm = Callable[[int], tuple[nn.Module, nn.Module]]


def stock_norm(channels: int) -> tuple[nn.Module, nn.Module]:
    """PyTorch's GroupNorm and a ReLU beside it."""
    return nn.GroupNorm(GROUPS, channels), nn.ReLU(inplace=True)


def steady_norm(channels: int) -> tuple[nn.Module, nn.Module]:
    """Our GroupNorm with the ReLU inside; the Identity keeps the module tree, and so the keys."""
    return GroupNorm(GROUPS, channels, activation="relu"), nn.Identity()


class Block(nn.Module):
    """conv3d, GroupNorm, ReLU, twice: `Tensor[N, C_in, *]` to `Tensor[N, C_out, *]`."""

    def __init__(self, c_in: int, c_out: int, norm: Norm) -> None:
        super().__init__()
        # No convolution bias: the normalisation would subtract most of it again.
        self.conv0 = nn.Conv3d(c_in, c_out, 3, padding=1, bias=False)
        self.norm0, self.act0 = norm(c_out)
        self.conv1 = nn.Conv3d(c_out, c_out, 3, padding=1, bias=False)
        self.norm1, self.act1 = norm(c_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act0(self.norm0(self.conv0(x)))
        return self.act1(self.norm1(self.conv1(x)))


class UNet(nn.Module):
    """`Tensor[N, inputs, X, Y, Z]` to class scores `Tensor[N, classes, X, Y, Z]`.

    width:  channels at full resolution, doubled at each level down, a multiple of 8.
    depth:  number of resolutions; X, Y and Z must be multiples of 2**(depth - 1).
    norm:   channels -> (normalisation, activation), `stock_norm` or `steady_norm`.
    inputs: channels of the volume.
    pool:   what halves X, Y and Z; default: the maximum of 2 x 2 x 2 voxels.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        norm: Norm,
        classes: int = 3,
        inputs: int = 2,
        pool: nn.Module | None = None,
    ) -> None:
        super().__init__()
        channels = [width << level for level in range(depth)]
        self.down = nn.ModuleList(
            Block(c_in, c_out, norm) for c_in, c_out in itertools.pairwise((inputs, *channels))
        )
        self.pool = nn.MaxPool3d(2) if pool is None else pool
        self.rise = nn.ModuleList(nn.ConvTranspose3d(2 * c, c, 2, stride=2) for c in reversed(channels[:-1]))
        self.up = nn.ModuleList(Block(2 * c, c, norm) for c in reversed(channels[:-1]))
        self.head = nn.Conv3d(width, classes, 1)
        # The outermost skip: absolute intensity, which every normalisation takes away.
        self.direct = nn.Conv3d(inputs, classes, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        image, skips = x, []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((skips.pop(), rise(x)), dim=1))
        return self.head(x) + self.direct(image)


def norm_sites(model: nn.Module) -> list[tuple[str, nn.GroupNorm]]:
    """Every GroupNorm of the model, by its dotted name, in the order of the module tree."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, nn.GroupNorm)]
