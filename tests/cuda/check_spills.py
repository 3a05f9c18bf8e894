# SPDX-License-Identifier: Apache-2.0
"""Fails when a kernel in a library or program keeps registers in memory: spills, or arrays indexed at run time.

Reads `cuobjdump --dump-resource-usage`, whose STACK and LOCAL are bytes a thread. Exit status 0 none, 1 some, 77 no cuobjdump.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

_ENTRY = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def main(paths: list[str]) -> int:
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path="/usr/local/cuda/bin")
    if tool is None:
        print("check_spills: needs cuobjdump, got none")
        return 77
    kernels, spilling = [], []
    for path in paths:
        text = subprocess.run(
            [tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True
        ).stdout
        for name, registers, stack, shared, local in _ENTRY.findall(text):
            kernels.append((int(registers), name))
            if int(stack) or int(local):
                spilling.append(f"{name}: {registers} registers, {stack} B stack, {local} B local, {shared} B shared")
    if not kernels:
        print("check_spills: found no kernel in " + ", ".join(paths))
        return 1
    print(f"{len(kernels)} kernels, {len(spilling)} spill; most registers: {max(kernels)[0]}")
    print("\n".join(spilling))
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
