# SPDX-License-Identifier: Apache-2.0
"""Prints this interpreter's torch as `directory;version;CUDA major;Python's headers`, importing nothing.

Without CUDA its major is "none"; so are the headers of a free-threaded Python, which has no limited API.
"""

import importlib.util
import pathlib
import runpy
import sys
import sysconfig

spec = importlib.util.find_spec("torch")
if spec is None or spec.origin is None:
    sys.exit(1)
root = pathlib.Path(spec.origin).parent
version = runpy.run_path(str(root / "version.py"))
cuda = version.get("cuda")
major = cuda.split(".")[0] if cuda else "none"
headers = "none" if sysconfig.get_config_var("Py_GIL_DISABLED") else sysconfig.get_path("include")
print(root.as_posix(), version["__version__"].split("+")[0], major, pathlib.Path(headers).as_posix(), sep=";")
