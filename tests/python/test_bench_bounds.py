# SPDX-License-Identifier: Apache-2.0
"""The right values and the bounds of steadynorm.bench.bounds, against stock PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import normal
from steadynorm.bench import bounds
from steadynorm.bench.bounds import ACTIVATIONS, U, expect


def stock(x, groups, weight, bias, eps, activation, dy) -> dict[str, torch.Tensor]:
    """Every output by F.group_norm and autograd in float64; weight and bias [C] or [N, C], or missing."""
    given = {"dx": x, "dweight": weight, "dbias": bias}
    leaves = {name: t.double().requires_grad_() for name, t in given.items() if t is not None}
    y = F.group_norm(leaves["dx"], groups, eps=eps)
    rows = (-1, x.shape[1], *[1] * (x.dim() - 2))
    if weight is not None:
        y = y * leaves["dweight"].reshape(rows)
    if bias is not None:
        y = y + leaves["dbias"].reshape(rows)
    y = bounds.activate(y, activation)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy), strict=True))}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("samples", [None, 0, 3])
def test_every_output_is_stocks_in_float64(samples: int | None, activation: str) -> None:
    x, dy = normal(3, 6, 5, 4).double(), normal(3, 6, 5, 4, seed=1).double()
    row = (samples, 6) if samples else (6,)
    weight, bias = (None, None) if samples is None else (normal(*row, seed=s) for s in (2, 3))
    right = stock(x, 2, weight, bias, 0.125, activation, dy)
    found = expect(x, 2, weight, bias, 0.125, activation, dy)
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name].value, value, rtol=1e-12, atol=1e-12)
        assert found[name].allowance.shape == found[name].size.shape == value.shape


def test_a_far_mean_and_no_deviation_are_right() -> None:
    """float64 rounds the mean of 1e9 + x to 1e-7, and of a constant to something else than the constant."""
    x = normal(2, 6, 500).double()
    near, far = (expect(t, 2, eps=0.0)["y"].value for t in (x, x + 2.0**30))
    torch.testing.assert_close(far, expect((x + 2.0**30) - 2.0**30, 2, eps=0.0)["y"].value, rtol=0, atol=0)
    torch.testing.assert_close(far, near, rtol=1e-5, atol=1e-5)
    assert expect(torch.full((1, 2, 300), 0.1), 1, eps=1e-30)["y"].value.count_nonzero() == 0


def test_the_unit_of_zero_is_the_smallest_number() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert bounds.unit(zero, torch.float32).item() == 2.0**-149
    assert bounds.unit(zero, torch.float16).item() == 2.0**-24
    got = torch.tensor([0.0, 1e-8])
    assert bounds.beyond_half_unit(got, zero).tolist() == [0.0, float(got[1]) - 2.0**-51]


def test_the_bounds_are_those_of_the_manual() -> None:
    """Of two values -1 and 1 with weight 4 and bias 1: |weight x^| = 4: 8 (10, 18) of 4, 2 of weight."""
    x, dy = torch.tensor([[[-1.0, 1.0]]]), torch.tensor([[[3.0, 0.5]]])
    weight, bias = torch.tensor([4.0]), torch.tensor([1.0])
    for activation, units in (("none", 40), ("relu", 48), ("silu", 81.2)):
        found = expect(x, 1, weight, bias, 0.0, activation)["y"]
        torch.testing.assert_close(
            found.allowance, torch.full((1, 1, 2), units * U, dtype=torch.float64), rtol=1e-12, atol=0
        )
    found = expect(x, 1, weight, bias, 0.0, "none", dy)
    assert found["dbias"].allowance.item() == pytest.approx(8 * U * 3.5)
    assert found["dweight"].allowance.item() == pytest.approx(18 * U * 3.5)
    # a = 12 and 2, their mean 7 with and without |x^| = 1; rstd = 1.
    expected = [U * (16 * (a + 7 + 7) + 2 * (7 + 7)) for a in (12.0, 2.0)]
    assert found["dx"].allowance.flatten().tolist() == pytest.approx(expected)
