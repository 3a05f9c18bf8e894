# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench step`: a step of a full-size 3-D U-Net, stock GroupNorm beside ours."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from . import provenance, step_report
from .step_arms import ARMS, OURS, OURS_FP32
from .step_run import PARTS, Measured, Options, new_result, release, repeat, summarise
from .step_training import Scale
from .unet import GROUPS

GIB = 2**30
FULL, SMALL = (8, 7), (4,)  # default scales with a GPU, and without
SMALLEST, LARGEST = 4, 10
SECONDS = {8: 240, 7: 90}  # of a whole run on an NVIDIA H200, not measured yet


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        print(f"step: {message}", file=sys.stderr)
        raise SystemExit(2)


def number(low: int, high: int, rule: str = ""):
    """An argument type: an integer in [low, high]."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else -1
        if not low <= value <= high or (rule and value % GROUPS):
            raise argparse.ArgumentTypeError(
                f"expected {rule or 'an integer'} from {low} to {high}, got {text}"
            )
        return value

    return parse


def words(allowed: tuple[str, ...], count: int | None = None):
    """An argument type: words of `allowed` between commas."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if not set(chosen) <= set(allowed) or len(chosen) != (count or len(chosen)):
            rule = f"{count} words" if count else "words"
            raise argparse.ArgumentTypeError(f"expected {rule} of {', '.join(allowed)}, got '{text}'")
        return chosen if count else list(dict.fromkeys(chosen))

    return parse


def scales(text: str) -> list[int]:
    one = number(SMALLEST, LARGEST)
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
    add("--width", type=number(GROUPS, 1024, f"a multiple of {GROUPS}"), default=64,
        help="channels at full resolution, doubled at each level (64)")  # fmt: skip
    add("--arms", type=words(tuple(ARMS)), default=list(ARMS), help=f"({','.join(ARMS)})")
    add("--parts", type=words(PARTS), default=list(PARTS),
        help="time: replicates of the step; profile: its device time itemised; losses: of "
        f"{OURS_FP32} and {OURS}, step by step; trace: where these two first differ; processes: the same "
        f"bits in processes of their own ({','.join(PARTS)})")  # fmt: skip
    add("--trace-difference", type=words(tuple(ARMS), 2), metavar="ARM,ARM",
        help="only trace where the steps of these two first differ")  # fmt: skip
    add("--replicates", type=number(2, 1000), default=6, help="at least 2 (6)")
    add("--steps", type=number(1, 1000), default=1, help="timed steps of an arm in a replicate (1)")
    add("--loss-steps", type=number(1, 10000), default=23, help="steps after which losses are compared (23)")
    add("--processes", type=number(2, 100), default=3, help="how many repeat a step (3)")
    add(
        "--output",
        type=Path,
        help="default: bench/results/<device>-step.json in a checkout, else in this folder",
    )
    add("--commit", help="the commit to record, where no repository tells (a copied tree)")
    options = parser.parse_args(arguments)
    if options.trace_difference:
        options.parts, options.arms = ["trace"], list(dict.fromkeys(options.trace_difference))
    gpu = torch.cuda.is_available()
    options.device = torch.device("cuda" if gpu else "cpu")
    options.scales = options.scales or list(FULL if gpu else SMALL)
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
        expected = f"scale {scale.number} needs about {need / GIB:.3g} GiB of device memory"
        return f"{expected}, got {free / GIB:.3g} GiB free{advice}"
    return None


def intention(options: argparse.Namespace, chosen: list[Scale], device: str) -> str:
    """What the run will do, and about how long it takes."""
    lines = [
        f"step: {', '.join(options.parts)} of a training step on {device}, arms {', '.join(options.arms)}",
        *(step_report.title(new_result(scale, [])) for scale in chosen),
        f"synthetic volume, batch 1, bf16 autocast, channels_last_3d, {options.replicates} replicates of "
        f"{options.steps} steps",
    ]
    if options.device.type == "cpu":
        lines.append(
            "no GPU: a small step on the CPU, a minute or two; it shows that this runs, and is no proof"
        )
    elif all(scale.number in SECONDS and scale.width == 64 for scale in chosen):
        seconds = sum(SECONDS[scale.number] for scale in chosen)
        lines.append(f"about {seconds / 60:.2g} minutes with all parts and arms on an NVIDIA H200")
    return "\n".join(lines)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


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
        **provenance.source(options.commit),
        "date": provenance.today(),
        "device": device_name(options.device),
        "driver": (provenance.gpu() or {}).get("driver"),
        "versions": {
            **provenance.versions("steadynorm", "torch", "triton"),
            "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        },
        "options": {key: getattr(options, key) for key in keys},
        "volume": "synthetic",
    }  # fmt: skip


def default_output(options: argparse.Namespace) -> Path:
    """A CPU's figures are no result: they go where the command runs."""
    name = f"{provenance.slug(device_name(options.device))}-step.json"
    root = provenance.repository() if options.device.type == "cuda" else None
    return root / "bench" / "results" / name if root else Path(name)


def write(path: Path, content: dict) -> None:
    """Complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


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
        for part in Measured(scale, of_run, results[-1], tell).run():
            summarise(results[-1])
            save(f"not finished, {part} of scale {scale.number} done")
        release(options.device)
    if "processes" in options.parts:
        repeat(chosen, of_run, results, tell)


def main(arguments: list[str] | None = None) -> int:
    """The command: returns its exit status."""
    options = parse_arguments(arguments)
    chosen = [Scale(n, options.width) for n in options.scales]
    if options.device.type == "cuda":
        problem = check_memory(chosen, options.arms, torch.cuda.mem_get_info(options.device)[0])
        if problem:
            print(f"step: {problem}", file=sys.stderr)
            return 2
    head, path = describe(options), options.output or default_output(options)
    print(intention(options, chosen, head["device"]), flush=True)
    began, results, stopped, cache = time.monotonic(), [], None, None

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:.0f} s] {line}", flush=True)

    def save(stopped: str | None) -> None:
        seconds = round(time.monotonic() - began, 1)
        write(path, {**head, "seconds": seconds, "stopped": stopped, "scales": results})

    # Of this run alone: no choice of an earlier one is taken over.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="steadynorm-bench-")
    # As Ctrl-C: what was measured is written.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        measure(options, chosen, results, tell, save)
    except KeyboardInterrupt:
        stopped = "interrupted"
    except RuntimeError as error:  # of the device itself, or of a process: what came before stands
        stopped = f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.signal(signal.SIGTERM, before)
        if cache:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            shutil.rmtree(cache, ignore_errors=True)
    for result in results:
        summarise(result)
    save(stopped)
    print("\n" + "\n\n".join(step_report.text(result) for result in results))
    if stopped:
        print(f"stopped early: {stopped}")
    print(f"wrote {path} after {time.monotonic() - began:.0f} s")
    if stopped == "interrupted":
        return 130
    failed = any(
        "error" in of for result in results for arm, of in result["arms"].items() if arm in (OURS, OURS_FP32)
    )
    return 1 if failed or stopped else 0
