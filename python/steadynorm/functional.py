# SPDX-License-Identifier: Apache-2.0
"""The function form of GroupNorm."""

from __future__ import annotations

import enum
from typing import overload

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import eager, rungs


class _OutDtype(enum.Enum):
    MATCH_STOCK = "match stock"

    def __repr__(self) -> str:
        return "MATCH_STOCK_DTYPE"


#: The default of `out_dtype`: what `torch.nn.functional.group_norm` returns in the same context.
MATCH_STOCK_DTYPE = _OutDtype.MATCH_STOCK


@overload
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | _OutDtype | None = MATCH_STOCK_DTYPE,
    residual: None = None,
) -> torch.Tensor: ...
@overload
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | _OutDtype | None = MATCH_STOCK_DTYPE,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = None,
    out_dtype: torch.dtype | _OutDtype | None = MATCH_STOCK_DTYPE,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Group normalisation, with an optional activation in the same pass.

    For each sample the C channels are cut into `num_groups` runs of C/G channels. Each run, with all its
    positions, is brought to mean 0 and variance 1, then scaled and shifted per channel: `activation((x -
    mean) / sqrt(variance + eps) * weight + bias)`, where the variance is the biased one.

    Args:
        input (Tensor[N, C, *]): fp32, bf16, fp16 or fp64, of any strides, rank 2 or more. N may be 0.
        num_groups (int): G, a divisor of C.
        weight (Tensor[C] or Tensor[N, C], optional): scale, one row for all samples or one row for each. Any
            of the dtypes above whatever the input's is, but fp64 only with fp64 input. Default: 1.
        bias (Tensor[C] or Tensor[N, C], optional): shift, as `weight`. Default: 0.
        eps (float): added to the variance, in the square of the input's unit. Default: 1e-5.
        activation (str, optional): none, relu, silu, gelu (exact) or gelu_tanh. Default: none.
        out_dtype (torch.dtype, optional): dtype of the result; None is the input's. Default:
            `MATCH_STOCK_DTYPE`, the dtype that `torch.nn.functional.group_norm` returns in the same context:
            fp32 under CUDA autocast, else the input's. Where stock refuses a mix of dtypes, the input's.
        residual (Tensor[N, C, *], optional): added to the input first, in the same pass; of its sizes, dtype
            and device, with any strides. The result is then a pair. Default: none.

    Returns:
        Tensor[N, C, *]: in the input's memory format when that is contiguous, channels_last or
            channels_last_3d, else contiguous. The answer is computed in fp32 (fp64 for fp64 input) and
            rounded once: `out_dtype=torch.bfloat16` equals `out_dtype=torch.float32` followed by
            `.to(torch.bfloat16)`. Gradients have the dtype of what they are gradients of; the input's has
            also its memory format.
        With a residual a pair, (Tensor[N, C, *], Tensor[N, C, *]): the answer for the sum, and the sum, for
            the next skip connection. The sum is `input + residual`, rounded once to their dtype; all else,
            the statistics too, is of the sum as it is stored. So the pair is that of `sum = input +
            residual; y = group_norm(sum, ...)`, bit for bit, and so are all gradients: the norm's input
            gradient, rounded to the sum's dtype, and the gradient of the sum are added by autograd, and what
            comes of it is the gradient of input and of residual.

    Raises:
        ValueError: before any work, one sentence that names the rule and the value received.
        RuntimeError: the device or the build can't serve the call.

    Deterministic: a sample's result and input gradient have the same bits whatever the batch around it, the
    storage dtype of the same values, the number of threads and the run; the gradients of [C] parameters
    depend on N too.

    Accuracy: with u = 2^-24 and x^ the normalised input, the result is within half a unit of its dtype plus
    8u * max(|weight * x^|, |bias|) + 2u * |weight| of the exact one, also when the mean is 1e5 deviations
    away from 0; with an activation 18u and 2.3u. Both promises are the native kernel's; `last_rung` tells
    whether it served.

    After Wu and He, Group Normalization, arXiv:1803.08494.

    Example:
        >>> import torch, steadynorm
        >>> x = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])  # N=1, C=2, two positions
        >>> steadynorm.group_norm(x, 2, eps=0.0)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
        >>> steadynorm.group_norm(x, 2, eps=0.0, activation="relu", out_dtype=torch.bfloat16)
        tensor([[[0., 1.],
                 [0., 1.]]], dtype=torch.bfloat16)
        >>> y, sum = steadynorm.group_norm(x, 2, eps=0.0, residual=torch.ones_like(x))
        >>> sum
        tensor([[[2., 4.],
                 [6., 8.]]])
    """
    if has_torch_function_variadic(input, weight, bias, residual):
        # What is no tensor but acts as one, such as a torch.fx proxy. Subclasses of Tensor meet the operator.
        tensors = (input, weight, bias, residual)
        proxies = [t for t in tensors if t is not None and not isinstance(t, torch.Tensor)]
        if proxies:
            options = {
                "weight": weight,
                "bias": bias,
                "eps": eps,
                "activation": activation,
                "out_dtype": out_dtype,
            }
            if residual is not None:
                options["residual"] = residual
            return handle_torch_function(group_norm, proxies, input, num_groups, **options)
    if not isinstance(input, torch.Tensor):
        eager.check_input(input)
    if out_dtype is MATCH_STOCK_DTYPE:
        out_dtype = _stock_dtype(input)
    elif out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise ValueError(f"group_norm: out_dtype must be a floating dtype or None, got {out_dtype!r}")
    if activation is None:
        activation = "none"
    if residual is None:
        return rungs.serve(None, input, num_groups, weight, bias, eps, activation, out_dtype)
    return rungs.serve_residual(None, input, residual, num_groups, weight, bias, eps, activation, out_dtype)


def _stock_dtype(input: torch.Tensor) -> torch.dtype | None:
    """The dtype of F.group_norm; None for the input's.

    Autocast's list of fp32 operators has group_norm on CUDA, not on the CPU; fp64 is left alone (torch 2.11).
    """
    if input.is_cuda:  # asking a device for its type takes longer than all of the rest
        autocast = torch.is_autocast_enabled("cuda")
    elif input.is_cpu:
        return None
    else:
        device_type = input.device.type
        autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.float32 if autocast and input.dtype != torch.float64 else None
