# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench` on the CPU, at sizes that take milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import normal
from steadynorm import bench
from steadynorm.bench import arms, errors, output, shapes, timing
from support.cases import read_cases

SMALL = ["--shape", "2,8,6,5", "--groups", "4", "--peers", "eager", "--repeats", "3", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick(native, set_threads, monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(1)
    monkeypatch.setattr(timing, "CPU_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "LOOP_MS", 1e-3)


def rows_of(tmp_path: Path, *options: str, status: int = 0) -> list[dict]:
    path = tmp_path / "out.json"
    assert bench.main([*SMALL, "--json", str(path), *options]) == status
    return json.loads(path.read_text())["rows"]


def test_every_combination_has_a_row_with_times_errors_rung_and_format(tmp_path: Path, capsys) -> None:
    rows = rows_of(tmp_path, "--shape", "1,4,3,7", "--dtype", "bf16,fp32", "--activation", "none,silu",
                   "--channels-last")  # fmt: skip
    assert len(rows) == 2 * 2 * 2 * 2
    kinds = [(row["shape"], row["dtype"], row["activation"], row["which"]) for row in rows]
    assert kinds[:3] == [
        ([2, 8, 6, 5], "bf16", "none", "forward"), ([2, 8, 6, 5], "bf16", "none", "training"),
        ([2, 8, 6, 5], "bf16", "silu", "forward"),
    ]  # fmt: skip
    for row in rows:
        assert list(row["arms"]) == ["ours", "eager"]
        of, stock = row["arms"]["ours"], row["arms"]["eager"]
        assert (of["rung"], of["format"], stock["format"]) == ("native", "kept", "kept")
        assert 0 <= of["error_y"] < (8 if row["activation"] == "none" else 18)
        assert ("error_dx" in of) == (row["which"] == "training")
        assert of["p10_us"] <= of["median_us"] <= of["p90_us"]
        assert of["repeats"] == 3
        assert stock["over_ours"] == pytest.approx(stock["median_us"] / of["median_us"])
        assert stock["over_floor"] == pytest.approx(stock["median_us"] / row["floor_us"])
    told = capsys.readouterr()
    assert "wall time on the CPU" in told.out
    assert "2x8x6x5, 4 groups, channels_last, bf16, silu: forward + backward" in told.out
    assert "[16/16] 1x4x3x7" in told.err


@pytest.mark.parametrize(("which", "tensors"), [("forward", 2), ("training", 5)])
def test_the_floor_is_the_least_bytes_at_the_runs_copy_rate(tmp_path: Path, which: str, tensors: int) -> None:
    (row,) = rows_of(tmp_path, "--pass", which)
    head = json.loads((tmp_path / "out.json").read_text())
    least = tensors * 2 * 8 * 6 * 5 * 2  # of bf16
    assert row["floor_us"] == pytest.approx(1e6 * least / head["copy_bytes_per_second"])


def test_forward_is_without_gradients_and_training_with_all(monkeypatch, tmp_path: Path) -> None:
    seen = set()
    right = arms._ours

    def ours(o: arms.Operands) -> torch.Tensor:
        y = right(o)
        seen.add(tuple(t.requires_grad for t in (o.x, o.weight, o.bias, y)))
        return y

    monkeypatch.setattr(arms, "_ours", ours)
    for which, grad in (("forward", False), ("training", True)):
        seen.clear()
        rows_of(tmp_path, "--pass", which)
        assert seen == {(grad,) * 4}


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("arm", ["ours", "eager"])
def test_each_arm_applies_the_activation(arm: str, activation: str) -> None:
    job = shapes.Job((2, 8, 6, 5), 4, "contiguous", "fp32", activation, "training")
    o = arms.operands(job, "fp32", activation, "cpu")
    result = arms.training_step(arms.arms_of(job, ["eager"])[arm], o)[:2]
    worst, _ = errors.measure(o, {arm: result})
    assert worst[arm]["error_y"] < 100  # another activation: above 10^5


def test_an_arm_that_fails_is_told_and_the_others_are_timed(monkeypatch, tmp_path: Path, capsys) -> None:
    def fail(o: arms.Operands) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(arms, "_ours", fail)
    (row,) = rows_of(tmp_path, "--pass", "forward", status=1)
    assert row["arms"]["eager"]["median_us"] > 0
    assert "over_ours" not in row["arms"]["eager"]
    assert "ours  failed: RuntimeError: no kernel for this device" in capsys.readouterr().out


def test_a_job_without_memory_is_left_out_and_the_next_is_timed(monkeypatch, tmp_path: Path, capsys) -> None:
    operands = arms.operands

    def short(job: shapes.Job, *rest, **named) -> arms.Operands:
        if job.which == "forward":
            raise torch.OutOfMemoryError("out of memory")
        return operands(job, *rest, **named)

    monkeypatch.setattr(arms, "operands", short)
    first, second = rows_of(tmp_path, status=1)
    assert first["error"] == "OutOfMemoryError: out of memory"
    assert "median_us" in second["arms"]["ours"]
    assert "left out: OutOfMemoryError" in capsys.readouterr().out


def test_an_error_that_needs_too_much_memory_is_left_open(monkeypatch, tmp_path: Path, capsys) -> None:
    def short(*_) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(errors, "measure", short)
    (row,) = rows_of(tmp_path, "--pass", "forward")
    assert row["errors_of"] == "nothing: OutOfMemoryError: out of memory"
    assert "median_us" in row["arms"]["ours"]
    assert "errors of: nothing: OutOfMemoryError: out of memory" in capsys.readouterr().out


def test_each_row_is_in_the_file_as_soon_as_it_is_measured(monkeypatch, tmp_path: Path) -> None:
    measure = shapes.measure

    def killed(job: shapes.Job, *rest) -> dict:
        if job.which == "training":
            held = json.loads((tmp_path / "out.json").read_text())
            assert (len(held["rows"]), held["stopped"]) == (1, "not finished")
            raise SystemExit
        return measure(job, *rest)

    monkeypatch.setattr(shapes, "measure", killed)
    with pytest.raises(SystemExit):
        rows_of(tmp_path)


def test_ctrl_c_keeps_what_was_measured(monkeypatch, tmp_path: Path, capsys) -> None:
    measure = shapes.measure

    def interrupted(job: shapes.Job, *rest) -> dict:
        if job.which == "training":
            raise KeyboardInterrupt
        return measure(job, *rest)

    monkeypatch.setattr(shapes, "measure", interrupted)
    (row,) = rows_of(tmp_path, status=130)
    assert row["which"] == "forward"
    assert json.loads((tmp_path / "out.json").read_text())["stopped"] == "interrupted after 1 of 2"
    told = capsys.readouterr()
    assert "ours" in told.out
    assert "bench: interrupted after 1 of 2" in told.err


def test_the_named_cases_are_those_of_the_file_that_fit_and_small_ones() -> None:
    options = shapes.parse(["--cases", "all", "--device", "cpu", "--peers", "eager", "--pass", "forward"])
    jobs = shapes.jobs_of(options)
    held = {(job.case, job.shape, job.groups, job.layout) for job in jobs}
    file = [case for case in read_cases() if case.elements <= 1 << 26]
    assert {(case.name, case.shape, case.groups, case.layout) for case in file} <= held
    assert len(file) == 29 and len(held) == len(jobs) == 29 + 9
    small = {
        (shape, groups, layout) for name, shape, groups, layout in held if name not in {c.name for c in file}
    }
    sizes = [((8, 64, 56, 56), 32), ((32, 256, 14, 14), 32), ((1, 320, 64, 64), 32), ((1, 32, 96, 96, 96), 8)]
    assert small == {((64, 512), 32, "contiguous")} | {
        (*size, layout) for size in sizes for layout in ("contiguous", "channels_last")
    }
    assert [job.bytes for job in jobs] == sorted(job.bytes for job in jobs)
    gpu = shapes.named("unet3d-64,liger-a")
    assert [case.name for case in gpu] == ["liger-a", "unet3d-64"]


def test_a_named_case_has_its_name_in_its_row_and_the_budget_keeps_rows(
    monkeypatch, tmp_path, capsys
) -> None:
    path = tmp_path / "out.json"
    now = iter(range(100))
    monkeypatch.setattr(shapes.time, "monotonic", lambda: next(now))
    arguments = ["--cases", "rows-512", "--device", "cpu", "--peers", "eager", "--repeats", "3"]
    assert bench.main([*arguments, "--dtype", "bf16,fp32", "--budget", "5", "--json", str(path)]) == 0
    held = json.loads(path.read_text())
    assert held["stopped"] == f"the budget of 5 s was spent after {len(held['rows'])} of 4"
    expected = [("rows-512", [64, 512], dtype) for dtype in ("bf16", "bf16", "fp32")]
    assert [(row["case"], row["shape"], row["dtype"]) for row in held["rows"]] == expected
    told = capsys.readouterr()
    assert told.out.index("4 times ours beside eager") < told.out.index("copy rate")
    assert "rows-512, 64x512, 32 groups" in told.out and " left" in told.err


def test_without_a_checkout_there_are_no_cases(monkeypatch, capsys) -> None:
    monkeypatch.setattr(shapes.provenance, "repository", lambda: None)
    with pytest.raises(SystemExit):
        bench.main(["--cases", "all"])
    told = "bench: --cases: needs a checkout, which has cases/cases.csv, got none\n"
    assert capsys.readouterr().err == told


def test_times_have_three_digits_from_microseconds_to_seconds() -> None:
    assert [output.format_us(us) for us in (0.04, 999.94, 1000.0, 999.4e3, 999.6e3, 12.34e6)] == [
        "0.0 us", "999.9 us", "1 ms", "999 ms", "1 s", "12.3 s",
    ]  # fmt: skip


def test_a_picture_that_cannot_be_written_is_told(monkeypatch, tmp_path: Path, capsys) -> None:
    def full(*_) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(shapes, "picture", shapes.writable)
    monkeypatch.setattr(shapes, "draw", full)
    (row,) = rows_of(tmp_path, "--pass", "forward", "--plot", str(tmp_path / "a.png"), status=1)
    assert "median_us" in row["arms"]["ours"]
    assert f"bench: {tmp_path / 'a.png'} could not be written: no space\n" in capsys.readouterr().err


def test_a_copied_tree_names_its_commit(tmp_path: Path) -> None:
    rows_of(tmp_path, "--pass", "forward", "--commit", "0123abc")
    assert json.loads((tmp_path / "out.json").read_text())["commit"] == "0123abc"


def test_nothing_starts_after_the_budget(tmp_path: Path, capsys) -> None:
    assert rows_of(tmp_path, "--budget", "1e-9") == []
    assert "bench: the budget of 1e-09 s was spent after 0 of 2" in capsys.readouterr().err


def test_the_format_of_a_result_is_kept_restored_or_lost(monkeypatch) -> None:
    job = shapes.Job((2, 8, 6, 5), 4, "channels_last", "fp32", "none", "forward")
    o = arms.operands(job, "fp32", "none", "cpu", gradients=False)
    assert shapes.format_of("ours", o.x, o) == "kept"
    assert shapes.format_of("ours", o.x.contiguous(), o) == "lost"
    assert shapes.format_of("eager", o.x, o) == "kept"
    stock = F.group_norm
    monkeypatch.setattr(F, "group_norm", lambda *arguments: stock(*arguments).contiguous())
    assert shapes.format_of("eager", o.x, o) == "restored"
    assert shapes.format_of("ours", o.x, o) == "kept"


def test_a_timer_with_host_times_has_their_column(capsys) -> None:
    class Timer(timing.CpuTimer):
        def calls(self, functions: dict) -> dict[str, timing.Time]:
            return {name: timing.Time(1234.5, 1.0, 2.0, 3) for name in functions}

    job = shapes.Job((2, 8, 6, 5), 4, "contiguous", "bf16", "none", "forward")
    row = shapes.measure(job, ["eager"], Timer(1.0, 3), 1e9)
    lines = shapes.table(job, row).splitlines()
    assert lines[1].split()[:8] == ["time", "spread", "/", "floor", "/", "ours", "call", "error"]
    assert all("1.23 ms" in line for line in lines[2:4])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "--shape: must be given, expected N,C,*, got none (--help has examples)"),
        ("--shape 2,x", "--shape: must be N,C,*, two or more sizes above 0, got '2,x'"),
        ("--shape 2,0", "--shape: must be N,C,*, two or more sizes above 0, got '2,0'"),
        ("--shape 2,30,4", "--groups: must divide the channels, got 32 for shape 2,30,4"),
        ("--shape 2,32 --groups 0", "--groups: must be a whole number of at least 1, got '0'"),
        ("--shape 2,32,4 --channels-last", "--channels-last: needs shapes of rank 4 or 5, got 2,32,4"),
        ("--shape 2,32 --dtype fp8", "--dtype: expected words of bf16, fp16, fp32, got 'fp8'"),
        ("--shape 2,32 --repeats 2", "--repeats: must be a whole number of at least 3, got '2'"),
        ("--shape 2,32 --budget -1", "--budget: must be seconds above 0, got '-1'"),
        ("--shape 2,32 --json /no/x", "--json: must name a file that can be written, got '/no/x'"),
        ("--shape 2,32 --plot x.pdf", "--plot: must name a .png or .svg file, got 'x.pdf'"),
        ("--shape 2,32 --plot x.png", "--plot: needs matplotlib (pip install matplotlib), got none"),
        ("--shape 2,32 --budget nan", "--budget: must be seconds above 0, got 'nan'"),
        ("--cases odd", "--cases: must be all or beginnings of names in cases/cases.csv, got 'odd'"),
        (
            "--cases liger-a,",
            "--cases: must be all or beginnings of names in cases/cases.csv, got 'liger-a,'",
        ),
        (
            "--cases all --groups 8",
            "--cases: has shapes, groups and layouts of its own, got --shape, --groups or "
            "--channels-last too",
        ),
        ("--cases unet3d-64 --device cpu", "--cases: must have one of at most 256 MiB on the CPU, got none"),
        ("--shape 2,32 --device cuda", "--device: cuda needs a GPU that PyTorch can use, got none"),
        ("--shape 2,32 --device cpu --peers liger", "--peers: liger needs a CUDA device, got none"),
    ],
)
def test_bad_options_are_one_sentence_before_any_work(monkeypatch, capsys, arguments, sentence) -> None:
    monkeypatch.setattr(shapes.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "CpuTimer", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as stopped:
        bench.main(arguments.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"bench: {sentence}\n"


def test_help_has_examples_that_parse(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out.replace("\\\n", " ")
    examples = [
        line.split()[4:] for line in text.splitlines() if line.startswith("  python -m steadynorm bench")
    ]
    assert len(examples) == 4
    for example in examples:
        plain = [word for i, word in enumerate(example) if "--plot" not in example[max(i - 1, 0) : i + 1]]
        assert shapes.jobs_of(shapes.parse([*plain, "--peers", "eager"]))


def test_peers_are_those_that_are_there(monkeypatch) -> None:
    assert arms.missing("liger", "cpu") == "a CUDA device"
    monkeypatch.setattr(arms.importlib.util, "find_spec", lambda name: None)
    assert arms.available(arms.PEERS, "cuda") == ["eager"]
    monkeypatch.setattr(arms.importlib.util, "find_spec", lambda name: name)
    assert arms.available(arms.PEERS, "cuda") == ["eager", "inductor", "liger"]
    monkeypatch.setattr(arms.shutil, "which", lambda name: name)
    assert arms.available(arms.PEERS, "cpu") == ["eager", "inductor"]
    monkeypatch.setattr(arms.shutil, "which", lambda name: None)
    assert arms.available(arms.PEERS, "cpu") == ["eager"]


class Clock:
    """Time as the functions below spend it, in ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[str] = []

    def perf_counter(self) -> float:
        return self.now / 1e3

    def spender(self, name: str, ms: float):
        def spend() -> None:
            self.now += ms
            self.events.append(name)

        return spend


def test_wall_times_are_of_loops_in_turn_with_one_wait_at_their_ends(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(timing, "LOOP_MS", 4.0)
    functions = {"fast": clock.spender("fast", 1.0), "slow": clock.spender("slow", 20.0)}
    # One call and the wait take 3 ms, so that a loop of 4 ms is two calls.
    found = timing.wall_times(functions, 40.0, 3, synchronize=clock.spender("wait", 2.0))
    assert found["fast"].median_us == pytest.approx((2 * 1e3 + 2e3) / 2)
    assert found["slow"].median_us == pytest.approx(20e3 + 2e3)
    turn = ["wait", "fast", "fast", "wait", "wait", "slow", "wait"]
    assert clock.events[-3 * len(turn) :] == 3 * turn


def test_repeats_fill_the_budget_within_their_limits() -> None:
    assert timing.repeats_within(40.0, 1.9) == 20
    assert timing.repeats_within(40.0, 0.01) == timing.MAX_REPEATS
    assert timing.repeats_within(40.0, 30.0) == timing.MIN_REPEATS
    assert timing.repeats_within(40.0, 60.0) == timing.SLOW_REPEATS


def test_the_gpus_timer_repeats_as_often_as_is_asked_and_waits_for_its_calls(monkeypatch) -> None:
    timer = object.__new__(timing.Timer)
    timer.budget_ms, timer.repeats = 40.0, None
    monkeypatch.setattr(timer, "_once", lambda graph: 1.9, raising=False)
    assert timer._repeats(None) == 20
    timer.repeats = 3
    assert timer._repeats(None) == 3
    waits, calls = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(calls)))
    found = timer.calls({"one": lambda: calls.append(0)})
    assert found["one"].repeats == 3
    assert len(waits) == 2 * (2 + 3)  # around the warm-up, the first call and each loop
    assert waits[-1] == len(calls)


def test_a_copy_reads_and_writes(monkeypatch) -> None:
    second = timing.Time(1e6, 1e6, 1e6, 7)
    monkeypatch.setattr(timing.CpuTimer, "measure", lambda self, functions: dict.fromkeys(functions, second))
    assert timing.CpuTimer(1.0).copy_rate() == 2 * timing.CPU_COPY_BYTES


def test_progress_is_a_line_each_and_details_are_for_terminals(monkeypatch, capsys) -> None:
    output.progress("one")
    output.progress("more", detail=True)
    output.progress("")
    assert capsys.readouterr().err == "one\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    output.progress("one")
    output.progress("more", detail=True)
    output.progress("")
    assert capsys.readouterr().err == "\r\x1b[Kone\r\x1b[Kmore\r\x1b[K"


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_drawn_on_request(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"times{suffix}"
    rows_of(tmp_path, "--plot", str(path))
    assert path.read_bytes().startswith(beginning)


def test_errors_are_measured_by_parts_too(monkeypatch) -> None:
    job = shapes.Job((3, 8, 6, 5), 4, "contiguous", "fp32", "silu", "training")
    o = arms.operands(job, "fp32", "silu", "cpu")
    y, dx, *_ = arms.training_step(arms.arms_of(job, [])["ours"], o)
    wrong = y.detach().clone()
    wrong[1, 4] += normal(6, 5)  # in a part of its own, in the corners not
    whole, _ = errors.measure(o, {"right": (y, dx), "wrong": (wrong, dx)})
    monkeypatch.setitem(errors.LIMITS, "cpu", (2 * 6 * 5, 1 << 26))
    parts, checked = errors.measure(o, {"right": (y, dx), "wrong": (wrong, dx)})
    assert (parts, checked) == (whole, "all groups")
    assert parts["wrong"]["error_y"] > 1e4
    monkeypatch.setitem(errors.LIMITS, "cpu", (2 * 6 * 5, 1))
    corners, checked = errors.measure(o, {"right": (y, dx), "wrong": (wrong, dx)})
    assert checked == "first and last group of the first and last sample"
    assert corners["wrong"] == corners["right"]
