# SPDX-License-Identifier: Apache-2.0
"""Named shapes: those of cases/cases.csv, and small ones of classifiers and short rows.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # short name: bytes
WITH_RELU = ("unet3d", "monai", "resnet", "one-32")  # what the shapes come from; elsewhere SiLU


@dataclass(frozen=True)
class Case:
    """One named shape: [N, C, *], groups, and `contiguous` or `channels_last`."""

    name: str
    shape: tuple[int, ...]
    groups: int
    layout: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def activation(self) -> str:
        """The activation that follows this GroupNorm where the shape comes from."""
        return "relu" if self.name.startswith(WITH_RELU) else "silu"

    def bytes(self, dtype: str) -> int:
        """Size of x in a dtype given by its short name."""
        return self.elements * DTYPES[dtype]


def read_cases(path: Path) -> list[Case]:
    """All cases of a file, in its order."""
    with path.open(newline="") as file:
        return [
            Case(
                row["name"],
                tuple(int(size) for size in row["shape"].split("x")),
                int(row["groups"]),
                row["layout"],
            )
            for row in csv.DictReader(file)
        ]


def small_cases() -> list[Case]:
    """What the file lacks: a call costs as much as its bytes here."""
    sizes = {
        "resnet-64x56": ((8, 64, 56, 56), 32),
        "resnet-256x14": ((32, 256, 14, 14), 32),
        "one-320x64": ((1, 320, 64, 64), 32),
        "one-32x96": ((1, 32, 96, 96, 96), 8),
    }
    layouts = {"nchw": "contiguous", "nhwc": "channels_last"}
    both = [Case(f"{name}-{told}", *of, layout) for name, of in sizes.items()
            for told, layout in layouts.items()]  # fmt: skip
    return [*both, Case("rows-512", (64, 512), 32, "contiguous")]
