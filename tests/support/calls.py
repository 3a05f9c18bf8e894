# SPDX-License-Identifier: Apache-2.0
"""Operands, and calls of the public Python entry on a GPU that see to it that the native kernel served."""

from __future__ import annotations

import torch
from bits import assert_same_bits

import steadynorm
from cases import Case
from steadynorm.bench.bounds import Expected, beyond_half_unit, expect, worst

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = ("contiguous", "channels_last")
GRADIENTS = ("dx", "dweight", "dbias")


def memory_format(layout: str, rank: int) -> torch.memory_format:
    if layout == "contiguous":
        return torch.contiguous_format
    return {4: torch.channels_last, 5: torch.channels_last_3d}[rank]


def normal(*shape: int, seed: int = 0, dtype=torch.float32, layout="contiguous", offset=0.0, device="cuda"):
    """randn + offset, rounded to dtype; drawn on the CPU, so the same on each device and in each process."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).add_(offset).to(dtype)
    return values.to(device).contiguous(memory_format=memory_format(layout, len(shape)))


def drawn_on_gpu(shape, *, seed=0, dtype=torch.float32, layout="contiguous"):
    """randn in place on the GPU, for large tensors."""
    generator = torch.Generator("cuda").manual_seed(seed)
    empty = torch.empty(shape, dtype=dtype, device="cuda", memory_format=memory_format(layout, len(shape)))
    return empty.normal_(generator=generator)


def parameters(
    channels: int, *, samples: int = 0, dtypes=(torch.float32, torch.float32), seed=100, device="cuda"
):
    """A random weight and bias, [C] or with `samples` [N, C]."""
    shape = (samples, channels) if samples else (channels,)
    return tuple(normal(*shape, seed=seed + i, dtype=dtype, device=device) for i, dtype in enumerate(dtypes))


def operands_of(case: Case, dtype: str):
    x, dy = (drawn_on_gpu(case.shape, seed=i, dtype=DTYPES[dtype], layout=case.layout) for i in range(2))
    return x, *parameters(case.shape[1]), dy


def step(x, groups, weight=None, bias=None, eps=1e-5, *, dy=None, wanted=GRADIENTS, rung="native", **options):
    """y and, with dy, the wanted gradients of those operands that are there, by name."""
    given = {"dx": x, "dweight": weight, "dbias": bias}
    leaves = {
        name: None if tensor is None else tensor.detach().requires_grad_(dy is not None and name in wanted)
        for name, tensor in given.items()
    }
    y = steadynorm.group_norm(leaves["dx"], groups, leaves["dweight"], leaves["dbias"], eps, **options)
    assert steadynorm.last_rung() == rung, f"served by {steadynorm.last_rung()}, not {rung}"
    found = {"y": y.detach()}
    asked = {name: tensor for name, tensor in leaves.items() if tensor is not None and tensor.requires_grad}
    if asked:
        found.update(zip(asked, torch.autograd.grad(y, list(asked.values()), dy), strict=True))
    return found


def assert_within(got: torch.Tensor, expected: Expected, what: str) -> None:
    """Fails with the worst coordinate when a value is further from the right one than its bound."""
    assert got.shape == expected.value.shape, (
        f"{what}: shape {tuple(got.shape)}, not {tuple(expected.value.shape)}"
    )
    ratio = worst(got, expected.value, expected.allowance)
    if ratio <= 1:
        return
    beyond = beyond_half_unit(got, expected.value)
    share = torch.where(beyond > 0, beyond / expected.allowance, torch.zeros_like(beyond)).flatten()
    at = int(share.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    raise AssertionError(
        f"{what}: {ratio:.3g} times the bound at {place}: got {got.flatten()[at].item()!r}, "
        f"right {expected.value.flatten()[at].item()!r}, "
        f"allowed {expected.allowance.flatten()[at].item():.3g} beyond half a unit; "
        f"{int((share > 1).sum())} of {share.numel()} values are out"
    )


def assert_step_within(
    x, groups, weight, bias, dy, what, *, activation="none", eps=1e-5, typical=False, **options
):
    """One forward and backward, every output against its bound; returns the outputs."""
    found = step(x, groups, weight, bias, eps, dy=dy, activation=activation, **options)
    expected = expect(x, groups, weight, bias, eps, activation, dy, typical=typical)
    for name, got in found.items():
        assert_within(got, expected[name], f"{what}: {name}")
    for name in ("y", "dx"):
        assert same_format(found[name], x), (
            f"{what}: {name} has strides {found[name].stride()}, x {x.stride()}"
        )
    return found


def same_format(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a has b's strides; a tensor that is both formats at once counts as contiguous."""
    return a.is_contiguous() if b.is_contiguous() else a.stride() == b.stride()


def assert_all_same_bits(got: dict, expected: dict, what: str) -> None:
    assert got.keys() == expected.keys(), f"{what}: {sorted(got)}, not {sorted(expected)}"
    for name, tensor in got.items():
        assert_same_bits(tensor, expected[name], f"{what}: {name}")
