# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from helpers import RUNGS, use_rung
from steadynorm import compiled, rungs

KINDS = {}  # what the compiled rung has compiled: its time is most of these tests'


@pytest.fixture(params=[rungs.NATIVE, rungs.EAGER])
def rung(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """Runs the test on each rung, and sees to it that this one served."""
    use_rung(request.param, monkeypatch)
    rungs._last.rung = None
    yield request.param
    assert rungs.last_rung() in (None, request.param)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch):
    use_rung(rungs.NATIVE, monkeypatch)
    rungs._last.rung = None
    yield
    assert rungs.last_rung() in (None, rungs.NATIVE)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch):
    """Every rung on, Dynamo without Inductor; every change to the ladder is undone."""
    use_rung(rungs.NATIVE, monkeypatch)
    monkeypatch.setattr(compiled.rung, "off", None)
    monkeypatch.setattr(compiled, "_kinds", KINDS)
    monkeypatch.setattr(compiled, "MAX_KINDS", 10**6)
    monkeypatch.setattr(rungs, "_refused", {})
    return monkeypatch


@pytest.fixture(params=RUNGS[:-1])
def failing(ladder: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The rung that is to fail, and the one below it; those above are off."""
    if request.param == rungs.COMPILED:
        rungs.native_rung.off = "turned off by a test"
    return request.param, RUNGS[RUNGS.index(request.param) + 1]


@pytest.fixture
def no_loop():
    """PyTorch's vmap raises where it would call an operator once for each example."""
    enabled = torch._C._functorch._is_vmap_fallback_enabled()
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(enabled)
