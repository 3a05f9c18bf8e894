# SPDX-License-Identifier: Apache-2.0
"""The options of a benchmark: what is wrong with one is told in one sentence, before any work.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message.removeprefix('argument ')}\n")


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """An argument type: words of `allowed` between commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for word in chosen:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"expected words of {', '.join(allowed)}, got '{word}'")
        return list(dict.fromkeys(chosen))

    return parse


def whole(least: int) -> Callable[[str], int]:
    """An argument type: a whole number of at least `least`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, got '{text}'")
        return int(text)

    return parse


def writable(text: str) -> Path:
    """An argument type: a file that can be written; nothing is written yet."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"must name a file that can be written, got '{text}'")
    return path
