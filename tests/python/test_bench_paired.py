# SPDX-License-Identifier: Apache-2.0
"""Paired statistics against values of published tables."""

from __future__ import annotations

import doctest

import pytest

from steadynorm.bench import paired


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (8, 2.306), (29, 2.045), (120, 1.980)]
)
def test_quantiles_are_those_of_a_table_of_students_t(freedom: int, quantile: float) -> None:
    assert paired.quantile_95(freedom) == pytest.approx(quantile, abs=5e-4)


def test_the_intervals_half_width_is_t_times_the_standard_error() -> None:
    # Deviation 1 of three values: 4.3027 / sqrt(3).
    found = paired.interval([9.0, 10.0, 11.0])
    assert (found.mean, found.count) == (10.0, 3)
    assert found.half_width == pytest.approx(2.4842, abs=1e-4)


def test_drift_that_both_arms_share_drops_out_of_the_difference() -> None:
    drift = [0.0, 5.0, 9.0, 20.0]
    found = paired.difference([10.0 + d for d in drift], [8.0 + d for d in drift])
    assert (found.mean, found.half_width, found.differs) == (2.0, 0.0, True)
    assert not paired.difference([1.0, -1.0], [0.0, 0.0]).differs


@pytest.mark.parametrize("samples", [[], [1.0]])
def test_one_sample_has_no_interval(samples: list[float]) -> None:
    with pytest.raises(ValueError, match=f"at least 2 samples, got {len(samples)}"):
        paired.interval(samples)


def test_pairs_must_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired.difference([1.0, 2.0], [1.0])


def test_the_examples_run() -> None:
    found = doctest.testmod(paired)
    assert found.attempted == 3
    assert found.failed == 0
