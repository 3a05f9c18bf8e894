# SPDX-License-Identifier: Apache-2.0
"""What `python -m steadynorm bench step` measured, as the page shows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import step_report
from .bars import Bars
from .results import Results, commit, reading


@dataclass(frozen=True)
class StepScale:
    """One size of the network; `arms` and `items` are lines of tables, the first of `items` its head."""

    title: str
    head: tuple[str, ...]
    arms: list[tuple[str, ...]]
    outcome: list[str]  # what failed, what was not served by the native kernel, what is unclaimed
    items: list[list[str]]
    bars: Bars | None
    told: list[str]  # bits, differences, losses

    @property
    def named_arms(self) -> list[list[str]]:
        """Each arm, and its figures with their names."""
        _, *names = self.head
        return [[arm, *(f"{name} {text}" for name, text in zip(names, cells, strict=True))]
                for arm, *cells in self.arms]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """One file."""

    file: str
    title: str
    measured: str  # device, date and commit
    introduction: str
    command: str
    scales: list[StepScale]


def command(options: dict) -> str:
    """The command that measures the same again."""
    words = ["--scales", ",".join(map(str, options["scales"])), "--width", str(options["width"])]
    if options["trace_difference"]:
        words += ["--trace-difference", ",".join(options["trace_difference"])]
    else:
        words += ["--arms", ",".join(options["arms"]), "--parts", ",".join(options["parts"])]
    for name in ("replicates", "steps", "loss_steps", "processes"):
        words += [f"--{name.replace('_', '-')}", str(options[name])]
    return f".venv/bin/python -m steadynorm bench step {' '.join(words)}"


def introduction(data: dict) -> str:
    versions, options = data["versions"], data["options"]
    named = [f"driver {data['driver']}"] + [
        f"{name} {versions[name]}" for name in ("torch", "cudnn", "triton") if versions.get(name)
    ]
    arms = {arm: of["told"] for scale in data["scales"] for arm, of in scale["arms"].items()}
    text = (
        f"{data['device']}, {data['date']}, commit {commit(data)}, {', '.join(named)}. Forward, loss, "
        "backward and optimiser of the demo's 3-D U-Net: bf16 autocast, channels_last_3d, batch 1, GroupNorm "
        f"in 8 groups and ReLU, a {data['volume']} volume. Arms share one network and take turns: "
        f"{options['replicates']} replicates, in each {options['steps']} timed "
        f"{'step' if options['steps'] == 1 else 'steps'} of every arm; mean ± half of the 95 % interval "
        "(Student's t), differences from ours within a replicate. Peak: the most that PyTorch's allocator "
        "held in a step, weights, gradients and momentum included; one figure where all replicates agree. "
        "Device time is that of one more step, profiled. "
    )
    text += "; ".join(f"{arm}: {told}" for arm, told in arms.items()) + "."
    return text + (f" Stopped early: {data['stopped']}." if data["stopped"] else "")


def bars_of(file: str, data: dict, result: dict) -> Bars | None:
    if not result.get("items"):
        return None
    name = f"{file.removesuffix('.json')}-{result['scale']}"
    told = f"{data['device']}, {data['date']}, commit {commit(data)}"
    title = f"Device time of a step at scale {result['scale']} ({told})"
    bars = {arm: {row: us / 1e3 for row, us in of["rows_us"].items()} for arm, of in result["items"].items()}
    values = [ms for of in bars.values() for ms in of.values()]
    if not all(0 <= ms < math.inf for ms in values) or not any(values):
        raise ValueError(f"device times must be finite and not all 0, at scale {result['scale']}")
    return Bars(name, title, "ms", bars)


def step(file: str, data: dict) -> Step:
    scales = [
        StepScale(
            f"{data['device']}, {step_report.title(result)}", step_report.ARM_HEAD,
            step_report.arm_lines(result), step_report.outcome(result),
            step_report.item_lines(result) if result.get("items") else [], bars_of(file, data, result),
            step_report.told(result),
        )
        for result in data["scales"]
    ]  # fmt: skip
    measured = f"{data['device']}, {data['date']}, commit {commit(data)}"
    return Step(file, f"A training step: {data['device']}", measured, introduction(data),
                command(data["options"]), scales)  # fmt: skip


def steps(results: Results) -> list[Step]:
    """One for each file, the newest first."""
    made = []
    for file, data in results.steps.items():
        with reading(file):
            made.append((data["date"], file, step(file, data)))
    return [of for *_, of in sorted(made, key=lambda of: of[:2], reverse=True)]
