# SPDX-License-Identifier: Apache-2.0
"""cases/cases.csv, the one list of named shapes. Imports no torch."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # short name: bytes


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
        return "relu" if self.name.startswith(("unet3d", "monai")) else "silu"

    def bytes(self, dtype: str) -> int:
        """Size of x in a dtype given by its short name."""
        return self.elements * DTYPES[dtype]


def read_cases(path: Path = ROOT / "cases" / "cases.csv") -> list[Case]:
    """All cases, in the order of the file."""
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
