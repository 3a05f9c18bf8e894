# SPDX-License-Identifier: Apache-2.0
"""Runs the chosen benchmarks on a GPU and writes what was measured, also when it is stopped early."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from steadynorm import last_rung
from steadynorm.bench import arms, errors
from steadynorm.bench.arms import Operands
from steadynorm.bench.timing import Timer, capture, capture_copy

from . import output, report
from .precompile import precompile

PRECOMPILE_SHARE = 0.5  # of what is left of the budget
PRECOMPILE_SECONDS = 240.0


def step_peak(function, o: Operands) -> tuple[tuple[torch.Tensor, ...], float]:
    """(y, dx, dweight, dbias) of a forward and backward, and the MiB that it allocates at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = arms.training_step(function, o)
    torch.cuda.synchronize()
    return result, round((torch.cuda.max_memory_allocated() - before) / 2**20, 3)


class Bench:
    """One run: the timer, the copy rate, and the rows so far."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.timer = Timer(options.repeat_ms)
        self.copy_rate = self.timer.copy_rate()
        self.rows: list[dict] = []
        self.our_failures = 0

    def job(self, case, dtype: str, activation_set: str, activation: str) -> str:
        """Measures every pass of one case; returns the line that tells of it."""
        torch._dynamo.reset()  # each case compiles for its own sizes
        o = arms.operands(case, dtype, activation)
        functions = arms.arms_of(case, self.options.peers)
        found: dict[str, dict] = {arm: {} for arm in functions}
        self._check(functions, o, found)
        told = []
        for which in self.options.passes:
            times = self._time(which, functions, o, found)
            row = self._row(case, dtype, activation_set, activation, which, times, found, o)
            self.rows.append(row)
            told.append(", ".join(f"{arm} {report.cell(of)}" for arm, of in row["arms"].items()))
        self.our_failures += "error" in found["ours"]
        return " | ".join(told)

    def _check(self, functions: dict, o: Operands, found: dict[str, dict]) -> None:
        """Peak memory and error of each arm, and what served ours. An arm that fails here is not timed."""
        results = {}
        for arm, function in functions.items():
            try:
                arms.training_step(function, o)  # compiles, loads, allocates the libraries' own workspaces
                result, found[arm]["peak_mib"] = step_peak(function, o)
                results[arm] = result[:2]
                if arm == "ours":
                    found[arm]["rung"] = last_rung()
            except Exception as error:
                found[arm] = output.failure(error)
            result = None
        self.checked = "nothing"
        if self.options.no_errors or not results:
            return
        try:
            worst, self.checked = errors.measure(o, results)
            for arm, of in worst.items():
                found[arm].update(of)
        except torch.OutOfMemoryError:
            self.checked = "nothing: out of memory"

    def _time(self, which: str, functions: dict, o: Operands, found: dict[str, dict]) -> dict:
        target = torch.empty_like(o.x, requires_grad=False)
        source = o.x.detach()
        graphs = {"copy": capture_copy(target, source)}
        for arm, function in functions.items():
            if "error" in found[arm]:
                continue
            try:
                if which == "forward":  # as in training: with a graph recorded
                    graphs[arm] = capture(lambda function=function: function(o))
                else:
                    graphs[arm] = capture(lambda function=function: arms.training_step(function, o))
            except Exception as error:
                found[arm] = output.failure(error)
        return self.timer.measure(graphs)

    def _row(self, case, dtype, activation_set, activation, which, times, found, o: Operands) -> dict:
        size = case.bytes(dtype)
        least = {"forward": 2, "forward_backward": 5}[which] * size
        floor_us = 1e6 * least / self.copy_rate
        timed = {}
        for arm, of in found.items():
            timed[arm] = dict(of)
            if arm in times:
                timed[arm].update(times[arm].as_dict(), over_floor=round(times[arm].median_us / floor_us, 3))
        return {
            "name": report.benchmark_name(which, case.layout, dtype, activation, case.name),
            "case": case.name, "shape": list(case.shape), "groups": case.groups, "layout": case.layout,
            "dtype": dtype, "set": activation_set, "activation": activation, "pass": which,
            "tensor_bytes": size, "least_bytes": least, "floor_us": round(floor_us, 3),
            "copy": times["copy"].as_dict(), "empty": times["empty"].as_dict(),
            "errors_of": self.checked, "arms": timed,
        }  # fmt: skip


def run(options: argparse.Namespace, jobs: list, head: dict, path: Path, deadline: float) -> int:
    """Measures `jobs` until `deadline`, writes `path`, prints the tables; returns the exit status."""
    began = time.monotonic()
    options.peers = arms.available(options.peers)
    with_activation = [
        (case, dtype, chosen, "none" if chosen == "none" else case.activation) for case, dtype, chosen in jobs
    ]
    if "inductor" in options.peers and not options.no_precompile:
        seconds = min(PRECOMPILE_SECONDS, PRECOMPILE_SHARE * (deadline - began))
        done, took = precompile(
            [(case, dtype, activation) for case, dtype, _, activation in with_activation], seconds
        )
        print(f"compiled {done} of {len(jobs)} for Inductor beforehand in {took:.0f} s", flush=True)
    bench = Bench(options)
    print(f"{head['device']}: copy rate {bench.copy_rate / 1e12:.3f} TB/s", flush=True)
    stopped = None
    try:
        for index, (case, dtype, activation_set, activation) in enumerate(with_activation, 1):
            if time.monotonic() > deadline:
                stopped = (
                    f"the budget of {options.budget_seconds:g} s was spent after {index - 1} of {len(jobs)}"
                )
                break
            try:
                told = bench.job(case, dtype, activation_set, activation)
                torch.cuda.empty_cache()
            except torch.OutOfMemoryError as error:
                told = f"left out: {output.failure(error)['error']}"
                torch.cuda.empty_cache()
            except RuntimeError as error:  # of the device itself: nothing after it can be trusted
                stopped = f"{case.name} {dtype} {activation}: {output.failure(error)['error']}"
                bench.our_failures += 1
                break
            output.save(path, {**head, "stopped": "not finished"}, bench.rows)
            spent = time.monotonic() - began
            print(
                f"[{index}/{len(jobs)}] {case.name} {dtype} {activation}: {told}  [{spent:.0f} s]", flush=True
            )
        else:
            head["copy_bytes_per_second_end"] = round(bench.timer.copy_rate())
    except KeyboardInterrupt:
        stopped = "interrupted"
    head.update(
        copy_bytes_per_second=round(bench.copy_rate),
        seconds=round(time.monotonic() - began, 1),
        stopped=stopped,
    )
    saved = output.save(path, head, bench.rows)
    shown = [arm for arm in arms.ARMS if arm == "ours" or arm in options.peers]
    print("\n" + report.table(bench.rows, shown, [case.name for case in options.cases]))
    print("\nerror: beyond one rounding, in 2^-24 of the largest term, of the tensors that were timed; "
          "peak: MiB that one forward and backward allocate beyond their operands")  # fmt: skip
    if stopped:
        print(f"stopped early: {stopped}")
    if saved:
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB)")
    if stopped == "interrupted":
        return 130
    return 1 if bench.our_failures or not saved else 0
