# SPDX-License-Identifier: Apache-2.0
"""The error of each arm on the tensors that were timed, against float64 on the same device, by parts."""

from __future__ import annotations

from collections.abc import Iterator

import bounds
import torch

from steadynorm.bench.arms import EPS, Operands

PART_ELEMENTS = 1 << 25  # of x in one part; in float64 a part takes some twenty times 8 bytes an element
WHOLE_BYTES = (
    1 << 30
)  # larger tensors are checked in the first and the last group of the first and the last sample

Part = tuple[slice, slice, int]  # samples, channels, groups


def parts(samples: int, channels: int, groups: int, positions: int, whole: bool) -> Iterator[Part]:
    """Slices of whole groups that cover the tensor, or its corners when not `whole`."""
    width = channels // groups
    if not whole:
        for n in sorted({0, samples - 1}):
            for g in sorted({0, groups - 1}):
                yield slice(n, n + 1), slice(g * width, (g + 1) * width), 1
        return
    sample = channels * positions
    if sample <= PART_ELEMENTS:
        step = PART_ELEMENTS // sample
        for n in range(0, samples, step):
            yield slice(n, min(n + step, samples)), slice(0, channels), groups
        return
    step = max(1, PART_ELEMENTS // (width * positions))
    for n in range(samples):
        for g in range(0, groups, step):
            count = min(step, groups - g)
            yield slice(n, n + 1), slice(g * width, (g + count) * width), count


def errors(
    o: Operands, results: dict[str, tuple[torch.Tensor, ...]]
) -> tuple[dict[str, dict[str, float]], str]:
    """Each arm's error of y and dx beyond one rounding, in 2^-24 of the largest term; and what was checked.

    The terms are those of docs/numerics.md: for y max(|weight·x̂|, |bias|) + |weight|/4, 8 are allowed;
    for dx rstd·(a + mean a + |x̂|·mean(a·|x̂|)) with a = |weight·dz|, and the mean's own error: 16 are allowed.
    """
    samples, channels = o.x.shape[:2]
    positions = o.x[0, 0].numel()
    whole = o.x.numel() * o.x.element_size() <= WHOLE_BYTES
    worst = {arm: {"error_y": 0.0, "error_dx": 0.0} for arm in results}
    for n, c, groups in parts(samples, channels, o.groups, positions, whole):
        expected = bounds.expect(
            o.x[n, c], groups, o.weight[c], o.bias[c], EPS, o.activation, o.dy[n, c]
        )  # fmt: skip
        y, dx = expected["y"], expected["dx"]
        for arm, (got_y, got_dx, *_) in results.items():
            error_y = bounds.worst(got_y[n, c], y.value, y.unit)
            error_dx = bounds.worst(got_dx[n, c], dx.value, dx.unit)
            worst[arm]["error_y"] = max(worst[arm]["error_y"], error_y)
            worst[arm]["error_dx"] = max(worst[arm]["error_dx"], error_dx)
    checked = "all groups" if whole else "first and last group of the first and last sample"
    return {
        arm: {key: float(f"{value:.3g}") for key, value in of.items()} for arm, of in worst.items()
    }, checked
