# SPDX-License-Identifier: Apache-2.0
"""The demo's options. A bad one ends the program with one sentence and exit status 2."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

GROUPS = 8  # as in the network, which is not imported: it would import torch before --help


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def integer(rule: str, accept):
    """An argparse type: an integer that `accept` takes, else a sentence with the rule in it."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            raise argparse.ArgumentTypeError(f"expected {rule}, got {text}")
        return value

    return parse


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check; what depends on the machine (device, defaults) is settled here too."""
    parser = Parser(
        prog="brain_unet",
        description="Train a 3-D U-Net with GroupNorm to segment grey and white matter in the "
        "MNI152 T1 volume, once with torch.nn.GroupNorm and once with steadynorm.GroupNorm, from "
        "the same initial weights, on the same patches, in alternating steps; then compare.",
        epilog="Ctrl-C writes the report so far. Exit status: 0 done, 2 bad option or data, 130 interrupted.",
    )
    positive = integer("an integer of at least 1", lambda v: v >= 1)
    add = parser.add_argument
    add("--steps", type=positive, default=300, help="training steps of each arm (300)")
    add(
        "--width",
        type=integer(f"a positive multiple of {GROUPS}", lambda v: v > 0 and v % GROUPS == 0),
        help="channels at full resolution, doubled at each level (16; 32 on a GPU)",
    )
    add(
        "--depth",
        type=integer("2, 3 or 4", lambda v: 2 <= v <= 4),
        default=3,
        help="number of resolutions (3)",
    )
    add("--size", type=positive, help="edge of a cubic training patch in voxels (32; 64 on a GPU)")
    add("--batch", type=positive, help="patches a step (2; 4 on a GPU)")
    add("--device", help="cpu, cuda or cuda:N (cuda where there is one)")
    add("--out", type=Path, default=Path("out/demo"), help="folder of the report (out/demo)")
    seeds = integer("an integer from 0 to 2**32 - 1", lambda v: 0 <= v < 2**32)
    add("--seed", type=seeds, default=0, help="of initial weights and data order (0)")
    options = parser.parse_args(argv)
    options.device = check_device(parser, options.device)

    gpu = options.device.type == "cuda"
    options.width = options.width or (32 if gpu else 16)
    options.size = options.size or (64 if gpu else 32)
    options.batch = options.batch or (4 if gpu else 2)
    grid = 2 ** (options.depth - 1)
    if options.size % grid or options.size < 2 * grid:
        parser.error(
            "argument --size: the patch is halved at each level and the last must keep 2 voxels: "
            f"expected a multiple of {grid} of at least {2 * grid} at depth {options.depth}, "
            f"got {options.size}"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        probe = options.out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as e:
        parser.error(
            f"argument --out: expected a folder that can be written to, got {options.out} ({e.strerror})"
        )
    return options


def check_device(parser: argparse.ArgumentParser, name: str | None):
    import torch

    there = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if there else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: expected cpu, cuda or cuda:N, got {name}")
    count = torch.cuda.device_count() if there else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        parser.error(
            f"argument --device: expected a device that PyTorch sees (it sees {count} CUDA "
            f"devices), got {name}"
        )
    return device
