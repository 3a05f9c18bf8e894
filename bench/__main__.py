# SPDX-License-Identifier: Apache-2.0
"""Command line of the benchmark harness. Without a GPU, `--help` and `--list` work."""

from __future__ import annotations

import argparse
import sys
import time

from cases import DTYPES, ROOT, Case, read_cases

from . import output, provenance, report
from .options import Parser, above_zero, default_output, words, writable
from .session import session

ACTIVATION_SETS = ("none", "fused")
PEERS = ("eager", "inductor", "liger")
# Of one case, dtype and activation: NVIDIA H200, 2026-11-30, with all passes, alone and beside all peers.
SECONDS_ALONE, SECONDS_BESIDE = 0.13, 5.0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m bench",
        description="Times steadynorm beside other implementations on this GPU: device time of a graph "
        "replay with a cold L2, over the time that the minimal bytes take at the copy rate of the same run.",
        epilog="Exit status: 0 done, 1 our arm failed somewhere, 2 no GPU or bad options, 130 interrupted. "
        "What was measured is written in every case.",
    )
    parser.add_argument("--cases", default="", help="comma-separated beginnings of case names (default: all)")
    parser.add_argument(
        "--dtypes", type=words(tuple(DTYPES)), default=list(DTYPES), help="default: bf16,fp16,fp32"
    )
    parser.add_argument(
        "--activation", type=words(ACTIVATION_SETS), default=list(ACTIVATION_SETS),
        help="none, and fused: relu for unet3d* and monai*, silu for the others (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--passes", type=words(report.PASSES), default=list(report.PASSES), help="default: both"
    )
    parser.add_argument("--peers", type=words(PEERS), default=list(PEERS), help="default: those installed")
    parser.add_argument(
        "--no-peers", dest="peers", action="store_const", const=[], help="time ours and a copy only"
    )
    parser.add_argument("--no-errors", action="store_true", help="do not compare with float64")
    parser.add_argument(
        "--budget-seconds", type=above_zero("seconds"), default=float("inf"), metavar="SECONDS",
        help="stop after this and write",
    )  # fmt: skip
    parser.add_argument(
        "--repeat-ms", type=above_zero("ms"), default=40.0, metavar="MS",
        help="device time of one graph's repeats (default: 40)",
    )  # fmt: skip
    parser.add_argument(
        "--no-precompile", action="store_true", help="compile Inductor's code one after the other"
    )
    parser.add_argument(
        "--output", type=writable, metavar="FILE", help="default: bench/results/<device>-<tag>.json"
    )
    parser.add_argument(
        "--tag", default=provenance.today(), help="part of the file's name (default: the date)"
    )
    parser.add_argument("--commit", help="the commit to record, where no repository tells (a copied tree)")
    parser.add_argument("--list", action="store_true", help="print the names of the benchmarks and exit")
    options = parser.parse_args(arguments)
    beginnings = tuple(word for word in options.cases.split(",") if word)
    options.cases = [case for case in read_cases() if not beginnings or case.name.startswith(beginnings)]
    if not options.cases:
        parser.error(f"--cases must name a case of cases/cases.csv, got '{','.join(beginnings)}'")
    return options


def jobs_of(options: argparse.Namespace) -> list[tuple[Case, str, str]]:
    """(case, dtype, activation set), in the order in which they are timed."""
    return [
        (case, dtype, chosen)
        for dtype in options.dtypes
        for chosen in options.activation
        for case in options.cases
    ]


def activation_of(case: Case, activation_set: str) -> str:
    return "none" if activation_set == "none" else case.activation


def intention(options: argparse.Namespace, jobs: int, device: str) -> str:
    """What will be done, and about how long it takes."""
    seconds = jobs * (SECONDS_BESIDE if options.peers else SECONDS_ALONE)
    beside = f"beside {', '.join(options.peers)} (those installed)" if options.peers else "ours and a copy"
    return (
        f"bench: {device}: {jobs} times {' and '.join(options.passes)}, {beside}: "
        f"{output.format_seconds(seconds)} on an NVIDIA H200\n{output.destination(options.output)}"
    )


def list_names(options: argparse.Namespace) -> None:
    for case, dtype, chosen in jobs_of(options):
        for which in options.passes:
            print(report.benchmark_name(which, case.layout, dtype, activation_of(case, chosen), case.name))


def require_gpu() -> None:
    """Exits with status 2 and one sentence when nothing can be timed here."""
    try:
        import torch

        if torch.cuda.is_available():
            import steadynorm  # noqa: F401

            return
        message = (
            "bench: needs a CUDA GPU that PyTorch can use, got none (--list and --help work without; for a "
            "CPU: python -m steadynorm bench --cases all --device cpu)"
        )
    except ImportError as error:
        message = f"bench: needs PyTorch and the installed package, got: {error}"
    print(message, file=sys.stderr)
    sys.exit(2)


def describe(options: argparse.Namespace) -> dict:
    """The head of the file of results."""
    from steadynorm.bench import machine

    unshown = ("cases", "output", "list", "commit")
    shown = {key: value for key, value in vars(options).items() if key not in unshown}
    shown["budget_seconds"] = None if options.budget_seconds == float("inf") else options.budget_seconds
    cases = [case.name for case in options.cases]
    return {**machine.head("cuda", options.commit), "options": {**shown, "cases": cases}}


def main() -> int:
    options = parse_arguments()
    if options.list:
        list_names(options)
        return 0
    require_gpu()
    deadline = time.monotonic() + options.budget_seconds
    head, jobs = describe(options), jobs_of(options)
    name = f"{provenance.slug(head['device'])}-{options.tag}.json"
    options.output = options.output or default_output(ROOT / "bench" / "results" / name)
    print(intention(options, len(jobs), head["device"]), flush=True)
    try:
        with session():
            from .run import run

            return run(options, jobs, head, options.output, deadline)
    except KeyboardInterrupt:
        print("bench: interrupted before anything was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
