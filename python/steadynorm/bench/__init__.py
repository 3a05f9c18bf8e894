# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench`: is it fast here. A module a benchmark, each with `main(arguments)`."""

from __future__ import annotations

import importlib

BENCHMARKS = {
    "shapes": "GroupNorm alone, at shapes that you name, beside what else is installed",
    "step": "a training step of a full-size 3-D U-Net, stock GroupNorm beside ours",
    "inference": "a VAE decoder and a video VAE block, stock GroupNorm beside ours",
}


def main(arguments: list[str]) -> int:
    """Runs the benchmark that the first argument names, `shapes` where it names none."""
    name, *rest = arguments if arguments and arguments[0] in BENCHMARKS else ["shapes", *arguments]
    return importlib.import_module(f"{__name__}.{name}").main(rest)
