# SPDX-License-Identifier: Apache-2.0
"""Reads what test runners, compute-sanitizer, cuobjdump and ncu print. Imports no torch."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from dataclasses import dataclass
from xml.etree import ElementTree

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Outcome:
    """One test: its name, passed, failed or skipped, and why when it did not pass."""

    name: str
    outcome: str
    message: str = ""

    def as_dict(self) -> dict[str, str]:
        shown = {"name": self.name, "outcome": self.outcome}
        return {**shown, "message": self.message[:500]} if self.message else shown


def from_gtest(text: str) -> list[Outcome]:
    """Outcomes in the JSON of --gtest_output=json. A test that was filtered out or disabled is not one."""
    found = []
    for suite in json.loads(text)["testsuites"]:
        for test in suite["testsuite"]:
            if test.get("status") != "RUN":
                continue
            name = f"{suite['name']}.{test['name']}"
            failures = test.get("failures", [])
            skipped = test.get("skipped", [])
            if failures:
                found.append(Outcome(name, FAILED, failures[0]["failure"]))
            elif skipped or test.get("result") == "SKIPPED":
                found.append(Outcome(name, SKIPPED, skipped[0]["message"] if skipped else ""))
            else:
                found.append(Outcome(name, PASSED))
    return found


def from_junit(text: str) -> list[Outcome]:
    """Outcomes in pytest's --junitxml; an error while collecting or in a fixture is a failure."""
    found: dict[str, Outcome] = {}
    for test in ElementTree.fromstring(text).iter("testcase"):
        name = f"{test.get('classname', '')}::{test.get('name', '')}".removeprefix("::")
        outcome = Outcome(name, PASSED)
        for child in test:
            if child.tag in ("failure", "error"):
                outcome = Outcome(name, FAILED, child.get("message") or (child.text or "").strip())
                break
            if child.tag == "skipped":
                outcome = Outcome(name, SKIPPED, child.get("message", ""))
        if (
            name not in found or outcome.outcome == FAILED
        ):  # teardown errors are a second entry of the same test
            found[name] = outcome
    return list(found.values())


@dataclass(frozen=True)
class Findings:
    """What one tool of compute-sanitizer reported; `total` is None when it did not come to its summary."""

    total: int | None
    lines: list[str]
    refusal: str = ""

    def as_dict(self) -> dict:
        return {
            "findings": self.total,
            "first": self.lines[:20],
            **({"refusal": self.refusal} if self.refusal else {}),
        }


_SUMMARY = re.compile(r"=========\s+(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_REFUSAL = re.compile(
    r"=========\s+.*(Device not supported|is not supported on this|Unable to find injection).*", re.I
)
_FINDING = re.compile(
    r"=========\s+((?:Invalid|Program hit|Uninitialized|Error:|Warning:|Barrier error|Divergent|Race reported"
    r"|Potential|Leaked|Internal|Missing|Unused|Out-of-range|Misaligned|Fatal).*)"
)


def from_sanitizer(text: str) -> Findings:
    """Findings in compute-sanitizer's output, the largest of its summaries."""
    totals = [int(a or b) for a, b in _SUMMARY.findall(text)]
    refusal = _REFUSAL.search(text)
    lines = [match[1].strip() for match in _FINDING.finditer(text)]
    return Findings(max(totals) if totals else None, lines, refusal[1] if refusal else "")


def kernels_in_cuobjdump(text: str) -> set[str]:
    """Mangled names of the kernels in `cuobjdump -symbols`."""
    return {line.split()[-1] for line in text.splitlines() if "STO_ENTRY" in line and "STT_FUNC" in line}


def kernels_in_ncu(text: str) -> set[str]:
    """Names of the kernels that ran, in `ncu --csv --page raw`, after any lines of its own."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return set()
    rows = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return {
        row["Kernel Name"] for row in rows if row.get("ID", "").strip().isdigit() and row.get("Kernel Name")
    }


def base_name(demangled: str) -> str:
    """`void steadynorm::cuda::apply<float, 3>(Arguments)` is `steadynorm::cuda::apply`."""
    depth, kept = 0, []
    for character in demangled.replace("(anonymous namespace)", "{anonymous}"):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth == 0:
            break
        elif depth == 0:
            kept.append(character)
    return "".join(kept).strip().split(" ")[-1].replace("{anonymous}::", "")


def coverage(compiled: dict[str, str], reached: set[str]) -> list[dict]:
    """How many instantiations of each kernel exist and how many ran; `compiled` maps mangled to demangled."""
    total = Counter(base_name(name) for name in compiled.values())
    ran = Counter(base_name(name) for mangled, name in compiled.items() if mangled in reached)
    return [{"kernel": name, "compiled": total[name], "reached": ran[name]} for name in sorted(total)]
