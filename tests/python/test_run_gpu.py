# SPDX-License-Identifier: Apache-2.0
"""tests/cuda/run_gpu.py from end to end, with stand-ins for the GPU's programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

CPP = """
import json, sys
report = next((a.split("json:")[1] for a in sys.argv if "json:" in a), None)
print("[       OK ] CudaSanitizer.Small (1 ms)")
if report:
    results = {"A": "COMPLETED", "B": "SKIPPED"}
    tests = [{"name": name, "status": "RUN", "result": result} for name, result in results.items()]
    json.dump({"testsuites": [{"name": "Cuda", "testsuite": tests}]}, open(report, "w"))
"""
SANITIZER = """
import subprocess, sys
print("========= COMPUTE-SANITIZER")
command = [a for a in sys.argv[1:] if a.startswith(("/", "--gtest"))]
print(subprocess.run(command, capture_output=True, text=True).stdout)
racecheck = "racecheck" in sys.argv
print("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" if racecheck else
      "========= ERROR SUMMARY: FINDINGS errors")
sys.exit(99 if "FINDINGS" != "0" and not racecheck else 0)
"""
CUOBJDUMP = """print("STT_FUNC STB_GLOBAL STO_ENTRY _Z5applyIfEvPT_")"""
NCU = """print('"ID","Kernel Name","launch__grid_size"\\n"0","KERNEL","8"')"""
SMI = """print("NVIDIA H200, 580.1, 143771 MiB")"""


@pytest.fixture
def programs(tmp_path: Path):
    def install(findings: int = 0, kernel: str = "_Z5applyIfEvPT_") -> dict[str, str]:
        sources = {
            "cuda_test": CPP, "compute-sanitizer": SANITIZER.replace("FINDINGS", str(findings)),
            "cuobjdump": CUOBJDUMP, "ncu": NCU.replace("KERNEL", kernel), "nvidia-smi": SMI,
        }  # fmt: skip
        for name, source in sources.items():
            path = tmp_path / name
            path.write_text(f"#!{sys.executable}\n{source}")
            path.chmod(0o755)
        return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return install


def run_gpu(tmp_path: Path, environment: dict, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    output = tmp_path / "gpu-tests.json"
    command = [sys.executable, "tests/cuda/run_gpu.py", "--cpp-test", str(tmp_path / "cuda_test")]
    command += ["--output", str(output), "--commit", "abc", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done, json.loads(output.read_text()) if output.is_file() else {}


def test_all_parts_pass(programs, tmp_path: Path) -> None:
    done, held = run_gpu(tmp_path, programs(), "--only", "cpp,sanitizer,kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "6 passed, 0 failed, 1 skipped"
    assert (held["passed"], held["failed"], held["skipped"]) == (6, 0, 1)
    assert held["device"] == "NVIDIA H200"
    assert len(held["sha256"]["cuda_test"]) == 64
    assert held["sanitizer"]["racecheck"] == {"findings": 0, "first": [], "tests": 1}
    assert held["kernels"]["kernels"] == [{"kernel": "apply", "compiled": 1, "reached": 1}]
    assert {"name": "Cuda.A", "outcome": "passed"} in held["tests"]


def test_findings_fail(programs, tmp_path: Path) -> None:
    done, held = run_gpu(tmp_path, programs(findings=2), "--only", "sanitizer")
    assert done.returncode == 1
    assert held["failed"] == 3
    assert held["sanitizer"]["memcheck"]["findings"] == 2
    assert "2 findings" in done.stdout


def test_a_kernel_that_is_never_launched_fails(programs, tmp_path: Path) -> None:
    done, held = run_gpu(tmp_path, programs(kernel="_Z5otherv"), "--only", "kernels")
    assert done.returncode == 1
    assert held["kernels"]["reached"] == 0
    assert "never launched: apply" in done.stdout


def test_a_crash_of_the_cpp_tests_fails(programs, tmp_path: Path) -> None:
    environment = programs()
    (tmp_path / "cuda_test").write_text(f"#!{sys.executable}\nimport os; print('last words'); os.abort()\n")
    done, held = run_gpu(tmp_path, environment, "--only", "cpp")
    assert done.returncode == 1
    assert "last words" in held["tests"][0]["message"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--only", "cpp", "--cpp-test", "missing"],
            "--cpp-test must be the C++ test program, got no file",
        ),
        (["--only", "perl"], "--only must name cpp, python, sanitizer or kernels, got perl"),
    ],
)
def test_bad_options(programs, tmp_path: Path, arguments: list[str], sentence: str) -> None:
    done, _ = run_gpu(tmp_path, programs(), *arguments)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_without_a_gpu(tmp_path: Path) -> None:
    done, held = run_gpu(tmp_path, {"PATH": str(tmp_path)})
    assert (done.returncode, held) == (2, {})
    assert done.stderr.strip() == "run_gpu: needs an NVIDIA GPU and its driver (nvidia-smi), got none"
