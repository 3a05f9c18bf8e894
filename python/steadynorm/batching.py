# SPDX-License-Identifier: Apache-2.0
"""vmap of the differentiable operators: B calls of N samples are one call of B·N samples, by the kernels.

Tensors [N, *] become [B·N, *]; a parameter that differs between the calls becomes one row for each sample.
What is outside of vmap, autograd and torch.func's transforms included, meets the folded call.
"""

from __future__ import annotations

import torch

from . import eager


def register() -> None:
    """Tells PyTorch the rules, once. The operator library must be loaded."""
    for name, rule in (("group_norm", _group_norm), ("group_norm_residual", _group_norm_residual)):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"steadynorm::{name}", "FuncTorchBatched"):
            torch.library.register_vmap(f"steadynorm::{name}", rule)


def _group_norm(
    info, dims, input, num_groups, weight=None, bias=None, eps=1e-5, activation="none", out_dtype=None
):
    dims = (*dims, None, None)  # defaults at the end of the arguments are not passed
    options = (num_groups, (weight, dims[2]), (bias, dims[3]), eps, activation, out_dtype)
    return _folded(torch.ops.steadynorm.group_norm, info.batch_size, [(input, dims[0])], *options), 0


def _group_norm_residual(
    info,
    dims,
    input,
    residual,
    num_groups,
    weight=None,
    bias=None,
    eps=1e-5,
    activation="none",
    out_dtype=None,
):
    dims = (*dims, None, None)
    options = (num_groups, (weight, dims[3]), (bias, dims[4]), eps, activation, out_dtype)
    tensors = [(input, dims[0]), (residual, dims[1])]
    return _folded(torch.ops.steadynorm.group_norm_residual, info.batch_size, tensors, *options), (0, 0)


def _folded(operator, B, tensors, num_groups, weight, bias, *options):
    """`tensors` are input and residual; each of them, weight and bias comes with its vmapped dimension."""
    # Folded, 5 calls of a sample with one value each would be a batch of 5: each call is checked as it is.
    examples = [_example(*tensor) for tensor in tensors]
    eager.check(examples[0], num_groups, _example(*weight), _example(*bias), *options)
    if len(examples) > 1:
        eager.check_residual(*examples)
    N = examples[0].shape[0]

    folded = (_stacked(*tensor, B).flatten(0, 1) for tensor in tensors)
    output = operator(*folded, num_groups, _rows(*weight, B, N), _rows(*bias, B, N), *options)
    if isinstance(output, torch.Tensor):
        return output.unflatten(0, (B, N))
    return tuple(t.unflatten(0, (B, N)) for t in output)


def _rows(parameter: torch.Tensor | None, dim: int | None, B: int, N: int) -> torch.Tensor | None:
    if parameter is None or (dim is None and parameter.dim() == 1):
        return parameter  # [C], the same in all calls
    each = _stacked(parameter, dim, B)  # [B, C] or [B, N, C]
    return (each if each.dim() == 3 else each.unsqueeze(1).expand(-1, N, -1)).flatten(0, 1)


def _example(tensor: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
    """What one call was given, without its values; there may be no call."""
    if tensor is None or dim is None:
        return tensor
    return tensor.new_empty(()).expand(*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _stacked(tensor: torch.Tensor, dim: int | None, B: int) -> torch.Tensor:
    """[B, *]; what all calls share is repeated, in the order of its strides."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(B, *tensor.shape).clone()
