# SPDX-License-Identifier: Apache-2.0
"""The native library missing, damaged, or for another torch: one warning says why, stock PyTorch agrees."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import steadynorm
from helpers import ACTIVATIONS, FLOATS, LAYOUTS, laid_out, layout_of, normal, outputs, use_rung
from steadynorm import _native, rungs

LIBRARY = "libsteadynorm_torch.so"
HERE = {"torch": torch.__version__, "cuda": None, "cuda_architectures": [], "version": "0"}

CHILD = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import steadynorm
    import torch
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, 4).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    norm = steadynorm.GroupNorm(3, 6, activation="silu")
    y = norm(x)
    y.sum().backward()
    try:
        steadynorm.group_norm(x, 4)
        error = None
    except ValueError as e:
        error = str(e)
    meta = steadynorm.group_norm(torch.empty(2, 6, 5, device="meta"), 3)
ours = [w for w in caught if "steadynorm" in str(w.message)]
print(json.dumps({
    "file": steadynorm.__file__, "version": steadynorm.__version__, "rung": steadynorm.last_rung(),
    "warnings": [[w.category.__name__, str(w.message)] for w in ours], "from": [w.filename for w in ours],
    "y": y.detach().float().flatten().tolist(), "dtype": str(y.dtype), "strides": y.stride(),
    "dx": x.grad.float().flatten().tolist(), "error": error,
}))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package, its lib folder empty."""
    copy = tmp_path / "steadynorm"
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(Path(steadynorm.__file__).parent, copy, ignore=ignored)
    (copy / "lib").mkdir()
    return copy


def environment(package: Path, **variables: str) -> dict[str, str]:
    """Without the compiled rung, which would take a minute, unless `variables` say otherwise."""
    fixed = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "STEADYNORM_COMPILE": "0"}
    return os.environ | fixed | variables


def import_in_child(package: Path) -> dict:
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=environment(package),
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    result = json.loads(child.stdout)
    assert Path(result["file"]).parent == package
    return result


def write(package: Path, library: bytes | None, build_info: str | None) -> None:
    if library is not None:
        (package / "lib" / LIBRARY).write_bytes(library)
    if build_info is not None:
        (package / "lib" / "build_info.json").write_text(build_info, encoding="utf-8")


DAMAGES = {
    "missing": (None, None, [f"{LIBRARY} is missing from ", "/steadynorm/lib"]),
    "garbage": (
        b"no library" * 1000,
        json.dumps(HERE),
        [f"{LIBRARY} can't be loaded: OSError: ", "invalid ELF header"],
    ),
    "empty": (b"", json.dumps(HERE), [f"{LIBRARY} can't be loaded: OSError: ", "file too short"]),
    "another torch": (
        b"",
        json.dumps(HERE | {"torch": "2.9.1+cpu"}),
        [f"{LIBRARY} was built for torch 2.9.1+cpu, this is torch {torch.__version__}"],
    ),
    "no build info": (b"", None, ["build_info.json is missing", "the torch that"]),
    "damaged build info": (b"", "{", ["build_info.json can't be read: JSONDecodeError"]),
    "build info of another shape": (b"", "[1]", ["build_info.json can't be read: TypeError"]),
    "build info without torch": (b"", "{}", ["build_info.json can't be read: KeyError: 'torch'"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_reason_is_one_sentence(package, damage):
    library, build_info, words = DAMAGES[damage]
    write(package, library, build_info)
    found = _native.load([str(package)])
    assert found.operator is None
    assert all(word in found.reason for word in words), found.reason
    assert "\n" not in found.reason


def test_the_library_may_be_in_a_later_folder_of_the_package(package, tmp_path):
    # An editable install has the Python files in one place and the built library in another.
    write(package, b"", json.dumps(HERE | {"torch": "1.0"}))
    assert _native.load([str(tmp_path / "sources"), str(package)]).path == package / "lib" / LIBRARY


@pytest.mark.parametrize("damage", ["missing", "garbage", "another torch"])
def test_one_warning_says_why_and_stock_serves(package, damage):
    library, build_info, words = DAMAGES[damage]
    write(package, library, build_info)
    found = import_in_child(package)
    assert len(found["warnings"]) == 1, found["warnings"]
    category, message = found["warnings"][0]
    assert category == "RuntimeWarning"
    assert message.startswith("steadynorm: stock PyTorch serves instead of the native kernels: ")
    assert all(word in message for word in words), message
    assert found["from"] == ["<string>"]  # the line that imported the package
    assert found["rung"] == "eager"
    assert found["dtype"] == "torch.bfloat16"
    assert found["error"] == "group_norm: channels must be divisible by groups, got C=6, G=4"


def info_in_child(package: Path, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "steadynorm", "info"],
        env=environment(package, **variables),
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_info_says_why(package):
    child = info_in_child(package)
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    why = f"{LIBRARY} is missing from {package / 'lib'}"
    assert f"  not loaded: {why}" in lines
    assert f"rung native: off: {why}" in lines
    assert "rung compiled: off: turned off by STEADYNORM_COMPILE=0" in lines
    assert "rung eager: on" in lines
    assert any(line.startswith("cpu ") and line.endswith(f": rung eager ({why})") for line in lines)


@pytest.mark.usefixtures("native")
def test_the_environment_turns_rungs_off_without_a_warning(package):
    for name in (LIBRARY, "build_info.json"):
        shutil.copy(rungs.native.path.parent / name, package / "lib" / name)
    child = info_in_child(package, STEADYNORM_NATIVE="0", STEADYNORM_COMPILE="1")
    assert child.stderr == ""
    lines = child.stdout.splitlines()
    assert "rung native: off: turned off by STEADYNORM_NATIVE=0" in lines
    assert "rung compiled: on" in lines
    assert any(line.endswith(": rung compiled (turned off by STEADYNORM_NATIVE=0)") for line in lines)


def test_a_bad_value_in_the_environment_stops_the_import(package):
    child = info_in_child(package, STEADYNORM_NATIVE="off")
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert last == "ValueError: steadynorm: STEADYNORM_NATIVE must be 0 (off) or 1 (on), got 'off'"


@pytest.mark.usefixtures("native")
def test_a_sound_library_gives_no_warning_and_agrees(package):
    for name in (LIBRARY, "build_info.json"):
        shutil.copy(rungs.native.path.parent / name, package / "lib" / name)
    sound = import_in_child(package)
    assert sound["warnings"] == []
    assert sound["rung"] == "native"
    (package / "lib" / LIBRARY).unlink()
    without = import_in_child(package)
    assert without["rung"] == "eager"
    for name in ("dtype", "strides", "error"):
        assert without[name] == sound[name]
    for name in ("y", "dx"):
        ours, expected = torch.tensor(without[name]), torch.tensor(sound[name])
        torch.testing.assert_close(ours, expected, atol=2**-8, rtol=2**-7)


def both(monkeypatch, call) -> list:
    found = []
    for name in (rungs.NATIVE, rungs.EAGER):
        with monkeypatch.context() as patch:
            use_rung(name, patch)
            found.append(call())
            assert steadynorm.last_rung() == name
    return found


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parameters", ["none", "[C]", "[N, C]", "weight", "bias", "[C] and [N, C]"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
@pytest.mark.parametrize("layout", [*LAYOUTS, "strided"])
def test_rungs_agree(monkeypatch, layout, dtype, parameters, activation):
    """Values to fp32 rounding, dtype, memory format; forward and every gradient."""
    shape = (3, 12, 7, 10)
    x, dy = normal(*shape, seed=1, dtype=dtype), normal(*shape, seed=2)
    x = x[..., ::2] if layout == "strided" else laid_out(x, layout)
    dy = dy[..., ::2] if layout == "strided" else dy
    row = shape[:2] if parameters == "[N, C]" else shape[1:2]
    weight, bias = 1 + normal(*row, seed=3) / 3, normal(*row, seed=4) / 3
    if parameters == "[C] and [N, C]":
        bias = normal(*shape[:2], seed=4) / 3
    if parameters in ("none", "bias"):
        weight = None
    if parameters in ("none", "weight"):
        bias = None
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def call():
        return outputs(x, 4, weight, bias, dy=dy.to(out_dtype), activation=activation, out_dtype=out_dtype)

    native, eager = both(monkeypatch, call)
    assert native.keys() == eager.keys()
    for name, expected in native.items():
        assert eager[name].dtype == expected.dtype
        assert layout_of(eager[name]) == layout_of(expected)
        tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(expected.dtype, 2e-6)
        scale = float(expected.abs().max()) or 1.0
        torch.testing.assert_close(
            eager[name] / scale, expected / scale, atol=tolerance, rtol=tolerance, check_stride=False
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rungs_agree_on_nan(monkeypatch, activation, bad):
    x = normal(2, 6, 5)
    x[1, 2, 3] = bad
    call = lambda: outputs(x, 3, dy=torch.ones_like(x), activation=activation)  # noqa: E731
    native, eager = both(monkeypatch, call)
    for name in native:
        assert torch.equal(native[name].isnan(), eager[name].isnan())


# What the library can serve.


def test_devices_that_the_library_does_not_serve():
    built = _native.Native(build=HERE)
    assert _native.why_not_on(built, torch.device("cpu")) is None
    assert _native.why_not_on(built, torch.device("meta")) is None
    assert _native.why_not_on(built, torch.device("cuda")) == "the native library was built without CUDA"
    assert _native.why_not_on(built, torch.device("mps")) == (
        "the native library does not serve device type 'mps'"
    )


def test_a_gpu_without_code_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    built = _native.Native(build=HERE | {"cuda": "13.0", "cuda_architectures": ["80", "90"]})
    assert _native.why_not_on(built, torch.device("cuda:0")) == (
        "the native library has no code for T4 (sm_75), it was built for 80, 90"
    )
    built.build["cuda_architectures"].append("75")
    assert _native.why_not_on(built, torch.device("cuda:0")) is None


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [
        ("90", (9, 0), True),
        ("90", (10, 0), True),  # PTX
        ("90", (8, 9), False),
        ("90-real", (9, 0), True),
        ("90-real", (10, 0), False),
        ("80-real", (8, 6), True),
        ("86-real", (8, 0), False),
        ("80-virtual", (12, 0), True),
        ("90a", (9, 0), True),
        ("90a-real", (10, 0), False),
        ("100f", (10, 3), True),
        ("100f", (12, 0), False),
        ("120", (12, 0), True),
        ("native", (9, 0), False),
    ],
)
def test_architectures_that_run_on_a_gpu(architecture, capability, expected):
    assert _native.runs_on(architecture, capability) is expected


def test_a_device_is_refused_with_one_warning(monkeypatch):
    monkeypatch.setattr(rungs, "native", _native.Native(build=HERE, operator=lambda *_: None))
    monkeypatch.setattr(rungs, "_refused", {})
    with pytest.warns(RuntimeWarning, match="built without CUDA") as caught:
        for _ in range(3):
            assert rungs.why_not_native(torch.device("cuda:0")) is not None
    assert len(caught) == 1
