# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing and saved-tensor hooks, on each rung, and with a failure in between."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import steadynorm
from helpers import RUNGS, broken, laid_out, normal, use_rung
from steadynorm import GroupNorm, group_norm, rungs

MODES = pytest.mark.parametrize("reentrant", [False, True])


class Block(nn.Module):
    """A convolution and a normalisation, replayed in backward; notes the rungs that served."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 6, 1), GroupNorm(3, 6, activation="silu")
        self.reentrant, self.rungs = reentrant, []
        self.norm.register_forward_hook(lambda *_: self.rungs.append(steadynorm.last_rung()))

    def inner(self, x):
        return self.norm(self.conv(x)).square()  # what saves last ends a replay: it shall not be the norm

    def forward(self, x):
        if self.reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def leaf() -> torch.Tensor:
    return laid_out(normal(2, 4, 5, 3), "channels_last").requires_grad_()


def gradients(block: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    y.float().square().sum().backward()
    found = [x.grad, *(p.grad for p in block.parameters())]
    block.zero_grad()
    return found


def step(block: nn.Module, autocast: bool = False) -> list[torch.Tensor]:
    x = leaf()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = block(x)
    return gradients(block, x, y)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RUNGS)
@MODES
def test_gradients_are_those_without_a_checkpoint(ladder, reentrant, name, autocast):
    use_rung(name, ladder)
    block = Block(reentrant)
    found = step(block, autocast)
    assert block.rungs == [name, name]
    for ours, expected in zip(found, step(Block(None), autocast), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("autocast", [False, True])
@MODES
def test_a_failure_in_forward_is_replayed_by_who_served(failing, reentrant, autocast):
    """Whether the module has been served before or not; and training goes on."""
    name, below = failing
    for before in (0, 1):
        steadynorm.set_rung(name, True)
        block, x = Block(reentrant), leaf()
        for _ in range(before):
            step(block, autocast)
        block.rungs.clear()
        low = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with pytest.warns(RuntimeWarning), broken(name), low:
            y = block(x)
        found = gradients(block, x, y)
        assert block.rungs == [below, below]
        for ours, expected in zip(found, step(Block(None), autocast), strict=True):
            assert ours.dtype == expected.dtype
            tolerance = {"atol": 2**-4, "rtol": 2**-4} if autocast else {"atol": 1e-5, "rtol": 1e-5}
            torch.testing.assert_close(ours, expected, **tolerance)
        block.rungs.clear()
        step(block, autocast)
        assert block.rungs == [name if before else below] * 2


@MODES
def test_a_failure_in_the_replay_is_raised(failing, reentrant):
    name, _ = failing
    block, x = Block(reentrant), leaf()
    y = block(x)
    with pytest.warns(RuntimeWarning), broken(name) as tries, pytest.raises(RuntimeError) as raised:
        gradients(block, x, y)
    assert len(tries) == 1
    words = "cudaErrorLaunchOutOfResources" if name == rungs.NATIVE else "no C++ compiler here"
    assert words in str(raised.value)
    assert rungs.ladder[name].failure is not None
    block.rungs.clear()
    block.zero_grad()
    step(block)  # the module keeps its rung, which is sound again
    assert block.rungs == [name, name]


@MODES
def test_a_failure_elsewhere_does_not_change_a_replay(failing, reentrant):
    name, _ = failing
    block, x = Block(reentrant), leaf()
    y = block(x)
    with pytest.warns(RuntimeWarning), broken(name):
        GroupNorm(3, 6)(normal(2, 6, 4))
    gradients(block, x, y)
    assert block.rungs == [name, name]


@MODES
def test_a_rung_turned_on_between_does_not_change_a_replay(failing, reentrant):
    name, below = failing
    steadynorm.set_rung(name, False)
    block, x = Block(reentrant), leaf()
    y = block(x)
    steadynorm.set_rung(name, True)
    gradients(block, x, y)
    assert block.rungs == [below, below]


def test_the_function_raises_in_a_replay_too(failing):
    name, _ = failing
    x = leaf()
    y = checkpoint(lambda x: group_norm(x, 2), x, use_reentrant=False)
    with pytest.warns(RuntimeWarning), broken(name), pytest.raises(RuntimeError):
        y.sum().backward()
    assert rungs.ladder[name].failure is not None


def test_a_first_call_in_a_backward_is_no_replay(failing):
    name, below = failing

    class Normalise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            found.append((group_norm(dy, 2), steadynorm.last_rung()))
            found.append((GroupNorm(2, 4)(dy), steadynorm.last_rung()))
            return dy

    found = []
    with pytest.warns(RuntimeWarning), broken(name):
        Normalise.apply(leaf()).sum().backward()
    assert [rung for _, rung in found] == [below, below]


@pytest.mark.parametrize("name", RUNGS)
def test_early_stop_of_a_replay_passes_through(ladder, name):
    """The replay ends by an exception as soon as the last tensor is saved: in the middle of our call."""
    use_rung(name, ladder)
    x = leaf()
    y = checkpoint(lambda x: group_norm(x, 2, activation="relu"), x, use_reentrant=False)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(group_norm(x, 2, activation="relu").sum(), x)
    assert torch.equal(dx, expected)
    assert not any(rung.failure for rung in rungs.ladder.values())


@pytest.mark.parametrize("name", RUNGS)
def test_saved_tensors_may_be_moved_away(ladder, name):
    use_rung(name, ladder)
    expected = step(Block(None))
    moved = []

    def pack(tensor):
        moved.append(tensor)
        return tensor.clone()

    for hooks in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
    ):
        with hooks:
            found = step(Block(None))
        for ours, right in zip(found, expected, strict=True):
            assert torch.equal(ours, right)
    assert moved


@pytest.mark.parametrize("name", RUNGS)
def test_errors_in_unpacking_pass_through(ladder, name):
    use_rung(name, ladder)

    def unpack(tensor):
        raise OSError("the disk is gone")

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = group_norm(x, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        y.sum().backward()
    assert not any(rung.failure for rung in rungs.ladder.values())
