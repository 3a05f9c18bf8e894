# SPDX-License-Identifier: Apache-2.0
"""What bench/results holds: the runs, and of each benchmark on each device the newest row."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cases import ROOT, Case, read_cases, small_cases

from ..provenance import slug
from ..report import PASSES, benchmark_name

OURS = "ours"
DTYPES = ("bf16", "fp16", "fp32")
LAYOUTS = ("contiguous", "channels_last")
ERRORS = {"forward": "error_y", "forward_backward": "error_dx"}
PASS_NAMES = {"forward": "forward", "forward_backward": "forward + backward"}


class PageError(Exception):
    """One sentence: the rule, and what was found."""


@contextlib.contextmanager
def reading(file: str) -> Iterator[None]:
    """What is wrong with a file of results is told with its name."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise PageError(f"bench/results/{file} cannot be shown: {what}") from error


@dataclass(frozen=True)
class Run:
    """One file of `make bench` or of `python -m steadynorm bench`; `number` names it on the page."""

    number: str
    file: str
    head: dict
    rows: list[dict]

    @property
    def device(self) -> str:
        return self.head["device"]

    @property
    def on_cpu(self) -> bool:
        return self.head.get("device_type") == "cpu"

    @property
    def told(self) -> str:
        """Device, date and commit, as each table of numbers has them."""
        threads = f", {self.head['threads']} threads" if self.on_cpu else ""
        return f"{self.device}{threads}, {self.head['date']}, commit {commit(self.head)}"

    @property
    def copy_told(self) -> str:
        """The copy rate, at the run's start and end where both were measured, in GB/s."""
        rates = (self.head.get(f"copy_bytes_per_second{at}") for at in ("", "_end"))
        return " to ".join(f"{rate / 1e9:.4g}" for rate in rates if rate) or "?"

    @property
    def command(self) -> str:
        """The command that measures the same again."""
        return shapes_command(self) if "options" not in self.head else make_command(self.head["options"])


def make_command(options: dict) -> str:
    words = ["--dtypes", ",".join(options["dtypes"]), "--activation", ",".join(options["activation"])]
    if tuple(options["passes"]) != PASSES:
        words += ["--passes", ",".join(options["passes"])]
    words += ["--peers", ",".join(options["peers"])] if options["peers"] else ["--no-peers"]
    if options["cases"] != [case.name for case in read_cases()]:
        words += ["--cases", ",".join(options["cases"])]
    words += ["--no-errors"] if options["no_errors"] else []
    words += ["--repeat-ms", f"{options['repeat_ms']:g}"]
    return f'make bench ARGS="{" ".join(words)}"'


def shapes_command(run: Run) -> str:
    """Of `python -m steadynorm bench`: its options, as its rows have them."""

    def every(key: str) -> list:
        return list(dict.fromkeys(json.dumps(row[key]) for row in run.rows))

    def words(key: str) -> str:
        return ",".join(json.loads(text) for text in every(key))

    known = {case.name: case.bytes("fp32") for case in named_cases()}
    shown = dict.fromkeys(row["case"] for row in run.rows)
    if shown.keys() == {name for name, size in known.items() if size <= 256 << 20 or not run.on_cpu}:
        command = ["--cases", "all"]
    elif shown.keys() <= known.keys():
        command = ["--cases", ",".join(shown)]
    else:
        command = [
            word for shape in every("shape") for word in ("--shape", shape.strip("[]").replace(" ", ""))
        ]
        command += ["--groups", words_of_numbers(every("groups"))]
        command += ["--channels-last"] * (words("layout") == "channels_last")
    command += ["--dtype", words("dtype"), "--activation", words("activation")]
    command += ["--pass", "both" if len(every("which")) == 2 else words("which")]
    arms = dict.fromkeys(arm for row in run.rows for arm in row.get("arms", ()) if arm != OURS)
    command += ["--peers", ",".join(arms)] if arms else []
    command += ["--device", run.head["device_type"], "--json", f"bench/results/{run.file}"]
    return f".venv/bin/python -m steadynorm bench {' '.join(command)}"


def words_of_numbers(texts: list[str]) -> str:
    if len(texts) != 1:
        raise ValueError(f"rows without a case must have one number of groups, got {', '.join(texts)}")
    return texts[0]


def named_cases() -> list[Case]:
    return [*read_cases(), *small_cases()]


def page_row(row: dict, head: dict) -> dict:
    """A row of `python -m steadynorm bench` as one of `make bench`: with a case, a set and a name."""
    shape, layout = tuple(row["shape"]), row["layout"]
    known = {(case.shape, case.groups, case.layout): case.name for case in named_cases()}
    case = row.get("case") or known.get((shape, row["groups"], layout))
    case = case or f"{'x'.join(map(str, shape))}, {row['groups']} groups"
    which = PASSES[row["which"] == "training"]
    size = math.prod(shape) * (4 if row["dtype"] == "fp32" else 2)
    floor_us = 1e6 * (2 if which == "forward" else 5) * size / head["copy_bytes_per_second"]
    measured = {"tensor_bytes": size, "floor_us": floor_us, "errors_of": "nothing"}
    if "error" in row:  # left out as a whole
        measured["arms"] = {OURS: {"error": row["error"]}}
    return {
        **measured, **row, "case": case, "pass": which, "set": row["activation"],
        "name": benchmark_name(which, layout, row["dtype"], row["activation"], case, head["device_type"]),
    }  # fmt: skip


def check(row: dict, number: int) -> None:
    """Raises where a row cannot be one of the page."""

    def number_above_zero(what: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"row {number}: {what} must be a number above 0, got {value!r}")

    for key, allowed in (("pass", PASSES), ("dtype", DTYPES), ("layout", LAYOUTS)):
        if row[key] not in allowed:
            raise ValueError(f"row {number}: {key} must be one of {', '.join(allowed)}, got {row[key]!r}")
    for key in ("case", "set", "activation", "shape", "groups", "errors_of", "name"):
        row[key]
    for key in ("tensor_bytes", "floor_us"):
        number_above_zero(key, row[key])
    for arm, of in row["arms"].items():
        if "median_us" in of:
            number_above_zero(f"median_us of {arm}", of["median_us"])
        for key in ERRORS.values():
            if not float(of.get(key, 0)) >= 0:
                raise ValueError(f"row {number}: {key} of {arm} must be a number or inf, got {of[key]!r}")


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
        error = self.data["arms"].get(arm, {}).get(ERRORS[self.data["pass"]])
        return None if error is None else float(error)


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
        """Each (device, dtype, activation set) that was measured, GPUs first."""
        on_cpu = {row.table: row.run.on_cpu for row in self.rows}
        return sorted(on_cpu, key=lambda of: (on_cpu[of], of[0], DTYPES.index(of[1]), of[2] != "none"))

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


def load(path: Path) -> dict:
    with reading(path.name):
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict):
            raise ValueError(f"it must hold an object, got {type(held).__name__}")
        return held


def read(folder: Path = ROOT / "bench" / "results") -> Results:
    """All files of `folder`; where runs repeat a benchmark the newest has it (of one day, the last by name).

    Rows are in the order of passes, dtypes and cases. Raises PageError for a file that is damaged.
    """
    held = {path.name: load(path) for path in sorted(folder.glob("*.json"))}

    def having(*keys: str) -> dict[str, dict]:
        return {file: data for file, data in held.items() if set(keys) <= data.keys()}

    shapes = {
        file: data
        for file, data in having("rows", "copy_bytes_per_second", "device_type").items()
        if "options" not in data
    }
    benches = having("rows", "options") | shapes
    tests = having("passed", "failed", "skipped")
    inference = {
        file: data
        for file, data in held.items()
        if (data.get("benchmark"), data.get("size")) == ("inference", "full")
    }
    # A step on a CPU is a trial of the command.
    steps = {file: data for file, data in having("scales", "options").items()
             if data.get("device_type") != "cpu"}  # fmt: skip
    runs, newest = [], {}
    for file in sorted(benches, key=lambda file: (str(benches[file].get("date")), file)):
        data = benches[file]
        with reading(file):
            head = {key: value for key, value in data.items() if key != "rows"}
            rows = [page_row(row, head) for row in data["rows"]] if file in shapes else data["rows"]
            for number, row in enumerate(rows):
                check(row, number)
            run = Run(str(len(runs) + 1), file, head, rows)
            _ = run.told, [head[key] for key in ("stopped", "driver", "versions")], run.command
        runs.append(run)
        newest |= {(run.device, row["name"]): Row(run, row) for row in rows}
    cases = {case.name: i for i, case in enumerate(named_cases())}

    def place(row: Row) -> tuple:
        data = row.data
        kind = (PASSES.index(data["pass"]), DTYPES.index(data["dtype"]), data["set"] != "none")
        return *kind, cases.get(row.case, len(cases)), row.case

    rows = sorted(newest.values(), key=place)
    read_too = (benches, tests, inference, steps)
    others = [file for file in held if not any(file in kind for kind in read_too)]
    return Results(runs, rows, tests, inference, steps, others)
