# SPDX-License-Identifier: Apache-2.0
"""The charts as PNG. Each picture carries the SHA-256 of what it was drawn from.

So its age is told without drawing it again: its bytes also depend on the libraries that draw and compress.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

from .charts import Chart, Figure, sizes, tick_text, y_ticks

STAMP = "Source"  # PNG's own keyword for where a picture comes from
DPI = 100


def stamp(figure: Figure, styles: dict[str, tuple[str, str]]) -> str:
    """What the picture depends on: its data, its styles and the code that draws."""
    drawn = json.dumps([figure.plain(), {arm: styles[arm] for arm in figure.arms}])
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("charts.py", "pictures.py"))
    return hashlib.sha256(drawn.encode() + code).hexdigest()


def read_stamp(png: bytes) -> str | None:
    """The stamp that a PNG carries; None without one, or where the file is damaged or cut short."""
    at, held = 8, None
    while at + 12 <= len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + size]
        if zlib.crc32(kind + body) != int.from_bytes(png[at + 8 + size : at + 12 + size], "big"):
            return None
        keyword, _, text = body.partition(b"\0")
        if kind == b"tEXt" and keyword == STAMP.encode():
            held = text.decode("latin-1")
        if kind == b"IEND":
            return held
        at += 12 + size
    return None


def draw_chart(axis, chart: Chart, styles: dict[str, tuple[str, str]]) -> None:
    low, high = chart.y_range
    if chart.line is not None:
        axis.axhline(chart.line, color="#555555", lw=0.9, ls="--")
        axis.annotate(
            chart.line_label, (1, chart.line), xycoords=("axes fraction", "data"), xytext=(-4, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color="#555555",
        )  # fmt: skip
    for size, (arm, points) in zip(sizes(len(chart.series)), chart.series.items(), strict=True):
        colour, marker = styles[arm]
        y = [min(max(point.y, low), high) for point in points]
        axis.plot(
            [point.x for point in points], y, marker, color=colour, ms=6.5 * size, mec="white", mew=0.5,
            clip_on=False, label=arm,
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set(xlim=chart.x_range, ylim=chart.y_range, title=chart.title, ylabel=chart.y_label)
    axis.xaxis.set_major_formatter(lambda value, _: tick_text(value))
    axis.yaxis.set_major_formatter(lambda value, _: tick_text(value))
    axis.set_yticks(y_ticks(chart.y_range))
    axis.minorticks_off()
    axis.grid(color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def png(figure: Figure, styles: dict[str, tuple[str, str]]) -> bytes:
    """The picture: the same bytes for the same figure and the same libraries."""
    from matplotlib import figure as canvas
    from matplotlib import style

    # matplotlib's own style, whatever the user's is; and no pyplot, which keeps figures and a backend.
    with style.context(["default", {"font.size": 10, "axes.titlesize": 11}]):
        lines = len(figure.charts) // 2
        drawn = canvas.Figure(figsize=(11, 3.4 * lines + 0.8), layout="constrained")
        axes = drawn.subplots(lines, 2, squeeze=False)
        for axis, chart in zip(axes.flat, figure.charts, strict=True):
            draw_chart(axis, chart, styles)
        for axis in axes[-1]:
            axis.set_xlabel("tensor, MiB")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        drawn.suptitle(figure.title, fontsize=11)
        file = io.BytesIO()
        metadata = {"Software": None, STAMP: stamp(figure, styles)}
        drawn.savefig(file, format="png", dpi=DPI, metadata=metadata)
    return file.getvalue()
