# SPDX-License-Identifier: Apache-2.0
"""What bench/results holds: the runs, and of each benchmark on each device the newest row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cases import ROOT, read_cases

from ..provenance import slug
from ..report import PASSES

OURS = "ours"
DTYPES = ("bf16", "fp16", "fp32")
ERRORS = {"forward": "error_y", "forward_backward": "error_dx"}
PASS_NAMES = {"forward": "forward", "forward_backward": "forward + backward"}


@dataclass(frozen=True)
class Run:
    """One file of `make bench`; `number` names it on the page."""

    number: str
    file: str
    head: dict
    measured: int

    @property
    def device(self) -> str:
        return self.head["device"]

    @property
    def told(self) -> str:
        """Device, date and commit, as each table of numbers has them."""
        return f"{self.device}, {self.head['date']}, commit {commit(self.head)}"

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        options = self.head["options"]
        words = ["--dtypes", ",".join(options["dtypes"]), "--activation", ",".join(options["activation"])]
        if tuple(options["passes"]) != PASSES:
            words += ["--passes", ",".join(options["passes"])]
        words += ["--peers", ",".join(options["peers"])] if options["peers"] else ["--no-peers"]
        if options["cases"] != [case.name for case in read_cases()]:
            words += ["--cases", ",".join(options["cases"])]
        words += ["--no-errors"] if options["no_errors"] else []
        words += ["--repeat-ms", f"{options['repeat_ms']:g}"]
        return f'make bench ARGS="{" ".join(words)}"'


@dataclass(frozen=True)
class Row:
    """One benchmark of one run: the file's row, and times in microseconds."""

    run: Run
    data: dict

    @property
    def case(self) -> str:
        return self.data["case"]

    @property
    def table(self) -> tuple[str, str, str]:
        """Device, dtype and activation set: the rows that are shown together."""
        return self.run.device, self.data["dtype"], self.data["set"]

    @property
    def mib(self) -> float:
        return self.data["tensor_bytes"] / 2**20

    @property
    def times(self) -> dict[str, float]:
        """Median of each arm that has one."""
        return {arm: of["median_us"] for arm, of in self.data["arms"].items() if "median_us" in of}

    @property
    def peers(self) -> dict[str, float]:
        return {arm: us for arm, us in self.times.items() if arm != OURS}

    @property
    def rung(self) -> str | None:
        """What served our arm; None where it failed."""
        return self.data["arms"].get(OURS, {}).get("rung")

    def share(self, arm: str) -> float:
        """Of the copy rate: the time of the least bytes at that rate, over the arm's."""
        return self.data["floor_us"] / self.times[arm]

    def error(self, arm: str) -> float | None:
        """Of y (forward) or dx (forward + backward), in the unit of steadynorm.bench.errors."""
        return self.data["arms"].get(arm, {}).get(ERRORS[self.data["pass"]])


@dataclass(frozen=True)
class Results:
    runs: list[Run]
    rows: list[Row]
    tests: dict[str, dict]  # file: what `make test-gpu` wrote
    inference: dict[str, dict]  # file: what `python -m steadynorm bench inference` wrote, in full size
    steps: dict[str, dict]  # file: what `python -m steadynorm bench step` wrote
    others: list[str]  # files that the page does not read

    def shown(self, run: Run) -> int:
        """How many rows of a run are the newest of their kind."""
        return sum(row.run is run for row in self.rows)

    @property
    def tables(self) -> list[tuple[str, str, str]]:
        """Each (device, dtype, activation set) that was measured."""
        seen = {row.table for row in self.rows}
        return sorted(seen, key=lambda of: (of[0], DTYPES.index(of[1]), of[2] != "none"))

    def of_table(self, table: tuple[str, str, str]) -> list[Row]:
        return [row for row in self.rows if row.table == table]


def commit(head: dict) -> str:
    """Ten digits of the commit, and whether tracked files differed from it."""
    return head["commit"][:10] + (", modified" if head["dirty"] else "")


def arms_of(rows: list[Row]) -> list[str]:
    """Every arm that is there, ours first."""
    return sorted({arm for row in rows for arm in row.data["arms"]}, key=lambda arm: (arm != OURS, arm))


def table_slug(table: tuple[str, str, str]) -> str:
    device, dtype, chosen = table
    return f"{slug(device)}-{dtype}-{chosen}"


def read(folder: Path = ROOT / "bench" / "results") -> Results:
    """All files of `folder`; where runs repeat a benchmark the newest has it (of one day, the last by name).

    Rows are in the order of passes, dtypes and cases.
    """
    held = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    benches = {file: data for file, data in held.items() if {"rows", "options"} <= data.keys()}
    tests = {file: data for file, data in held.items() if {"passed", "failed", "skipped"} <= data.keys()}
    inference = {
        file: data
        for file, data in held.items()
        if (data.get("benchmark"), data.get("size")) == ("inference", "full")
    }
    steps = {file: data for file, data in held.items() if {"scales", "options"} <= data.keys()}
    runs, newest = [], {}
    for file in sorted(benches, key=lambda file: (benches[file]["date"], file)):
        data = benches[file]
        head = {key: value for key, value in data.items() if key != "rows"}
        run = Run(str(len(runs) + 1), file, head, len(data["rows"]))
        runs.append(run)
        newest |= {(run.device, row["name"]): Row(run, row) for row in data["rows"]}
    cases = {case.name: i for i, case in enumerate(read_cases())}

    def place(row: Row) -> tuple:
        data = row.data
        kind = (PASSES.index(data["pass"]), DTYPES.index(data["dtype"]), data["set"] != "none")
        return *kind, cases.get(row.case, len(cases)), row.case

    rows = sorted(newest.values(), key=place)
    read_too = (benches, tests, inference, steps)
    others = [file for file in held if not any(file in kind for kind in read_too)]
    return Results(runs, rows, tests, inference, steps, others)
