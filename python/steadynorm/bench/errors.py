# SPDX-License-Identifier: Apache-2.0
"""The error of each arm on the tensors that were timed, against float64 on the same device, by parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import bounds
from .arms import EPS, Operands

# Elements of x in one part, which in float64 takes some twenty times 8 bytes an element; and bytes of x.
# Larger tensors are checked in the first and the last group of the first and the last sample.
LIMITS = {"cuda": (1 << 25, 1 << 30), "cpu": (1 << 22, 1 << 26)}

Part = tuple[slice, slice, int]  # samples, channels, groups


def parts(
    samples: int, channels: int, groups: int, positions: int, part_elements: int | None
) -> Iterator[Part]:
    """Slices of whole groups, of at most `part_elements` where groups are no larger, that cover the tensor;
    its corners when that is None.
    """
    width = channels // groups
    if part_elements is None:
        for n in sorted({0, samples - 1}):
            for g in sorted({0, groups - 1}):
                yield slice(n, n + 1), slice(g * width, (g + 1) * width), 1
        return
    sample = channels * positions
    if sample <= part_elements:
        step = part_elements // sample
        for n in range(0, samples, step):
            yield slice(n, min(n + step, samples)), slice(0, channels), groups
        return
    step = max(1, part_elements // (width * positions))
    for n in range(samples):
        for g in range(0, groups, step):
            count = min(step, groups - g)
            yield slice(n, n + 1), slice(g * width, (g + count) * width), count


def measure(
    o: Operands, results: dict[str, tuple[torch.Tensor, ...]]
) -> tuple[dict[str, dict[str, float]], str]:
    """Each arm's error of y, or of y and dx, beyond one rounding, in 2^-24 of the largest term; and what was
    checked. `results` has (y,) or (y, dx) of each arm.

    The terms are those of docs/numerics.md: for y max(|weight·x̂|, |bias|) + |weight|/4, 8 are allowed;
    for dx rstd·(a + mean a + |x̂|·mean(a·|x̂|)) with a = |weight·dz|, and the mean's own error: 16 are allowed.
    """
    samples, channels = o.x.shape[:2]
    positions = o.x[0, 0].numel()
    part_elements, whole_bytes = LIMITS[o.x.device.type]
    whole = o.x.numel() * o.x.element_size() <= whole_bytes
    outputs = ("y", "dx")[: max(map(len, results.values()))]
    worst = {arm: {f"error_{output}": 0.0 for output in outputs} for arm in results}
    for n, c, groups in parts(samples, channels, o.groups, positions, part_elements if whole else None):
        dy = o.dy[n, c] if "dx" in outputs else None
        expected = bounds.expect(o.x[n, c], groups, o.weight[c], o.bias[c], EPS, o.activation, dy)
        for arm, tensors in results.items():
            for output, tensor in zip(outputs, tensors, strict=True):
                right = expected[output]
                error = bounds.worst(tensor[n, c], right.value, bounds.U * right.size)
                worst[arm][f"error_{output}"] = max(worst[arm][f"error_{output}"], error)
    checked = "all groups" if whole else "first and last group of the first and last sample"
    return {
        arm: {key: float(f"{value:.3g}") for key, value in of.items()} for arm, of in worst.items()
    }, checked
