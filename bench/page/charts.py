# SPDX-License-Identifier: Apache-2.0
"""The page's charts as data; pictures.py and html.py draw them alike."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from ..report import PASSES, format_us
from .results import ERRORS, LAYOUTS, PASS_NAMES, Results, Row, arms_of, table_slug

# Readable on white and on black.
COLOURS = ("#2b7bba", "#d9731a", "#3f9142", "#a05bb5", "#8c6d31", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P")
ALLOWED = {"error_y": 8, "error_dx": 16}  # docs/numerics.md, without an activation


@dataclass(frozen=True)
class Point:
    """x: MiB of the tensor; y: a percentage or an error; `told`: the point in words."""

    x: float
    y: float
    told: str


@dataclass(frozen=True)
class Chart:
    """Logarithmic axes: x has ticks at powers of 2, y of 10. A y out of its range is drawn on its edge."""

    title: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    series: dict[str, list[Point]]  # by arm
    line: float | None  # a horizontal line: the copy rate, the error allowed
    line_label: str


@dataclass(frozen=True)
class Figure:
    """Four charts, two a row: each pass's share of the copy rate, with the error beside it."""

    table: tuple[str, str, str]  # device, dtype, activation set
    name: str
    title: str
    arms: tuple[str, ...]
    charts: tuple[Chart, ...]

    def plain(self) -> dict:
        return asdict(self)


def powers(low: float, high: float, base: int) -> tuple[float, float]:
    """The nearest powers of `base` around [low, high], at least one apart."""
    under = math.floor(math.log(low, base) + 1e-9)
    over = max(math.ceil(math.log(high, base) - 1e-9), under + 1)
    return float(base) ** under, float(base) ** over


def share_chart(rows: list[Row], arms: list[str], x_range: tuple[float, float], which: str) -> Chart:
    series = {arm: [] for arm in arms}
    for row in rows:
        for arm in row.times:
            percent = 100 * row.share(arm)
            told = f"{row.case}, {arm}: {percent:.3g} % of the copy rate, {format_us(row.times[arm])}"
            series[arm].append(Point(row.mib, percent, told))
    lowest = min((point.y for points in series.values() for point in points), default=1)
    y_range = (powers(lowest, 100, 10)[0], 200.0)
    return Chart(
        f"{PASS_NAMES[which]}: share of the copy rate", "% of the copy rate", x_range, y_range, series, 100,
        "copy",
    )  # fmt: skip


def error_chart(rows: list[Row], arms: list[str], x_range: tuple[float, float], which: str) -> Chart:
    series = {arm: [] for arm in arms}
    for row in rows:
        for arm in arms:
            error = row.error(arm)
            if error is not None:
                series[arm].append(Point(row.mib, error, f"{row.case}, {arm}: error {error:g}"))
    highest = max((p.y for points in series.values() for p in points if p.y < float("inf")), default=1)
    key = ERRORS[which]
    plain = all(row.data["activation"] == "none" for row in rows)
    return Chart(
        f"error of {key.removeprefix('error_')} against float64", "beyond one rounding, in 2⁻²⁴", x_range,
        (0.1, powers(1, max(highest, 30), 10)[1]), series, ALLOWED[key] if plain else None, "allowed",
    )  # fmt: skip


def figures(results: Results) -> list[Figure]:
    """One for each device, dtype, activation set and layout that was measured."""
    made = []
    for table in results.tables:
        for layout in LAYOUTS:
            rows = [row for row in results.of_table(table) if row.data["layout"] == layout]
            if not rows:
                continue
            arms = arms_of(rows)
            x_range = powers(min(row.mib for row in rows), max(row.mib for row in rows), 2)
            charts = []
            for which in PASSES:
                of_pass = [row for row in rows if row.data["pass"] == which]
                if of_pass:
                    charts += [chart(of_pass, arms, x_range, which) for chart in (share_chart, error_chart)]
            told = "; ".join(dict.fromkeys(row.run.told for row in rows))
            _, dtype, chosen = table
            title = f"{layout}, {dtype}, activation {chosen} ({told})"
            made.append(Figure(table, f"{table_slug(table)}-{layout}", title, tuple(arms), tuple(charts)))
    return made


def y_ticks(limits: tuple[float, float]) -> list[float]:
    """Powers of 10; of less than two decades also twice and five times them."""
    low, high = limits
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    every = (step * 10.0**decade for decade in decades for step in steps)
    return [value for value in every if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def tick_text(value: float) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e4 else f"{value:.0e}".replace("e+0", "e")


def sizes(arms: int) -> list[float]:
    """Of each arm's marks: ours is drawn first and largest, so that what coincides with it is seen on it."""
    return [max(1.25 - 0.2 * i, 0.65) for i in range(arms)]


def styles(results: Results) -> dict[str, tuple[str, str]]:
    """Colour and marker of each arm: the same in every figure."""
    arms = arms_of(results.rows)
    return {arm: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, arm in enumerate(arms)}
