# SPDX-License-Identifier: Apache-2.0
"""Every test that needs a GPU: C++, Python, and compute-sanitizer over the C++ tests that reach every kernel.

Writes bench/results/gpu-tests-<gpu>.json; the last line printed is `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cuda")]

import reports  # noqa: E402
from bench import provenance  # noqa: E402
from reports import FAILED, PASSED, SKIPPED, Outcome  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CUDA_BIN = "/usr/local/cuda/bin"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Exit status: 0 all passed or skipped, 1 a failure, 2 no GPU or a bad option.",
    )
    parser.add_argument("--cpp-test", type=Path, default=ROOT / "build/dev/tests/cuda_test",
                        help="the C++ test program (default: build/dev/tests/cuda_test)")  # fmt: skip
    parser.add_argument(
        "--library", type=Path, help="the operator library to hash (default: that of the package)"
    )
    parser.add_argument(
        "--sanitizer-filter", default="CudaSanitizer.*", help="C++ tests that reach every kernel"
    )
    parser.add_argument(
        "--only", default="cpp,python,sanitizer,kernels", help="parts to run (default: all four)"
    )
    parser.add_argument("--timeout", type=float, default=400, help="seconds for each program (default: 400)")
    parser.add_argument("--pytest", default="", help="further arguments for pytest: --pytest='-k WORD'")
    parser.add_argument("--output", type=Path, help="default: bench/results/gpu-tests-<gpu>.json")
    parser.add_argument("--commit", help="the commit to record, where no repository tells (a copied tree)")
    options = parser.parse_args()
    options.only = set(options.only.split(","))
    if unknown := options.only - {"cpp", "python", "sanitizer", "kernels"}:
        parser.error(f"--only must name cpp, python, sanitizer or kernels, got {', '.join(sorted(unknown))}")
    return options


def program(name: str) -> str | None:
    """A CUDA tool on PATH or in CUDA's usual folder."""
    return shutil.which(name) or shutil.which(name, path=CUDA_BIN)


def execute(command: list[str], timeout: float) -> tuple[int | None, str]:
    """Exit status and output; the status is None when time ran out."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            errors="replace",
        )
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        return None, text.decode(errors="replace") if isinstance(text, bytes) else text


def ending(status: int | None, output: str) -> str:
    """How a program ended that gave no report, with its last lines."""
    how = "ran out of time" if status is None else f"ended with status {status}"
    return f"{how}: " + " | ".join(output.strip().splitlines()[-8:])


def run_cpp(options: argparse.Namespace, work: Path) -> list[Outcome]:
    report = work / "cpp.json"
    status, output = execute([str(options.cpp_test), f"--gtest_output=json:{report}"], options.timeout)
    if not report.is_file():
        return [Outcome("cuda_test", FAILED, ending(status, output))]
    outcomes = reports.from_gtest(report.read_text())
    if status != 0 and all(o.outcome != FAILED for o in outcomes):
        outcomes.append(Outcome("cuda_test", FAILED, ending(status, output)))
    return outcomes or [Outcome("cuda_test", FAILED, "no test ran")]


def run_python(options: argparse.Namespace, work: Path) -> list[Outcome]:
    report = work / "python.xml"
    targets = [str(path) for path in sorted((ROOT / "tests/cuda").glob("test_gpu_*.py"))]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *targets,
        "-m",
        "gpu",
        "-q",
        f"--junitxml={report}",
        *shlex.split(options.pytest),
    ]
    status, output = execute(command, options.timeout)
    if not report.is_file():
        return [Outcome("pytest", FAILED, ending(status, output))]
    outcomes = reports.from_junit(report.read_text())
    if status not in (0, 1) or not outcomes:
        outcomes.append(Outcome("pytest", FAILED, ending(status, output)))
    return outcomes


def run_sanitizer(tool: str, options: argparse.Namespace) -> tuple[Outcome, dict]:
    """One tool of compute-sanitizer over the filtered C++ tests: its outcome as a test, and its findings."""
    name = f"compute-sanitizer.{tool}"
    sanitizer = program("compute-sanitizer")
    if sanitizer is None:
        return Outcome(name, SKIPPED, "compute-sanitizer is not installed"), {"findings": None}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", str(options.cpp_test)]
    status, output = execute([*command, f"--gtest_filter={options.sanitizer_filter}"], options.timeout)
    found = reports.from_sanitizer(output)
    tests = output.count("[       OK ]")
    record = {**found.as_dict(), "tests": tests}
    if found.refusal:
        return Outcome(name, SKIPPED, f"the tool refuses this device: {found.refusal}"), record
    if found.total is None:
        return Outcome(name, FAILED, ending(status, output)), record
    if found.total:
        return Outcome(name, FAILED, f"{found.total} findings, first: {' | '.join(found.lines[:3])}"), record
    if status != 0 or tests == 0:
        return Outcome(name, FAILED, ending(status, output)), record
    return Outcome(name, PASSED), record


def run_kernels(options: argparse.Namespace) -> tuple[Outcome, dict]:
    """Which of the kernels in the test program the sanitized tests launch, seen by ncu."""
    name = "CudaSanitizer.ReachesEveryKernel"
    cuobjdump, ncu = program("cuobjdump"), program("ncu")
    missing = [tool for tool, path in (("cuobjdump", cuobjdump), ("ncu", ncu)) if path is None]
    if missing:
        return Outcome(name, SKIPPED, f"{' and '.join(missing)} not installed"), {"reached": None}
    _, symbols = execute([cuobjdump, "-symbols", str(options.cpp_test)], options.timeout)
    mangled = sorted(reports.kernels_in_cuobjdump(symbols))
    plain = provenance.output_of(["c++filt", *mangled]) if mangled else None
    compiled = dict(zip(mangled, plain.splitlines() if plain else mangled, strict=True))
    # A metric of the launch itself: nothing is replayed, clocks are left as they are.
    command = [ncu, "--csv", "--page", "raw", "--clock-control", "none", "--print-kernel-base", "mangled",
               "--metrics", "launch__grid_size", str(options.cpp_test)]  # fmt: skip
    status, output = execute([*command, f"--gtest_filter={options.sanitizer_filter}"], options.timeout)
    reached = reports.kernels_in_ncu(output)
    if not reached:
        return Outcome(name, SKIPPED, f"ncu saw no kernel: {ending(status, output)}"), {"reached": None}
    absent = sorted(compiled[kernel] for kernel in compiled if kernel not in reached)
    record = {
        "compiled": len(compiled), "reached": len(reached & set(compiled)),
        "kernels": reports.coverage(compiled, reached), "not_reached": absent[:60],
    }  # fmt: skip
    templates_missed = [entry["kernel"] for entry in record["kernels"] if entry["reached"] == 0]
    if not compiled:
        return Outcome(name, FAILED, "cuobjdump shows no kernel in the test program"), record
    if templates_missed:
        return Outcome(name, FAILED, f"never launched: {', '.join(templates_missed)}"), record
    return Outcome(name, PASSED), record


def find_library() -> Path | None:
    """The operator library in the installed package, found without importing it."""
    found = importlib.util.find_spec("steadynorm")
    folders = [Path(entry) for entry in (found.submodule_search_locations or [])] if found else []
    return next((path for folder in folders for path in folder.glob("lib/libsteadynorm_torch.so")), None)


def main() -> int:
    options = parse_arguments()
    gpu = provenance.gpu()
    if gpu is None:
        print("run_gpu: needs an NVIDIA GPU and its driver (nvidia-smi), got none", file=sys.stderr)
        return 2
    if options.only & {"cpp", "sanitizer", "kernels"} and not options.cpp_test.is_file():
        print(
            f"run_gpu: --cpp-test must be the C++ test program, got no file {options.cpp_test}",
            file=sys.stderr,
        )
        return 2
    library = options.library or find_library()
    outcomes: list[Outcome] = []
    seconds: dict[str, float] = {}
    sanitizer: dict[str, dict] = {}
    kernels: dict = {"reached": None}

    def timed(part: str, function, *arguments):
        began = time.monotonic()
        print(f"{part} ...", end=" ", flush=True)
        result = function(*arguments)
        seconds[part] = round(time.monotonic() - began, 1)
        print(f"{seconds[part]} s", flush=True)
        return result

    with tempfile.TemporaryDirectory() as folder:
        if "cpp" in options.only:
            outcomes += timed("C++ tests", run_cpp, options, Path(folder))
        if "python" in options.only:
            outcomes += timed("Python tests", run_python, options, Path(folder))
        if "sanitizer" in options.only:
            for tool in TOOLS:
                outcome, sanitizer[tool] = timed(f"compute-sanitizer {tool}", run_sanitizer, tool, options)
                outcomes.append(outcome)
        if "kernels" in options.only:
            outcome, kernels = timed("kernels reached", run_kernels, options)
            outcomes.append(outcome)

    counts = {word: sum(o.outcome == word for o in outcomes) for word in (PASSED, FAILED, SKIPPED)}
    binaries = [path for path in (library, options.cpp_test) if path and path.is_file()]
    head = {
        **provenance.source(options.commit), "date": provenance.today(),
        "sha256": {path.name: provenance.sha256(path) for path in binaries},
        "device": gpu["name"], "driver": gpu["driver"],
        "versions": {**provenance.versions("steadynorm", "torch", "triton", "pytest"), **tool_versions()},
        **counts, "parts": sorted(options.only), "seconds": seconds,
        "sanitizer": sanitizer, "kernels": kernels,
    }  # fmt: skip
    path = options.output or ROOT / "bench" / "results" / f"gpu-tests-{provenance.slug(gpu['name'])}.json"
    write(path, head, outcomes)
    for o in outcomes:
        if o.outcome != PASSED:
            print(f"{o.outcome}: {o.name}: {o.message[:1000]}")
    print(f"wrote {path}")
    print(f"{counts[PASSED]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped")
    return 1 if counts[FAILED] or not outcomes else 0


def tool_versions() -> dict[str, str | None]:
    found = {}
    for tool in ("nvcc", "compute-sanitizer", "ncu"):
        path = program(tool)
        text = provenance.output_of([path, "--version"]) if path else None
        found[tool] = text.splitlines()[-1] if text else None
    return found


def write(path: Path, head: dict, outcomes: list[Outcome]) -> None:
    """`head` and the outcomes as one object, one line a test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    tests = ",\n".join(f"  {json.dumps(o.as_dict(), ensure_ascii=False)}" for o in outcomes)
    path.write_text("\n".join(["{", *lines, ' "tests": [', tests, " ]", "}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
