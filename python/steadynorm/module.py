# SPDX-License-Identifier: Apache-2.0
"""The module form of GroupNorm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import eager, rungs
from .functional import group_norm


class GroupNorm(nn.GroupNorm):
    """A `torch.nn.GroupNorm` with exact statistics that keeps its input's dtype and memory format.

    Its state dict is that of `torch.nn.GroupNorm`, in both directions, and so is its place in `isinstance`.

    Args:
        num_groups (int): G, a divisor of `num_channels`.
        num_channels (int): C.
        eps (float): added to the variance, in the square of the input's unit. Default: 1e-5.
        affine (bool): learnable weight (starts at 1) and bias (starts at 0), each [C]. Default: True.
        device (torch.device, optional): of the parameters. Default: the current default device.
        dtype (torch.dtype, optional): of the parameters; need not be the input's. Default: the current
            default.
        activation (str, optional): none, relu, silu, gelu (exact) or gelu_tanh, in the same pass. Default:
            none.

    Shape: input Tensor[N, C, *], output Tensor[N, C, *] of the input's dtype, also under autocast, and of its
    memory format when that is contiguous, channels_last or channels_last_3d, else contiguous. With a residual
    Tensor[N, C, *], `norm(input, residual)`, the output is a pair: that of `input + residual`, and this sum.

    Raises:
        ValueError: in the constructor for groups that don't divide the channels, an eps that is no number or
            negative, and an unknown activation; in a call for an input that doesn't fit, before any work.

    Determinism and accuracy are those of `steadynorm.group_norm`.

    Example:
        >>> import torch, steadynorm
        >>> norm = steadynorm.GroupNorm(8, 32, activation="relu")
        >>> norm
        GroupNorm(8, 32, eps=1e-05, affine=True, activation=relu)
        >>> x = torch.randn(2, 32, 4, 6, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)
        >>> y = norm(x)
        >>> y.dtype, y.is_contiguous(memory_format=torch.channels_last_3d)
        (torch.bfloat16, True)
    """

    activation = "none"  # objects pickled before the attribute existed have none of their own
    _served_by: tuple[str, ...] = ()  # the rungs that have served it in this process, the last one last

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        activation = "none" if activation is None else activation
        eager.check_groups(num_groups)
        eager.check_eps(eps)
        eager.check_activation(activation)
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        self.activation = activation

    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        own = self._parameters
        if type(self) is GroupNorm and "weight" in own and "bias" in own:
            # What the attributes are, in a tenth of their 0.8 us. A subclass, which a parametrised module is
            # too, may have others; pruning takes the names away.
            weight, bias = own["weight"], own["bias"]
        else:
            weight, bias = self.weight, self.bias
        if residual is None and isinstance(input, torch.Tensor):
            return rungs.serve(self, input, self.num_groups, weight, bias, self.eps, self.activation, None)
        arguments = (self.num_groups, weight, bias, self.eps)
        if isinstance(input, torch.Tensor) and isinstance(residual, torch.Tensor):
            return rungs.serve_residual(self, input, residual, *arguments, self.activation, None)
        # A torch.fx proxy, or an error.
        return group_norm(input, *arguments, activation=self.activation, out_dtype=None, residual=residual)

    def __getstate__(self) -> dict[str, Any]:
        # What served it here says nothing about where a copy will run.
        return {name: value for name, value in self.__dict__.items() if name != "_served_by"}

    def extra_repr(self) -> str:
        stock = super().extra_repr()
        return stock if self.activation == "none" else f"{stock}, activation={self.activation}"
