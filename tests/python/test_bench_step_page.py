# SPDX-License-Identifier: Apache-2.0
"""The page's section on a training step says what the step's file of results holds. Runs without a GPU."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.page import __main__ as command_line
from bench.page import bars, pictures, steps
from page_helpers import HEAD, chunk, empty_tree, line_of, lost_and_won, put, stamped, texts


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a README and a file of `make bench`."""
    tree = empty_tree(tmp_path)
    put(tree, "a.json", lost_and_won())
    return tree


STEP_ROWS = ("GroupNorm forward", "dtype conversions", "convolutions", "pooling", "unclaimed")


def interval(mean: float, half_width: float) -> dict:
    return {"mean": mean, "half_width": half_width, "count": 6}


def items(*us: float) -> dict:
    rows = dict(zip(STEP_ROWS, us, strict=True))
    unclaimed = [["odd kernel", us[-1]]]
    return {"total_us": sum(us), "rows_us": rows, "group_norm_share": 0.25, "unclaimed": unclaimed}


def step_results() -> dict:
    """Ours lost to stock in time, another arm ran out of memory, and one has other bits."""
    told = {"told": "what it is"}
    scale = {
        "scale": 8, "size": 256, "levels": 6, "sites": 22, "width": 64, "parameters": 361893190,
        "arms": {
            "stock": {**told, "step_ms": [400.0], "step_ms_interval": interval(400.0, 1.25),
                      "step_ms_less_ours": interval(-35.7, 0.9), "peak_mib_interval": interval(43827.2, 0.0),
                      "peak_mib_less_ours": interval(4403.2, 0.0)},
            "compiled": {**told, "error": "OutOfMemoryError: 2 GiB", "step_ms": []},
            "ours": {**told, "step_ms": [435.7], "step_ms_interval": interval(435.7, 0.5), "rung": "eager",
                     "peak_mib_interval": interval(39424.0, 0.0)},
        },
        "items": {"stock": items(100e3, 100e3, 180e3, 0.0, 20e3), "ours": items(50e3, 0.0, 380e3, 0.0, 0.1)},
        "bits": {
            "stock": {"same": False, "processes": 3, "gradients": 80, "same_loss": True,
                      "different_gradients": 2, "first_different": "up.0.conv0.weight",
                      "not_deterministic": ["max_pool3d_backward"]},
            "ours": {"same": True, "processes": 3, "gradients": 80, "not_deterministic": []},
        },
        "trace": {
            "arms": ["ours_fp32", "ours"], "sites": 22, "sites_rounded_once": 22, "forward_first": None,
            "backward_first": "input of pool", "backward_why": "ties",
            "backward_dtypes": ["float32", "bfloat16"],
        },
        "losses": {"arms": ["ours_fp32", "ours"], "steps": 23, "relative_last": 4.4e-6,
                   "relative_largest": 5e-6, "same_first": True},
    }  # fmt: skip
    options = {
        "scales": [8], "width": 64, "arms": ["stock", "compiled", "ours"], "parts": ["time", "profile"],
        "replicates": 7, "steps": 2, "loss_steps": 22, "processes": 4, "trace_difference": None,
    }  # fmt: skip
    head = {key: HEAD[key] for key in ("commit", "dirty", "date", "device", "driver", "stopped")}
    head |= {"versions": {"torch": "2.11.0", "triton": None}, "options": options, "volume": "synthetic"}
    return {**head, "scales": [scale]}


def put_step(root: Path, data: dict, file: str = "some-gpu-step.json") -> None:
    (root / "bench" / "results" / file).write_text(json.dumps(data), encoding="utf-8")


def test_a_step_has_its_section_losers_and_failures_in_it(root: Path) -> None:
    without = texts(root)
    assert "training step" not in without["performance.md"] + without["performance.html"]
    put_step(root, step_results())
    made = texts(root)["performance.md"]
    assert "some-gpu-step.json." not in made  # read, not named as of another kind
    assert line_of(made, "stock") == [
        "stock",
        "400.0 ± 1.2",
        "-35.70 ± 0.90",
        "42.800",
        "4.300",
    ]
    assert line_of(made, "compiled") == ["compiled", "failed", "–", "–", "–"]
    assert line_of(made, "ours")[:3] == ["ours", "435.70 ± 0.50", "–"]
    assert line_of(made, "convolutions") == ["convolutions", "180.00", "380.00"]
    assert line_of(made, "total") == ["total", "400.00", "430.00"]
    assert "| pooling |" not in made  # nobody has any
    for sentence in (
        "a synthetic volume", "compiled failed: OutOfMemoryError: 2 GiB",
        "ours was served by the eager rung, not by the native kernel", "stock, unclaimed: odd kernel, 20 ms",
        "ours: the same bits in 3 processes, loss and 80 gradients",
        "stock: other bits in 3 processes: loss the same, 2 of 80 gradients other, the first in backward "
        "up.0.conv0.weight", "PyTorch calls not deterministic: max_pool3d_backward",
        "forward: 22 of 22 sites have the same bits",
        "the gradient of the input of pool (float32 against bfloat16)",
        "the same bits at step 1, 4.4e-06 apart (relative) at step 23",
        "7 replicates, in each 2 timed steps of every arm", "(performance/some-gpu-step-8.png)",
        "Some GPU, 2026-01-02, commit 0123456789",
    ):  # fmt: skip
        assert sentence in made, sentence
    assert "ours, unclaimed" not in made  # 0.1 us of 430 ms
    page = texts(root)["performance.html"]
    drawn = [title.text for title in ElementTree.fromstring(page).iter("title")]
    assert "stock, dtype conversions: 100 ms" in drawn and "ours, convolutions: 380 ms" in drawn
    assert "ours: the same bits in 3 processes" in page and not re.search(r"https?:|\bhref=", page)


def test_a_step_of_times_alone_has_no_items_and_no_picture(root: Path) -> None:
    data = step_results()
    for key in ("items", "bits", "trace", "losses"):
        del data["scales"][0][key]
    data["stopped"] = "interrupted"
    put_step(root, data)
    made = texts(root)["performance.md"]
    assert "-35.70 ± 0.90" in made and "step-8.png" not in made and "Stopped early: interrupted." in made


def test_two_files_of_one_device_have_a_picture_each(root: Path) -> None:
    older = step_results()
    older["date"] = "2026-01-01"
    put_step(root, older, "older-step.json")
    put_step(root, step_results())
    made = texts(root)["performance.md"]
    assert made.index("(performance/some-gpu-step-8.png)") < made.index("(performance/older-step-8.png)")
    names = {path.name for path in command_line.Page(root).pictures}
    assert {"some-gpu-step-8.png", "older-step-8.png"} <= names


def test_a_step_on_a_cpu_is_no_proof(root: Path) -> None:
    put_step(root, {**step_results(), "device_type": "cpu"})
    made = texts(root)
    assert "training step" not in made["performance.md"] + made["README.md"]
    assert "not on this page: some-gpu-step.json." in made["performance.md"]


def test_what_groupnorm_causes_is_named_whichever_rows_are_there(root: Path) -> None:
    data = step_results()
    for of in data["scales"][0]["items"].values():
        of["rows_us"]["dtype conversions"] = 0.0
    put_step(root, data)
    made = texts(root)["performance.md"]
    assert "| dtype conversions |" not in made
    assert line_of(made, "share of GroupNorm, conversions and layout")[1:] == ["25.0 %", "25.0 %"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data["scales"][0]["arms"]["stock"].pop("told"), "lacks 'told'"),
        (lambda data: data.pop("versions"), "lacks 'versions'"),
        (lambda data: data["scales"][0]["items"]["ours"]["rows_us"].update(pooling=float("nan")),
         "device times must be finite and not all 0, at scale 8"),
        (lambda data: data["scales"][0]["items"]["ours"].pop("rows_us"), "lacks 'rows_us'"),
        (lambda data: data["scales"][0].update(items={"ours": items(0.0, 0.0, 0.0, 0.0, 0.0)}),
         "device times must be finite and not all 0, at scale 8"),
    ],
)  # fmt: skip
def test_a_damaged_step_is_told_with_its_file(root: Path, damage, told: str, capsys) -> None:
    data = step_results()
    damage(data)
    put_step(root, data)
    assert command_line.main(["--check"], root) == 1
    assert capsys.readouterr().err == f"report: bench/results/some-gpu-step.json cannot be shown: {told}\n"


def test_a_steps_picture_is_stale_when_its_items_change(root: Path, monkeypatch) -> None:
    def png(drawn: bars.Bars) -> bytes:
        text = f"{pictures.STAMP}\0{bars.stamp(drawn)}".encode()
        parts = ((b"tEXt", text), (b"IEND", b""))
        return b"".join([b"\x89PNG\r\n\x1a\n", *(chunk(*part) for part in parts)])

    monkeypatch.setattr(pictures, "png", stamped)
    monkeypatch.setattr(bars, "png", png)
    data = step_results()
    put_step(root, data)
    command_line.Page(root).write()
    assert command_line.Page(root).stale() == []
    data["scales"][0]["items"]["ours"]["rows_us"]["convolutions"] += 1e3
    put_step(root, data)
    assert "docs/performance/some-gpu-step-8.png" in command_line.Page(root).stale()


def test_a_steps_picture_is_the_same_each_time(root: Path) -> None:
    pytest.importorskip("matplotlib")
    put_step(root, step_results())
    (drawn,) = (of for of in command_line.Page(root).pictures.values() if isinstance(of, bars.Bars))
    first = bars.png(drawn)
    assert bars.png(drawn) == first and pictures.read_stamp(first) == bars.stamp(drawn)


def test_a_bars_parts_lie_end_to_end() -> None:
    drawn = bars.svg(bars.Bars("n", "t", "ms", {"one": {"a": 30.0, "b": 10.0}, "two": {"a": 0.0, "b": 20.0}}))
    found = re.findall(r'x="([\d.]+)" y="(\d+)" width="([\d.]+)"', drawn)
    scale = (bars.WIDTH - bars.LEFT - 70) / 40
    expected = [(0, 0, 30), (30, 0, 10), (0, bars.BAR + bars.GAP, 0), (0, bars.BAR + bars.GAP, 20)]
    assert len(found) == 4
    for (x, y, width), (before, top, value) in zip(found, expected, strict=True):
        assert float(x) == pytest.approx(bars.LEFT + before * scale, abs=0.06)
        assert int(y) == top and float(width) == pytest.approx(value * scale, abs=0.06)


def test_the_steps_command_measures_what_the_run_did() -> None:
    parse = pytest.importorskip("steadynorm.bench.step").parse_arguments
    data = step_results()
    pair = {
        **data["options"],
        "arms": ["stock", "ours"],
        "parts": ["trace"],
        "trace_difference": ["stock", "ours"],
    }
    assert steps.command(pair).startswith(".venv/bin/python -m steadynorm bench step ")
    for options in (data["options"], pair):
        again = vars(parse(shlex.split(steps.command(options))[5:]))
        assert {key: again[key] for key in options} == options


def test_the_readme_says_what_a_step_gains(root: Path) -> None:
    assert "A training step" not in texts(root)["README.md"]
    data = step_results()
    del data["scales"][0]["arms"]["compiled"]
    put_step(root, data)
    readme = texts(root)["README.md"]
    assert (
        "**A training step**, Some GPU, 2026-01-02, commit 0123456789, scale 8: 256³ voxels, 6 levels from "
        "64 channels, 22 GroupNorms, 362 M parameters, bf16: stock GroupNorm 400.0 ± 1.2 ms and 42.800 GiB, "
        "ours 435.70 ± 0.50 ms and 38.500 GiB ("
    ) in readme
    data["scales"][0]["arms"]["stock"] = {"told": "", "error": "OutOfMemoryError: 2 GiB", "step_ms": []}
    put_step(root, data)
    assert "bf16: stock GroupNorm failed, ours 435.70 ± 0.50 ms" in texts(root)["README.md"]
