# SPDX-License-Identifier: Apache-2.0
"""vmap of the differentiable operator: B calls of N samples are one call of B·N samples, by the kernels.

Tensors [N, *] become [B·N, *]; a parameter that differs between the calls becomes one row for each sample.
What is outside of vmap, autograd and torch.func's transforms included, meets the folded call.
"""

from __future__ import annotations

import torch

from . import eager


def register() -> None:
    """Tells PyTorch the rule, once. The operator library must be loaded."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("steadynorm::group_norm", "FuncTorchBatched"):
        torch.library.register_vmap("steadynorm::group_norm", _group_norm)


def _group_norm(
    info, dims, input, num_groups, weight=None, bias=None, eps=1e-5, activation="none", out_dtype=None
):
    B = info.batch_size
    dims = (*dims, None, None)  # defaults at the end of the arguments are not passed

    # Folded, 5 calls of a sample with one value each would be a batch of 5: each call is checked as it is.
    example = _example(input, dims[0])
    parameters = (_example(weight, dims[2]), _example(bias, dims[3]))
    eager.check(example, num_groups, *parameters, eps, activation, out_dtype)
    N = example.shape[0]

    def rows(parameter: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        if parameter is None or (dim is None and parameter.dim() == 1):
            return parameter  # [C], the same in all calls
        each = _stacked(parameter, dim, B)  # [B, C] or [B, N, C]
        return (each if each.dim() == 3 else each.unsqueeze(1).expand(-1, N, -1)).flatten(0, 1)

    folded = _stacked(input, dims[0], B).flatten(0, 1)
    y = torch.ops.steadynorm.group_norm(
        folded, num_groups, rows(weight, dims[2]), rows(bias, dims[3]), eps, activation, out_dtype
    )
    return y.unflatten(0, (B, N)), 0


def _example(tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """What one call was given, without its values; there may be no call."""
    if tensor is None or dim is None:
        return tensor
    return tensor.new_empty(()).expand(*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _stacked(tensor: torch.Tensor, dim: int | None, B: int) -> torch.Tensor:
    """[B, *]; what all calls share is repeated, in the order of its strides."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(B, *tensor.shape).clone()
