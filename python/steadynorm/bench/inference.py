# SPDX-License-Identifier: Apache-2.0
"""A VAE decoder and a video VAE block in bf16, stock GroupNorm beside the same model converted.

Random weights, no gradients. Latency is the wall time of one forward until the device is done; stock and ours
take turns. Peak memory is what a forward allocates beyond its model and input. The outputs of both are
compared with those of the same weights in float32.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..convert import convert_group_norm, report
from . import arms, machine, output, paired, provenance, vae
from .options import Parser, default_output, whole, writable
from .session import session

WARM_UPS = 3
LEAST_REPLICATES = 6
FORWARD_SECONDS = 0.2  # of all comparisons together, a forward of each arm: NVIDIA H200, 2026-11-30
LAYOUTS = ("contiguous", "channels_last")
FULL, SMALL = "full", "small"


@dataclass(frozen=True)
class Network:
    """What is run: a model with stock norms, made anew each time, and the shape of its input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def networks(size: str) -> list[Network]:
    if size == FULL:
        return [
            Network("VAE decoder", lambda: vae.Decoder((512, 512, 256, 128), 32), (1, 4, 128, 128)),
            Network("video VAE block", lambda: vae.video_block(128, 32), (1, 128, 20, 256, 256)),
        ]
    return [
        Network("VAE decoder", lambda: vae.Decoder((32, 32, 16, 16), 8), (1, 4, 4, 4)),
        Network("video VAE block", lambda: vae.video_block(16, 8), (1, 16, 3, 8, 8)),
    ]


@dataclass
class Pair:
    """One network in one memory format, stock and converted, on a device."""

    models: dict[str, nn.Module]
    x: torch.Tensor
    synchronize: Callable[[], None]

    def latency_ms(self, arm: str) -> float:
        self.synchronize()
        began = time.perf_counter()
        self.models[arm](self.x)
        self.synchronize()
        return 1e3 * (time.perf_counter() - began)

    def peak_mib(self, arm: str) -> float | None:
        """None on the CPU, which does not count."""
        if self.x.device.type != "cuda":
            return None
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.models[arm](self.x)
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def errors(self) -> dict[str, float]:
        """Each arm's largest difference from the stock model in float32, over the largest value of that."""
        results = {arm: model(self.x) for arm, model in self.models.items()}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            right = copy.deepcopy(self.models["stock"]).float()(self.x.float())
        largest = right.abs().max()
        return {arm: ((y.float() - right).abs().max() / largest).item() for arm, y in results.items()}


def pair_of(network: Network, layout: str, device: str) -> Pair:
    format = arms.memory_format(layout, len(network.shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock, x = network.make(), torch.randn(network.shape)
    stock = stock.to(device, torch.bfloat16, memory_format=format).eval().requires_grad_(False)
    x = x.to(device, torch.bfloat16).contiguous(memory_format=format)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Pair({"stock": stock, "ours": convert_group_norm(copy.deepcopy(stock))}, x, synchronize)


def measure(network: Network, layout: str, device: str, replicates: int) -> dict:
    """The row of one network in one memory format."""
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        pair = pair_of(network, layout, device)
        with report(pair.models["ours"]) as seen:
            pair.models["ours"](pair.x)
        for _ in range(WARM_UPS):
            warm = [pair.latency_ms(arm) for arm in pair.models]
        output.progress(f"  {replicates} replicates, about {1e-3 * sum(warm) * (replicates + 1):.2g} s")
        times: dict[str, list[float]] = {arm: [] for arm in pair.models}
        for turn in range(replicates):
            for arm in list(pair.models)[:: 1 if turn % 2 == 0 else -1]:
                times[arm].append(pair.latency_ms(arm))
        peaks = {arm: pair.peak_mib(arm) for arm in pair.models}
        errors = pair.errors()
    saved = paired.difference(times["stock"], times["ours"])
    found = {}
    for arm in pair.models:
        of = paired.interval(times[arm])
        found[arm] = {
            "latency_ms": of.mean, "half_width_ms": of.half_width, "peak_mib": peaks[arm],
            "error": errors[arm], "samples_ms": [round(ms, 4) for ms in times[arm]],
        }  # fmt: skip
    return {
        "network": network.name, "shape": list(network.shape), "layout": layout, "dtype": "bf16",
        "norms": len(seen.rows), "rungs": sorted({row.rung or "none" for row in seen.rows}),
        "fused": sum(getattr(m, "activation", "none") != "none" for m in pair.models["ours"].modules()),
        "saved_ms": saved.mean, "saved_half_width_ms": saved.half_width, "arms": found,
    }  # fmt: skip


def verdict(row: dict) -> str:
    saved = paired.Interval(
        row["saved_ms"], row["saved_half_width_ms"], len(row["arms"]["ours"]["samples_ms"])
    )
    share = 100 * saved.mean / row["arms"]["stock"]["latency_ms"]
    found = f"ours is {'faster' if share > 0 else 'slower'} by {abs(share):.3g} %"
    return f"stock - ours: {saved} ms, paired: {found if saved.differs else 'no difference is shown'}"


def table(row: dict) -> str:
    lines = [["", "latency, ms", "peak, MiB", "error"]]
    for arm, of in row["arms"].items():
        latency = paired.Interval(of["latency_ms"], of["half_width_ms"], len(of["samples_ms"]))
        peak = "-" if of["peak_mib"] is None else f"{of['peak_mib']:.0f}"
        lines.append([arm, str(latency), peak, f"{of['error']:.2g}"])
    shape = "x".join(map(str, row["shape"]))
    norms = f"{row['norms']} norms, {row['fused']} with their SiLU fused, served by {', '.join(row['rungs'])}"
    title = f"{row['network']}, {shape}, {row['layout']}: {norms}"
    return "\n".join([title, *output.aligned(lines), verdict(row)])


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m steadynorm bench inference", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 done, 1 a network failed, 2 bad options, 130 interrupted; what was measured\n"
        "is written.",
    )  # fmt: skip
    add = parser.add_argument
    add("--device", choices=machine.DEVICES, default=machine.default_device(),
        help="default: cuda where there is a GPU")  # fmt: skip
    add("--size", choices=(FULL, SMALL), help="full: a decoder to 1024x1024 and (1,128,20,256,256); "
        "small: a trial run that proves nothing (default: full on a GPU, small on the CPU)")  # fmt: skip
    add(
        "--replicates",
        type=whole(LEAST_REPLICATES),
        default=10,
        metavar="R",
        help="of each arm (default: 10)",
    )
    add("--output", type=writable, metavar="FILE", help="the JSON (default: <device>-inference.json, in "
        "bench/results of a checkout when the size is full, else in the current folder)")  # fmt: skip
    add("--commit", help="the commit to record, where no repository tells (a copied tree)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda needs a GPU that PyTorch can use, got none")
    options.size = options.size or (FULL if options.device == "cuda" else SMALL)
    options.output = options.output or default_output(place(machine.name(options.device), options.size))
    return options


def place(device: str, size: str) -> Path:
    """Where results go: those of the small size, which are none, to where the command runs."""
    checkout = provenance.repository()
    folder = checkout / "bench" / "results" if checkout and size == FULL else Path()
    return folder / f"{provenance.slug(device)}-inference.json"


def plan(device: str, options: argparse.Namespace, comparisons: int) -> str:
    """What will be done, before it is."""
    forwards = 2 * (WARM_UPS + options.replicates)
    lines = [f"{device}, torch {torch.__version__}: {comparisons} comparisons of {forwards} forwards each"]
    if options.size == FULL and options.device == "cuda":
        lines.append(
            f"The forwards take {output.format_seconds(FORWARD_SECONDS * forwards)} on an NVIDIA H200; each "
            "comparison says how long it will take here, once the convolutions' algorithms are chosen."
        )
    elif options.size == FULL:
        lines.append("On a CPU each takes minutes, and says so once it has begun.")
    else:
        lines.append("About 10 s on two cores.")
    if options.size == SMALL:
        lines.append("A trial run: this size proves nothing.")
    lines.append("Latency: mean ± 95 %. Error: largest difference from float32, over its largest value.")
    return "\n".join([*lines, output.destination(options.output)])


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    head = machine.head(options.device, options.commit)
    head |= {"benchmark": "inference", "size": options.size, "replicates": options.replicates}
    jobs = [(network, layout) for network in networks(options.size) for layout in LAYOUTS]
    print(plan(head["device"], options, len(jobs)), flush=True)
    rows: list[dict] = []
    stopped = None
    try:
        with session():
            for number, (network, layout) in enumerate(jobs, 1):
                output.progress(f"[{number}/{len(jobs)}] {network.name}, {layout}")
                try:
                    row = measure(network, layout, options.device, options.replicates)
                    told = table(row)
                except Exception as error:
                    row = {"network": network.name, "shape": list(network.shape), "layout": layout}
                    row |= output.failure(error)
                    told = f"{network.name}, {layout}: left out: {row['error']}"
                output.progress("")
                print(f"\n{told}", flush=True)
                rows.append(row)
                output.save(options.output, {**head, "stopped": "not finished"}, rows)
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(rows)} of {len(jobs)}"
        output.progress("")
        print(f"bench: {stopped}", file=sys.stderr)
    saved = output.save(options.output, {**head, "stopped": stopped}, rows)
    if saved:
        print(f"\nwrote {options.output}")
    return 130 if stopped else int(not saved or any("error" in row for row in rows))
