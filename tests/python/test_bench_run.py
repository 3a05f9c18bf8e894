# SPDX-License-Identifier: Apache-2.0
"""The benchmark's run on the CPU, with the device's clock and memory counters replaced."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench import __main__ as command_line  # noqa: E402
from bench import run  # noqa: E402
from steadynorm.bench import arms, errors, timing  # noqa: E402
from support.cases import Case  # noqa: E402

SMALL = [Case("small-a", (2, 8, 6, 5), 4, "contiguous"), Case("small-b", (1, 6, 3, 4, 5), 3, "channels_last")]


class FakeTimer:
    """Runs nothing again; the median of every graph is 10 us."""

    interrupt_after = 1000

    def __init__(self, budget_ms: float):
        self.calls = 0

    def copy_rate(self) -> float:
        return 4e12

    def measure(self, graphs: dict) -> dict[str, timing.Time]:
        self.calls += 1
        if self.calls > self.interrupt_after:
            raise KeyboardInterrupt
        return {name: timing.Time(10.0, 9.0, 11.0, 7) for name in ["empty", *graphs]}


@pytest.fixture
def options(native, monkeypatch: pytest.MonkeyPatch):
    for counter in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, counter, lambda: None)
    for counter in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, counter, lambda: 1 << 20)
    monkeypatch.setattr(run, "Timer", FakeTimer)
    monkeypatch.setattr(run, "capture", lambda function: function())
    monkeypatch.setattr(run, "capture_copy", lambda target, source: target.copy_(source))
    monkeypatch.setattr(FakeTimer, "interrupt_after", 1000)
    monkeypatch.setattr(arms, "operands", functools.partial(arms.operands, device="cpu"))
    chosen = command_line.parse_arguments(["--dtypes", "fp32,bf16", "--peers", "eager"])
    chosen.cases = SMALL
    return chosen


def finish(options, tmp_path: Path, deadline: float = float("inf")) -> tuple[int, dict]:
    path = tmp_path / "out.json"
    status = run.run(options, command_line.jobs_of(options), {"device": "none"}, path, deadline)
    return status, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--budget-seconds nan", "--budget-seconds: must be seconds above 0, got 'nan'"),
        ("--repeat-ms 0", "--repeat-ms: must be ms above 0, got '0'"),
        ("--output /no/x", "--output: must name a file that can be written, got '/no/x'"),
        ("--peers apex", "--peers: expected words of eager, inductor, liger, got 'apex'"),
    ],
)
def test_bad_options_are_one_sentence(capsys, arguments: str, sentence: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.parse_arguments(arguments.split())
    assert (stopped.value.code, capsys.readouterr().err) == (2, f"bench: {sentence}\n")


@pytest.mark.parametrize(("peers", "told"), [
    (["--no-peers"], "ours and a copy: about 27 s"),
    (["--peers", "eager"], "beside eager (those installed): about 17 min"),
])  # fmt: skip
def test_what_is_done_and_how_long_it_takes_is_told_first(monkeypatch, tmp_path, capsys, peers, told) -> None:
    def interrupted(options, jobs, head, path, deadline) -> int:
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(command_line, "require_gpu", lambda: None)
    monkeypatch.setattr(command_line, "describe", lambda options: {"device": "NVIDIA H200"})
    monkeypatch.setattr(command_line, "ROOT", tmp_path)
    monkeypatch.setattr(run, "run", interrupted)
    monkeypatch.setattr(sys, "argv", ["bench", "--tag", "x", *peers])
    (tmp_path / "bench" / "results").mkdir(parents=True)
    path = tmp_path / "bench" / "results" / "h200-x.json"
    path.write_text("{}")
    before = signal.getsignal(signal.SIGTERM), os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert command_line.main() == 130
    assert (signal.getsignal(signal.SIGTERM), os.environ.get("TORCHINDUCTOR_CACHE_DIR")) == before
    printed = capsys.readouterr()
    assert printed.out == (
        f"bench: NVIDIA H200: 204 times forward and forward_backward, {told} on an NVIDIA H200\n"
        f"Writes {path}, over what is there\n"
    )
    assert printed.err == "bench: interrupted before anything was measured\n"


def test_a_disk_that_is_full_ends_no_measurement(options, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
    path = tmp_path / "out.json"
    jobs = command_line.jobs_of(options)
    assert run.run(options, jobs, {"device": "none"}, path, float("inf")) == 1
    printed = capsys.readouterr()
    assert printed.err.count(f"bench: {path} could not be written: no space\n") == len(jobs) + 1
    assert "[8/8] small-b bf16" in printed.out and "small-b" in printed.out.split("[8/8]")[1]
    assert "wrote" not in printed.out


@pytest.mark.parametrize("missing", ["torch", "steadynorm"])
def test_nothing_is_timed_without_the_package(monkeypatch, capsys, missing: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command_line.require_gpu()
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as stopped:
        command_line.require_gpu()
    assert stopped.value.code == 2
    assert "bench: needs PyTorch and the installed package, got:" in capsys.readouterr().err


def test_every_case_has_a_row_for_each_pass(options, tmp_path: Path, capsys) -> None:
    status, held = finish(options, tmp_path)
    assert status == 0
    assert len(held["rows"]) == len(SMALL) * 2 * 2 * 2
    assert held["stopped"] is None
    row = held["rows"][0]
    assert row["floor_us"] == pytest.approx(1e6 * 2 * 2 * 8 * 30 * 4 / 4e12, abs=1e-3)
    ours = row["arms"]["ours"]
    assert (ours["rung"], ours["median_us"]) == ("native", 10.0)
    assert 0 <= ours["error_y"] < 8
    assert 0 <= ours["error_dx"] < 16
    assert "[8/8] small-b bf16" in capsys.readouterr().out


def test_an_arm_that_fails_is_recorded_and_the_others_go_on(options, tmp_path: Path, monkeypatch) -> None:
    def fail(*arguments, **named):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(arms, "_ours", fail)
    status, held = finish(options, tmp_path)
    assert status == 1
    assert held["rows"][0]["arms"]["ours"] == {"error": "RuntimeError: no kernel for this device"}
    assert held["rows"][0]["arms"]["eager"]["median_us"] == 10.0


def test_ctrl_c_writes_what_was_measured(options, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(FakeTimer, "interrupt_after", 3)
    status, held = finish(options, tmp_path)
    assert (status, held["stopped"], len(held["rows"])) == (130, "interrupted", 3)


def test_the_budget_ends_the_run(options, tmp_path: Path) -> None:
    status, held = finish(options, tmp_path, deadline=0.0)
    assert (status, held["rows"]) == (0, [])
    assert "budget" in held["stopped"]


def test_a_wrong_result_shows_as_an_error(options) -> None:
    o = arms.operands(SMALL[0], "fp32", "silu")
    right = arms.training_step(arms.arms_of(SMALL[0], [])["ours"], o)
    off = (right[0] + 1e-3, right[1], *right[2:])
    found, checked = errors.measure(o, {"ours": right[:2], "off": off[:2]})
    assert found["off"]["error_y"] > 1000 > 20 > found["ours"]["error_y"]
    assert checked == "all groups"


@pytest.mark.parametrize(
    "sizes", [(5, 12, 4, 3 << 20), (2, 8, 4, 1 << 23), (5, 4, 2, 1 << 22), (3, 4, 2, 100)]
)
def test_parts_cover_each_group_once(sizes: tuple[int, ...]) -> None:
    samples, channels, groups, positions = sizes
    seen = torch.zeros(samples, channels, dtype=torch.int64)
    for n, c, count in errors.parts(samples, channels, groups, positions, 1 << 25):
        seen[n, c] += 1
        assert (c.stop - c.start) == count * channels // groups
    assert seen.eq(1).all()


def test_turns_are_spread_evenly() -> None:
    turns = timing.spread_turns({"fast": 8, "slow": 2})
    assert [("slow" in names) for names in turns] == [False, False, False, True] * 2
    assert sum(("fast" in names) for names in turns) == 8


def test_summary_subtracts_the_empty_graph() -> None:
    found = timing.summarise([0.012, 0.013, 0.014], overhead_ms=0.003)
    assert (found.median_us, found.repeats) == (10.0, 3)
    assert found.p10_us == pytest.approx(9.2)


def test_what_a_disturbed_run_measured_is_measured_again() -> None:
    calm, disturbed = {"empty": [3.1, 3.0, 3.2]}, {"empty": [3.0, 36.0, 62.0]}
    runs = iter([disturbed, disturbed, calm])
    assert timing.undisturbed(lambda: next(runs)) == (calm, True)
    runs = iter([disturbed] * 4)
    assert timing.undisturbed(lambda: next(runs)) == (disturbed, False)
    assert next(runs, None) is None
