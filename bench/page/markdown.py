# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and README's table."""

from __future__ import annotations

from collections.abc import Sequence

from ..output import format_us
from ..report import PASSES
from . import inference
from .charts import Figure
from .results import ERRORS, OURS, PASS_NAMES, Results, Row, Run, arms_of, commit, reading
from .steps import Step, StepScale

# README's rows: both layouts, from large to small, some of them lost.
REPRESENTATIVE = (
    "unet3d-64", "vae-256x512-nhwc", "unet3d-512", "sdxl-1280x32", "sd15-1280x8",
    "video-vae", "liger-d", "vae-512x128-nchw", "monai-128", "liger-a",
)  # fmt: skip
REPRESENTATIVE_CPU = (
    "unet3d-512", "sdxl-1280x32", "vae-512x128-nhwc", "vae-512x128-nchw", "liger-e", "monai-128",
    "one-32x96-nchw", "resnet-64x56-nchw", "resnet-64x56-nhwc", "rows-512",
)  # fmt: skip
README_DTYPE, README_DTYPE_CPU, README_SET = "bf16", "fp32", "none"

INTRODUCTION = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Made by `make report` from bench/results: do not edit. -->
# Performance

How long a call takes, beside the least time that its bytes need, other implementations, and its error.
Nothing is left out: rows where another implementation is faster are here, and counted. In one table that
sorts: [performance.html](performance/performance.html), to download and open.

## How it is measured

- *Time*: the device's, of a CUDA graph's replay with a cold L2; median of the repeats, less an empty
  graph's. *Forward* records for a backward, as in training; *forward + backward* gives y, dx, dweight and
  dbias.
- *Floor*: the least bytes (forward: read x, write y; forward + backward: five times the tensor) at the
  rate of a 1 GiB device-to-device copy in the same run. *Share of the copy rate*: floor over time. In
  brackets behind a time: time over floor. For small tensors the launches of the kernels take longer than
  the bytes.
- *Error*: the worst of y (forward) or dx (forward + backward) of the very tensors that were timed,
  against float64, beyond one rounding to the tensor's dtype, in 2⁻²⁴ of the largest term. Without an
  activation ours may have [8 for y and 16 for dx](numerics.md); 0: no value is further off than its own
  rounding. With ReLU millions in dx, of any arm, mean a z of about 0, which float64 and fp32 round to
  different sides: the one passes dy there and the other does not. Tensors of many million values have some.
- *Arms*: `eager` is `F.group_norm`, `inductor` the same under `torch.compile` for one size, `liger` the
  Triton kernel of liger-kernel, for contiguous tensors alone. Each gives y in x's memory format,
  activation included.
- *Rung*: what served our call; bold where it was not the native kernel. Bold time: the fastest of the
  row.
"""

ON_CPU = """\
- *On a CPU*: time is the wall time of a call in a loop of them, caches as the calls leave them; *forward* is
  without gradients; the copy is one of 256 MiB by PyTorch. Tensors that caches hold can be faster than it.
"""


def plain(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(plain(text).replace("|", "\\|") for text in cells) + " |"


def table(head: Sequence[str], lines: list[Sequence[str]], left: int) -> str:
    """The first `left` columns to the left, numbers to the right."""
    rule = "|" + "|".join("---" if i < left else "---:" for i in range(len(head))) + "|"
    return "\n".join([line(head), rule, *map(line, lines)])


def figure_of(value: float) -> str:
    """A ratio or a count of MiB, to three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def error_of(row: Row, arm: str) -> str:
    error = row.error(arm)
    return "–" if error is None else f"{error:g}"


def time_of(row: Row, arm: str) -> str:
    """Time and, in brackets, times the floor; bold where nobody is faster."""
    if arm not in row.data["arms"]:
        return "–"
    if arm not in row.times:
        return "error"
    text = f"{format_us(row.times[arm])} ({figure_of(1 / row.share(arm))})"
    return f"**{text}**" if row.peers and row.times[arm] == min(row.times.values()) else text


def rung_of(row: Row) -> str:
    return row.rung if row.rung == "native" else f"**{row.rung or 'failed'}**"


def against(peer: str, rows: list[Row]) -> str:
    """How one peer does on these rows of one pass: where it is faster comes first."""
    both = [row for row in rows if peer in row.times and OURS in row.times]
    ratios = sorted((row.times[peer] / row.times[OURS], row.case) for row in both)
    wins = [of for of in ratios if of[0] < 1]
    losses = [ratio for ratio, _ in ratios if ratio >= 1]
    if wins:
        best = figure_of(1 / wins[0][0])
        names = ", ".join(case for _, case in wins)
        text = f"{peer} is faster than ours in {len(wins)} of {len(both)}, up to {best} times: {names}"
        return text + (f"; in the others up to {figure_of(max(losses))} times slower" if losses else "")
    if not losses:
        return f"{peer} was not timed beside ours"
    return (
        f"{peer} is faster in none of {len(both)}: {figure_of(min(losses))} to {figure_of(max(losses))} "
        "times slower than ours"
    )


def outcome(rows: list[Row]) -> list[str]:
    """A sentence for each pass and peer, the worst errors, and what was not served natively or failed."""
    told = []
    for which in PASSES:
        of_pass = [row for row in rows if row.data["pass"] == which]
        peers = [arm for arm in arms_of(of_pass) if arm != OURS]
        name = PASS_NAMES[which].capitalize()
        told += [f"{name}: {against(peer, of_pass)}." for peer in peers]
        errors = {
            arm: max(error for row in of_pass if (error := row.error(arm)) is not None)
            for arm in arms_of(of_pass)
            if any(row.error(arm) is not None for row in of_pass)
        }
        if errors:
            worst = ", ".join(f"{arm} {figure_of(error)}" for arm, error in errors.items())
            told.append(f"{name}, worst error of {ERRORS[which].removeprefix('error_')}: {worst}.")
    stood_in = [row for row in rows if row.rung not in ("native", None)]
    if stood_in:
        told.append(f"Not served by the native kernel: {len(stood_in)} of {len(rows)} rows.")
    failed = [(row, arm) for row in rows for arm in row.data["arms"] if arm not in row.times]
    told += [
        f"{arm} failed: {row.case}, {PASS_NAMES[row.data['pass']]}: {plain(row.data['arms'][arm]['error'])}"
        for row, arm in failed
    ]
    return told


def runs_table(results: Results) -> str:
    lines = []
    for run in results.runs:
        versions = {"driver": run.head["driver"], **run.head["versions"]}
        named = [
            f"{name} {versions[name]}"
            for name in ("driver", "torch", "triton", "liger-kernel")
            if versions.get(name)
        ]
        lines.append(
            (run.number, f"[{run.file}](../bench/results/{run.file})", run.told, ", ".join(named),
             run.copy_told, f"{results.shown(run)} of {len(run.rows)}", run.head["stopped"] or "finished")
        )  # fmt: skip
    head = ("run", "file", "device, date, commit", "versions", "copy, GB/s", "rows shown", "end")
    return table(head, lines, 4)


def repeat(results: Results) -> str:
    commands = [f"{run.command}   # run {run.number}" for run in results.runs if results.shown(run)]
    lines = ["```sh", *commands, *["make test-gpu"] * bool(results.tests), "make report", "```"]
    timed = [run.head["versions"] for run in results.runs
             if any("liger" in row["arms"] for row in run.rows)]  # fmt: skip
    liger = {versions["liger-kernel"] for versions in timed if versions.get("liger-kernel")}
    text = [
        "On such a device, in a checkout of a run's commit, one command measures its figures again (where it "
        "begins with `.venv`, after `make build`):",
        "\n".join(lines),
        "The last one makes this page from `bench/results`, without a GPU. Where runs share a benchmark, the "
        "page has the newest.",
    ]
    if liger:
        installs = (f"`.venv/bin/python -m pip install liger-kernel=={version}`" for version in sorted(liger))
        text.append(f"liger is timed where it is installed: after `make build`, {', '.join(installs)}.")
    return "\n\n".join(text)


def tests_told(results: Results) -> list[str]:
    told = []
    for file, of in results.tests.items():
        with reading(file):
            told.append(f"- {test_told(of)} ([{file}](../bench/results/{file}))")
    return told


def test_told(of: dict) -> str:
    count = f"{of['passed']} passed, {of['failed']} failed, {of['skipped']} skipped"
    kernels = of.get("kernels") or {}
    reached = f"; {kernels['reached']} of {kernels['compiled']} compiled kernels reached" if kernels else ""
    findings = {tool: found["findings"] for tool, found in (of.get("sanitizer") or {}).items()}
    sanitizer = ", ".join(f"{tool} {count}" for tool, count in findings.items())
    return f"{of['device']}, {of['date']}, commit {commit(of)}: {count}{reached}" + (
        f"; findings of compute-sanitizer: {sanitizer}" if findings else ""
    )


def rows_table(rows: list[Row]) -> str:
    arms = arms_of(rows)
    head = ["case", "layout", "rung", "MiB", "floor", *arms, *(f"error {arm}" for arm in arms), "run"]
    lines = [
        [row.case, row.data["layout"], rung_of(row), figure_of(row.mib), format_us(row.data["floor_us"]),
         *(time_of(row, arm) for arm in arms), *(error_of(row, arm) for arm in arms), row.run.number]
        for row in rows
    ]  # fmt: skip
    return table(head, lines, 3)


def runs_told(rows: list[Row]) -> str:
    """Device, date, commit and copy rate of each run that the rows are of."""
    runs: dict[str, Run] = {row.run.number: row.run for row in rows}
    return "Run " + "; run ".join(
        f"{number}: {runs[number].told}, copy {runs[number].copy_told} GB/s"
        for number in sorted(runs, key=int)
    )


def errors_told(rows: list[Row]) -> list[str]:
    """Where less than all groups were compared with float64."""
    parts: dict[str, list[str]] = {}
    for row in rows:
        parts.setdefault(row.data["errors_of"], []).append(row.case)
    return [f"Errors of {', '.join(cases)}: {part}." for part, cases in parts.items() if part != "all groups"]


def section(results: Results, of_table: tuple[str, str, str], figures: list[Figure]) -> str:
    device, dtype, chosen = of_table
    rows = results.of_table(of_table)
    title = f"{device}, {dtype}, activation {chosen}"
    parts = [f"## {title}", runs_told(rows) + ".", "\n".join(f"- {text}" for text in outcome(rows))]
    parts += [
        f"![{figure.title}](performance/{figure.name}.png)" for figure in figures if figure.table == of_table
    ]
    for which in PASSES:
        of_pass = [row for row in rows if row.data["pass"] == which]
        if of_pass:
            told = " ".join([runs_told(of_pass) + ".", *errors_told(of_pass)])
            parts += [f"### {PASS_NAMES[which].capitalize()}: {title}", told, rows_table(of_pass)]
    return "\n\n".join(filter(None, parts))


def networks(results: Results) -> str:
    parts = ["## Networks: a VAE decoder and a video VAE block", inference.INTRODUCTION]
    for file, data in results.inference.items():
        with reading(file):
            lines = [inference.cells(row) for row in data["rows"]]
            told = inference.told_by(file, data, commit(data))
        parts += [told + ":", table(inference.HEAD, lines, inference.WORDS)]
    return "\n\n".join(parts)


def scale_told(scale: StepScale) -> list[str]:
    """One scale of a step: its arms, its figure, its items, and what its bits are."""
    parts = [f"### {scale.title}", table(scale.head, scale.arms, 1)]
    parts += ["\n".join(f"- {text}" for text in scale.outcome)] if scale.outcome else []
    if scale.bars:
        head, *lines = scale.items
        parts.append(f"![{scale.bars.title}](performance/{scale.bars.name}.png)")
        parts.append(table(head, lines, 1))
    parts += ["\n".join(f"- {text}" for text in scale.told)] if scale.told else []
    return parts


def step_section(step: Step) -> str:
    link = f"[{step.file}](../bench/results/{step.file})"
    told = (f"{step.introduction} All figures: {link}; with a CUDA GPU, after `make build`, one command "
            "measures them again:")  # fmt: skip
    parts = [f"## {step.title}", told, f"```sh\n{step.command}\n```"]
    for scale in step.scales:
        parts += scale_told(scale)
    return "\n\n".join(parts)


def page(results: Results, figures: list[Figure], steps: list[Step]) -> str:
    """docs/performance.md."""
    introduction = INTRODUCTION + (ON_CPU if any(run.on_cpu for run in results.runs) else "")
    parts = [introduction.rstrip(), "## Runs, and how to repeat them", runs_table(results), repeat(results)]
    if results.tests:
        parts += ["Tests on a GPU (`make test-gpu`):", "\n".join(tests_told(results))]
    if results.others:
        parts.append("Also in `bench/results`, not on this page: " + ", ".join(results.others) + ".")
    if results.inference:
        parts.append(networks(results))
    parts += [step_section(step) for step in steps]
    parts += [section(results, of_table, figures) for of_table in results.tables]
    return "\n\n".join(parts) + "\n"


def best_peer(rows: list[Row]) -> tuple[str, str]:
    """Ours over the floor, and what the fastest peer takes against it, of at most one row."""
    if not rows or OURS not in rows[0].times:
        return "–", "–"
    row = rows[0]
    floor = figure_of(1 / row.share(OURS)) + ("" if row.rung == "native" else f" ({row.rung})")
    if not row.peers:
        return floor, "–"
    peer = min(row.peers, key=row.peers.get)
    ratio = row.peers[peer] / row.times[OURS]
    text = f"{figure_of(ratio)} ({peer})"
    return floor, f"**{text}**" if ratio < 1 else text


def step_sentences(steps: list[Step]) -> list[str]:
    """What a training step gains, of the first scale of the newest file of each device."""
    told = []
    for step in {step.title: step for step in reversed(steps)}.values():
        arms = {arm: cells for arm, *cells in step.scales[0].arms} if step.scales else {}
        if {"stock", OURS} <= arms.keys():
            stock, ours = (
                time if time == "failed" else f"{time} ms" + ("" if peak == "–" else f" and {peak} GiB")
                for time, _, peak, _ in (arms["stock"], arms[OURS])
            )
            told.append(
                f"**A training step**, {step.measured}, {step.scales[0].title.partition(', ')[2]}, bf16: "
                f"stock GroupNorm {stock}, ours {ours} ([all arms](docs/performance.md))."
            )
    return told


def readme_table(results: Results, steps: list[Step]) -> str:
    """README's sentences and table, of each device."""
    parts = step_sentences(steps)
    for of_table in results.tables:
        _, dtype, chosen = of_table
        rows = results.of_table(of_table)
        on_cpu = rows[0].run.on_cpu
        if (dtype, chosen) != (README_DTYPE_CPU if on_cpu else README_DTYPE, README_SET):
            continue
        lines = []
        for case in REPRESENTATIVE_CPU if on_cpu else REPRESENTATIVE:
            of_case = [row for row in rows if row.case == case]
            if of_case:
                cells = [best_peer([row for row in of_case if row.data["pass"] == which]) for which in PASSES]
                lines.append(
                    (case, of_case[0].data["layout"], figure_of(of_case[0].mib), *cells[0], *cells[1])
                )
        told = "; ".join(dict.fromkeys(row.run.told for row in rows))
        how = "wall time of a call" if on_cpu else "cold L2"
        head = ["case", "layout", "MiB"]
        head += [
            f"{name}, {what}" for name in PASS_NAMES.values() for what in ("ours / floor", "best peer / ours")
        ]
        parts += [
            f"{dtype}, {how}; {told}. *Floor*: the time of the least bytes at the copy rate. *Best peer*: "
            "the fastest one's time over ours; bold where it is faster than ours.",
            table(head, lines, 2),
            "\n".join(f"- {text}" for text in outcome(rows)),
        ]
    return "\n\n".join(parts)
