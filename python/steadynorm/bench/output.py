# SPDX-License-Identifier: Apache-2.0
"""Tables for people and JSON for programs.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write_json(path: Path, head: dict, rows: list[dict]) -> None:
    """`head` and `rows` as one object, one line a row, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    text = "\n".join(["{", *lines, ' "rows": [', body, " ]", "}"]) + "\n"
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def format_us(us: float) -> str:
    if us < 1000:
        return f"{us:.1f} us"
    return f"{us / 1000:.3g} ms"


def aligned(lines: list[list[str]]) -> list[str]:
    """Columns padded to their widest cell, the first one to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]


def failure(error: Exception) -> dict[str, str]:
    """The first lines of an error, short enough for a table of results."""
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def progress(text: str, detail: bool = False) -> None:
    """What is being done, on stderr: over the last such line on a terminal, else a line of its own.

    "" ends it; a detail is for terminals alone.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and not detail:
        print(text, file=sys.stderr, flush=True)
