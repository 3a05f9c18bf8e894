# SPDX-License-Identifier: Apache-2.0
"""The fused residual, the two calls that it is, and what both give."""

from __future__ import annotations

import torch

from helpers import assert_same_bits, laid_out, layout_of, normal
from operator_samples import sample
from steadynorm import group_norm

fused_operator = torch.ops.steadynorm.group_norm_residual
inner = torch.ops.steadynorm.group_norm_residual_forward


def fused(x, r, groups, weight=None, bias=None, **options):
    return group_norm(x, groups, weight, bias, residual=r, **options)


def unfused(x, r, groups, weight=None, bias=None, **options):
    s = x + r
    return group_norm(s, groups, weight, bias, **options), s


def results(call, tensors, groups, used=(0, 1), tracked=(0, 1, 2, 3), **options):
    """y and the sum, and from the `used` of them the gradients of what is `tracked` of `tensors`, or None."""
    x, r, weight, bias = (
        None if t is None else t.detach().requires_grad_(i in tracked) for i, t in enumerate(tensors)
    )
    outputs = call(x, r, groups, weight, bias, **options)
    leaves = dict(zip(("dx", "dr", "dweight", "dbias"), (x, r, weight, bias), strict=True))
    leaves = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    upstream = [normal(*t.shape, seed=8 + i, dtype=t.dtype) for i, t in enumerate(outputs)]
    roots = [i for i in used if outputs[i].requires_grad]
    found = torch.autograd.grad(
        [outputs[i] for i in roots], list(leaves.values()), [upstream[i] for i in roots], allow_unused=True
    )
    return {"y": outputs[0].detach(), "sum": outputs[1].detach(), **dict(zip(leaves, found, strict=True))}


def assert_same(got: dict, expected: dict, case: str) -> None:
    assert got.keys() == expected.keys(), case
    for name, tensor in got.items():
        other = expected[name]
        assert (tensor is None) == (other is None), f"{case}: {name}"
        if tensor is not None:
            assert_same_bits(tensor, other, f"{case}: {name}")
            assert layout_of(tensor) == layout_of(other), f"{case}: {name}"


def operands(shape, dtype=torch.float32, parameters="both", layout="contiguous", seed=0):
    """x, r, weight and bias; the sum of x and r rounds, and its mean is far from 0."""
    s = sample(
        shape, 1, parameters, dtype, torch.float64 if dtype == torch.float64 else torch.float32, seed=seed
    )
    x, r = (s.x * 3 + 40).to(dtype), normal(*shape, seed=seed + 77, dtype=dtype)
    if len(shape) in (4, 5):
        x, r = laid_out(x, layout), laid_out(r, layout)
    return x, r, s.weight, s.bias
