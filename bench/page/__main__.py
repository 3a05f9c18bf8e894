# SPDX-License-Identifier: Apache-2.0
"""Writes docs/performance.md, its pictures and HTML, and README's table, from bench/results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cases import ROOT

from . import bars, charts, html, markdown, pictures, steps
from .results import PageError, read

BEGIN = "<!-- Made by `make report` from bench/results: do not edit. -->\n"
END = "<!-- End of what `make report` made. -->\n"


def with_table(readme: str, table: str) -> str:
    """README with `table` between its two markers."""
    before, found, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise PageError(f"README.md must have the lines {BEGIN.strip()} and {END.strip()}, in this order")
    return f"{before}{BEGIN}\n{table}\n\n{END}{after}"


class Page:
    """All that is made of the results below `root`."""

    def __init__(self, root: Path):
        self.root = root
        held = read(root / "bench" / "results")
        if not held.rows:
            raise PageError("bench/results must have a file of `make bench`, got none")
        figures, of_steps = charts.figures(held), steps.steps(held)
        self.styles = charts.styles(held)
        readme = (root / "README.md").read_text(encoding="utf-8")
        self.texts = {
            root / "docs" / "performance.md": markdown.page(held, figures, of_steps),
            root / "docs" / "performance" / "performance.html": html.page(
                held, figures, self.styles, of_steps
            ),
            root / "README.md": with_table(readme, markdown.readme_table(held, of_steps)),
        }
        drawn = [*figures, *(scale.bars for step in of_steps for scale in step.scales if scale.bars)]
        self.pictures = {root / "docs" / "performance" / f"{figure.name}.png": figure for figure in drawn}

    def left_over(self) -> list[Path]:
        """Pictures that no result asks for."""
        return sorted(set((self.root / "docs" / "performance").glob("*.png")) - self.pictures.keys())

    def stale(self) -> list[str]:
        """The files that are not those of the results, as paths from the root."""
        old = [
            path for path, text in self.texts.items() if not path.is_file() or path.read_text("utf-8") != text
        ]
        for path, figure in self.pictures.items():
            held = pictures.read_stamp(path.read_bytes()) if path.is_file() else None
            if held != self.stamp(figure):
                old.append(path)
        return [str(path.relative_to(self.root)) for path in [*old, *self.left_over()]]

    def write(self) -> list[str]:
        """Brings every file up to date, and tells which were not; a picture that is stays as it is."""
        old = self.stale()
        made = {path: text.encode() for path, text in self.texts.items()}
        for path, figure in self.pictures.items():
            if str(path.relative_to(self.root)) in old:
                made[path] = self.draw(figure)
        try:
            for path, content in made.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            for path in self.left_over():
                path.unlink()
        except OSError as error:
            raise PageError(f"{error.filename} could not be written: {error.strerror}") from error
        return old

    def stamp(self, figure: charts.Figure | bars.Bars) -> str:
        return bars.stamp(figure) if isinstance(figure, bars.Bars) else pictures.stamp(figure, self.styles)

    def draw(self, figure: charts.Figure | bars.Bars) -> bytes:
        try:
            if isinstance(figure, bars.Bars):
                return bars.png(figure)
            return pictures.png(figure, self.styles)
        except ImportError as error:
            raise PageError(f"the pictures need matplotlib (requirements/demo.txt), got: {error}") from error


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 where a file is out of date"
    )
    options = parser.parse_args(arguments)
    try:
        page = Page(root)
        for name in [] if options.check else page.write():
            print(f"report: wrote {name}")
        stale = page.stale()
    except PageError as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    for name in stale:
        print(f"report: {name} is not what bench/results gives: run `make report`", file=sys.stderr)
    if not stale:
        print("report: docs/performance.md, its pictures and README's table are those of bench/results")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
