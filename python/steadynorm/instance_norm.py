# SPDX-License-Identifier: Apache-2.0
"""InstanceNorm with per-sample statistics is GroupNorm with a group for each channel."""

from __future__ import annotations

import torch
from torch import nn

from .functional import group_norm


class _PerSampleStatistics:
    """Computes what stock's InstanceNorm does after it has checked the rank and added a missing batch."""

    activation = "none"

    def _apply_instance_norm(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[2:].numel() <= 1:
            return super()._apply_instance_norm(input)  # stock's own error: one value has no deviation
        return group_norm(
            input,
            input.size(1),
            self.weight,
            self.bias,
            self.eps,
            activation=self.activation,
            out_dtype=None,
        )

    def extra_repr(self) -> str:
        stock = super().extra_repr()
        return stock if self.activation == "none" else f"{stock}, activation={self.activation}"


class InstanceNorm1d(_PerSampleStatistics, nn.InstanceNorm1d):
    """`torch.nn.InstanceNorm1d`, served by `steadynorm.group_norm`: Tensor[N, C, L] or Tensor[C, L]."""


class InstanceNorm2d(_PerSampleStatistics, nn.InstanceNorm2d):
    """`torch.nn.InstanceNorm2d`, served by `steadynorm.group_norm`: Tensor[N, C, H, W] or Tensor[C, H, W]."""


class InstanceNorm3d(_PerSampleStatistics, nn.InstanceNorm3d):
    """`torch.nn.InstanceNorm3d`, served by `steadynorm.group_norm`: Tensor[N, C, D, H, W] or [C, D, H, W]."""
