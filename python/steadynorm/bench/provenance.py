# SPDX-License-Identifier: Apache-2.0
"""Where a recorded number comes from: commit, device, driver, versions.

Imports no torch and nothing of the package: in a checkout it is read without either, as a file.
"""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def repository() -> Path | None:
    """The checkout that this file is in, or else the current folder where it is one."""
    for folder in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (folder / "python" / "steadynorm").is_dir() and (folder / "bench" / "results").is_dir():
            return folder
    return None


def output_of(command: list[str], folder: Path | None = None) -> str | None:
    """What a program run in `folder` prints, stripped; None when it is missing or fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def source(commit: str | None = None) -> dict:
    """The commit and whether tracked files differ from it; `commit` names it where no repository tells."""
    folder = repository()
    head = None if folder is None else output_of(["git", "rev-parse", "HEAD"], folder)
    if commit is not None or head is None:
        return {"commit": commit or "unknown", "dirty": None}
    changes = output_of(["git", "status", "--porcelain", "--untracked-files=no"], folder)
    return {"commit": head, "dirty": bool(changes)}


def gpu() -> dict | None:
    """Name, driver and memory of the first GPU; None without one."""
    line = output_of(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if not line or line.count(",") < 2:
        return None
    name, driver, memory = (field.strip() for field in line.splitlines()[0].split(",")[:3])
    return {"name": name, "driver": driver, "memory": memory}


def cpu() -> str:
    """The model's name, as Linux tells it, else the architecture."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        told = ""
    found = re.search(r"^model name\s*: (.+)$", told, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def versions(*packages: str) -> dict[str, str | None]:
    """Version of Python and of each installed package."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def slug(text: str) -> str:
    """A device's name as part of a file name: `NVIDIA H200` is `h200`."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return words.removeprefix("nvidia-") or "device"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
