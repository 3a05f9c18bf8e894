# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench step`: a step of a full-size 3-D U-Net, stock GroupNorm beside ours."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from . import machine, output, provenance, step_report
from .options import Parser, default_output, whole, words, writable
from .session import session
from .step_arms import ARMS, OURS, OURS_FP32
from .step_run import PAIRED_PARTS, PARTS, Measured, Options, new_result, release, repeat, summarise
from .step_training import Scale
from .unet import GROUPS

GIB = 2**30
FULL, SMALL = (8, 7), (4,)  # default scales with a GPU, and without
SMALLEST, LARGEST = 4, 10
LEAST_REPLICATES = 6
SECONDS = {8: 210, 7: 63}  # of a whole run: NVIDIA H200, 2026-12-01, 273 s together, shared out by the step


def scales(text: str) -> list[int]:
    one = whole(SMALLEST, LARGEST)
    return list(dict.fromkeys(one(word) for word in text.split(",")))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m steadynorm bench step",
        description="A training step (forward, loss, backward, optimiser) of the demo's 3-D U-Net at full "
        "size: bf16 autocast, channels_last_3d, batch 1, GroupNorm in 8 groups and ReLU, a synthetic volume. "
        "Arms: "
        + "; ".join(f"{name}: {arm.told}" for name, arm in ARMS.items())
        + ". They share one network and take turns.",
        epilog="Without a GPU a small step runs on the CPU, which is no proof. Ctrl-C writes what was "
        "measured. Exit status: 0 done, 1 an arm of ours failed, 2 bad option or too little memory, 130 "
        "interrupted.",
    )
    add = parser.add_argument
    add(
        "--scales",
        type=scales,
        help="n: a cube of 2^n voxels an edge and n - 2 levels (8,7; without a GPU 4)",
    )
    add("--width", type=whole(GROUPS, 1024, GROUPS), default=64,
        help="channels at full resolution, doubled at each level (64)")  # fmt: skip
    add("--arms", type=words(tuple(ARMS)), default=list(ARMS), help=f"({','.join(ARMS)})")
    add("--parts", type=words(PARTS), default=list(PARTS),
        help="time: replicates of the step; profile: its device time itemised; losses: of "
        f"{OURS_FP32} and {OURS}, step by step; trace: where these two first differ; processes: the same "
        f"bits in processes of their own ({','.join(PARTS)})")  # fmt: skip
    add("--trace-difference", type=words(tuple(ARMS), 2), metavar="ARM,ARM",
        help="only trace where the steps of these two first differ")  # fmt: skip
    add("--replicates", type=whole(LEAST_REPLICATES, 1000), default=LEAST_REPLICATES,
        help=f"at least {LEAST_REPLICATES} ({LEAST_REPLICATES})")  # fmt: skip
    add("--steps", type=whole(1, 1000), default=1, help="timed steps of an arm in a replicate (1)")
    add("--loss-steps", type=whole(1, 10000), default=23, help="steps after which losses are compared (23)")
    add("--processes", type=whole(2, 100), default=3, help="how many repeat a step (3)")
    add("--output", type=writable, metavar="FILE", help="the JSON (default: <device>-step.json, in "
        "bench/results of a checkout with a GPU, else in the current folder)")  # fmt: skip
    add("--commit", help="the commit to record, where no repository tells (a copied tree)")
    options = parser.parse_args(arguments)
    if options.trace_difference:
        options.parts, options.arms = ["trace"], list(dict.fromkeys(options.trace_difference))
    options.device = torch.device(machine.default_device())
    gpu = options.device.type == "cuda"
    options.scales = options.scales or list(FULL if gpu else SMALL)
    for part in PAIRED_PARTS:
        lacking = {OURS_FP32, OURS} - set(options.arms)
        if lacking and options.parts == [part] and not options.trace_difference:
            parser.error(
                f"--parts: {part} needs the arms {OURS_FP32} and {OURS}, got {','.join(options.arms)}"
            )
    options.output = options.output or default_output(place(options.device.type))
    return options


def check_memory(chosen: list[Scale], arms: list[str], free: int) -> str | None:
    """One sentence where a scale needs more than `free` bytes in every arm; an arm alone may still fail."""
    for scale in chosen:
        need = min(scale.need_bytes(arm) for arm in arms)
        if need <= free:
            continue
        smaller = (Scale(n, scale.width) for n in range(scale.number - 1, SMALLEST - 1, -1))
        fits = next((s for s in smaller if min(s.need_bytes(arm) for arm in arms) <= free), None)
        advice = f"; scale {fits.number} fits: --scales {fits.number}" if fits else ""
        expected = f"scale {scale.number} needs about {need / GIB:.3g} GiB of the device's memory"
        return f"{expected}, got {free / GIB:.3g} GiB free{advice}"
    return None


def intention(options: argparse.Namespace, chosen: list[Scale], device: str) -> str:
    """What the run will do, and about how long it takes."""
    lines = [
        f"step: {', '.join(options.parts)} of a training step on {device}, arms {', '.join(options.arms)}",
        *(step_report.title(new_result(scale, [])) for scale in chosen),
        f"synthetic volume, batch 1, bf16 autocast, channels_last_3d, {options.replicates} replicates of "
        f"{options.steps} {'step' if options.steps == 1 else 'steps'}",
    ]
    if options.device.type == "cpu":
        small = (
            "a small step on the CPU, a minute or two" if options.scales == [*SMALL] else "a step on the CPU"
        )
        lines.append(f"no GPU: {small}; it shows that this runs, and is no proof")
    elif all(scale.number in SECONDS and scale.width == 64 for scale in chosen):
        seconds = sum(SECONDS[scale.number] for scale in chosen)
        lines.append(f"{output.format_seconds(seconds)} with all parts and arms on an NVIDIA H200")
    return "\n".join([*lines, output.destination(options.output)])


def describe(options: argparse.Namespace) -> dict:
    """The head of the file of results."""
    keys = (
        "scales",
        "width",
        "arms",
        "parts",
        "replicates",
        "steps",
        "loss_steps",
        "processes",
        "trace_difference",
    )
    return {
        **machine.head(options.device.type, options.commit),
        "options": {key: getattr(options, key) for key in keys},
        "volume": "synthetic",
    }


def place(device: str) -> Path:
    """Where results go: a CPU's figures are none, and go to where the command runs."""
    name = f"{provenance.slug(machine.name(device))}-step.json"
    root = provenance.repository() if device == "cuda" else None
    return root / "bench" / "results" / name if root else Path(name)


def measure(options: argparse.Namespace, chosen: list[Scale], results: list[dict], tell, save) -> None:
    """Fills `results`, one a scale; `save` is called whenever there is more in them."""
    pair = tuple(options.trace_difference or (OURS_FP32, OURS))
    of_run = Options(
        options.arms, options.parts, options.replicates, options.steps, options.loss_steps, options.processes,
        pair, options.device,
    )  # fmt: skip
    for scale in chosen:
        results.append(new_result(scale, options.arms))
        tell(step_report.title(results[-1]))
        try:
            for part in Measured(scale, of_run, results[-1], tell).run():
                summarise(results[-1])
                save(f"not finished, {part} of scale {scale.number} done")
        except torch.OutOfMemoryError as error:  # of what all arms share: the next scale may fit
            tell(f"scale {scale.number} left out: {error}")
            for of in results[-1]["arms"].values():
                of.setdefault("error", output.failure(error)["error"])
        release(options.device)
    if "processes" in options.parts:
        repeat(chosen, of_run, results, tell)


def main(arguments: list[str] | None = None) -> int:
    """The command: returns its exit status."""
    options = parse_arguments(arguments)
    chosen = [Scale(n, options.width) for n in options.scales]
    problem = check_memory(chosen, options.arms, machine.free_bytes(options.device.type))
    if problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    head = describe(options)
    print(intention(options, chosen, head["device"]), flush=True)
    began, results, stopped = time.monotonic(), [], None

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {line}", flush=True)

    def save(stopped: str | None) -> bool:
        seconds = round(time.monotonic() - began, 1)
        return output.save(
            options.output, {**head, "seconds": seconds, "stopped": stopped}, results, "scales"
        )

    try:
        with session():
            measure(options, chosen, results, tell, save)
    except KeyboardInterrupt:
        stopped = "interrupted"
    except Exception as error:  # of the device itself, or of a process: what came before stands
        stopped = output.failure(error)["error"]
    for result in results:
        summarise(result)
    saved = save(stopped)
    print("\n" + "\n\n".join(step_report.text(result) for result in results))
    if stopped:
        print(f"stopped early: {stopped}")
    if saved:
        print(f"wrote {options.output} after {time.monotonic() - began:.0f} s")
    if stopped == "interrupted":
        return 130
    failed = any(
        "error" in of for result in results for arm, of in result["arms"].items() if arm in (OURS, OURS_FP32)
    )
    return 1 if failed or stopped or not saved else 0
