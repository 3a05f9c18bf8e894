# SPDX-License-Identifier: Apache-2.0
"""Fails when a kernel keeps registers in memory: spills, or arrays indexed at run time.

Arguments: libraries or programs. Reads `cuobjdump --dump-resource-usage`, whose STACK and LOCAL are bytes a
thread. Exit status: 0 none spills, 1 some do or there is no kernel, 77 no cuobjdump.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Kernel(NamedTuple):
    name: str
    registers: int
    stack: int
    shared: int
    local: int

    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0

    def __str__(self) -> str:
        return f"{self.name}: {self.registers} registers, {self.stack} B stack, {self.local} B local"


_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def kernels_in(report: str) -> list[Kernel]:
    return [Kernel(name, *map(int, numbers)) for name, *numbers in _USAGE.findall(report)]


def check(kernels: list[Kernel]) -> int:
    """Prints what spills; the exit status."""
    if not kernels:
        print("check_spills: found no kernel")
        return 1
    spilling = [kernel for kernel in kernels if kernel.spills()]
    most = max(kernel.registers for kernel in kernels)
    print(f"{len(kernels)} kernels, {len(spilling)} spill; most registers: {most}")
    for kernel in spilling:
        print(f"  {kernel}")
    return 1 if spilling else 0


def find_tool() -> str | None:
    """cuobjdump on PATH, of the CUDA toolkit, or of triton, which comes with PyTorch."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return shutil.which("cuobjdump", path=os.pathsep.join(folders))


def main(paths: list[str]) -> int:
    tool = find_tool()
    if tool is None:
        print("check_spills: needs cuobjdump, got none on PATH, beside nvcc or in triton")
        return 77
    kernels = []
    for path in paths:
        command = [tool, "--dump-resource-usage", path]
        kernels += kernels_in(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return check(kernels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
