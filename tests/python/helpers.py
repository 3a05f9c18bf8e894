# SPDX-License-Identifier: Apache-2.0
"""Data, layouts and comparisons that the tests share."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steadynorm
from steadynorm import accuracy, compiled, rungs

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}
LAYOUTS = ("contiguous", "channels_last")
OUTPUTS = ("y", "dx", "dweight", "dbias")
RUNGS = (rungs.NATIVE, rungs.COMPILED, rungs.EAGER)
LAUNCH_FAILED = (
    "group_norm: the statistics kernel failed with cudaErrorLaunchOutOfResources: too many resources "
    "requested for launch"
)
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}


def use_rung(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves this rung and eager PyTorch, which is always on; forgets every failure."""
    if name == rungs.NATIVE and rungs.native.reason is not None:
        pytest.fail(f"the native library does not serve: {rungs.native.reason}")
    for rung in rungs.ladder.values():
        monkeypatch.setattr(rung, "off", None if rung.name == name else "turned off by a test")
        monkeypatch.setattr(rung, "failure", None)
    # Inductor takes seconds for each kind of call: what is not about its code is tested without it.
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(rungs, "_function_served", ())


@contextlib.contextmanager
def broken(name: str, error: Exception | None = None) -> Iterator[list[None]]:
    """Makes a rung fail where it does its work; the list grows with every try."""
    tries: list[None] = []

    def native(*_):
        tries.append(None)
        raise error or RuntimeError(LAUNCH_FAILED)

    def backend(graph, inputs):
        tries.append(None)
        raise error or RuntimeError("no C++ compiler here")

    with pytest.MonkeyPatch.context() as patch:
        if name == rungs.NATIVE:
            patch.setattr(rungs.native, "operator", native)
        else:
            patch.setattr(compiled, "BACKEND", backend)
        yield tries


def warnings_of(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if str(w.message).startswith("steadynorm: ")]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(model: nn.Module) -> nn.Module:
    """The same values of order one third in every parameter of a kind of model."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=number + 5) / 3)
    return model


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()])


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    return channels_last(x) if layout == "channels_last" else x.contiguous()


def layout_of(x: torch.Tensor) -> str:
    if x.is_contiguous():
        return "contiguous"
    if x.dim() in (4, 5) and x.stride() == channels_last(x).stride():
        return "channels_last"
    return f"strides {x.stride()}"


def assert_within_bounds(x, groups, weight=None, bias=None, eps=1e-5, **options) -> None:
    """The public function against float64: y and, with `dy`, every gradient."""
    measured = accuracy.measure(steadynorm.group_norm, x, groups, weight, bias, eps, **options)
    broken = [str(m) for m in measured if not m.ok]
    assert not broken, "\n".join(broken)


def outputs(
    x, groups, weight=None, bias=None, eps=1e-5, *, dy, activation=None, out_dtype=None, wanted=OUTPUTS[1:]
) -> dict[str, torch.Tensor]:
    """y and the wanted gradients of the public function."""
    given = {"dx": x, "dweight": weight, "dbias": bias}
    leaves = {n: None if t is None else t.detach().requires_grad_(n in wanted) for n, t in given.items()}
    y = steadynorm.group_norm(
        leaves["dx"],
        groups,
        leaves["dweight"],
        leaves["dbias"],
        eps,
        activation=activation,
        out_dtype=out_dtype,
    )
    found = {"y": y.detach()}
    names = [n for n in OUTPUTS[1:] if n in wanted and leaves[n] is not None]
    if names:
        found.update(zip(names, torch.autograd.grad(y, [leaves[n] for n in names], dy), strict=True))
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(_BITS.get(x.dtype, torch.int16))


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, case: str) -> None:
    assert got.dtype == expected.dtype, f"{case}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{case}: {list(got.shape)}, expected {list(expected.shape)}"
    a, b = bits(got), bits(expected)
    if torch.equal(a, b):
        return
    where = (a != b).nonzero()
    index = tuple(where[0].tolist())
    mask = (1 << (8 * got.element_size())) - 1
    digits = 2 * got.element_size()
    raise AssertionError(
        f"{case}{list(index)}: {float(got[index])!r} 0x{int(a[index]) & mask:0{digits}x}, "
        f"expected {float(expected[index])!r} 0x{int(b[index]) & mask:0{digits}x}; "
        f"{len(where)} of {got.numel()} differ"
    )


def assert_all_same_bits(got: dict, expected: dict, case: str) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert_same_bits(tensor, expected[name], f"{case}: {name}")
