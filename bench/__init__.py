# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: `python -m bench` from the repository's root, `--help` for its options."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# The named cases are shared with the tests.
sys.path.insert(0, str(ROOT / "tests" / "support"))


def load(name: str) -> ModuleType:
    """A module of steadynorm.bench, read as a file: without PyTorch and without a built package."""
    path = ROOT / "python" / "steadynorm" / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# What the options, the list of cases and the page need of it; the last one reads `output`.
options, output, paired, provenance, session, step_report = map(
    load, ("options", "output", "paired", "provenance", "session", "step_report")
)
