# SPDX-License-Identifier: Apache-2.0
"""What tells whether a step of the U-Net gives the same bits, and where two arms of it first differ."""

from __future__ import annotations

import pytest
import torch

from steadynorm.bench import step_bits, step_report
from steadynorm.bench.step_arms import ARMS, Arm, ours
from steadynorm.bench.step_training import Scale, Training


@pytest.fixture
def training(set_threads) -> Training:
    set_threads(1)
    return Training(Scale(4, 8), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_changes_with_any_bit_and_place(dtype: torch.dtype, monkeypatch) -> None:
    x = torch.randn(2, 3, 4, 5, 6, dtype=dtype)
    same = step_bits.digest(x)
    assert len(same) == 16 and same == step_bits.digest(x.clone())
    assert same == step_bits.digest(x.to(memory_format=torch.channels_last_3d))
    monkeypatch.setattr(step_bits, "CHUNK", 7)
    assert same == step_bits.digest(x)
    seen = {same}
    flat = x.view(-1)
    bits = flat.view(step_bits.INTEGERS[x.element_size()])
    width = 8 * x.element_size()
    for place in (0, 6, 7, 719):
        for bit in (0, 9, width - 1):
            mask = (1 << bit) if bit < width - 1 else -(1 << bit)
            bits[place] ^= mask
            seen.add(step_bits.digest(x))
            bits[place] ^= mask
    assert len(seen) == 13
    swapped = flat.clone()
    swapped[[3, 11]] = flat[[11, 3]]
    assert step_bits.digest(swapped) != same


def test_a_step_from_the_initial_weights_has_the_same_bits_whatever_came_before(training: Training) -> None:
    first = step_bits.one_step(training, "ours")
    training.use("stock")
    training.step()
    assert step_bits.one_step(training, "ours") == first
    assert list(first["gradients"]) == [name for name, _ in training.network.named_parameters()]
    assert all(parameter.grad is None for parameter in training.network.parameters())


def test_other_bits_are_named_in_the_order_of_backward() -> None:
    def step(loss: float, **changed: str) -> dict:
        return {"loss": loss.hex(), "gradients": {"first": "a", "middle": "b", "last": "c", **changed}}

    same = step_bits.compare([step(1.5), step(1.5)])
    assert same["same"] and step_report.bits_told("ours", same) == (
        "ours: the same bits in 2 processes, loss and 3 gradients"
    )
    other = step_bits.compare([step(1.5), step(1.5), step(1.5, first="x", middle="y")])
    assert (other["same"], other["different_gradients"], other["first_different"]) == (False, 2, "middle")
    assert step_report.bits_told("a", other) == (
        "a: other bits in 3 processes: loss the same, 2 of 3 gradients other, the first in backward middle"
    )
    assert not step_bits.compare([step(1.5), step(2.5)])["same"]


def test_an_arm_does_not_differ_from_itself(training: Training) -> None:
    found = step_bits.difference(training, ("ours", "ours"))
    assert found["forward_first"] is None and found["backward_first"] is None
    assert found["sites_rounded_once"] == found["sites"] == 6
    assert "the same bits everywhere" in step_report.trace_told(found)[1]
    assert found["forward_places"] == 17 and found["backward_places"] == 30


def test_ours_is_its_fp32_answer_rounded_once_and_the_maximum_is_where_they_part(training: Training) -> None:
    found = step_bits.difference(training, ("ours_fp32", "ours"))
    assert found["sites_rounded_once"] == 6 and found["forward_first"] is None
    assert found["backward_first"] == "input of pool" and found["backward_why"] == step_bits.TIES
    assert found["backward_dtypes"] == ["float32", "bfloat16"]
    losses = [step_bits.losses(training, arm, 3) for arm in ("ours_fp32", "ours")]
    assert losses[0][0] == losses[1][0] and losses[0][2] != losses[1][2]


def test_without_the_maximum_they_part_where_gradients_are_summed(training: Training) -> None:
    training.network.pool = Rounded()
    found = step_bits.difference(training, ("ours_fp32", "ours"))
    assert found["forward_first"] is None
    assert found["backward_first"] == "output of down.0.norm1" and found["backward_why"] == step_bits.SUMMED


class Rounded(torch.nn.Module):
    """Every second value, rounded to bf16: no sum and no choice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()[:, :, ::2, ::2, ::2]


def test_a_site_with_other_values_is_found(training: Training, monkeypatch) -> None:
    def wrong(x, groups, weight, bias, eps):
        y = ours(x, groups, weight, bias, eps)
        return y * (1 + 2**-7) if weight.numel() == 16 else y

    monkeypatch.setitem(ARMS, "ours", Arm("e", "wrong at the deepest level", lambda: wrong, 1.0))
    found = step_bits.difference(training, ("ours_fp32", "ours"))
    assert found["forward_first"] == "output of down.1.norm0" and found["sites_rounded_once"] < 6
    assert found["backward_why"] == "forward differs already, at output of down.1.norm0"


@pytest.mark.parametrize(
    ("place", "first", "second", "cause"),
    [
        ("output of a", ("float32", "1", "r"), ("bfloat16", "2", "r"), step_bits.SUMMED),
        ("input of pool (call 2)", ("float32", "1", "r"), ("bfloat16", "2", "s"), step_bits.TIES),
        ("output of a", ("float32", "1", "r"), ("bfloat16", "2", "s"), "not explained by one rounding"),
        (
            "input of pool",
            ("float32", "1", "r"),
            ("float32", "2", "s"),
            "the same operations gave other bits",
        ),
    ],
)
def test_a_cause_is_told_as_far_as_the_bits_go(place, first, second, cause) -> None:
    assert step_bits.why(place, step_bits.Seen(*first), step_bits.Seen(*second)) == cause
