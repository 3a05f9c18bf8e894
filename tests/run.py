# SPDX-License-Identifier: Apache-2.0
"""Runs lint, the C++ tests and the Python tests, whatever fails before, and sums them.

The last line is `N passed, N failed, N skipped`. Counts come from each runner's own JUnit report; one
that crashes, exits non-zero without a failed test, or runs no test counts as one failure. Exit status 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What CTest writes for a test that chose to be skipped. Its other reasons not to run one (no executable, a
# missing file) are failures.
CTEST_SKIPS = ("SKIP_REGULAR_EXPRESSION_MATCHED", "SKIP_RETURN_CODE")

CTEST_PASSED = re.compile(r"\s*(Start\s+\d+: |\d+/\d+ Test .* Passed )")
PARTS = ("lint", "cpp", "python")


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read_report(path: Path) -> tuple[Count, list[str]]:
    """Counts of a JUnit report, and the names of the failed tests."""
    count, failed = Count(), []
    for case in ElementTree.parse(path).iter("testcase"):
        skipped = case.find("skipped")
        status = case.get("status", "run")  # CTest's alone
        chose_to_skip = skipped is not None and (status != "notrun" or skipped.get("message") in CTEST_SKIPS)
        if (
            any(case.find(kind) is not None for kind in ("failure", "error"))
            or status == "fail"
            or (status == "notrun" and not chose_to_skip)
        ):
            count.failed += 1
            # CTest writes the name in both places.
            names = dict.fromkeys(filter(None, (case.get("classname"), case.get("name"))))
            failed.append("::".join(names))
        elif skipped is not None or status == "disabled":
            count.skipped += 1
        else:
            count.passed += 1
    return count, failed


def run_quietly(command: list[str]) -> int:
    """Runs a command, shows its output but for CTest's lines on passed tests, and returns its exit status."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **pipe) as process:
        for line in process.stdout:
            if not CTEST_PASSED.match(line):
                print(line, end="", flush=True)
    return process.returncode


def run_counted(name: str, command: list[str], report: Path) -> Count:
    """Runs one runner, which writes `report`, and returns what it counted."""
    report.unlink(missing_ok=True)
    print(f"\n=== {name} ===", flush=True)
    started = time.monotonic()
    status = run_quietly(command)
    try:
        count, failed = read_report(report)
    except (OSError, ElementTree.ParseError) as error:
        print(f"{name}: no report ({error}), exit status {status}")
        return Count(failed=1)
    for test in failed:
        print(f"{name}: failed: {test}")
    if count == Count():
        print(f"{name}: ran no test, exit status {status}")
        count.failed = 1
    elif status != 0 and count.failed == 0:
        print(f"{name}: exit status {status} with no failed test")
        count.failed = 1
    print(f"{name}: {count} in {time.monotonic() - started:.0f} s", flush=True)
    return count


def build_cpp_tests(build: Path, allow_missing: bool) -> Count | None:
    """Adds the C++ tests to the build tree. None when they are built, else what their absence counts as."""
    print("\n=== C++ build ===", flush=True)
    configure = ["cmake", "-S", ".", "-B", str(build), "-DSTEADYNORM_TESTS=ON"]
    result = subprocess.run(configure, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        print(result.stdout, result.stderr, sep="\n")
        if allow_missing and "needs GoogleTest" in result.stderr:
            return Count(skipped=1)
        return Count(failed=1)
    if subprocess.run(["cmake", "--build", str(build)], cwd=ROOT, stdin=subprocess.DEVNULL).returncode != 0:
        print("C++ build: failed")
        return Count(failed=1)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/dev"), help="CMake build tree")
    parser.add_argument("--jobs", type=int, default=2, help="C++ tests at once")
    parser.add_argument("--only", choices=PARTS, action="append", help="run this part only")
    parser.add_argument("--allow-missing", action="store_true", help="what lacks its tool is skipped")
    arguments = parser.parse_args()
    parts = arguments.only or PARTS
    build = (ROOT / arguments.build).resolve()
    reports = build / "reports"
    reports.mkdir(parents=True, exist_ok=True)

    total = Count()
    if "lint" in parts:
        report = reports / "lint.xml"
        command = [sys.executable, "tests/lint/lint.py", "--junitxml", str(report)]
        command += ["--jobs", str(arguments.jobs)] + ["--allow-missing"] * arguments.allow_missing
        total += run_counted("lint", command, report)
    if "cpp" in parts:
        absent = build_cpp_tests(build, arguments.allow_missing)
        if absent is not None:
            total += absent
        else:
            report = reports / "ctest.xml"
            command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error"]
            command += ["--parallel", str(arguments.jobs), "--output-junit", str(report)]
            total += run_counted("C++ tests", command, report)
    if "python" in parts:
        report = reports / "pytest.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--junitxml", str(report)]
        total += run_counted("Python tests", command, report)

    print(f"\n{total}", flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
