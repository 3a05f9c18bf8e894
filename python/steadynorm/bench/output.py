# SPDX-License-Identifier: Apache-2.0
"""Tables for people and JSON for programs.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path


def plain(value: object) -> object:
    """JSON has no NaN and no infinity: they become words, which float() reads."""
    if isinstance(value, dict):
        return {key: plain(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(of) for of in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, head: dict, rows: list[dict], key: str = "rows") -> None:
    """`head` and `rows` as one object, one line a row, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(name)}: {json.dumps(plain(value), ensure_ascii=False)},"
             for name, value in head.items()]  # fmt: skip
    body = ",\n".join(
        f"  {json.dumps(plain(row), ensure_ascii=False, separators=(',', ':'))}" for row in rows
    )
    text = "\n".join(["{", *lines, f" {json.dumps(key)}: [", body, " ]", "}"]) + "\n"
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save(path: Path, head: dict, rows: list[dict], key: str = "rows") -> bool:
    """Whether `write_json` could; where not, why is told: a full disk ends no measurement."""
    try:
        write_json(path, head, rows, key)
    except OSError as error:
        print(f"bench: {path} could not be written: {error.strerror}", file=sys.stderr, flush=True)
        return False
    return True


def destination(path: Path) -> str:
    """Said before the work: where its results go."""
    return f"Writes {path}" + (", over what is there" if path.exists() else "")


def format_us(us: float) -> str:
    if us < 1e3:
        return f"{us:.1f} us"
    return f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def format_seconds(seconds: float) -> str:
    """For people who wait: about so long."""
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell, the first one to the left."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def failure(error: BaseException) -> dict[str, str]:
    """An error on one line, short enough for a table of results."""
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}


def progress(text: str, detail: bool = False) -> None:
    """What is being done, on stderr: over the last such line on a terminal, else a line of its own.

    "" ends it; a detail is for terminals alone.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and not detail:
        print(text, file=sys.stderr, flush=True)
