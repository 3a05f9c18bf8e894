# SPDX-License-Identifier: Apache-2.0
"""Networks of the shape that latent diffusion decodes with: an image decoder and a block of a video decoder.

Plain PyTorch with random weights. GroupNorm is stock's, with SiLU as a module after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


class CausalConv3d(nn.Conv3d):
    """A convolution of x [N, C, T, H, W] with kernel 3 that sees no later frame."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(channels_in, channels_out, 3, padding=(0, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, 2, 0)))


def conv2d(channels_in: int, channels_out: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, padding=1)


class Residual(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), x through a 2-D convolution of 1 where channels change."""

    def __init__(
        self, channels_in: int, channels_out: int, groups: int, conv: Callable[[int, int], nn.Module] = conv2d
    ) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(groups, channels_in, EPS), nn.SiLU(), conv(channels_in, channels_out),
            nn.GroupNorm(groups, channels_out, EPS), nn.SiLU(), conv(channels_out, channels_out),
        )  # fmt: skip
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.body(x)


class Attention(nn.Module):
    """One head over all positions of x [N, C, H, W]."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, EPS)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)  # [N, H*W, C]
        q, k, v = (project(y).unsqueeze(1) for project in (self.query, self.key, self.value))
        y = self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + y.transpose(1, 2).reshape(x.shape)


class Decoder(nn.Module):
    """Latents [N, 4, h, w] to an image [N, 3, 8h, 8w], the `channels` of its levels from the coarsest on."""

    def __init__(self, channels: tuple[int, ...], groups: int) -> None:
        super().__init__()
        coarsest = channels[0]
        layers = [
            nn.Conv2d(4, 4, 1), conv2d(4, coarsest),
            Residual(coarsest, coarsest, groups), Attention(coarsest, groups),
            Residual(coarsest, coarsest, groups),
        ]  # fmt: skip
        before = coarsest
        for level, width in enumerate(channels):
            if level:
                layers += [nn.Upsample(scale_factor=2.0), conv2d(before, before)]
            layers += [Residual(before, width, groups), *(Residual(width, width, groups) for _ in range(2))]
            before = width
        layers += [nn.GroupNorm(groups, before, EPS), nn.SiLU(), conv2d(before, 3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.layers(latents)


def video_block(channels: int, groups: int) -> nn.Module:
    """Two residual blocks of causal convolutions over [N, C, T, H, W]."""
    return nn.Sequential(*(Residual(channels, channels, groups, CausalConv3d) for _ in range(2)))
