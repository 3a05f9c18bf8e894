# SPDX-License-Identifier: Apache-2.0
"""Statistics of paired replicates: two arms measured in turn, so that drift reaches both alike.

Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A mean, and the half width of its two-sided 95 % confidence interval by Student's t, in one unit."""

    mean: float
    half_width: float
    count: int

    def __str__(self) -> str:
        """Both to the second digit of the half width."""
        decimals = max(0, 1 - math.floor(math.log10(self.half_width))) if self.half_width else 3
        return f"{self.mean:.{decimals}f} ± {self.half_width:.{decimals}f}"

    @property
    def differs(self) -> bool:
        """Whether 0 is outside of the interval."""
        return abs(self.mean) > self.half_width


def interval(samples: Sequence[float]) -> Interval:
    """The mean of independent samples, at least two of them (ValueError).

    >>> str(interval([9.0, 10.0, 11.0]))
    '10.0 ± 2.5'
    """
    count = len(samples)
    if count < 2:
        raise ValueError(f"interval: an interval needs at least 2 samples, got {count}")
    half = quantile_95(count - 1) * statistics.stdev(samples) / math.sqrt(count)
    return Interval(statistics.fmean(samples), half, count)


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """The mean of first[i] - second[i], where sample i of both was taken in the same turn.

    >>> str(difference([11.0, 12.0, 13.0], [10.0, 11.5, 11.5]))
    '1.0 ± 1.2'
    """
    return interval([a - b for a, b in zip(first, second, strict=True)])


def quantile_95(freedom: int) -> float:
    """t with P(|T| <= t) = 0.95 for Student's T with `freedom` (>= 1) degrees of freedom.

    >>> round(quantile_95(5), 4)
    2.5706
    """
    low, high = 0.0, 13.0  # the largest, of 1 degree, is 12.71
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < 0.95 else (low, middle)
    return high


def within(t: float, freedom: int) -> float:
    """P(|T| <= t), by the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
