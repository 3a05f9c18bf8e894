# SPDX-License-Identifier: Apache-2.0
"""The straight line of a served call: what it leaves out is what would have been the same."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

import steadynorm
from helpers import LAYOUTS, laid_out, normal
from steadynorm import module, rungs

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def norm() -> module.GroupNorm:
    norm = steadynorm.GroupNorm(2, 6)
    with torch.no_grad():
        norm.weight.copy_(normal(6, seed=1))
        norm.bias.copy_(normal(6, seed=2))
    return norm


def expect(norm: nn.Module, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    x = normal(2, 6, 5)
    torch.testing.assert_close(norm(x), F.group_norm(x, 2, weight, bias), rtol=1e-5, atol=1e-5)


class Doubled(module.GroupNorm):
    """Its weight is another than its parameter."""

    def __getattr__(self, name: str):
        value = super().__getattr__(name)
        return 2 * value if name == "weight" else value


class Twice(nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def test_a_subclass_may_have_a_weight_of_its_own():
    norm = Doubled(2, 6)
    own = normal(6, seed=1)
    norm.load_state_dict({"weight": own, "bias": torch.zeros(6)})
    expect(norm, 2 * own, torch.zeros(6))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrised_module_has_what_the_parametrisation_makes(norm, name):
    weight, bias = norm.weight.detach().clone(), norm.bias.detach().clone()
    parametrize.register_parametrization(norm, name, Twice())
    expect(norm, *((2 * weight, bias) if name == "weight" else (weight, 2 * bias)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_pruned_module_has_what_is_left(norm, name):
    weight, bias = norm.weight.detach().clone(), norm.bias.detach().clone()
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    prune.custom_from_mask(norm, name, mask)
    expect(norm, *((weight * mask, bias) if name == "weight" else (weight, bias * mask)))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_tensor_may_take_the_place_of_a_parameter(norm, name):
    """As DataParallel's replicas and FSDP have it."""
    given = normal(6, seed=3)
    delattr(norm, name)
    setattr(norm, name, given)
    expect(norm, *((given, norm.bias) if name == "weight" else (norm.weight, given)))


def test_functional_call_and_a_missing_parameter(norm):
    given = {"weight": normal(6, seed=4), "bias": normal(6, seed=5)}
    x = normal(2, 6, 5)
    y = torch.func.functional_call(norm, given, x)
    torch.testing.assert_close(y, F.group_norm(x, 2, *given.values()), rtol=1e-5, atol=1e-5)
    norm.register_parameter("bias", None)
    expect(norm, norm.weight, None)
    expect(steadynorm.GroupNorm(2, 6, affine=False), None, None)


def served_in_a_thread(call) -> list[str | None]:
    """The thread's last rung before and after the call."""
    found = []
    thread = threading.Thread(
        target=lambda: found.extend((steadynorm.last_rung(), call(), steadynorm.last_rung()))
    )
    thread.start()
    thread.join()
    return [found[0], found[-1]]


@pytest.mark.parametrize("call", [steadynorm.GroupNorm(3, 6), lambda x: steadynorm.group_norm(x, 3)])
def test_each_thread_has_its_last_rung(call):
    x = normal(2, 6, 5)
    for _ in range(2):
        call(x)
        assert served_in_a_thread(lambda: call(x)) == [None, rungs.NATIVE]


@pytest.mark.parametrize(
    "shape, groups",
    [
        ((2, 6, 5), 3),
        ((1, 32, 2, 2), 2),
        ((0, 6, 5), 3),
        ((3, 4, 7, 5, 3), 4),
        ((2, 64, 33, 40), 8),
        ((300, 64, 7), 32),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_bring_at_most_a_small_workspace_along(shape, groups, layout):
    x = laid_out(normal(*shape), layout) if len(shape) > 3 else normal(*shape)
    _, statistics = torch.ops.steadynorm.group_norm_forward(x, None, None, shape[1] // groups)
    assert statistics.shape == (3, shape[0], groups)
    assert statistics.is_contiguous()
    assert statistics.storage_offset() == 0
    mean = x.double().unflatten(1, (groups, -1)).flatten(2).mean(-1)
    torch.testing.assert_close(statistics[0].double() + statistics[1].double(), mean, rtol=1e-6, atol=1e-6)
    behind = statistics.untyped_storage().nbytes() - 4 * statistics.numel()
    assert behind <= 256 + 4096
