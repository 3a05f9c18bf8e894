# SPDX-License-Identifier: Apache-2.0
"""Stacked bars, one an arm, drawn alike as PNG and as SVG."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from .pictures import DPI, STAMP

# GroupNorm and what it causes in warm colours, the rest in cold ones. Readable on white and on black.
COLOURS = (
    "#d9731a", "#a8430f", "#e3b23c", "#c94f6d", "#8c6d31", "#2b7bba", "#6aa9d8", "#3f9142", "#7cb87e",
    "#5f6f8f", "#a05bb5", "#9a9a9a", "#555555",
)  # fmt: skip
WIDTH, LEFT, BAR, GAP = 900, 90, 22, 10
SHOWN = 1e-3  # of the longest bar: shorter parts are not drawn


@dataclass(frozen=True)
class Bars:
    """`bars`: of each arm the parts of its bar, all arms with the same parts in the same order."""

    name: str
    title: str
    unit: str
    bars: dict[str, dict[str, float]]

    @property
    def longest(self) -> float:
        return max(sum(parts.values()) for parts in self.bars.values())

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Name and colour of each part that is drawn in any bar."""
        names = next(iter(self.bars.values()))
        least = SHOWN * self.longest
        return [
            (name, COLOURS[i % len(COLOURS)])
            for i, name in enumerate(names)
            if any(of[name] > least for of in self.bars.values())
        ]


def svg(bars: Bars) -> str:
    """The bars, from the first arm down; point at a part to read it."""
    scale = (WIDTH - LEFT - 70) / bars.longest
    height = len(bars.bars) * (BAR + GAP)
    box = f'viewBox="0 0 {WIDTH} {height}" style="width: {WIDTH}px"'
    drawn = [f'<svg {box} role="img" aria-label="{escape(bars.title)}">']
    for i, (arm, parts) in enumerate(bars.bars.items()):
        top, x = i * (BAR + GAP), float(LEFT)
        drawn.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(arm)}</text>')
        for name, colour in bars.parts:
            width = parts[name] * scale
            told = f"{arm}, {name}: {parts[name]:.3g} {bars.unit}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}">'
                f"<title>{escape(told)}</title></rect>"
            )
            x += width
        total = f"{sum(parts.values()):.4g} {bars.unit}"
        drawn.append(f'<text x="{x + 6:.1f}" y="{top + 15}">{escape(total)}</text>')
    legend = "".join(
        f'<span><svg class="key" viewBox="0 0 12 12"><rect width="12" height="12" fill="{colour}"/></svg> '
        f"{escape(name)}</span>"
        for name, colour in bars.parts
    )
    return "".join([*drawn, f'</svg><p class="legend">{legend}</p>'])


def stamp(bars: Bars) -> str:
    """What the picture depends on: its data and the code that draws."""
    return hashlib.sha256(json.dumps(asdict(bars)).encode() + Path(__file__).read_bytes()).hexdigest()


def png(bars: Bars) -> bytes:
    """The picture: the same bytes for the same bars and the same libraries."""
    from matplotlib import figure as canvas
    from matplotlib import style

    with style.context(["default", {"font.size": 10, "axes.titlesize": 11}]):
        drawn = canvas.Figure(figsize=(11, 0.45 * len(bars.bars) + 1.6), layout="constrained")
        axis = drawn.subplots()
        for name, colour in bars.parts:
            names = [part for part, _ in bars.parts]
            before = [sum(of[part] for part in names[: names.index(name)]) for of in bars.bars.values()]
            values = [of[name] for of in bars.bars.values()]
            axis.barh(list(bars.bars), values, left=before, color=colour, label=name, height=0.7)
        for place, of in enumerate(bars.bars.values()):
            total = sum(of.values())
            axis.annotate(
                f"{total:.4g}", (total, place), xytext=(4, 0), textcoords="offset points", va="center"
            )
        axis.invert_yaxis()
        axis.set(xlabel=bars.unit, xlim=(0, 1.08 * bars.longest))
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        drawn.legend(loc="outside lower center", ncols=5, frameon=False)
        drawn.suptitle(bars.title, fontsize=11)
        file = io.BytesIO()
        drawn.savefig(file, format="png", dpi=DPI, metadata={"Software": None, STAMP: stamp(bars)})
    return file.getvalue()
