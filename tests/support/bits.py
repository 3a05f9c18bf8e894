# SPDX-License-Identifier: Apache-2.0
"""Equality of bits, with the first difference shown."""

from __future__ import annotations

import torch

_AS_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor, in its logical order."""
    return tensor.detach().contiguous().view(_AS_INTEGER[tensor.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bits(a), as_bits(b).to(a.device))


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails with the case, the first coordinate that differs and both bit patterns."""
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, not {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    expected = expected.to(got.device)
    if same_bits(got, expected):
        return
    differs = (as_bits(got) != as_bits(expected)).flatten()
    at = int(differs.to(torch.uint8).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), got.shape))
    digits = 2 * got.element_size()
    mask = (1 << 8 * got.element_size()) - 1
    a, b = (int(as_bits(t).flatten()[at]) & mask for t in (got, expected))
    raise AssertionError(
        f"{what}: {int(differs.sum())} of {got.numel()} values differ, first at {place}: "
        f"0x{a:0{digits}x} ({got.flatten()[at].item()!r}), "
        f"not 0x{b:0{digits}x} ({expected.flatten()[at].item()!r})"
    )
