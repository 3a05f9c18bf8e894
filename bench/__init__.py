# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness: `python -m bench` from the repository's root, `--help` for its options."""

import sys
from pathlib import Path

# The named cases and the float64 reference are shared with the tests. Of the package provenance.py alone is
# taken from here, as a file: the options, the list and the page need neither PyTorch nor a built package.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "python" / "steadynorm" / "bench")]
