# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs on."""

from __future__ import annotations

import torch

from .. import __version__
from . import provenance

DEVICES = ("cuda", "cpu")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else provenance.cpu()


def head(device: str, commit: str | None = None) -> dict:
    """The head of a file of results: commit, date, device, driver, versions."""
    gpu = provenance.gpu() if device == "cuda" else None
    return {
        **provenance.source(commit),
        "date": provenance.today(),
        "device": name(device),
        "driver": (gpu or {}).get("driver"),
        "versions": {
            **provenance.versions("triton", "liger-kernel", "numpy"),
            "steadynorm": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
    }
