# SPDX-License-Identifier: Apache-2.0
"""Whether a rung may serve: turned on or off by the user, latched off by a failure. And the warnings."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(eq=False)
class Rung:
    """One rung of the ladder in this process. `instead` completes "steadynorm: ... serves instead of"."""

    name: str
    instead: str
    off: str | None = None  # why it can serve nobody: turned off, or nothing to load
    failure: str | None = None  # what latched it off for modules that it has not served before
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def turn(self, on: bool, by: str) -> None:
        with self._lock:
            self.off = None if on else f"turned off by {by}"
            if on:
                self.failure = None

    def latch(self, reason: str) -> None:
        """Notes the first failure, and warns of it."""
        with self._lock:
            first = self.failure is None
            if first:
                self.failure = reason
        if first:
            warn(f"{self.instead}: {reason}")

    def state(self) -> str:
        """For people: on, off and why, or latched off and why."""
        if self.off is not None:
            return f"off: {self.off}"
        return "on" if self.failure is None else f"latched off: {self.failure}"


def warn(text: str) -> None:
    """A RuntimeWarning at the user's line, which imported the package or called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    warnings.warn_explicit(
        f"steadynorm: {text}",
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def sentence(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Where the frames are that no user wrote: this package, torch, the import system.
_OURS = (f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", "<frozen importlib")
