# SPDX-License-Identifier: Apache-2.0
"""python -m steadynorm info | check: what is built, and is it right here?"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from . import __version__, _native, accuracy, bench, functional, rungs
from .accuracy import Measurement

OUTPUTS = ("y", "dx", "dweight", "dbias", "rounding")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Case:
    """Random data of one shape. `mean` is in deviations; constant data has deviation 0."""

    name: str
    shape: tuple[int, ...]
    groups: int
    dtype: str = "fp32"
    layout: str = "contiguous"
    activation: str = "none"
    parameter_dtype: str = "fp32"
    per_sample: bool = False
    mean: float = 0.0
    deviation: float = 1.0
    eps: float = 1e-5


def cases() -> Iterator[Case]:
    volume = (2, 24, 6, 10, 9)
    for activation in ("none", "relu", "silu", "gelu", "gelu_tanh"):
        for dtype in DTYPES:
            for layout in ("contiguous", "channels_last"):
                yield Case("volume", volume, 8, dtype, layout, activation)
    for layout in ("contiguous", "channels_last"):
        # At mean/deviation 1e5 an fp32 value holds 8 bits of its deviation: any sum that loses one shows.
        yield Case("far mean", volume, 8, layout=layout, mean=1e5)
        yield Case("far mean", volume, 8, layout=layout, mean=1e5, activation="silu")
        yield Case("far mean, long", (1, 4, 300, 150), 2, layout=layout, mean=-1e5)
        yield Case("large", volume, 8, layout=layout, deviation=1e30)
        yield Case("small", volume, 8, layout=layout, deviation=1e-3, mean=3, eps=1e-12)
        yield Case("constant", volume, 8, layout=layout, mean=0.1, deviation=0)
        yield Case("long", (1, 8, 400, 400), 2, layout=layout)
        yield Case("per-sample parameters", volume, 8, layout=layout, per_sample=True, activation="silu")
        for channels, groups in ((30, 10), (30, 6), (28, 4), (30, 3), (60, 2), (32, 1), (32, 32)):
            yield Case(f"{channels} channels, {groups} groups", (2, channels, 9, 7), groups, layout=layout)
        for dtype, parameter_dtype in (
            ("fp16", "bf16"),
            ("bf16", "fp16"),
            ("fp32", "bf16"),
            ("bf16", "bf16"),
        ):
            name = f"{parameter_dtype} parameters"
            yield Case(name, volume, 8, dtype, layout, parameter_dtype=parameter_dtype)
        yield Case("fp16 to 40000", volume, 8, "fp16", layout, deviation=12000, eps=1e-12)
    yield Case("rank 2", (64, 48), 6)
    yield Case("rank 3", (3, 20, 513), 5)


def run(case: Case, device: torch.device, seed: int) -> list[Measurement]:
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    dtype, parameter_dtype = DTYPES[case.dtype], DTYPES[case.parameter_dtype]
    x = normal(case.shape) * case.deviation + case.mean * (case.deviation or 1.0)
    if dtype == torch.float16:
        x = x.clamp(-65504, 65504)
    dy = normal(case.shape)
    if case.layout == "channels_last":
        format = CHANNELS_LAST[len(case.shape)]
        x, dy = x.to(memory_format=format), dy.to(memory_format=format)
    row = (case.shape[0], case.shape[1]) if case.per_sample else (case.shape[1],)
    weight, bias = 1 + 0.3 * normal(row), 0.3 * normal(row)
    x, dy = x.to(device, dtype), dy.to(device, dtype)
    weight, bias = weight.to(device, parameter_dtype), bias.to(device, parameter_dtype)

    arguments = (x, case.groups, weight, bias, case.eps)
    found = accuracy.measure(
        functional.group_norm, *arguments, activation=case.activation, out_dtype=dtype, dy=dy
    )
    wide = functional.group_norm(*arguments, activation=case.activation, out_dtype=torch.float32)
    wrong = 0
    for narrow in (torch.bfloat16, torch.float16):
        y = functional.group_norm(*arguments, activation=case.activation, out_dtype=narrow)
        wrong += int((y != wide.to(narrow)).sum())
    return [*found, Measurement("rounding", 1.0 + wrong if wrong else 0.0, wrong)]


def check(devices: list[torch.device], seed: int, report: str | None) -> int:
    all_cases = list(cases())
    rows = []
    status = 0
    print("Worst error against float64, in units of the last place of the sizes that enter a result, in % of")
    print("its bound. rounding: how many bf16 and fp16 results are not the fp32 result rounded.")
    start = time.perf_counter()
    try:
        with without_compiling():
            for device in devices:
                status |= check_device(device, all_cases, seed, rows)
    except KeyboardInterrupt:
        status = 130
    bad = sum(not row["ok"] for row in rows)
    print(f"{len(rows)} results, {bad} beyond their bound, {time.perf_counter() - start:.1f} s")
    if status == 130:
        print("stopped before the end", file=sys.stderr)
    if report:
        document = {
            "version": __version__,
            "torch": torch.__version__,
            "seed": seed,
            "complete": status != 130,
            "ok": status == 0,
            "results": rows,
        }
        with open(report, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
    return status


@contextlib.contextmanager
def without_compiling() -> Iterator[None]:
    """What the native rung does not serve is eager's: nearly every case would be compiled for itself."""
    compiled = rungs.ladder[rungs.COMPILED]
    before = compiled.off
    compiled.turn(False, by="check")
    try:
        yield
    finally:
        compiled.off = before


def check_device(device: torch.device, all_cases: list[Case], seed: int, rows: list[dict]) -> int:
    print(f"\n{describe(device)}: {serving(device)}")
    widths = (24, 5, 13, 10, 14, 14, 14, 14, 8)
    print_row(widths, "case", "dtype", "layout", "activation", *OUTPUTS, "ok")
    status = 0
    for number, case in enumerate(all_cases, 1):
        progress(f"{number}/{len(all_cases)} {case.name}")
        measured = {m.output: m for m in run(case, device, seed)}
        progress("")
        ok = all(m.ok for m in measured.values())
        status |= not ok
        cells = [cell(measured[name]) for name in OUTPUTS]
        print_row(
            widths, case.name, case.dtype, case.layout, case.activation, *cells, "ok" if ok else "BROKEN"
        )
        for m in measured.values():
            if not m.ok:
                print(f"  {m}")
            rows.append(
                {"device": str(device), "rung": rungs.last_rung(), **asdict(case), **in_json(m), "ok": m.ok}
            )
    return status


def in_json(m: Measurement) -> dict:
    """JSON has no NaN and no infinity: they become words."""
    values = asdict(m)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def cell(m: Measurement) -> str:
    return f"{m.ulp:.0f}" if m.output == "rounding" else f"{m.ulp:.3g} {100 * m.share:.3g}%"


def info() -> int:
    native = rungs.native
    build = native.build
    print(f"steadynorm {__version__}")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    )
    print(f"native library: {native.path or 'none'}")
    if build:
        architectures = ", ".join(map(str, build.get("cuda_architectures") or [])) or "no architecture"
        print(f"  built for torch {build.get('torch')}, CUDA {build.get('cuda') or 'none'} ({architectures})")
    print(f"  {'loaded' if native.reason is None else f'not loaded: {native.reason}'}")
    print(f"threads: {torch.get_num_threads()}")
    for rung in rungs.ladder.values():
        print(f"rung {rung.name}: {rung.state()}")
    print(f"rung {rungs.EAGER}: on")
    for device in all_devices():
        print(f"{describe(device)}: rung {serving(device)}")
    return 0


def serving(device: torch.device) -> str:
    """The first rung that serves a device, and why not the native one."""
    native, compiled = rungs.ladder.values()
    refused = native.off or native.failure or _native.why_not_on(rungs.native, device)
    if refused is None:
        return rungs.NATIVE
    first = rungs.COMPILED if compiled.off is None and compiled.failure is None else rungs.EAGER
    return f"{first} ({refused})"


def describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, sm_{major}{minor})"


def all_devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def devices_from(name: str) -> list[torch.device]:
    chosen = [d for d in all_devices() if name in ("all", d.type, str(d))]
    if not chosen:
        known = ", ".join(map(str, all_devices()))
        raise argparse.ArgumentTypeError(f"no device '{name}' here, only {known}")
    return chosen


def writable(path: str) -> str:
    try:
        with open(path, "a", encoding="utf-8"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't write {path}: {error.strerror}") from None


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def print_row(widths: tuple[int, ...], *cells: str) -> None:
    print(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, (*widths, 0), strict=True)).rstrip(),
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m steadynorm", description="GroupNorm: what is built, is it right here, is it fast here"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, the native library, and what serves each device")
    checker = commands.add_parser(
        "check", help="measure the errors against float64; exit status 1 if a bound is broken"
    )
    checker.add_argument(
        "--device", type=devices_from, default="all", metavar="D", help="cpu, cuda, cuda:N or all (default)"
    )
    checker.add_argument("--seed", type=int, default=0, metavar="N", help="of the random data (default 0)")
    checker.add_argument("--json", type=writable, metavar="FILE", help="write every result there too")
    # Its options belong to the benchmark named after it.
    commands.add_parser("bench", help="measure the speed: shapes, step, inference", add_help=False)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:
        return bench.main(arguments[1:])
    options = parser.parse_args(arguments)
    return info() if options.command == "info" else check(options.device, options.seed, options.json)


if __name__ == "__main__":
    sys.exit(main())
