# SPDX-License-Identifier: Apache-2.0
"""Prints this interpreter's torch as `directory;version;CUDA major` (or "none"), importing nothing."""

import importlib.util
import pathlib
import runpy
import sys

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(1)
root = pathlib.Path(spec.origin).parent
version = runpy.run_path(str(root / "version.py"))
cuda = version.get("cuda")
print(root.as_posix(), version["__version__"].split("+")[0], cuda.split(".")[0] if cuda else "none", sep=";")
