# SPDX-License-Identifier: Apache-2.0
"""The names of the benchmarks and the tables that are printed. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from .output import aligned, format_us

PASSES = ("forward", "forward_backward")


def benchmark_name(
    which: str, layout: str, dtype: str, activation: str, case: str, backend: str = "cuda"
) -> str:
    """backend/pass/layout/type/activation/case, as in the C++ benchmarks."""
    return f"{backend}/{which}/{layout}/{dtype}/{activation}/{case}"


def cell(arm: dict | None) -> str:
    """Median and, in brackets, times the floor; a word where there is no time."""
    if arm is None:
        return "-"
    if "error" in arm:
        return "error"
    return f"{format_us(arm['median_us'])} ({arm['over_floor']:.2f})"


def table(rows: Iterable[dict], arms: list[str], order: list[str]) -> str:
    """One table for each dtype, activation set and pass; cases in the order of `order`."""
    blocks: dict[tuple[str, str, str], list[dict]] = {}
    for row in rows:
        blocks.setdefault((row["dtype"], row["set"], row["pass"]), []).append(row)
    shown = []
    for (dtype, activation_set, which), members in blocks.items():
        members.sort(key=lambda row: order.index(row["case"]))
        errors = ["error_y"] if which == "forward" else ["error_dx"]
        header = ["case", "MiB", *arms, "copy", "fastest"]
        header += [f"{key} {arm}" for key in errors for arm in arms]
        header += ["rung"] if which == "forward" else [f"peak {arm}" for arm in arms]
        lines = [header]
        for row in members:
            found = row["arms"]
            timed = {arm: of["median_us"] for arm, of in found.items() if arm in arms and "median_us" in of}
            line = [
                row["case"],
                f"{row['tensor_bytes'] / 2**20:.4g}",
                *(cell(found.get(arm)) for arm in arms),
            ]
            line += [format_us(row["copy"]["median_us"]) if row.get("copy") else "-"]
            line += [min(timed, key=timed.get) if timed else "-"]
            line += [f"{found.get(arm, {}).get(key, '-')}" for key in errors for arm in arms]
            ours = found.get("ours", {})
            if which == "forward":
                line += [ours.get("rung", "-")]
            else:
                line += [str(found.get(arm, {}).get("peak_mib", "-")) for arm in arms]
            lines.append(line)
        title = f"{dtype}, activation {activation_set}, {which} (in brackets: over the floor of least bytes)"
        shown.append("\n".join([title, *aligned(lines)]))
    return "\n\n".join(shown)
