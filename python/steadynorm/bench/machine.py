# SPDX-License-Identifier: Apache-2.0
"""What a benchmark runs on."""

from __future__ import annotations

import os

import torch

from .. import __version__
from . import provenance

DEVICES = ("cuda", "cpu")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else provenance.cpu()


def free_bytes(device: str) -> int:
    """Of the device's memory."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def head(device: str, commit: str | None = None) -> dict:
    """The head of a file of results: commit, date, device, driver, versions."""
    gpu = provenance.gpu() if device == "cuda" else None
    return {
        **provenance.source(commit),
        "date": provenance.today(),
        "device": name(device),
        "device_type": device,
        "driver": (gpu or {}).get("driver"),
        "versions": {
            **provenance.versions("triton", "liger-kernel", "numpy"),
            "steadynorm": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
    }
