# SPDX-License-Identifier: Apache-2.0
"""The page's part on whole networks: what `python -m steadynorm bench inference` wrote."""

from __future__ import annotations

from ..paired import Interval

INTRODUCTION = """\
A decoder from latents to an image and a block of a video decoder, in bf16 with random weights and without
gradients, stock GroupNorm beside the same model after `convert_group_norm`. *Latency*: wall time of one
forward until the device is done, stock and ours in turn, mean ± 95 %; *stock − ours* is of the pairs, bold
where 0 is outside of it. *Peak*: what a forward allocates beyond model and input. *Error*: the outputs'
largest difference from the same weights in float32, over its largest value."""
HEAD = (
    "network", "input", "layout", "rung", "norms (SiLU fused)", "stock, ms", "ours, ms", "stock − ours, ms",
    "stock − ours, %", "peak stock, MiB", "peak ours, MiB", "error stock", "error ours",
)  # fmt: skip
WORDS = 5  # columns of text


def command(data: dict) -> str:
    """The command that measures the same again."""
    return f".venv/bin/python -m steadynorm bench inference --replicates {data['replicates']}"


def told_by(file: str, data: dict, commit: str) -> str:
    """Where a file's numbers come from, and the command that measures them again."""
    end = f"; {data['stopped']}" if data["stopped"] else ""
    return (
        f"{data['device']}, {data['date']}, commit {commit}, torch {data['versions']['torch']}, "
        f"{data['replicates']} replicates{end} ([{file}](../bench/results/{file})). After `make build` "
        f"`{command(data)}` repeats it"
    )


def cells(row: dict) -> list[str]:
    if "error" in row:
        shape = "×".join(map(str, row["shape"]))
        return [
            row["network"],
            shape,
            row["layout"],
            "**failed**",
            row["error"],
            *["–"] * (len(HEAD) - WORDS),
        ]
    stock, ours = row["arms"]["stock"], row["arms"]["ours"]
    count = len(ours["samples_ms"])
    saved = Interval(row["saved_ms"], row["saved_half_width_ms"], count)
    share = f"{100 * saved.mean / stock['latency_ms']:.3g}"
    rungs = ", ".join(row["rungs"])
    return [
        row["network"], "×".join(map(str, row["shape"])), row["layout"],
        rungs if rungs == "native" else f"**{rungs}**", f"{row['norms']} ({row['fused']})",
        *(str(Interval(of["latency_ms"], of["half_width_ms"], count)) for of in (stock, ours)),
        *((f"**{text}**" if saved.differs else text) for text in (str(saved), share)),
        *("–" if of["peak_mib"] is None else f"{of['peak_mib']:.0f}" for of in (stock, ours)),
        *(f"{of['error']:.2g}" for of in (stock, ours)),
    ]  # fmt: skip
