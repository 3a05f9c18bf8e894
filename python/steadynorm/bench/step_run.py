# SPDX-License-Identifier: Apache-2.0
"""Measures the step at one scale, arm beside arm, and puts down what is measured at once."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from .. import rungs
from . import step_bits
from .output import failure
from .paired import Interval, difference, interval
from .step_arms import ARMS, OURS, OURS_FP32
from .step_items import Shapes, itemise, kernels_of
from .step_training import Scale, Training, deterministic

PARTS = ("time", "profile", "losses", "trace", "processes")
PAIRED_PARTS = ("losses", "trace")  # of ours in fp32 and ours
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is measured: `steps` timed ones of each arm in each replicate, after one that is not."""

    arms: list[str]
    parts: list[str]
    replicates: int
    steps: int
    loss_steps: int
    processes: int
    pair: tuple[str, str]
    device: torch.device


def release(device: torch.device) -> None:
    """Gives back what a failed or another arm's step left in the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def new_result(scale: Scale, arms: list[str]) -> dict:
    return {
        "scale": scale.number, "size": scale.size, "levels": scale.levels, "sites": scale.sites,
        "width": scale.width, "parameters": scale.parameters(),
        "arms": {arm: {"told": ARMS[arm].told, "step_ms": [], "peak_mib": []} for arm in arms},
    }  # fmt: skip


class Measured:
    """One scale: the training that all arms share, and its part of the file of results."""

    def __init__(self, scale: Scale, options: Options, result: dict, tell: Tell) -> None:
        self.options, self.result, self.tell = options, result, tell
        self.training = Training(scale, options.device)

    @property
    def serving(self) -> list[str]:
        """The arms that have not failed."""
        return [arm for arm, of in self.result["arms"].items() if "error" not in of]

    def attempt(self, arm: str, work: Callable[[], object]) -> object:
        """What `work` gives with `arm` at the sites; None where it fails, which ends the arm and is told."""
        release(self.options.device)
        error = None
        try:
            self.training.use(arm)
            return work()
        except Exception as caught:
            error = failure(caught)  # not the error itself, which would hold the step's tensors
        self.result["arms"][arm] |= error
        self.tell(f"{arm} failed: {error['error']}")
        self.training.restart()  # a part of a step may have been made
        return None

    def warm_up(self) -> None:
        """A first step of each arm: compiles, loads, and tells what cannot run here."""
        for arm in self.serving:
            began = time.perf_counter()
            if self.attempt(arm, self.training.timed_step) is None:
                continue
            of = self.result["arms"][arm]
            of["first_step_seconds"] = round(time.perf_counter() - began, 1)
            if arm in (OURS, OURS_FP32):
                of["rung"] = str(rungs.last_rung())
            self.tell(f"{arm}: first step {of['first_step_seconds']} s")

    def time(self) -> None:
        """Replicates: in each, every arm in turn, another one first each time."""

        def replicate() -> tuple[float, float | None]:
            self.training.timed_step()  # settles the allocator
            taken = [self.training.timed_step() for _ in range(self.options.steps)]
            peaks = [peak for _, peak in taken if peak is not None]
            return sum(ms for ms, _ in taken) / len(taken), max(peaks, default=None)

        for turn in range(self.options.replicates):
            arms = self.serving
            for arm in arms[turn % max(1, len(arms)) :] + arms[: turn % max(1, len(arms))]:
                taken = self.attempt(arm, replicate)
                if taken is not None:
                    self.result["arms"][arm]["step_ms"].append(round(taken[0], 3))
                    self.result["arms"][arm]["peak_mib"] += [round(taken[1], 1)] if taken[1] else []
            last = {arm: self.result["arms"][arm]["step_ms"][-1] for arm in self.serving}
            told = ", ".join(f"{arm} {ms:.4g}" for arm, ms in last.items())
            self.tell(f"replicate {turn + 1} of {self.options.replicates}, ms a step: {told}")

    def shapes(self) -> Shapes:
        """Sizes of what lies between convolutions: a site's tensor, two of them concatenated, one pooled."""
        sites = [self.training.scale.shape(level) for level in range(self.training.scale.levels)]
        joined = [(n, 2 * c, *size) for n, c, *size in sites]
        pooled = [(n, c, *(edge // 2 for edge in size)) for n, c, *size in sites[:-1]]
        parameters = (tuple(parameter.shape) for parameter in self.training.network.parameters())
        return Shapes(frozenset(sites + joined + pooled), frozenset(parameters))

    def profile(self) -> None:
        """The itemised device time of one step of each arm."""
        kinds = [ProfilerActivity.CPU]
        kinds += [ProfilerActivity.CUDA] if self.options.device.type == "cuda" else []

        def items() -> dict:
            with self.training.annotated():
                self.training.timed_step()
                with profile(activities=kinds, record_shapes=True, acc_events=True) as taken:
                    self.training.timed_step()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                taken.export_chrome_trace(str(path))
                events = json.loads(path.read_text("utf-8", "replace"), strict=False)["traceEvents"]
            return itemise(kernels_of(events), self.shapes())

        found = self.result["items"] = {}
        for arm in self.serving:
            if (of_arm := self.attempt(arm, items)) is not None:
                found[arm] = of_arm
                self.tell(f"{arm}: {of_arm['total_us'] / 1e3:.4g} ms of device time itemised")

    def losses(self) -> None:
        """How far the losses of ours in fp32 and ours are apart, step after step from the same weights."""
        arms, count = self.options.pair, self.options.loss_steps
        found = {}
        with deterministic():
            for arm in arms:
                found[arm] = self.attempt(arm, lambda arm=arm: step_bits.losses(self.training, arm, count))
        if all(found.values()):
            a, b = (found[arm] for arm in arms)
            apart = [abs(x - y) / (abs(x) or 1.0) for x, y in zip(a, b, strict=True)]
            self.result["losses"] = {
                "arms": list(arms), "steps": count, "losses": found, "relative_last": apart[-1],
                "relative_largest": max(apart), "same_first": a[0] == b[0],
            }  # fmt: skip
            self.tell(f"losses of {arms[0]} and {arms[1]} after {count} steps: {apart[-1]:.2g} apart")

    def trace(self) -> None:
        """Where two arms first differ."""
        pair = self.options.pair
        with deterministic():
            found = self.attempt(pair[1], lambda: step_bits.difference(self.training, pair))
        if found is not None:
            self.result["trace"] = found
            self.tell(f"traced {pair[0]} against {pair[1]}")

    def run(self) -> Iterator[str]:
        """Does each part that is asked for, and gives its name."""
        self.warm_up()
        for part in PARTS[:-1]:
            if part not in self.options.parts:
                continue
            lacking = sorted(set(self.options.pair) - set(self.serving)) if part in PAIRED_PARTS else []
            if lacking:
                self.tell(f"{part} left out: it needs {' and '.join(lacking)}")
                continue
            getattr(self, part)()
            yield part


def as_dict(of: Interval) -> dict:
    return {"mean": round(of.mean, 4), "half_width": round(of.half_width, 4), "count": of.count}


def summarise(result: dict) -> None:
    """Puts each arm's means, and its differences from ours over the replicates that both have."""
    arms = result["arms"]
    for key in ("step_ms", "peak_mib"):
        for of in arms.values():
            if len(of[key]) > 1:
                of[f"{key}_interval"] = as_dict(interval(of[key]))
        if OURS not in arms:
            continue
        for arm, of in arms.items():
            both = min(len(of[key]), len(arms[OURS][key]))
            if arm != OURS and both > 1:
                of[f"{key}_less_ours"] = as_dict(difference(of[key][:both], arms[OURS][key][:both]))


def repeat(scales: list[Scale], options: Options, results: list[dict], tell: Tell) -> None:
    """Puts into each result whether its arms gave the same bits in every process."""
    steps: dict[tuple[int, str], list[dict]] = {}
    serving = [arm for arm in options.arms if all("error" not in of["arms"][arm] for of in results)]
    if not serving:
        return
    try:
        for line in step_bits.processes(options.processes, scales, serving, options.device):
            told = line.get("error") or f"loss {float.fromhex(line['loss']):.9g}"
            tell(f"process {line['process'] + 1}, scale {line['scale']}, {line['arm']}: {told}")
            steps.setdefault((line["scale"], line["arm"]), []).append(line)
    finally:  # of those that have ended, whatever ended the rest
        for result in results:
            lines_of = {arm: steps.get((result["scale"], arm), []) for arm in serving}
            result["bits"] = {arm: same_bits(lines) for arm, lines in lines_of.items() if len(lines) > 1}


def same_bits(lines: list[dict]) -> dict:
    """What the processes' lines of one arm say; the first error where there is one."""
    failed = next((line["error"] for line in lines if "error" in line), None)
    if failed:
        return {"error": failed}
    warned = sorted({name for line in lines for name in line["not_deterministic"]})
    return {**step_bits.compare(lines), "not_deterministic": warned}
