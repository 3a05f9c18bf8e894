# SPDX-License-Identifier: Apache-2.0
"""What the step's results say, as tables for the terminal. Imports no torch."""

from __future__ import annotations

from .output import aligned


def signed(of: dict | None, unit: float = 1.0) -> str:
    """`12.3 ± 0.4`: a mean and the half width of its 95 % interval, over `unit`; the value alone where all
    replicates have the same, a dash for none.
    """
    if of is None:
        return "–"
    if not of["half_width"]:
        return f"{of['mean'] / unit:.3f}"
    half = of["half_width"] / unit
    digits = 3 if half < 0.01 else 2 if half < 1 else 1
    return f"{of['mean'] / unit:.{digits}f} ± {half:.{digits}f}"


NAMED_SHARE = 1e-3  # of a step's device time: smaller ones are in the file alone
ARM_HEAD = ("arm", "ms a step", "less ours, ms", "peak, GiB", "less ours, GiB")


def arm_lines(result: dict) -> list[tuple[str, ...]]:
    """Of each arm the mean and the paired difference from ours, of time and of memory; or its error."""
    lines = []
    for arm, of in result["arms"].items():
        cells = (
            signed(of.get("step_ms_interval")), signed(of.get("step_ms_less_ours")),
            signed(of.get("peak_mib_interval"), 1024), signed(of.get("peak_mib_less_ours"), 1024),
        )  # fmt: skip
        lines.append((arm, "failed", "–", "–", "–") if "error" in of else (arm, *cells))
    return lines


def item_lines(result: dict) -> list[list[str]]:
    """The head, then milliseconds of each row that any arm has, the total, and GroupNorm's share."""
    items = result["items"]
    rows = [
        row
        for row in next(iter(items.values()))["rows_us"]
        if any(of["rows_us"][row] for of in items.values())
    ]
    lines = [["device time of one step, ms", *items]]
    lines += [[row, *(f"{of['rows_us'][row] / 1e3:.2f}" for of in items.values())] for row in rows]
    lines.append(["total", *(f"{of['total_us'] / 1e3:.2f}" for of in items.values())])
    shares = ("–" if of["group_norm_share"] is None else f"{100 * of['group_norm_share']:.1f} %"
              for of in items.values())  # fmt: skip
    lines.append(["share of GroupNorm, conversions and layout", *shares])
    return lines


def bits_told(arm: str, of: dict) -> str:
    if "error" in of:
        return f"{arm}: failed in a process of its own: {of['error']}"
    if of["same"]:
        return f"{arm}: the same bits in {of['processes']} processes, loss and {of['gradients']} gradients"
    loss = "the same" if of["same_loss"] else "other"
    return (
        f"{arm}: other bits in {of['processes']} processes: loss {loss}, "
        f"{of['different_gradients']} of {of['gradients']} gradients other, the first in backward "
        f"{of['first_different']}"
    )


def trace_told(of: dict) -> list[str]:
    a, b = of["arms"]
    told = [
        f"{a} against {b}, forward: {of['sites_rounded_once']} of {of['sites']} sites have the same bits "
        "once rounded to the narrower of the two dtypes; "
        + (f"first other: {of['forward_first']}" if of["forward_first"] else "the loss has the same bits")
    ]
    if of["backward_first"]:
        told.append(
            f"{a} against {b}, backward: first other at the gradient of the {of['backward_first']} "
            f"({' against '.join(of['backward_dtypes'])}): {of['backward_why']}"
        )
    else:
        told.append(f"{a} against {b}, backward: the same bits everywhere")
    return told


def losses_told(of: dict) -> str:
    a, b = of["arms"]
    first = "the same" if of["same_first"] else "other"
    return (
        f"losses of {a} and {b}: {first} bits at step 1, {float(of['relative_last']):.2g} apart (relative) "
        f"at step {of['steps']}, at most {float(of['relative_largest']):.2g}"
    )


def told(result: dict) -> list[str]:
    """The sentences on reproducibility and differences."""
    lines = [bits_told(arm, of) for arm, of in result.get("bits", {}).items()]
    not_deterministic = {
        name for of in result.get("bits", {}).values() for name in of.get("not_deterministic", ())
    }
    if not_deterministic:
        lines.append(f"PyTorch calls not deterministic: {', '.join(sorted(not_deterministic))}")
    lines += trace_told(result["trace"]) if "trace" in result else []
    lines += [losses_told(result["losses"])] if "losses" in result else []
    return lines


def title(result: dict) -> str:
    return (
        f"scale {result['scale']}: {result['size']}³ voxels, {result['levels']} levels from "
        f"{result['width']} channels, {result['sites']} GroupNorms, "
        f"{result['parameters'] / 1e6:.3g} M parameters"
    )


def outcome(result: dict) -> list[str]:
    """What failed, what was not served by the native kernel, and what no row of the items claims."""
    lines = [f"{arm} failed: {of['error']}" for arm, of in result["arms"].items() if "error" in of]
    lines += [
        f"{arm} was served by the {of['rung']} rung, not by the native kernel"
        for arm, of in result["arms"].items()
        if of.get("rung", "native") != "native"
    ]
    return lines + [
        f"{arm}, unclaimed: {name}, {us / 1e3:.3g} ms"
        for arm, of in result.get("items", {}).items()
        for name, us in of["unclaimed"]
        if us > NAMED_SHARE * of["total_us"]
    ]


def text(result: dict) -> str:
    """Everything of one scale."""
    lines = [title(result), *aligned([ARM_HEAD, *arm_lines(result)])]
    lines += aligned(item_lines(result)) if result.get("items") else []
    return "\n".join([*lines, *outcome(result), *told(result)])
