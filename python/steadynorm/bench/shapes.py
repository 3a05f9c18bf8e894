# SPDX-License-Identifier: Apache-2.0
"""GroupNorm alone, at shapes that the user names, beside what else is installed."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from .. import rungs
from ..eager import ACTIVATIONS
from . import arms, cases, errors, machine, output, provenance, timing
from .options import Parser, above_zero, whole, words, writable
from .session import session

PASSES = ("forward", "training")
LEAST_TENSORS = {"forward": 2, "training": 5}  # read x, write y; backward: read x and dy, write dx
BUDGET_MS = {"cuda": 40.0, "cpu": 400.0}  # of the repeats of one arm
MOST_BYTES = {"cuda": math.inf, "cpu": 256 << 20}  # of a named case in fp32
EPILOG = """\
examples:
  python -m steadynorm bench --shape 2,320,128,128 --channels-last --activation silu
  python -m steadynorm bench --shape 1,32,128,128,128 --shape 1,64,64,64,64 --groups 8 --channels-last \\
      --activation relu --pass training --json times.json --plot times.png
  python -m steadynorm bench --shape 16,512,4096 --dtype bf16,fp32 --peers eager --device cpu
  python -m steadynorm bench --cases all --dtype fp32,bf16 --device cpu --budget 600

other benchmarks, each with a --help of its own:
  bench step         a training step of a full-size 3-D U-Net
  bench inference    a VAE decoder and a video VAE block

columns:
  time       GPU: device time of a CUDA graph's replay with a cold L2. CPU: wall time of a call, caches warm.
             Median of the repeats, all arms in turn; in brackets the spread, 10 to 90 % of them.
  / floor    over the time of the least bytes at the rate of a copy in the same run: 2 times the tensor
             forward (read x, write y), 5 times forward + backward (3 more: read x and dy, write dx)
  / ours     over our time: above 1, ours is faster
  call       GPU: wall time of a call without a graph, in a loop of them: the slower of host and device
  error      the worst of y (forward) or dx (training) against float64 beyond one rounding, in 2^-24 of the
             largest term. Without an activation ours may have 8 for y and 16 for dx
  rung       what served our call
  format     of y: kept, or restored by a copy that the time includes, or lost

exit status: 0 done, 1 our arm or writing failed, 2 bad options, 130 interrupted; what was measured is written
"""


@dataclass(frozen=True)
class Job:
    """One call to time: x is [N, C, *]; forward is without gradients, training with a backward. `case` is the
    shape's name, where it has one.
    """

    shape: tuple[int, ...]
    groups: int
    layout: str
    dtype: str
    activation: str
    which: str
    case: str | None = None

    @property
    def bytes(self) -> int:
        """Size of x."""
        return math.prod(self.shape) * arms.DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        call = f"{shape}, {self.groups} groups, {self.layout}, {self.dtype}, {self.activation}"
        call = f"{self.case}, {call}" if self.case else call
        return f"{call}: {'forward' if self.which == 'forward' else 'forward + backward'}"


def shape_from(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"must be N,C,*, two or more sizes above 0, got '{text}'")
    return tuple(map(int, sizes))


def picture(text: str) -> Path:
    path = writable(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"must name a .png or .svg file, got '{text}'")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib (pip install matplotlib), got none")
    return path


def named(text: str) -> list[cases.Case]:
    """An argument type: cases by the beginnings of their names, or all, from small to large."""
    root = provenance.repository()
    if root is None:
        raise argparse.ArgumentTypeError("needs a checkout, which has cases/cases.csv, got none")
    every = [*cases.read_cases(root / "cases" / "cases.csv"), *cases.small_cases()]
    chosen = [case for case in every if text == "all" or case.name.startswith(tuple(text.split(",")))]
    if not chosen or "" in text.split(","):
        raise argparse.ArgumentTypeError(
            f"must be all or beginnings of names in cases/cases.csv, got '{text}'"
        )
    return sorted(chosen, key=lambda case: case.elements)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m steadynorm bench", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--shape", dest="shapes", action="append", type=shape_from, metavar="N,C,*",
        help="sizes of x; repeat it for more shapes")  # fmt: skip
    add("--cases", type=named, metavar="NAMES", help="instead of --shape, --groups and --channels-last, in a "
        "checkout: shapes of cases/cases.csv and small ones by the beginnings of names, between commas, "
        "or all; on the CPU those of at most 256 MiB in fp32")  # fmt: skip
    add("--groups", type=whole(1), metavar="G", help="default: 32")
    add("--channels-last", action="store_true", help="x in channels_last (4-D) or channels_last_3d (5-D)")
    add("--dtype", type=words(tuple(arms.DTYPES)), default=["bf16"], help="bf16,fp16,fp32 (default: bf16)")
    add("--activation", type=words(tuple(ACTIVATIONS)), default=["none"],
        help=f"{','.join(ACTIVATIONS)} (default: none)")  # fmt: skip
    add("--pass", dest="which", choices=(*PASSES, "both"), default="both",
        help="forward without gradients, training: forward + backward, or both (default)")  # fmt: skip
    add("--peers", type=words(arms.PEERS), metavar="PEERS",
        help="eager (F.group_norm), inductor (the same under torch.compile), liger (contiguous alone); "
        "default: those installed")  # fmt: skip
    add("--device", choices=machine.DEVICES, default=machine.default_device(),
        help="default: cuda where there is a GPU")  # fmt: skip
    add("--repeats", type=whole(3), metavar="R", help="of each time (default: 5 to 40, by how long it takes)")
    add("--budget", type=above_zero("seconds"), default=math.inf, metavar="SECONDS",
        help="start nothing after this")  # fmt: skip
    add("--json", type=writable, metavar="FILE", help="write every number there too")
    add("--commit", help="the commit to record, where no repository tells (a copied tree)")
    add("--plot", type=picture, metavar="FILE", help="draw the times: a .png or .svg; needs matplotlib")
    options = parser.parse_args(arguments)
    if options.cases:
        if options.shapes or options.groups or options.channels_last:
            parser.error("--cases: has shapes, groups and layouts of its own, got --shape, --groups or "
                         "--channels-last too")  # fmt: skip
        most = MOST_BYTES[options.device]
        options.cases = [case for case in options.cases if case.bytes("fp32") <= most]
        if not options.cases:
            parser.error("--cases: must have one of at most 256 MiB on the CPU, got none")
    elif not options.shapes:
        parser.error("--shape: must be given, expected N,C,*, got none (--help has examples)")
    options.shapes, options.groups = options.shapes or [], options.groups or 32
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda needs a GPU that PyTorch can use, got none")
    for shape in options.shapes:
        told = ",".join(map(str, shape))
        if shape[1] % options.groups:
            parser.error(f"--groups: must divide the channels, got {options.groups} for shape {told}")
        if options.channels_last and len(shape) not in (4, 5):
            parser.error(f"--channels-last: needs shapes of rank 4 or 5, got {told}")
    if options.peers is None:
        options.peers = arms.available(arms.PEERS, options.device)
    for peer in options.peers:
        if (need := arms.missing(peer, options.device)) is not None:
            parser.error(f"--peers: {peer} needs {need}, got none")
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    layout = "channels_last" if options.channels_last else "contiguous"
    passes = PASSES if options.which == "both" else (options.which,)
    shapes = [(shape, options.groups, layout, None) for shape in options.shapes]
    shapes += [(case.shape, case.groups, case.layout, case.name) for case in options.cases or ()]
    every = itertools.product(shapes, options.dtype, options.activation, passes)
    return [Job(*shape, *rest, name) for (*shape, name), *rest in every]


def format_of(arm: str, y: torch.Tensor, o: arms.Operands) -> str:
    """What became of x's memory format. The stock arms restore it where stock loses it."""
    if not y.is_contiguous(memory_format=o.memory_format):
        return "lost"
    if arm not in ("eager", "inductor"):
        return "kept"
    with torch.no_grad():
        plain = F.group_norm(o.x, o.groups, o.weight, o.bias, arms.EPS)
    return "kept" if plain.is_contiguous(memory_format=o.memory_format) else "restored"


def measure(job: Job, peers: list[str], timer: timing.Timer | timing.CpuTimer, copy_rate: float) -> dict:
    """The row of one job: what each arm takes, how right it is, or the error that it ended with."""
    torch._dynamo.reset()  # each job compiles for its own sizes
    training = job.which == "training"
    o = arms.operands(job, job.dtype, job.activation, timer.device, gradients=training)
    functions: dict[str, Callable[[], object]] = {}
    found: dict[str, dict] = {}
    results = {}
    for arm, function in arms.arms_of(job, peers).items():
        output.progress(f"{job}: {arm}", detail=True)
        step = arms.training_step if training else lambda function, o: (function(o),)
        call = lambda function=function, step=step: step(function, o)  # noqa: E731
        try:
            result = call()[:2]  # y, dx; compiles
            found[arm] = {"format": format_of(arm, result[0], o)}
            if arm == "ours":
                found[arm]["rung"] = rungs.last_rung()
            results[arm] = result
            functions[arm] = call
        except Exception as error:
            found[arm] = output.failure(error)
    checked = "nothing"
    if results:
        output.progress(f"{job}: errors", detail=True)
        try:
            worst, checked = errors.measure(o, results)
            for arm, of in worst.items():
                found[arm].update(of)
        except RuntimeError as error:  # no memory, as a rule: the CPU's allocator names it no further
            checked = f"nothing: {output.failure(error)['error']}"
        del result
        results.clear()
    output.progress(f"{job}: times", detail=True)
    prepared = {}
    for arm, call in list(functions.items()):
        try:
            prepared[arm] = timer.prepare(call)
        except Exception as error:
            found[arm].update(output.failure(error))
            del functions[arm]
    times = timer.measure(prepared)
    calls = timer.calls(functions)
    least = LEAST_TENSORS[job.which] * job.bytes
    floor_us = 1e6 * least / copy_rate
    for arm in functions:
        of = times[arm].as_dict()
        found[arm].update(of, over_floor=of["median_us"] / floor_us)
        if "ours" in functions:
            found[arm]["over_ours"] = of["median_us"] / times["ours"].median_us
        if arm in calls:
            found[arm]["call_us"] = calls[arm].median_us
    return {
        **asdict(job), "tensor_bytes": job.bytes, "least_bytes": least, "floor_us": floor_us,
        "errors_of": checked, "arms": found,
    }  # fmt: skip


def table(job: Job, row: dict) -> str:
    """The rows of the arms under one line that names the job."""
    which = "dx" if job.which == "training" else "y"
    on_gpu = any("call_us" in of for of in row["arms"].values())
    head = [
        "",
        "time",
        "spread",
        "/ floor",
        "/ ours",
        *["call"] * on_gpu,
        f"error of {which}",
        "rung",
        "format",
    ]
    lines, failures = [head], []
    for arm, of in row["arms"].items():
        if "error" in of:
            failures.append(f"{arm}  failed: {' '.join(of['error'].split())}")
            continue
        spread = f"({output.format_us(of['p10_us'])} to {output.format_us(of['p90_us'])})"
        error = of.get(f"error_{which}")
        lines.append([
            arm, output.format_us(of["median_us"]), spread, f"{of['over_floor']:.3g}",
            f"{of['over_ours']:.3g}" if "over_ours" in of else "-",
            *([output.format_us(of["call_us"])] if "call_us" in of else ["-"] * on_gpu),
            "-" if error is None else f"{error:.3g}", of.get("rung", "-"), of["format"],
        ])  # fmt: skip
    size = f"{job.bytes / 2**20:.3g} MiB, floor {output.format_us(row['floor_us'])}"
    partly = [] if row["errors_of"] == "all groups" else [f"errors of: {row['errors_of']}"]
    return "\n".join([f"{job}; {size}", *output.aligned(lines), *failures, *partly])


def draw(path: Path, told: str, jobs: list[Job], rows: list[dict]) -> None:
    """The times of every job, one line each, on a common axis; the floor is a bar across the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    for number, arm in enumerate(names):
        timed = [
            (y, row["arms"][arm]) for y, row in enumerate(rows) if "median_us" in row["arms"].get(arm, {})
        ]
        if not timed:
            continue
        at = [y + 0.6 * ((number + 0.5) / len(names) - 0.5) for y, _ in timed]
        middle, low, high = ([of[key] for _, of in timed] for key in ("median_us", "p10_us", "p90_us"))
        spread = [[m - least for m, least in zip(middle, low, strict=True)],
                  [most - m for m, most in zip(middle, high, strict=True)]]  # fmt: skip
        axes.errorbar(middle, at, xerr=spread, fmt="osD^"[number % 4], label=arm, capsize=2)
    axes.scatter(
        [row["floor_us"] for row in rows], range(len(rows)), marker="|", s=500, c="black", label="floor"
    )
    axes.set_xscale("log")
    axes.set_xlabel("us, median and 10 to 90 %")
    axes.set_yticks(range(len(rows)), [str(job) for job in jobs], fontsize=7)
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(names) + 1, fontsize=8, markerscale=0.6)
    figure.suptitle(told, fontsize=9)
    figure.savefig(path, dpi=150)


def plan(options: argparse.Namespace, jobs: list[Job], device: str) -> str:
    """What will be done, before it is; how long it takes shows after the first of them."""
    beside = f"ours beside {', '.join(options.peers)}" if options.peers else "ours"
    arms_ms = BUDGET_MS[options.device] * (1 + len(options.peers))
    return (
        f"{device}, torch {torch.__version__}: {len(jobs)} times {beside}\n"
        f"Repeats take {output.format_seconds(1e-3 * arms_ms * len(jobs))} in all; large tensors, compiling "
        "and errors take more. Ctrl-C ends it: what was measured stands."
        + (f"\n{output.destination(options.json)}" if options.json else "")
    )


def left(began: float, done: int, count: int) -> str:
    """How long the rest takes, if it is as what was done."""
    if not done:
        return ""
    return f", {output.format_seconds((time.monotonic() - began) / done * (count - done))} left"


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    jobs = jobs_of(options)
    began = time.monotonic()
    head = {**machine.head(options.device, options.commit), "threads": torch.get_num_threads()}
    print(plan(options, jobs, head["device"]), flush=True)
    told = f"{head['device']}, torch {torch.__version__}"
    rows: list[dict] = []
    stopped = None

    def save(stopped: str | None) -> bool:
        return options.json is None or output.save(options.json, {**head, "stopped": stopped}, rows)

    try:
        with session():
            output.progress("copy rate")
            budget_ms = BUDGET_MS[options.device]
            timer = {"cuda": timing.Timer, "cpu": timing.CpuTimer}[options.device](budget_ms, options.repeats)
            copy_rate = head["copy_bytes_per_second"] = timer.copy_rate()
            kind = (
                "device time, cold L2"
                if options.device == "cuda"
                else f"wall time on the CPU, {head['threads']} threads"
            )
            told += f": {kind}; copy rate {copy_rate / 1e9:.4g} GB/s"
            output.progress("")
            print(told, flush=True)
            measuring = time.monotonic()
            for number, job in enumerate(jobs, 1):
                if time.monotonic() - began > options.budget:
                    stopped = (
                        f"the budget of {options.budget:g} s was spent after {number - 1} of {len(jobs)}"
                    )
                    break
                output.progress(f"[{number}/{len(jobs)}] {job}{left(measuring, number - 1, len(jobs))}")
                try:
                    row = measure(job, options.peers, timer, copy_rate)
                    shown = table(job, row)
                except Exception as error:  # no memory for the operands, as a rule
                    row = {**asdict(job), **output.failure(error)}
                    shown = f"{job}\nleft out: {row['error']}"
                output.progress("")
                print(f"\n{shown}", flush=True)
                rows.append(row)
                save("not finished")
                if options.device == "cuda":
                    torch.cuda.empty_cache()
    except KeyboardInterrupt:
        stopped = f"interrupted after {len(rows)} of {len(jobs)}"
    output.progress("")
    if stopped:
        print(f"bench: {stopped}", file=sys.stderr)
    saved = save(stopped)
    timed = [(job, row) for job, row in zip(jobs, rows, strict=False) if "arms" in row]
    if options.plot and timed:
        try:
            draw(options.plot, told, *map(list, zip(*timed, strict=True)))
        except OSError as error:
            print(f"bench: {options.plot} could not be written: {error.strerror}", file=sys.stderr)
            saved = False
    if stopped and stopped.startswith("interrupted"):
        return 130
    return 1 if not saved or any("error" in row or "error" in row["arms"]["ours"] for row in rows) else 0
