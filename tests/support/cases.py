# SPDX-License-Identifier: Apache-2.0
"""cases/cases.csv, the one list of named shapes, read by the package's module: without PyTorch or a build."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "cases" / "cases.csv"

_spec = importlib.util.spec_from_file_location(
    "steadynorm_cases", ROOT / "python" / "steadynorm" / "bench" / "cases.py"
)
_module = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _module  # dataclasses look their module up
_spec.loader.exec_module(_module)
Case, DTYPES, small_cases = _module.Case, _module.DTYPES, _module.small_cases


def read_cases(path: Path = FILE) -> list[Case]:
    """All cases, in the order of the file."""
    return _module.read_cases(path)
