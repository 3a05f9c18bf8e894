# SPDX-License-Identifier: Apache-2.0
"""One HTML file with the charts as SVG and every row in a table that sorts. It needs no other file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from ..output import format_us
from . import inference
from .bars import svg as bars_svg
from .charts import Chart, Figure, sizes, tick_text, y_ticks
from .results import PASS_NAMES, Results, Row, arms_of, commit
from .steps import Step

WIDTH, HEIGHT = 520, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 30, 42

STYLE, SCRIPT = (Path(__file__).with_name(name).read_text("utf-8") for name in ("style.css", "sort.js"))


WORD = ' class="word"'  # a cell of text: to the left, sorted by its letters


def number(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def mark(shape: str, x: float, y: float, size: float, colour: str, told: str) -> str:
    """One point, with its words as the tooltip."""
    paths = {
        "s": "M-4-4h8v8h-8z", "^": "M0-5l5 9h-10z", "D": "M0-5l5 5l-5 5l-5-5z", "v": "M0 5l5-9h-10z",
        "P": "M-2-5h4v3h3v4h-3v3h-4v-3h-3v-4h3z", "o": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    }  # fmt: skip
    title = f"<title>{escape(told)}</title>" if told else ""
    place = f"translate({number(x)} {number(y)})" + (f" scale({size:g})" if size != 1 else "")
    return f'<path d="{paths[shape]}" fill="{colour}" transform="{place}">{title}</path>'


def x_ticks(limits: tuple[float, float]) -> Iterator[float]:
    """Powers of 2, of which one is the lower limit."""
    value, high = limits
    while value <= high * (1 + 1e-9):
        yield value
        value *= 2


def svg(chart: Chart, styles: dict[str, tuple[str, str]]) -> str:
    def place(value: float, limits: tuple[float, float], start: float, end: float) -> float:
        low, high = limits
        inside = min(max(value, low), high)
        return start + (end - start) * math.log(inside / low) / math.log(high / low)

    def at_x(value: float) -> float:
        return place(value, chart.x_range, LEFT, WIDTH - RIGHT)

    def at_y(value: float) -> float:
        return place(value, chart.y_range, HEIGHT - BOTTOM, TOP)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(chart.title)}</text>',
        f'<text class="quiet" x="{(LEFT + WIDTH) // 2}" y="{HEIGHT - 6}" text-anchor="middle">'
        "tensor, MiB</text>",
        f'<text class="quiet" transform="translate(14 {HEIGHT // 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(chart.y_label)}</text>",
    ]
    down = [f"M{number(at_x(value))} {TOP}V{HEIGHT - BOTTOM}" for value in x_ticks(chart.x_range)]
    across = [f"M{LEFT} {number(at_y(value))}H{WIDTH - RIGHT}" for value in y_ticks(chart.y_range)]
    parts.append(f'<path class="grid" d="{"".join(down + across)}"/>')
    for value in x_ticks(chart.x_range):
        x = number(at_x(value))
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick_text(value)}</text>'
        )
    for value in y_ticks(chart.y_range):
        y = at_y(value)
        parts.append(f'<text x="{LEFT - 6}" y="{number(y + 4)}" text-anchor="end">{tick_text(value)}</text>')
    if chart.line is not None:
        y = at_y(chart.line)
        parts.append(f'<path class="line" d="M{LEFT} {number(y)}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text class="quiet" x="{WIDTH - RIGHT - 4}" y="{number(y - 4)}" text-anchor="end">'
            f"{chart.line_label}</text>"
        )
    for size, (arm, points) in zip(sizes(len(chart.series)), chart.series.items(), strict=True):
        colour, shape = styles[arm]
        parts += [mark(shape, at_x(point.x), at_y(point.y), size, colour, point.told) for point in points]
    return "".join([*parts, "</svg>"])


def legend(arms: tuple[str, ...], styles: dict[str, tuple[str, str]]) -> str:
    shown = []
    for arm in arms:
        colour, shape = styles[arm]
        shown.append(f'<span><svg class="key" viewBox="0 0 12 12">{mark(shape, 6, 6, 1, colour, "")}</svg> ')
        shown.append(f"{escape(arm)}</span>")
    return f'<p class="legend">{"".join(shown)}</p>'


def cell(text: str, value: float | None = None, kind: str = "") -> str:
    number = "" if value is None else f"{value:g}".replace("inf", "Infinity")
    held = f' data-value="{number}"' if number not in ("", text) else ""
    return f"<td{held}" + (f' class="{kind}"' if kind else "") + f">{escape(text)}</td>"


def columns(arms: list[str]) -> list[tuple[str, bool]]:
    """Each column's title, and whether it holds words."""
    words = [(title, True) for title in ("case", "pass", "dtype", "activation", "layout", "shape")]
    numbers = ["groups", "MiB", "floor"]
    numbers += [f"{arm}\n{what}" for arm in arms for what in ("time", "% of copy", "error", "peak MiB")]
    return [*words, *((title, False) for title in numbers), ("rung", True), ("measured", True)]


def row_line(row: Row, arms: list[str]) -> str:
    data = row.data
    shape = "×".join(map(str, data["shape"]))
    words = (row.case, PASS_NAMES[data["pass"]], data["dtype"], data["activation"], data["layout"], shape)
    cells = [cell(word, kind="word") for word in words]
    cells += [cell(str(data["groups"]), data["groups"]), cell(f"{row.mib:.4g}", row.mib)]
    cells.append(cell(format_us(data["floor_us"]), data["floor_us"]))
    for arm in arms:
        of = data["arms"].get(arm)
        if of is None or arm not in row.times:
            cells += [cell("–" if of is None else "error"), cell("–"), cell("–"), cell("–")]
            continue
        us, share = row.times[arm], 100 * row.share(arm)
        best = "best" if row.peers and us == min(row.times.values()) else ""
        cells += [cell(format_us(us), us, best), cell(f"{share:.3g}", share)]
        for value, form in ((row.error(arm), "g"), (of.get("peak_mib"), ".4g")):
            cells.append(cell("–") if value is None else cell(format(value, form), value))
    rung = row.rung or "failed"
    cells += [cell(rung, kind="word" if rung == "native" else "word mark"), cell(row.run.told, kind="word")]
    return f"<tr>{''.join(cells)}</tr>"


INTRODUCTION = """
Device time of a graph's replay with a cold L2. Floor: the least bytes at the copy rate of the same run.
Error: the worst of y (forward) or dx (forward + backward) against float64 beyond one rounding, in 2⁻²⁴ of
the largest term. Peak: what a forward and a backward allocate. On a CPU: wall time of a call, caches as the
calls leave them. docs/performance.md tells more of how each is measured; the commands repeat it, in a
checkout of the commit, after `make build`. Shaded: the fastest of a row. Point at a mark to read it; press a
column's title to sort.
"""


def commands(*lines: str) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def sorted_table(head: list[tuple[str, bool]], lines: list[str]) -> str:
    """`head`: each column's title, and whether it holds words; `lines`: the rows."""
    titles = "".join(
        f"<th{WORD if word else ''}><button>{escape(title)}</button></th>" for title, word in head
    )
    body = "\n".join(lines)
    return f'<div class="table"><table><thead><tr>{titles}</tr></thead><tbody>\n{body}</tbody></table></div>'


def network_parts(results: Results) -> list[str]:
    """Whole networks: one table of all files."""
    if not results.inference:
        return []
    told, lines = [], []
    for data in results.inference.values():
        told.append(inference.command(data))
        measured = f"{data['device']}, {data['date']}, commit {commit(data)}"
        for row in data["rows"]:
            texts = [text.strip("*") for text in inference.cells(row)]
            cells = [cell(text, kind="word") for text in texts[: inference.WORDS]]
            for text in texts[inference.WORDS :]:
                cells.append(cell(text) if text == "–" else cell(text, float(text.split(" ")[0])))
            lines.append(f"<tr>{''.join(cells)}{cell(measured, kind='word')}</tr>")
    head = [(title, i < inference.WORDS) for i, title in enumerate(inference.HEAD)] + [("measured", True)]
    introduction = escape(inference.INTRODUCTION.replace("`", "").replace("*", ""))
    return [f"<h2>Networks</h2><p>{introduction}</p>{commands(*told)}", sorted_table(head, lines)]


def step_parts(step: Step) -> list[str]:
    """A step's section: where its time goes, drawn, and its sentences."""
    parts = [f"<h2>{escape(step.title)}</h2><p>{escape(step.introduction)}</p>{commands(step.command)}"]
    for scale in step.scales:
        if scale.bars:
            parts.append(f"<h2>{escape(scale.bars.title)}</h2>{bars_svg(scale.bars)}")
        told = [*(": ".join((arm, ", ".join(cells))) for arm, *cells in scale.named_arms), *scale.told]
        parts.append(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in [*scale.outcome, *told])}</ul>")
    return parts


def page(
    results: Results, figures: list[Figure], styles: dict[str, tuple[str, str]], steps: list[Step]
) -> str:
    arms = arms_of(results.rows)
    parts = [
        "<!DOCTYPE html>",
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Made by `make report` from bench/results: do not edit. -->",
        '<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>',
        f"<title>steadynorm: performance</title><style>{STYLE}</style></head><body>",
        f"<h1>steadynorm: performance</h1><p>{INTRODUCTION}</p>",
    ]
    shown = [f"{run.command}   # {run.told}" for run in results.runs if results.shown(run)]
    parts.append(f"<h2>GroupNorm alone</h2>{commands(*shown)}")
    for figure in figures:
        drawn = "".join(svg(chart, styles) for chart in figure.charts)
        parts.append(f"<h2>{escape(figure.title)}</h2>{legend(figure.arms, styles)}")
        parts.append(f'<div class="charts">{drawn}</div>')
    for step in steps:
        parts += step_parts(step)
    parts += [
        *network_parts(results),
        "<h2>GroupNorm alone: every row</h2>",
        sorted_table(columns(arms), [row_line(row, arms) for row in results.rows]),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"
