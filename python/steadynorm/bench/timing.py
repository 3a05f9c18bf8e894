# SPDX-License-Identifier: Apache-2.0
"""Device time of a captured graph, and wall time of a call.

A replay is timed between two events, after a read of 256 MiB that leaves nothing of the operands in L2. The
sweep is launched before the first event, so it is not part of the time, and it runs long enough to hide the
host's work. What the same pair of events shows around an empty kernel's graph is subtracted. All graphs of a
case are replayed in turn, so that drift of the clocks reaches each alike.

The wall time of a call is that of a loop of calls over their number; a device is waited for at the end of the
loop alone. Loops of all functions are run in turn.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

SWEEP_BYTES = 256 << 20
COPY_BYTES = 1 << 30
WARM_UPS = 2
MIN_REPEATS, MAX_REPEATS = 7, 40
SLOW_MS, SLOW_REPEATS = 50.0, 5  # graphs slower than this move little from one replay to the next
CPU_COPY_BYTES = 1 << 28
LOOP_MS, MAX_CALLS = 5.0, 200  # of a loop of calls: the clock and the wait at its end are little of it


@dataclass(frozen=True)
class Time:
    """Microseconds, less the empty graph's median; p10 and p90 are the spread over repeats."""

    median_us: float
    p10_us: float
    p90_us: float
    repeats: int

    def as_dict(self) -> dict:
        return asdict(self)


def quantile(ordered: list[float], share: float) -> float:
    """Linear between the two nearest of an ordered, non-empty list."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(samples_ms: list[float], overhead_ms: float = 0.0) -> Time:
    net = sorted(1e3 * (sample - overhead_ms) for sample in samples_ms)
    return Time(
        round(statistics.median(net), 3), round(quantile(net, 0.1), 3), round(quantile(net, 0.9), 3), len(net)
    )


def disturbed(empty_ms: list[float]) -> bool:
    """Whether something else held the device or the driver: an empty kernel takes the same time each time."""
    return statistics.median(empty_ms) > 2 * min(empty_ms)


def undisturbed(
    sample: Callable[[], dict[str, list[float]]], tries: int = 4
) -> tuple[dict[str, list[float]], bool]:
    """What `sample()` measured, "empty" among it, and whether it is to be trusted: again while it is not."""
    for _ in range(tries):
        samples = sample()
        if not disturbed(samples["empty"]):
            return samples, True
    return samples, False


def spread_turns(counts: dict[str, int]) -> list[list[str]]:
    """Who is replayed in each turn, so that each name comes `counts[name]` times, evenly over all turns."""
    turns = max(counts.values())
    return [
        [name for name, count in counts.items() if (turn + 1) * count // turns > turn * count // turns]
        for turn in range(turns)
    ]


def repeats_within(budget_ms: float, ms: float) -> int:
    """How often what takes `ms` is repeated."""
    if ms > SLOW_MS:
        return SLOW_REPEATS
    return max(MIN_REPEATS, min(MAX_REPEATS, int(budget_ms / (ms + 0.1))))


def wall_times(
    functions: dict[str, Callable[[], object]],
    budget_ms: float,
    repeats: int | None = None,
    synchronize: Callable[[], object] = lambda: None,
) -> dict[str, Time]:
    """Wall time of one call of each function: where a device works too, the slower of it and the host."""

    def loop_ms(function: Callable[[], object], calls: int) -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize()
        return 1e3 * (time.perf_counter() - began)

    calls, counts = {}, {}
    for name, function in functions.items():
        loop_ms(function, WARM_UPS)
        ms = loop_ms(function, 1)
        calls[name] = max(1, min(MAX_CALLS, math.ceil(LOOP_MS / ms)))
        counts[name] = repeats or repeats_within(budget_ms, ms * calls[name])
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for names in spread_turns(counts) if counts else []:
        for name in names:
            samples[name].append(loop_ms(functions[name], calls[name]) / calls[name])
    return {name: summarise(values) for name, values in samples.items()}


class CpuTimer:
    """Times calls on the CPU by the wall clock, with caches as the calls leave them."""

    device = "cpu"

    def __init__(self, budget_ms: float, repeats: int | None = None):
        self.budget_ms, self.repeats = budget_ms, repeats

    def prepare(self, function: Callable[[], object]) -> Callable[[], object]:
        return function

    def measure(self, functions: dict[str, Callable[[], object]]) -> dict[str, Time]:
        return wall_times(functions, self.budget_ms, self.repeats)

    def calls(self, functions: dict[str, Callable[[], object]]) -> dict[str, Time]:
        """Nothing: `measure` has it."""
        return {}

    def copy_rate(self) -> float:
        """Bytes read and written per second by a copy of 256 MiB."""
        source = torch.ones(CPU_COPY_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        time = self.measure({"copy": lambda: target.copy_(source)})["copy"]
        return 2 * source.numel() / (time.median_us * 1e-6)


def capture(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`function` as a graph, after warm-ups on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@dataclass(frozen=True)
class Launch:
    """What has a graph's `replay` and is launched on the stream instead."""

    replay: Callable[[], object]


def capture_copy(target: torch.Tensor, source: torch.Tensor) -> torch.cuda.CUDAGraph | Launch:
    """A device-to-device copy at the best rate that the driver gives it.

    As a graph's node a copy of 512 MiB runs at 2.7 TB/s and from the stream at 4.1; at 256 MiB the node is
    the faster one, 4.1 against 3.9 (H200, driver 580.159.04, 2026-11-30).
    """
    if source.numel() * source.element_size() > 256 << 20:
        return Launch(lambda: target.copy_(source))
    return capture(lambda: target.copy_(source))


class Timer:
    """Times graphs on the current device with a cold L2."""

    device = "cuda"

    def __init__(self, budget_ms: float, repeats: int | None = None):
        self.budget_ms = budget_ms  # device time to spend on a graph's repeats
        self.repeats = repeats  # None: as many as the budget holds
        buffer = torch.ones(SWEEP_BYTES // 4, device="cuda")
        self._buffer = buffer
        self._sweep = capture(buffer.sum)
        self._empty = capture(lambda: torch.cuda._sleep(0))

    def _replay(self, graph: torch.cuda.CUDAGraph | Launch) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._sweep.replay()
        start.record()
        graph.replay()
        end.record()
        return start, end

    def _once(self, graph: torch.cuda.CUDAGraph | Launch) -> float:
        start, end = self._replay(graph)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    def _repeats(self, graph: torch.cuda.CUDAGraph | Launch) -> int:
        self._once(graph)
        return self.repeats or repeats_within(self.budget_ms, self._once(graph))

    def prepare(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        return capture(function)

    def calls(self, functions: dict[str, Callable[[], object]]) -> dict[str, Time]:
        """Wall time of an eager call of each function, without a graph."""
        return wall_times(functions, self.budget_ms, self.repeats, torch.cuda.synchronize)

    def measure(self, graphs: dict[str, torch.cuda.CUDAGraph | Launch]) -> dict[str, Time]:
        """Time of each graph, interleaved with the others and with the empty one.

        Raises RuntimeError where even an empty kernel's time does not repeat.
        """
        graphs = {"empty": self._empty, **graphs}
        counts = {name: self._repeats(graph) for name, graph in graphs.items()}

        def sample() -> dict[str, list[float]]:
            samples: dict[str, list[float]] = {name: [] for name in graphs}
            for names in spread_turns(counts):
                events = {name: self._replay(graphs[name]) for name in names}
                torch.cuda.synchronize()
                for name, (start, end) in events.items():
                    samples[name].append(start.elapsed_time(end))
            return samples

        samples, trusted = undisturbed(sample)
        if not trusted:
            empty = statistics.median(samples["empty"]) * 1e3
            raise RuntimeError(
                f"an empty kernel must take the same time each time, got a median of {empty:.1f} us "
                f"and a least of {min(samples['empty']) * 1e3:.1f}: is the device used by others?"
            )
        overhead = statistics.median(samples["empty"])
        result = {name: summarise(values, overhead) for name, values in samples.items() if name != "empty"}
        result["empty"] = summarise(samples["empty"])
        return result

    def copy_rate(self) -> float:
        """Bytes read and written per second by a device-to-device copy of 1 GiB (less on a small device)."""
        free, _ = torch.cuda.mem_get_info()
        size = min(COPY_BYTES, free // 4)
        source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        time = self.measure({"copy": capture_copy(target, source)})["copy"]
        return 2 * size / (time.median_us * 1e-6)
