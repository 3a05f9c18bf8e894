# SPDX-License-Identifier: Apache-2.0
"""Python's own entry to steadynorm::group_norm does what torch.ops' binding does, by a shorter way."""

from __future__ import annotations

import itertools
import sys
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import steadynorm
from helpers import FLOATS, normal
from steadynorm import _native, rungs

pytestmark = pytest.mark.usefixtures("native")

OPERATOR = torch.ops.steadynorm.group_norm.default
DEFAULTS = (1e-5, "none", None)


@pytest.fixture
def entry():
    assert rungs.native.operator is not OPERATOR._op, "torch.ops' binding serves: the entry is not here"
    return rungs.native.operator


def outcome(call, *arguments):
    """The type and the text of what is raised, or the result."""
    try:
        return call(*arguments)
    except Exception as error:
        return type(error), str(error).partition("\n")[0]


def leaves(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [t if t is None else t.detach().clone().requires_grad_() for t in tensors]


# Values and gradients.


@pytest.mark.parametrize("dtype, out_dtype", list(itertools.product(FLOATS, (None, *FLOATS))))
def test_values_are_the_operators(entry, dtype, out_dtype):
    x = normal(2, 6, 5, 4).to(dtype, memory_format=torch.channels_last)
    arguments = (
        x,
        3,
        torch.nn.Parameter(normal(6)),
        normal(2, 6, seed=1).bfloat16(),
        1e-3,
        "silu",
        out_dtype,
    )
    y, expected = entry(*arguments), OPERATOR(*arguments)
    assert type(y) is torch.Tensor
    assert (y.dtype, y.stride()) == (out_dtype or dtype, expected.stride())
    assert torch.equal(y, expected)


@pytest.mark.parametrize("weight, bias", list(itertools.product((True, False), repeat=2)))
def test_gradients_are_the_operators(entry, weight, bias):
    given = normal(2, 6, 5), normal(6, seed=1) if weight else None, normal(6, seed=2) if bias else None
    found = []
    for call in (entry, OPERATOR):
        x, *parameters = leaves(*given)
        y = call(x, 3, *parameters, *DEFAULTS)
        y.square().sum().backward()
        found.append([y.grad_fn.name(), *(t if t is None else t.grad for t in (x, *parameters))])
    assert found[0][0] == found[1][0]
    for ours, expected in zip(found[0][1:], found[1][1:], strict=True):
        assert ours is expected is None or torch.equal(ours, expected)


def test_what_needs_no_gradient_records_none(entry):
    x = normal(2, 6, 5)
    assert entry(x, 3, None, None, *DEFAULTS).grad_fn is None
    with torch.no_grad():
        assert entry(x.requires_grad_(), 3, None, None, *DEFAULTS).grad_fn is None


def test_nothing_is_kept(entry):
    tensors = normal(2, 6, 5), normal(6), torch.nn.Parameter(normal(6))
    before = [(sys.getrefcount(t), t._use_count()) for t in tensors]
    for _ in range(3):
        entry(tensors[0], 3, *tensors[1:], *DEFAULTS)
        outcome(entry, tensors[0], 4, *tensors[1:], *DEFAULTS)
        outcome(entry, *tensors)
    assert [(sys.getrefcount(t), t._use_count()) for t in tensors] == before


def test_under_vmap_and_grad_it_is_the_operator(entry):
    x, weight = normal(4, 2, 6, 5), normal(4, 6, seed=1)
    for transform in (torch.vmap, lambda f: torch.vmap(torch.func.grad(lambda *a: f(*a).square().sum()))):
        ours, expected = (
            transform(lambda a, b, f=f: f(a, 3, b, None, *DEFAULTS))(x, weight) for f in (entry, OPERATOR)
        )
        assert torch.equal(ours, expected)


# Arguments.


X = normal(2, 6, 5)
ODD_ARGUMENTS = {
    "groups that do not divide": (X, 4, None, None, *DEFAULTS),
    "no groups": (X, 0, None, None, *DEFAULTS),
    "negative eps": (X, 3, None, None, -1.0, "none", None),
    "another activation": (X, 3, None, None, 1e-5, "swish", None),
    "an integer out_dtype": (X, 3, None, None, 1e-5, "none", torch.int32),
    "an integer input": (X.long(), 3, None, None, *DEFAULTS),
    "rank 1": (X[0, 0], 1, None, None, *DEFAULTS),
    "another size of weight": (X, 3, X[0, 0], None, *DEFAULTS),
    "another device of bias": (X, 3, None, torch.empty(6, device="meta"), *DEFAULTS),
    "one value in each group": (X[:1, :, :1], 6, None, None, *DEFAULTS),
    "groups beyond 64 bits": (X, 2**70, None, None, *DEFAULTS),
    "minus one group": (X, -1, None, None, *DEFAULTS),
    "groups in a tensor": (X, torch.tensor(3), None, None, *DEFAULTS),
    "a float for groups": (X, 3.0, None, None, *DEFAULTS),
    "a bool for groups": (X, True, None, None, *DEFAULTS),
    "an int for eps": (X, 3, None, None, 1, "none", None),
    "no eps": (X, 3, None, None, None, "none", None),
    "bytes for the activation": (X, 3, None, None, 1e-5, b"none", None),
    "an activation that is no Unicode": (X, 3, None, None, 1e-5, "\ud800", None),
    "a type for out_dtype": (X, 3, None, None, 1e-5, "none", float),
    "a list for input": ([1.0], 3, None, None, *DEFAULTS),
    "None for input": (None, 3, None, None, *DEFAULTS),
    "a number for weight": (X, 3, 1.0, None, *DEFAULTS),
    "a list for bias": (X, 3, None, [0.0] * 6, *DEFAULTS),
    "a sparse input": (X.to_sparse(), 3, None, None, *DEFAULTS),
    "nothing": (),
    "defaults left out": (X, 3),
    "one too many": (X, 3, None, None, *DEFAULTS, None),
}


@pytest.mark.parametrize("name", ODD_ARGUMENTS)
def test_odd_arguments_meet_what_they_meet_under_torch_ops(entry, name):
    ours, expected = (outcome(call, *ODD_ARGUMENTS[name]) for call in (entry, OPERATOR))
    if isinstance(expected, torch.Tensor):
        assert torch.equal(ours, expected)
    else:
        assert ours == expected


# What sees a call before the kernels do.


SEEN = []


def watch(cls, function, types, arguments=(), keywords=None):
    SEEN.append((function, types, len(arguments)))
    return torch.Tensor.__torch_function__.__func__(cls, function, types, arguments, keywords or {})


class Watched(torch.Tensor):
    __torch_function__ = classmethod(watch)


class WatchedParameter(torch.nn.Parameter):
    __torch_function__ = classmethod(watch)


@pytest.mark.parametrize("kind", [Watched, WatchedParameter])
@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_subclass_is_asked_by_either(entry, kind, place):
    arguments = [normal(2, 6, 5), 3, normal(6), normal(6), *DEFAULTS]
    arguments[place] = arguments[place].as_subclass(kind)
    found = []
    for call in (entry, OPERATOR):
        SEEN.clear()
        y = call(*arguments)
        found.append([type(y), *SEEN])
    assert len(found[0]) > 1
    assert found[0] == found[1]


class FunctionLog(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.seen = [*getattr(self, "seen", []), (function, len(arguments))]
        return function(*arguments, **(keywords or {}))


class DispatchLog(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.seen = [*getattr(self, "seen", []), function]
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("mode, sees", [(FunctionLog, "group_norm"), (DispatchLog, "group_norm_forward")])
@pytest.mark.parametrize("grad", [False, True])
def test_a_mode_sees_the_same_calls(entry, mode, sees, grad):
    found = []
    x = normal(2, 6, 5).requires_grad_(grad)
    for call in (entry, OPERATOR):
        with mode() as log:
            call(x, 3, None, None, *DEFAULTS)
        found.append(log.seen)
    assert found[0] == found[1]
    assert sees in str(found[0])


@pytest.mark.parametrize("convert", [False, True])
def test_fake_tensors_stay_fake(entry, convert):
    mode = FakeTensorMode(allow_non_fake_inputs=not convert)
    x = normal(2, 6, 5)
    with mode:
        y = entry(mode.from_tensor(x) if convert else x, 3, None, None, *DEFAULTS)
    assert type(y) is FakeTensor
    assert y.shape == x.shape


def test_a_profiler_sees_the_operator(entry):
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        entry(normal(2, 6, 5), 3, None, None, *DEFAULTS)
    events = {event.name: event.input_shapes for event in profile.events()}
    assert events["steadynorm::group_norm"][0] == [2, 6, 5]
    assert "steadynorm::group_norm_forward" in events


def test_jit_trace_records_the_operator(entry):
    norm, x = steadynorm.GroupNorm(3, 6), normal(2, 6, 5)
    other = normal(2, 6, 5, seed=1)
    for traced in (
        torch.jit.trace(norm, x),
        torch.jit.trace(lambda t: entry(t, 3, None, None, *DEFAULTS), x),
    ):
        assert "steadynorm::group_norm" in str(traced.inlined_graph)
        assert torch.equal(traced(other), norm(other))


# Threads.


def test_other_threads_run_meanwhile(entry, set_threads):
    set_threads(1)
    x, gate, ran = torch.zeros(64, 64, 32, 32), threading.Event(), []  # 10 ms
    thread = threading.Thread(target=lambda: (gate.wait(), ran.append(True)))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # seconds: the other thread runs when this one lets it
    try:
        gate.set()
        y = entry(x, 8, None, None, *DEFAULTS)
        let = bool(ran)
        del y  # the end of a tensor lets others run too
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert let


def test_threads_do_not_meet(entry):
    inputs = [normal(2, 6, 5, seed=seed) for seed in range(4)]
    expected = [OPERATOR(x, 3, None, None, *DEFAULTS) for x in inputs]
    wrong = []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        for _ in range(200):
            if not torch.equal(entry(x, 3, None, None, *DEFAULTS), want):
                wrong.append(want)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Where it can't be, torch.ops' binding serves.


@pytest.mark.parametrize("damage", ["missing", "garbage", "for a Python with Python's lock"])
def test_without_it_the_binding_serves(monkeypatch, tmp_path, damage):
    folder = tmp_path
    if damage == "garbage":
        (tmp_path / "steadynorm_python.abi3.so").write_bytes(b"no library" * 1000)
    elif damage != "missing":
        folder = rungs.native.path.parent
        monkeypatch.setattr(sys, "abiflags", "t")
    assert _native._shortest(folder, OPERATOR._op) is OPERATOR._op
