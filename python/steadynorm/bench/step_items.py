# SPDX-License-Identifier: Apache-2.0
"""Where a step's device time goes: each kernel of a profile, by the operators that launched it, to one row.

A kernel's chain is what was open on the launching thread when it was launched, outermost first: ranges that
the step names, autograd nodes, operators with the dtypes, sizes and strides of their arguments. The first
rule of `RULES` that holds has the kernel; what none claims is named. The rows add up to the total.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SITE_RANGE = "group_norm site "
LOSS_RANGE = "loss"
UNCLAIMED = "unclaimed"
NAMED = 5  # kernels named of what is unclaimed


@dataclass(frozen=True)
class Op:
    """An operator or a range; types, dims and strides are those of its arguments, where recorded."""

    name: str
    types: tuple[str, ...] = ()
    dims: tuple[tuple[int, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Kernel:
    name: str
    us: float
    chain: tuple[Op, ...]


@dataclass(frozen=True)
class Shapes:
    """Sizes that tell what a copy copies: tensors between convolutions, and parameters."""

    activations: frozenset[tuple[int, ...]]
    parameters: frozenset[tuple[int, ...]]


def named(kernel: Kernel, *patterns: str) -> bool:
    """Whether an operator of the chain is named so; what merely encloses a node's run does not count."""
    return any(
        re.search(pattern, op.name)
        for op in kernel.chain
        if not op.name.startswith(EVALUATE)
        for pattern in patterns
    )


EVALUATE = "autograd::engine::evaluate_function"


def copy_of(kernel: Kernel) -> Op | None:
    """The copy that launched the kernel: its arguments are the target and the source."""
    found = [op for op in kernel.chain if op.name == "aten::copy_" and len(op.types) > 1 and len(op.dims) > 1]
    return found[-1] if found else None


def copies(kernel: Kernel, of: frozenset[tuple[int, ...]]) -> bool:
    op = copy_of(kernel)
    return op is not None and op.dims[0] in of


def converts(kernel: Kernel) -> bool:
    op = copy_of(kernel)
    return op is not None and op.types[0] != op.types[1]


def dense(dims: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the tensor fills its memory: contiguous, channels last or in any other order of its axes."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, dims, strict=True) if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def slice_copied(kernel: Kernel) -> bool:
    op = copy_of(kernel)
    return op is not None and len(op.strides) > 1 and not dense(op.dims[1], op.strides[1])


def summed(kernel: Kernel) -> bool:
    """A sum that the autograd engine itself makes, of the gradients of a tensor used twice."""
    return bool(kernel.chain) and kernel.chain[0].name.startswith(EVALUATE) and named(kernel, "^aten::add_?$")


FORWARD, BACKWARD = "GroupNorm forward", "GroupNorm backward"
CONVERSIONS, LAYOUT = "dtype conversions", "layout copies"
GROUP_NORM_ROWS = (FORWARD, BACKWARD, CONVERSIONS, LAYOUT)
TRANSFORMS, CONVOLUTIONS = "layout transforms in cuDNN", "convolutions"
PARAMETERS, POOLING, CONCATENATION = "parameters' conversions", "pooling", "concatenation"
SUMS, LOSS, OPTIMISER = "sums of gradients", "input, scores and loss", "optimiser"
ROWS = (
    *GROUP_NORM_ROWS, TRANSFORMS, CONVOLUTIONS, PARAMETERS, POOLING, CONCATENATION, SUMS, LOSS, OPTIMISER,
    UNCLAIMED,
)  # fmt: skip

CONVOLUTION = (
    r"^aten::(cudnn_|mkldnn_|miopen_)?_?convolution|^aten::conv(_transpose)?3d$|^ConvolutionBackward0$"
)
NORM_NODES = (
    "^NativeGroupNormBackward0$", "GroupNormFunction>$", "^CompiledFunctionBackward$", "^ReluBackward0$",
    "^ThresholdBackward0$",
)  # fmt: skip
LOSS_NODES = r"^(NllLoss\w*|LogSoftmax|Mean|SqueezeView|Add)Backward\d*$"
TRANSFORM = re.compile(
    r"nchwToNhwc|nhwcToNchw|[a-z]*(Nchw|Nhwc)\w*To\w*(Nchw|Nhwc)|tensorTransform", re.IGNORECASE
)

# In this order. Copies come before what they are made in: autocast converts inside of the reader.
RULES: tuple[tuple[str, Callable[[Kernel, Shapes], bool]], ...] = (
    (OPTIMISER, lambda k, s: named(k, "^Optimizer\\.")),
    (LOSS, lambda k, s: named(k, f"^{LOSS_RANGE}$", LOSS_NODES)),
    (POOLING, lambda k, s: named(k, "max_pool3d", "^MaxPool3D")),
    (PARAMETERS, lambda k, s: copies(k, s.parameters)),
    (CONVERSIONS, lambda k, s: copies(k, s.activations) and converts(k)),
    # Channels of what was concatenated: a gradient's slice is copied whole, whoever normalises.
    (CONCATENATION, lambda k, s: copies(k, s.activations) and slice_copied(k)),
    (LAYOUT, lambda k, s: copies(k, s.activations)),
    (LOSS, lambda k, s: copy_of(k) is not None),  # of other sizes: the volume and the scores
    (TRANSFORMS, lambda k, s: named(k, CONVOLUTION) and TRANSFORM.search(k.name) is not None),
    (CONVOLUTIONS, lambda k, s: named(k, CONVOLUTION)),
    (FORWARD, lambda k, s: named(k, f"^{SITE_RANGE}")),
    (BACKWARD, lambda k, s: named(k, *NORM_NODES)),
    (CONCATENATION, lambda k, s: named(k, "^aten::cat$", "^CatBackward0$")),
    (SUMS, lambda k, s: summed(k)),
    (LOSS, lambda k, s: bool(k.chain) and k.chain[0].name == "aten::add"),  # the two parts of the scores
)  # fmt: skip


def row_of(kernel: Kernel, shapes: Shapes) -> str:
    return next((row for row, holds in RULES if holds(kernel, shapes)), UNCLAIMED)


def itemise(kernels: Iterable[Kernel], shapes: Shapes) -> dict:
    """Microseconds of each row and in total, and the largest of what is unclaimed."""
    rows = dict.fromkeys(ROWS, 0.0)
    unclaimed: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        row = row_of(kernel, shapes)
        rows[row] += kernel.us
        if row == UNCLAIMED:
            within = kernel.chain[-1].name if kernel.chain else "no operator"
            unclaimed[f"{kernel.name[:100]} in {within}"] += kernel.us
    largest = sorted(unclaimed.items(), key=lambda item: -item[1])[:NAMED]
    total = sum(rows.values())
    caused = sum(rows[row] for row in GROUP_NORM_ROWS)
    return {
        "total_us": round(total, 1),
        "rows_us": {row: round(us, 1) for row, us in rows.items()},
        "group_norm_share": round(caused / total, 4) if total else None,
        "unclaimed": [[name, round(us, 1)] for name, us in largest],
    }


DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_KINDS = ("cuda_runtime", "cuda_driver")
HOST_KINDS = ("cpu_op", "user_annotation")


def kernels_of(events: list[dict]) -> list[Kernel]:
    """The device's kernels, copies and fills of a Chrome trace of torch.profiler, shapes recorded.

    Without any, the operators of the CPU, each by the time that is its own.
    """
    whole = [event for event in events if event.get("ph") == "X" and "cat" in event]
    threads: dict[tuple, list[dict]] = defaultdict(list)
    for event in whole:
        if event["cat"] in (*HOST_KINDS, *LAUNCH_KINDS):
            threads[event["pid"], event["tid"]].append(event)
    chains: dict[object, tuple[Op, ...]] = {}  # by correlation of the launch, and by an operator's own number
    on_host = []
    for thread in threads.values():
        on_host += nested(thread, chains)
    on_device = [event for event in whole if event["cat"] in DEVICE_KINDS]
    if not on_device:
        return on_host
    found = []
    for event in on_device:
        of = event.get("args", {})
        chain = (
            chains.get(("launch", of.get("correlation"))) or chains.get(("op", of.get("External id"))) or ()
        )
        found.append(Kernel(event["name"], float(event["dur"]), chain))
    return found


def nested(thread: list[dict], chains: dict[object, tuple[Op, ...]]) -> list[Kernel]:
    """Notes the chain of each launch and operator of one thread; returns its operators by their own time."""
    open_events: list[list] = []  # [end, Op, own time, chain]
    closed = []

    def close(until: float) -> None:
        while open_events and open_events[-1][0] <= until:
            _, op, own, chain = open_events.pop()
            closed.append(Kernel(op.name, own, chain))

    for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
        close(event["ts"])
        of = event.get("args", {})
        if event["cat"] in LAUNCH_KINDS:
            chains["launch", of.get("correlation")] = tuple(entry[1] for entry in open_events)
            continue
        if open_events:
            open_events[-1][2] -= event["dur"]
        op = Op(
            event["name"],
            tuple(of.get("Input type", ())),
            tuple(tuple(dims) for dims in of.get("Input Dims", ())),
            tuple(tuple(strides) for strides in of.get("Input Strides", ())),
        )
        chain = (*(entry[1] for entry in open_events), op)
        if event["cat"] == "cpu_op":
            chains["op", of.get("External id")] = chain
        open_events.append([event["ts"] + event["dur"], op, float(event["dur"]), chain])
    close(float("inf"))
    return closed
