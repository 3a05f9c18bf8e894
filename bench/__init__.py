# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: `python -m bench` from the repository's root, `--help` for its options."""

import sys
from pathlib import Path

# The named cases, the float64 reference and the provenance are shared with the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
