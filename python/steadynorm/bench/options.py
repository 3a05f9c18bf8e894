# SPDX-License-Identifier: Apache-2.0
"""The options of a benchmark: what is wrong with one is told in one sentence, before any work.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message.removeprefix('argument ')}\n")


def words(allowed: Sequence[str], count: int | None = None) -> Callable[[str], list[str]]:
    """An argument type: words of `allowed` between commas, each once; or `count` of them, as they are."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for word in chosen:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"expected words of {', '.join(allowed)}, got '{word}'")
        if count and len(chosen) != count:
            raise argparse.ArgumentTypeError(f"expected {count} words, got '{text}'")
        return chosen if count else list(dict.fromkeys(chosen))

    return parse


def whole(least: int, most: int | None = None, step: int = 1) -> Callable[[str], int]:
    """An argument type: a whole number of at least `least`, at most `most`, a multiple of `step`."""
    rule = f"a multiple of {step}" if step > 1 else "a whole number"
    rule += f" of at least {least}" if most is None else f" from {least} to {most}"

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1
        if value < least or (most is not None and value > most) or value % step:
            raise argparse.ArgumentTypeError(f"must be {rule}, got '{text}'")
        return value

    return parse


def above_zero(unit: str) -> Callable[[str], float]:
    """An argument type: a finite number of `unit` above 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"must be {unit} above 0, got '{text}'")
        return value

    return parse


def refused(path: Path) -> bool:
    """Whether a file cannot be written there; nothing is written yet."""
    return path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)


def writable(text: str) -> Path:
    """An argument type: a file that can be written."""
    path = Path(text)
    if refused(path):
        raise argparse.ArgumentTypeError(f"must name a file that can be written, got '{text}'")
    return path


def default_output(path: Path) -> Path:
    """Where results go that no option names a file for."""
    if refused(path):
        Parser().error(f"--output: must be given, since the default cannot be written, got '{path}'")
    return path
