# SPDX-License-Identifier: Apache-2.0
"""What a failing rung does: who serves instead, what is latched, what passes. Failures are injected."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import steadynorm
from helpers import (
    LAUNCH_FAILED,
    RUNGS,
    broken,
    laid_out,
    layout_of,
    normal,
    outputs,
    use_rung,
    warnings_of,
)
from steadynorm import GroupNorm, _native, compiled, group_norm, rungs

CAN_FAIL = {
    rungs.NATIVE: f"stock PyTorch serves instead of the native kernels: RuntimeError: {LAUNCH_FAILED}",
    rungs.COMPILED: ("eager PyTorch serves instead of compiled PyTorch: RuntimeError: no C++ compiler here"),
}


def data(dtype=torch.bfloat16):
    return laid_out(normal(2, 6, 5, 4, dtype=dtype), "channels_last")


def served_by(call) -> str:
    call()
    return steadynorm.last_rung()


# Who serves, and what is latched.


@pytest.mark.parametrize("autocast", [False, True])
def test_the_next_rung_serves_the_call_and_all_that_follow(failing, autocast):
    name, below = failing
    x = data()
    norm = GroupNorm(3, 6, activation="silu")
    expected = F.silu(F.group_norm(x.double(), 3))
    with pytest.warns(RuntimeWarning) as caught, torch.autocast("cpu", torch.float16, enabled=autocast):
        with broken(name) as tries:
            first = norm(x)
            assert steadynorm.last_rung() == below
            second, third = GroupNorm(3, 6, activation="silu")(x), group_norm(x, 3, activation="silu")
            assert len(tries) == 1
        after = norm(x)
        assert steadynorm.last_rung() == below
    for y in (first, second, third, after):
        assert y.dtype == torch.bfloat16
        assert layout_of(y) == "channels_last"
        torch.testing.assert_close(y.double(), expected, atol=2**-8, rtol=2**-8, check_stride=False)
    assert warnings_of(caught) == [f"steadynorm: {CAN_FAIL[name]}"]
    assert [w.filename for w in caught if "steadynorm" in str(w.message)] == [__file__]
    assert rungs.ladder[name].state() == f"latched off: {CAN_FAIL[name].partition(': ')[2]}"
    steadynorm.set_rung(name, True)
    assert rungs.ladder[name].state() == "on"
    assert served_by(lambda: norm(x)) == name


def test_a_module_that_was_served_keeps_its_rung(failing):
    name, below = failing
    x = data()
    old, new = GroupNorm(3, 6), GroupNorm(3, 6)
    right = old(x)
    assert steadynorm.last_rung() == name
    with pytest.warns(RuntimeWarning) as caught, broken(name) as tries:
        for count in (1, 2):
            torch.testing.assert_close(old(x), right, atol=2**-7, rtol=2**-7)
            assert steadynorm.last_rung() == below
            assert len(tries) == count
        assert served_by(lambda: new(x)) == below
    assert len(warnings_of(caught)) == 1
    assert served_by(lambda: old(x)) == name
    assert served_by(lambda: new(x)) == below


def test_the_function_has_the_processs_latch(failing):
    name, below = failing
    assert served_by(lambda: group_norm(data(), 3)) == name
    with pytest.warns(RuntimeWarning), broken(name):
        assert served_by(lambda: group_norm(data(), 3)) == below
    assert served_by(lambda: group_norm(data(), 3)) == below


def test_what_a_module_latched_is_off_for_the_function_that_was_served(failing):
    name, below = failing
    assert served_by(lambda: group_norm(data(), 3)) == name
    with pytest.warns(RuntimeWarning), broken(name):
        assert served_by(lambda: GroupNorm(3, 6)(data())) == below
    assert served_by(lambda: group_norm(data(), 3)) == below


@pytest.mark.parametrize("call", [GroupNorm(3, 6, affine=False), lambda x: group_norm(x, 3)])
def test_a_device_without_code_is_served_by_stock(ladder, call):
    x = data().to("meta")
    assert [served_by(lambda: call(x)) for _ in range(2)] == [rungs.NATIVE] * 2
    rungs._refused.clear()
    ladder.setattr(_native, "why_not_on", lambda *_: "no code for it")
    with pytest.warns(RuntimeWarning, match="no code for it"):
        assert served_by(lambda: call(x)) == rungs.EAGER
    assert served_by(lambda: call(x)) == rungs.EAGER


def test_turned_off_is_off_also_for_modules_that_were_served(failing):
    name, below = failing
    norm = GroupNorm(3, 6)
    assert served_by(lambda: norm(data())) == name
    steadynorm.set_rung(name, False)
    assert served_by(lambda: norm(data())) == below


def test_both_fail_and_eager_serves(ladder):
    norm = GroupNorm(3, 6)
    with pytest.warns(RuntimeWarning) as caught, broken(rungs.NATIVE), broken(rungs.COMPILED):
        assert served_by(lambda: norm(data())) == rungs.EAGER
    assert warnings_of(caught) == [f"steadynorm: {text}" for text in CAN_FAIL.values()]


@pytest.mark.parametrize("autocast", [False, True])
def test_training_goes_on(failing, autocast):
    name, below = failing
    x, dy = data(), normal(2, 6, 5, 4, seed=1, dtype=torch.bfloat16)
    weight, bias = 1 + normal(6, seed=2) / 3, normal(6, seed=3) / 3

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return outputs(x, 3, weight, bias, dy=dy, activation="gelu", out_dtype=None)

    expected = step()
    with pytest.warns(RuntimeWarning), broken(name):
        found = step()
        assert steadynorm.last_rung() == below
    for key, right in expected.items():
        assert found[key].dtype == right.dtype
        assert layout_of(found[key]) == layout_of(right)
        torch.testing.assert_close(found[key], right, atol=2**-6, rtol=2**-7)


def test_a_failing_backward_of_compiled_code_is_computed_uncompiled(ladder):
    steadynorm.set_rung(rungs.NATIVE, False)
    x, dy = data().requires_grad_(), normal(2, 6, 5, 4, seed=1, dtype=torch.bfloat16)
    weight = torch.ones(6, requires_grad=True)
    y = group_norm(x, 3, weight)
    with pytest.warns(RuntimeWarning) as caught, broken(rungs.COMPILED) as tries:
        found = torch.autograd.grad(y, (x, weight), dy)
    assert len(tries) == len(warnings_of(caught)) == 1
    use_rung(rungs.EAGER, ladder)
    expected = torch.autograd.grad(group_norm(x, 3, weight), (x, weight), dy)
    torch.testing.assert_close(found, expected)
    assert [t.stride() for t in found] == [t.stride() for t in expected]


def test_a_latch_of_many_threads_warns_once(ladder):
    x, barrier = data(), threading.Barrier(8)
    expected = group_norm(x, 3)

    def call(_):
        barrier.wait()
        return GroupNorm(3, 6, affine=False)(x), steadynorm.last_rung()

    steadynorm.set_rung(rungs.COMPILED, False)
    with pytest.warns(RuntimeWarning) as caught, broken(rungs.NATIVE), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(8)))
    for y, rung in found:
        torch.testing.assert_close(y, expected, atol=2**-7, rtol=2**-7)
        assert rung == rungs.EAGER
    assert len(warnings_of(caught)) == 1


# What is caught, and what is not.

NATIVE_FAILURES = [
    RuntimeError(LAUNCH_FAILED),
    RuntimeError("group_norm: cudaGetDevice failed with cudaErrorInsufficientDriver: too old"),
    NotImplementedError("group_norm: this build has code for compute capability 9.0, got a device of 7.5"),
]
OTHERS = [
    torch.OutOfMemoryError("CUDA out of memory."),
    MemoryError(),
    ValueError("the user's own"),
    KeyboardInterrupt(),
    RuntimeError("disk full"),
    RuntimeError("group_norm: a thread of the CPU backend failed"),
    RuntimeError("group_norm: the apply kernel failed with cudaErrorMemoryAllocation: out of memory"),
    RuntimeError(
        "group_norm: the apply kernel failed with cudaErrorIllegalAddress: an illegal memory access"
    ),
    RuntimeError(f"a hook: {LAUNCH_FAILED}"),
    NotImplementedError("a hook is not implemented"),
    TypeError("a hook wants another type"),
]


@pytest.mark.parametrize("error", NATIVE_FAILURES, ids=str)
def test_failures_of_the_native_rung(ladder, error):
    steadynorm.set_rung(rungs.COMPILED, False)
    with pytest.warns(RuntimeWarning), broken(rungs.NATIVE, error):
        assert served_by(lambda: group_norm(data(), 3)) == rungs.EAGER
    assert rungs.native_rung.failure == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_pass_through(ladder, error):
    with broken(rungs.NATIVE, error), pytest.raises(type(error)) as raised:
        group_norm(data(), 3)
    assert raised.value is error
    assert rungs.native_rung.failure is None
    assert served_by(lambda: group_norm(data(), 3)) == rungs.NATIVE


def test_out_of_memory_while_compiling_passes_through(ladder):
    use_rung(rungs.COMPILED, ladder)
    with broken(rungs.COMPILED, torch.OutOfMemoryError("CUDA out of memory.")), pytest.raises(RuntimeError):
        group_norm(data(), 3)
    assert compiled.rung.failure is None


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError, torch.OutOfMemoryError])
def test_errors_of_saved_tensor_hooks_pass_through(ladder, name, kind):
    use_rung(name, ladder)
    error = kind("disk full")

    def pack(tensor):
        raise error

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(kind) as raised:
        GroupNorm(3, 6)(data())
    assert raised.value is error
    assert not any(rung.failure for rung in rungs.ladder.values())


def test_the_first_compilation_is_the_main_threads(ladder):
    use_rung(rungs.COMPILED, ladder)
    ladder.setattr(compiled, "_kinds", {})
    with ThreadPoolExecutor(1) as other:
        assert other.submit(served_by, lambda: group_norm(data(), 3)).result() == rungs.EAGER
        assert served_by(lambda: group_norm(data(), 3)) == rungs.COMPILED
        assert other.submit(served_by, lambda: group_norm(data(), 3)).result() == rungs.COMPILED


def test_one_thread_compiles_at_a_time(ladder):
    use_rung(rungs.COMPILED, ladder)
    others = []

    def is_free() -> bool:
        free = compiled._lock.acquire(blocking=False)
        if free:
            compiled._lock.release()
        return free

    def backend(graph, inputs):
        with ThreadPoolExecutor(1) as other:
            others.append(other.submit(is_free).result())
        return make_boxed_func(graph.forward)

    ladder.setattr(compiled, "BACKEND", aot_autograd(fw_compiler=backend))
    group_norm(normal(2, 6, 4).requires_grad_(), 3).sum().backward()
    assert others == [False] * 3  # forward; forward again and backward
    assert compiled.rung.failure is None


def test_while_somebody_else_compiles_eager_serves(ladder):
    """Dynamo knows of tracing in the process, not in the thread."""
    use_rung(rungs.COMPILED, ladder)
    x = normal(2, 6, 4).requires_grad_()
    y = group_norm(x, 3)
    (right,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    ladder.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
    torch.testing.assert_close(group_norm(x, 3), y)
    assert steadynorm.last_rung() == rungs.EAGER
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], right)
    assert compiled.rung.failure is None


def test_torch_compile_that_refuses_is_a_failure(ladder):
    use_rung(rungs.COMPILED, ladder)

    def refuse(*_, **__):
        raise RuntimeError("torch.compile is not supported on this Python")

    ladder.setattr(torch, "compile", refuse)
    ladder.setattr(compiled, "BACKEND", "not compiled before")
    with pytest.warns(RuntimeWarning, match="CompileUnavailable: RuntimeError: torch.compile is not"):
        assert served_by(lambda: group_norm(data(), 3)) == rungs.EAGER


# Kinds of tensors.


class Wrapped(torch.Tensor):
    """A subclass that knows the operators that `known` says, and plain tensors inside."""

    known = staticmethod(lambda function: True)
    unknown: object = NotImplemented

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if not cls.known(str(function)):
            if cls.unknown is NotImplemented:
                return NotImplemented
            raise cls.unknown(f"{function} is not known here")
        unwrap = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
        found = function(*map(unwrap, arguments), **(options or {}))
        return torch.utils._pytree.tree_map(lambda t: cls(t) if isinstance(t, torch.Tensor) else t, found)


@pytest.mark.parametrize("unknown", [NotImplemented, NotImplementedError])
def test_a_subclass_that_only_stock_serves(ladder, unknown):
    class Stock(Wrapped):
        known = staticmethod(lambda function: "steadynorm" not in function)

    Stock.unknown = unknown
    x = normal(2, 6, 4)
    y = group_norm(Stock(x), 3)
    assert steadynorm.last_rung() == rungs.EAGER
    assert torch.equal(y.inner, F.group_norm(x, 3))
    assert not any(rung.failure for rung in rungs.ladder.values())


def test_a_subclass_whose_torch_function_only_knows_stock(ladder):
    class Stock(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            if "steadynorm" in f"{function} {getattr(function, '__module__', '')}":
                return NotImplemented
            return super().__torch_function__(function, types, arguments, options or {})

    x = normal(2, 6, 4)
    for call in (lambda x: group_norm(x, 3), GroupNorm(3, 6, affine=False)):
        y = call(x.as_subclass(Stock))
        assert steadynorm.last_rung() == rungs.EAGER
        assert type(y) is Stock
        assert torch.equal(y.as_subclass(torch.Tensor), F.group_norm(x, 3))


@pytest.mark.parametrize("unknown", [NotImplemented, NotImplementedError])
def test_a_subclass_that_no_rung_serves_raises_what_stock_raises(ladder, unknown):
    class Unknown(Wrapped):
        known = staticmethod(lambda function: "group_norm" not in function)

    Unknown.unknown = unknown
    x = Unknown(normal(2, 6, 4))
    with pytest.raises((NotImplementedError, TypeError)) as stock:
        F.group_norm(x, 3)
    with pytest.raises(stock.type) as ours:
        GroupNorm(3, 6, affine=False)(x)
    assert str(ours.value) == str(stock.value)


# Inductor itself.


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_inductors_code_agrees(ladder):
    x, dy = data(), normal(2, 6, 5, 4, seed=1)
    weight, bias = 1 + normal(6, seed=2) / 3, normal(6, seed=3) / 3
    call = lambda: outputs(x, 3, weight, bias, dy=dy, activation="silu", out_dtype=torch.float32)  # noqa: E731
    expected = call()
    use_rung(rungs.COMPILED, ladder)
    ladder.setattr(compiled, "BACKEND", "inductor")
    found = call()
    assert steadynorm.last_rung() == rungs.COMPILED
    assert compiled.rung.failure is None
    for key, right in expected.items():
        tolerance = 2**-7 if right.dtype == torch.bfloat16 else 2e-6 * float(right.abs().max())
        assert layout_of(found[key]) == layout_of(right)
        torch.testing.assert_close(found[key], right, atol=tolerance, rtol=2**-7 if key == "dx" else 2e-6)


def test_a_machine_without_a_cpp_compiler(ladder):
    use_rung(rungs.COMPILED, ladder)
    ladder.setattr(compiled, "BACKEND", "inductor")
    config = {"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}
    with torch._inductor.config.patch(config), pytest.warns(RuntimeWarning) as caught:
        for _ in range(2):
            assert served_by(lambda: group_norm(data(), 3)) == rungs.EAGER
    (text,) = warnings_of(caught)
    assert text.startswith(
        "steadynorm: eager PyTorch serves instead of compiled PyTorch: InvalidCxxCompiler: "
    )
    assert "compiler" in text
