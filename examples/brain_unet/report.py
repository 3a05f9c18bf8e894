# SPDX-License-Identifier: Apache-2.0
"""The demo's report: json, a table for the terminal, PNGs, and one HTML page that holds it all."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

ARMS = {"stock": "torch.nn.GroupNorm", "steadynorm": "steadynorm.GroupNorm"}
COLOURS = {"stock": "#b5651d", "steadynorm": "#1f6f8b"}
LOSS_BAR = 1e-2
SPLIT_NOTE = (
    "GroupNorm: each site alone at its recorded shape and strides, forward and backward, with its "
    "ReLU and the cast and relayout back to what the next convolution reads; medians, summed. "
    "Rest: the median step minus that."
)
PEAK_NOTE = (
    "Peak: tensor memory that a step holds beyond weights and optimiser state; on a GPU the "
    "allocator's maximum over all steps, on a CPU one traced forward and backward."
)
CPU_NOTE = (
    "CPU autocast leaves stock GroupNorm in bfloat16, so both arms look alike here; under CUDA "
    "autocast stock returns float32, and the two censuses differ."
)


def shown(value, form: str = ".4f") -> str:
    return "not measured" if value is None else format(value, form)


def headline(options, brain, device: str, model) -> str:
    count = sum(p.numel() for p in model.parameters())
    train, valid = brain.train, brain.valid
    return (
        f"split   trains on voxels {train.start} to {train.stop} from the back, validates on "
        f"{valid.start} to {valid.stop}, gap {valid.start - train.stop} (receptive field "
        f"{brain.gap})\n"
        f"network width {options.width}, depth {options.depth}, {count} weights; patches of "
        f"{options.size}^3, {options.batch} a step, {options.steps} steps an arm, seed "
        f"{options.seed}\n"
        f"device  {options.device} ({device})"
    )


def rows_of(result: dict) -> list[tuple[str, str, str]]:
    """The comparison, one quantity a row: (quantity, stock, ours)."""
    arms = [result["arms"][name] for name in ARMS]

    def row(title, key, form=".4f"):
        return (title, *(shown(a[key], form) for a in arms))

    def quartiles(a):
        if a["step_ms_q1"] is None:
            return "not measured"
        return f"{a['step_ms_q1']:.1f} to {a['step_ms_q3']:.1f}"

    return [
        row("loss, first step", "loss_first"),
        row("loss, last 10 steps", "loss_last"),
        row("Dice grey", "dice_grey"),
        row("Dice white", "dice_white"),
        row("Dice mean", "dice"),
        row("ms a step, median", "step_ms_median", ".1f"),
        ("ms a step, quartiles", *(quartiles(a) for a in arms)),
        row("  of it GroupNorm", "norm_ms", ".1f"),
        row("  of it the rest", "rest_ms", ".1f"),
        row("peak MiB", "peak_mib", ".1f"),
    ]


def site_rows(result: dict) -> list[tuple[str, ...]]:
    """(site, stock dtype, stock format, our dtype, our format, rung, mark)."""
    stock = {row["name"]: row for row in result["stock_sites"]}
    out = []
    for row in result["sites"]:
        s = stock.get(row["name"], {"out_dtype": "?", "memory_format": "?"})
        mark = "<-- expected bfloat16, channels_last_3d, native"
        mark = mark if row["name"] in result["sites_off_target"] else ""
        ours = (row["out_dtype"], row["memory_format"], row["rung"])
        out.append((row["name"], s["out_dtype"], s["memory_format"], *ours, mark))
    return out


SITE_HEAD = ("site", "stock dtype", "stock format", "our dtype", "our format", "rung", "")


def verdicts(result: dict) -> list[str]:
    """What the figures say, one sentence each."""
    base, lines = result["baseline_dice"], []
    if result["interrupted"]:
        lines.append(f"interrupted after {result['steps']} steps")
    dice = result["arms"]["steadynorm"]["dice"]
    beats = result["beats_baseline"]
    if beats is None:
        lines.append(f"Dice of the network not measured; two intensity thresholds reach {base:.4f}")
    else:
        word = "beats" if beats else f"after {result['steps']} steps does not beat"
        lines.append(f"Dice of the network {shown(dice)} {word} two intensity thresholds {base:.4f}")
    gap = result["max_rel_loss_gap"]
    if gap is not None:
        side = "within" if gap <= LOSS_BAR else "ABOVE"
        lines.append(
            f"loss curves at most {gap:.2e} apart (relative, running mean of 10), {side} {LOSS_BAR:.0e}"
        )
    off, sites = result["sites_off_target"], result["sites"]
    if sites:
        lines.append(
            f"{len(sites) - len(off)} of {len(sites)} GroupNorm sites are bfloat16, "
            "channels_last_3d and served by the native rung" + (f"; NOT: {', '.join(off)}" if off else "")
        )
    if any(a["norm_ms"] is not None and a["rest_ms"] is None for a in result["arms"].values()):
        lines.append(
            "no split of the step: its GroupNorms alone took longer, the machine was busy with other work"
        )
    if result["device"] == "cpu":
        lines.append(CPU_NOTE)
    return lines


def aligned(head: tuple, rows: list[tuple]) -> str:
    wide = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, wide, strict=True)).rstrip() for r in (head, *rows)]
    return "\n".join((lines[0], "-" * (sum(wide) + 2 * len(wide) - 2), *lines[1:]))


def table(result: dict) -> str:
    return "\n\n".join(
        (
            "",
            aligned(("", *ARMS.values()), rows_of(result)),
            aligned(SITE_HEAD, site_rows(result)),
            "\n".join((*verdicts(result), SPLIT_NOTE, PEAK_NOTE)),
        )
    )


def write_json(result: dict, out: Path) -> None:
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n")


def loss_picture(result: dict, path: Path) -> None:
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(2.2, 1), layout="constrained"
    )
    curves = {}
    for name, title in ARMS.items():
        losses = np.array(result["arms"][name]["losses"])
        width = max(1, min(10, len(losses)))
        mean = np.convolve(losses, np.ones(width) / width, "valid") if len(losses) else losses
        curves[name] = mean
        style = "-" if name == "stock" else "--"
        upper.plot(losses, color=COLOURS[name], alpha=0.25, lw=0.8)
        upper.plot(np.arange(len(mean)) + width - 1, mean, style, color=COLOURS[name], label=title)
    upper.set(ylabel="loss", title="Loss, and its running mean of 10")
    upper.legend()
    gap = np.abs(curves["steadynorm"] - curves["stock"]) / np.abs(curves["stock"])
    lower.semilogy(np.arange(len(gap)) + width - 1, np.maximum(gap, 1e-7), color="#444")
    lower.axhline(LOSS_BAR, color="#c00", lw=0.8, ls=":")
    lower.set(xlabel="step", ylabel="relative gap")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def slice_picture(brain, predicted, path: Path) -> None:
    """The middle slice of the validation part, seen from the front, up is up."""
    middle = brain.valid.labels.shape[1] // 2
    t1, truth = brain.valid.t1[:, middle].T, brain.valid.labels[:, middle].T
    guess = predicted[:, middle].T
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.6), layout="constrained")
    titles = ("T1", "true tissue", "predicted tissue", "wrong voxels")
    pictures = (t1, truth, guess, (truth != guess).astype(np.uint8))
    for axis, title, picture, top in zip(axes, titles, pictures, (255, 2, 2, 1), strict=True):
        axis.imshow(picture, cmap="gray", origin="lower", vmin=0, vmax=top, interpolation="nearest")
        axis.set(title=title, xticks=[], yticks=[])
    place = f"Validation part, slice {brain.valid.start + middle} from the back"
    figure.suptitle(place, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def time_picture(result: dict, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 2.2), layout="constrained")
    for i, name in enumerate(ARMS):
        arm = result["arms"][name]
        norm, rest = arm["norm_ms"], arm["rest_ms"]
        axis.barh(i, norm, color=COLOURS[name])
        axis.barh(i, rest, left=norm, color="#cccccc")
        axis.text(norm + rest, i, f" {norm:.1f} + {rest:.1f} ms", va="center", fontsize=8)
    axis.set(yticks=range(len(ARMS)), xlabel="ms a step: GroupNorm with ReLU (colour), rest (grey)")
    axis.set_yticklabels(ARMS.values())
    axis.margins(x=0.3)
    axis.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_pictures(result: dict, brain, predicted, out: Path) -> None:
    """The PNGs that there is data for, and report.html with them inside."""
    names = ("loss.png", "slice.png", "step_time.png")
    for name in names:  # an earlier run's picture must not pass for this one's
        (out / name).unlink(missing_ok=True)
    if result["steps"]:
        loss_picture(result, out / "loss.png")
    if predicted is not None:
        slice_picture(brain, predicted, out / "slice.png")
    if all(a["norm_ms"] is not None and a["rest_ms"] is not None for a in result["arms"].values()):
        time_picture(result, out / "step_time.png")
    pictures = [out / name for name in names if (out / name).is_file()]
    (out / "report.html").write_text(page(result, pictures))


def html_table(head: tuple, rows: list[tuple]) -> str:
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(r, "td") for r in rows) + "</table>"


def page(result: dict, pictures: list[Path]) -> str:
    """One HTML file that needs no other."""
    images = "".join(
        f'<p><img alt="{p.stem}" src="data:image/png;base64,{base64.b64encode(p.read_bytes()).decode()}"></p>'
        for p in pictures
    )
    plain = {k: v for k, v in result.items() if k in ("options", "split", "versions")}
    notes = "".join(f"<p><small>{html.escape(n)}</small></p>" for n in (SPLIT_NOTE, PEAK_NOTE))
    says = "".join(f"<li>{html.escape(v)}</li>" for v in verdicts(result))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        "<title>steadynorm: brain U-Net</title>"
        "<style>body{font:15px/1.4 sans-serif;max-width:62em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:left;"
        "border-bottom:1px solid #ddd}img{max-width:100%}pre{background:#f4f4f4;padding:1em}"
        "</style>"
        "<h1>Brain U-Net: stock GroupNorm and steadynorm</h1>"
        f"<p>{html.escape(result['device_name'])}, {result['steps']} steps an arm</p>"
        f"<ul>{says}</ul>"
        + html_table(("", *ARMS.values()), rows_of(result))
        + images
        + html_table(SITE_HEAD, site_rows(result))
        + notes
        + f"<pre>{html.escape(json.dumps(plain, indent=1))}</pre></html>\n"
    )
