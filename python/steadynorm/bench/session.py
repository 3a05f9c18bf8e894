# SPDX-License-Identifier: Apache-2.0
"""What a run of a benchmark changes of its process, and puts back.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

CACHE = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def session() -> Iterator[None]:
    """SIGTERM is as Ctrl-C: what was measured is written. And where the caller names no cache for Inductor,
    it has one of this run alone: no choice of an earlier run is taken over.
    """
    own = None if CACHE in os.environ else tempfile.mkdtemp(prefix="steadynorm-bench-")
    if own:
        os.environ[CACHE] = own
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if own:
            del os.environ[CACHE]
            shutil.rmtree(own, ignore_errors=True)
