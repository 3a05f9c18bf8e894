# SPDX-License-Identifier: Apache-2.0
"""What is measured beside the loss: every GroupNorm site, its time, and a step's peak memory."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

MIB = 2.0**20


def format_name(x: torch.Tensor) -> str:
    if x.is_contiguous():
        return "contiguous"
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    return "strided"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Census:
    """Notes at every training step what each GroupNorm site returns, and which rung served it."""

    sites: list[tuple[str, nn.GroupNorm]]
    last_rung: object = None  # () -> str, for our arm
    seen: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    handles: list = field(default_factory=list)

    def __post_init__(self):
        for name, module in self.sites:
            self.seen[name] = []
            self.handles.append(module.register_forward_hook(self.hook(name)))

    def hook(self, name: str):
        def note(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
            rung = self.last_rung() if self.last_rung else "stock"
            row = (dtype_name(out.dtype), format_name(out), rung)
            if row not in self.seen[name]:
                self.seen[name].append(row)
            if name not in self.inputs:  # the shape and strides are kept, not the values
                self.inputs[name] = torch.empty_like(args[0], device="meta")

        return note

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def rows(self) -> list[dict[str, str]]:
        """One row a site; where steps differed, every value that was seen."""
        keys = ("out_dtype", "memory_format", "rung")

        def columns(seen):
            return zip(keys, zip(*seen, strict=True), strict=True)

        return [
            {"name": name, **{k: ", ".join(dict.fromkeys(v)) for k, v in columns(seen)}}
            for name, seen in self.seen.items()
            if seen
        ]


def site_ms(
    site: nn.Module, act: nn.Module, like: torch.Tensor, device: torch.device, repeats: int = 7
) -> float:
    """Median ms of one GroupNorm site alone, forward and backward, at its recorded input.

    Normalisation, activation, and the cast and relayout that bring the result back to what the
    next convolution reads; the same for both arms, so that conversions hidden behind a
    normalisation are counted where they come from.
    """
    x = torch.randn(like.shape, device=device, dtype=like.dtype)
    x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device).copy_(x)
    grad = torch.randn_like(x)
    x.requires_grad_()
    layout = torch.channels_last_3d
    times = []
    # On a GPU a launch is shorter than its wait: several calls share one synchronisation.
    calls = 10 if device.type == "cuda" else 1
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            with torch.autocast(device.type, torch.bfloat16):
                y = act(site(x))
            y.to(grad.dtype, memory_format=layout).backward(grad)
            x.grad = None
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3 / calls)
    site.zero_grad(set_to_none=True)
    return statistics.median(times[2:])


def rest_ms(step: dict | None, norm: float | None) -> float | None:
    """A step's median without its GroupNorms, or None where there is no telling: the sites are timed after
    training, and a machine that is busier then makes them longer than the step that they are a part of."""
    if step is None or norm is None or norm > step["median"]:
        return None
    return step["median"] - norm


def partner(model: nn.Module, name: str) -> nn.Module:
    """The activation that stands beside the normalisation `name`."""
    return model.get_submodule(name.replace("norm", "act"))


def norm_ms(model: nn.Module, census: Census, device: torch.device) -> dict[str, float]:
    """Median ms of every site of one arm."""
    return {
        name: site_ms(module, partner(model, name), census.inputs[name], device)
        for name, module in census.sites
        if name in census.inputs
    }


class PeakMemory:
    """The most tensor memory that a step holds beyond what was there when it began: activations,
    gradients and workspaces, not weights and optimiser state. On a GPU the allocator counts it."""

    def __init__(self, device: torch.device):
        self.device, self.peak_mib = device, None
        self.cuda = device.type == "cuda"

    @contextlib.contextmanager
    def step(self):
        if not self.cuda:
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield
        peak = (torch.cuda.max_memory_allocated(self.device) - before) / MIB
        self.peak_mib = max(self.peak_mib or 0.0, peak)

    def trace(self, run_step) -> None:
        """On a CPU nothing counts along, so one more step is traced with every allocation."""
        if self.cuda:
            return
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
            run_step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        changes = sorted(
            (e["ts"], e["args"]["Bytes"])
            for e in events
            if e.get("name") == "[memory]" and e["args"].get("Device Type") == 0
        )
        held = most = 0
        for _, size in changes:
            held += size
            most = max(most, held)
        if changes:
            self.peak_mib = most / MIB


def spread(values: list[float]) -> dict[str, float] | None:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]} if values else None
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def running_mean(values: list[float], width: int = 10) -> list[float]:
    """Means of `width` consecutive values; of all of them where there are fewer."""
    width = max(1, min(width, len(values)))
    return [sum(values[i : i + width]) / width for i in range(len(values) - width + 1)]


def max_relative_gap(reference: list[float], other: list[float]) -> float | None:
    """The largest relative distance of the two running means of 10 losses."""
    pairs = zip(running_mean(reference), running_mean(other), strict=True)
    return max((abs(b - a) / abs(a) for a, b in pairs), default=None)
