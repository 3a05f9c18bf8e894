# SPDX-License-Identifier: Apache-2.0
"""Results, as the performance page reads them, and what the page is then. Runs without a GPU."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from bench.output import write_json

from bench.page import __main__ as command_line
from bench.page import charts, pictures

OPTIONS = {
    "dtypes": ["bf16"], "activation": ["none"], "passes": ["forward", "forward_backward"], "peers": ["eager"],
    "no_errors": False, "repeat_ms": 25.0, "cases": ["unet3d-512", "liger-a"],
}  # fmt: skip
HEAD = {
    "commit": "0123456789abcdef", "dirty": False, "date": "2026-01-02", "device": "Some GPU", "driver": "1.2",
    "versions": {"torch": "2.11.0", "liger-kernel": None}, "options": OPTIONS, "copy_bytes_per_second": 4e12,
    "stopped": None,
}  # fmt: skip
README = f"before\n{command_line.BEGIN}stale\n{command_line.END}after\n"


def arm(us: float, **fields) -> dict:
    return {
        "median_us": us,
        "over_floor": us / 10,
        "error_y": 1.5,
        "error_dx": 2.5,
        "peak_mib": 8.0,
        **fields,
    }


def row(case: str, which: str, arms: dict[str, dict], layout: str = "contiguous") -> dict:
    return {
        "name": f"cuda/{which}/{layout}/bf16/none/{case}", "case": case, "shape": [1, 8, 4, 4], "groups": 4,
        "layout": layout, "dtype": "bf16", "set": "none", "activation": "none", "pass": which,
        "tensor_bytes": 2 << 20, "least_bytes": 4 << 20, "floor_us": 10.0, "errors_of": "all groups",
        "arms": {"ours": {"rung": "native"}, **arms},
    }  # fmt: skip


def results_of(*rows: dict, **head) -> dict:
    return {**HEAD, **head, "rows": list(rows)}


def put(root: Path, file: str, data: dict) -> None:
    held = dict(data)
    write_json(root / "bench" / "results" / file, held, held.pop("rows"))


def lost_and_won() -> dict:
    """liger-a is lost forward, won with backward; of unet3d-512 eager failed, and another rung served."""
    return results_of(
        row("liger-a", "forward", {"ours": arm(40.0, rung="native"), "eager": arm(20.0, error_y=900.0)}),
        row("liger-a", "forward_backward", {"ours": arm(40.0, rung="native"), "eager": arm(80.0)}),
        row("unet3d-512", "forward", layout="channels_last",
            arms={"ours": arm(20.0, rung="compiled", error_y=0.5), "eager": {"error": "OOM: no\nGiB"}}),
    )  # fmt: skip


def texts(root: Path) -> dict[str, str]:
    page = command_line.Page(root)
    return {path.name: text for path, text in page.texts.items()}


def line_of(text: str, *beginning: str) -> list[str]:
    """The cells of the one line of a table that begins with these."""
    found = [
        cells
        for line in text.splitlines()
        if line.startswith("| ")
        and (cells := line.strip("| ").split(" | "))[: len(beginning)] == [*beginning]
    ]
    assert len(found) == 1, found
    return found[0]


def stamped(figure: charts.Figure, styles: dict) -> bytes:
    """A PNG of a stamp and no pixels: what pictures.png draws needs matplotlib."""
    text = f"{pictures.STAMP}\0{pictures.stamp(figure, styles)}".encode()
    parts = ((b"tEXt", text), (b"IDAT", b"pixels"), (b"IEND", b""))
    return b"".join([b"\x89PNG\r\n\x1a\n", *(chunk(*part) for part in parts)])


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def empty_tree(folder: Path) -> Path:
    """`folder` with a README and no results."""
    (folder / "bench" / "results").mkdir(parents=True)
    (folder / "README.md").write_text(README)
    return folder
