# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own samples and checks for GroupNorm, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("stock_suite.py")


def test_pytorchs_own_suite_passes():
    for package in ("expecttest", "numpy"):
        pytest.importorskip(package, reason=f"torch.testing._internal needs the package {package}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    child = subprocess.run(command, cwd=SUITE.parents[2], capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
