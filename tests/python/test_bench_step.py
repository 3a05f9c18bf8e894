# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench step`: its network, its options, and short runs on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from steadynorm.bench import machine, output, step, step_arms, step_run
from steadynorm.bench.step_arms import ARMS, Arm
from steadynorm.bench.step_items import GROUP_NORM_ROWS
from steadynorm.bench.step_training import Scale, Training
from support.cases import read_cases

SHORT = ["--scales", "4", "--width", "8", "--replicates", "6", "--steps", "1", "--loss-steps", "2"]


@pytest.fixture(autouse=True)
def one_thread(set_threads, monkeypatch: pytest.MonkeyPatch):
    """No GPU, and no second thread that waits for a core."""
    set_threads(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # The compiled sites' cache stays where other tests have theirs.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def run(path: Path, *arguments: str) -> tuple[int, dict]:
    status = step.main([*SHORT, *arguments, "--output", str(path)])
    return status, json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("number", "sites"), [(8, 22), (7, 18)])
def test_a_scale_has_the_sites_of_the_named_shapes(number: int, sites: int) -> None:
    scale = Scale(number)
    with torch.device("meta"):
        network = scale.network()
        seen = []
        for name, module in network.named_modules():
            if "norm" in name:
                module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
                module.function = lambda x, *_: x
        network(torch.empty(1, 1, *[scale.size] * 3))
    assert len(seen) == scale.sites == sites
    assert set(seen) == {scale.shape(level) for level in range(scale.levels)}
    if number == 8:
        named = {case.shape for case in read_cases() if case.name.startswith("unet3d-")}
        assert set(seen) == {tuple(shape) for shape in named}
        assert all(case.groups == step.GROUPS for case in read_cases() if case.name.startswith("unet3d-"))


def test_a_step_needs_what_the_committed_run_held() -> None:
    """No less, since a run that starts must fit; at most a tenth more."""
    path = Path(__file__).resolve().parents[2] / "bench" / "results" / "nvidia-h200-step.json"
    for result in json.loads(path.read_text(encoding="utf-8"))["scales"]:
        for arm, of in result["arms"].items():
            ratio = Scale(result["scale"]).need_bytes(arm) / (max(of["peak_mib"]) * 2**20)
            assert 1 <= ratio < 1.1, (result["scale"], arm)


def test_too_little_memory_is_told_with_the_next_smaller_scale() -> None:
    scales, arms = [Scale(8), Scale(7)], ["stock", "ours"]
    assert step.check_memory(scales, arms, 70 * 2**30) is None  # stock's need is more: it may fail, and tells
    assert step.check_memory(scales, ["stock"], 70 * 2**30) is not None
    told = step.check_memory(scales, arms, 24 * 2**30)
    assert told == (
        "scale 8 needs about 35.4 GiB of the device's memory, got 24 GiB free; scale 7 fits: --scales 7"
    )
    assert step.check_memory([Scale(7)], arms, 2 * 2**30).endswith("; scale 6 fits: --scales 6")
    assert step.check_memory([Scale(7)], arms, 1).endswith("free")


def test_a_gpu_with_too_little_memory_ends_the_command_before_any_work(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**30))
    path = tmp_path / "step.json"
    assert step.main(["--output", str(path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("bench: scale 8 needs about") and told.err.count("\n") == 1
    assert told.out == "" and not path.exists()


def test_a_cpu_with_too_little_memory_ends_the_command_too(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(
        machine.os, "sysconf", lambda name: {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}[name]
    )
    monkeypatch.setattr(step, "measure", lambda *_: pytest.fail("started"))
    path = tmp_path / "step.json"
    assert step.main(["--scales", "8", "--output", str(path)]) == 2
    assert "bench: scale 8 needs about 35.4 GiB" in capsys.readouterr().err and not path.exists()


def test_every_part_of_a_short_run_is_in_its_file(tmp_path, capsys) -> None:
    arms = "stock,restored,ours_fp32,ours"
    status, found = run(tmp_path / "step.json", "--arms", arms, "--processes", "2")
    assert status == 0 and found["stopped"] is None and found["volume"] == "synthetic"
    assert found["options"]["scales"] == [4] and found["device_type"] == "cpu"
    (scale,) = found["scales"]
    assert (scale["size"], scale["levels"], scale["sites"]) == (16, 2, 6)
    for arm in arms.split(","):
        of = scale["arms"][arm]
        assert len(of["step_ms"]) == 6 and min(of["step_ms"]) > 0 and of["step_ms_interval"]["count"] == 6
        assert ("step_ms_less_ours" in of) == (arm != "ours")
        items = scale["items"][arm]
        assert sum(items["rows_us"].values()) == pytest.approx(items["total_us"], abs=1)
        assert min(items["rows_us"][row] for row in GROUP_NORM_ROWS[:2]) > 0
        caused = sum(items["rows_us"][row] for row in GROUP_NORM_ROWS)
        assert items["group_norm_share"] == pytest.approx(caused / items["total_us"], abs=1e-3)
    assert scale["arms"]["ours"]["rung"] == "native"
    # fp32 is read by convolutions in bf16: converted at each site.
    assert scale["items"]["ours_fp32"]["rows_us"]["dtype conversions"] > 0
    for arm, of in scale["bits"].items():
        assert of["same"] and of["processes"] == 2 and of["gradients"] == 23, arm
    assert scale["trace"]["sites_rounded_once"] == 6 and scale["trace"]["forward_first"] is None
    assert scale["losses"]["same_first"] and len(scale["losses"]["losses"]["ours"]) == 2
    told = capsys.readouterr().out
    assert told.index("no GPU: a small step on the CPU") < told.index("[0 s]")
    assert "is no proof" in told and "about" not in told.split("[0 s]")[0]
    assert "ours_fp32 against ours, forward: 6 of 6 sites have the same bits" in told


def test_what_an_arm_does_is_done_at_every_site() -> None:
    training = Training(Scale(4, 8), torch.device("cpu"))
    x = torch.randn(1, 8, 4, 4, 4, dtype=torch.bfloat16).to(memory_format=torch.channels_last_3d)
    expected = torch.relu(torch.nn.functional.group_norm(x.double(), 8))
    for arm, dtype, kept in (
        ("stock", torch.bfloat16, None), ("restored", torch.bfloat16, True),
        ("ours_fp32", torch.float32, True), ("ours", torch.bfloat16, True),
    ):  # fmt: skip
        training.use(arm)
        assert all(module.function is training.functions[arm] for _, module in training.sites)
        y = training.sites[0][1](x)
        assert y.dtype == dtype, arm
        assert kept is None or y.is_contiguous(memory_format=torch.channels_last_3d), arm
        torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)


def test_the_restored_arm_makes_channels_last_of_what_it_gets() -> None:
    y = step_arms.restored(torch.randn(1, 8, 4, 4, 4), 8, torch.ones(8), torch.zeros(8), 1e-5)
    assert y.is_contiguous(memory_format=torch.channels_last_3d)


def test_a_compiled_site_never_runs_eager(monkeypatch) -> None:
    """More shapes than Dynamo keeps are an error, and a symbolic shape would keep them all."""
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_with(f, backend="eager", **options))
    torch._dynamo.reset()
    function = step_arms.compiled()
    try:
        with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(Exception, match="fullgraph"):
            for size in (5, 7):
                function(torch.randn(1, 8, size, 2, 2), 8, torch.ones(8), torch.zeros(8), 1e-5)
    finally:
        torch._dynamo.reset()


def broken(x, *_):
    raise RuntimeError("no compiler\nhere")


def test_an_arm_that_fails_is_told_and_the_rest_goes_on(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(ARMS, "compiled", Arm("c", "broken", lambda: broken, 1.0))
    status, found = run(tmp_path / "a.json", "--arms", "compiled,ours", "--parts", "time")
    arms = found["scales"][0]["arms"]
    assert status == 0 and found["stopped"] is None
    assert arms["compiled"]["error"] == "RuntimeError: no compiler here" and arms["compiled"]["step_ms"] == []
    assert len(arms["ours"]["step_ms"]) == 6
    assert "compiled failed: RuntimeError: no compiler here" in capsys.readouterr().out
    monkeypatch.setitem(ARMS, "ours", Arm("e", "broken", lambda: broken, 1.0))
    assert run(tmp_path / "b.json", "--arms", "ours", "--parts", "time,losses,trace,processes")[0] == 1


def test_an_interrupt_writes_what_was_measured(monkeypatch, tmp_path, capsys) -> None:
    calls = []

    def timed_step(self):
        calls.append(None)
        if len(calls) > 2 + 2 * 3:  # warm-up, one replicate of two arms, and a half
            raise KeyboardInterrupt
        return 5.0, None

    monkeypatch.setattr(Training, "timed_step", timed_step)
    status, found = run(tmp_path / "a.json", "--arms", "stock,ours", "--steps", "2", "--replicates", "9")
    assert (status, found["stopped"]) == (130, "interrupted")
    assert [of["step_ms"] for of in found["scales"][0]["arms"].values()] == [[5.0], [5.0]]
    assert "stopped early: interrupted" in capsys.readouterr().out


def test_an_interrupt_in_the_processes_keeps_those_that_ended(monkeypatch, tmp_path, capsys) -> None:
    def lines(count: int, scales, arms, device):
        for process in range(count):
            for arm in arms:
                if process == 1 and arm == "ours":
                    raise KeyboardInterrupt
                yield {"process": process, "scale": 4, "arm": arm, "loss": (1.5 + process).hex(),
                       "gradients": {"weight": "0"}, "not_deterministic": []}  # fmt: skip

    monkeypatch.setattr(step_run.step_bits, "processes", lines)
    status, found = run(tmp_path / "a.json", "--arms", "stock,ours", "--parts", "processes")
    bits = found["scales"][0]["bits"]
    assert (status, found["stopped"]) == (130, "interrupted")
    assert list(bits) == ["stock"]  # one process alone shows nothing of ours
    assert (bits["stock"]["processes"], bits["stock"]["same"]) == (2, False)
    assert "stock: other bits in 2 processes" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ValueError("odd"), RuntimeError("device lost")])
def test_an_error_of_the_run_itself_keeps_what_was_measured(monkeypatch, tmp_path, error) -> None:
    def fail(self) -> None:
        raise error

    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    monkeypatch.setattr(step_run.Measured, "profile", fail)
    status, found = run(tmp_path / "a.json", "--arms", "ours", "--parts", "time,profile")
    assert (status, found["stopped"]) == (1, f"{type(error).__name__}: {error}")
    assert found["scales"][0]["arms"]["ours"]["step_ms"] == [5.0] * 6


def test_a_disk_that_is_full_ends_no_measurement(monkeypatch, tmp_path, capsys) -> None:
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    monkeypatch.setattr(output, "write_json", full)
    path = tmp_path / "a.json"
    arguments = ["--arms", "ours", "--parts", "time", "--output", str(path)]
    assert step.main([*SHORT, *arguments]) == 1
    told = capsys.readouterr()
    assert f"bench: {path} could not be written: No space left on device" in told.err
    assert ["ours", "5.000"] in [line.split()[:2] for line in told.out.splitlines()]
    assert "wrote" not in told.out


def test_what_is_there_is_said_to_be_written_over(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    for told in ("", ", over what is there"):
        run(tmp_path / "a.json", "--arms", "ours", "--parts", "time")
        assert f"Writes {tmp_path / 'a.json'}{told}\n" in capsys.readouterr().out


def test_losses_that_are_no_numbers_are_words_in_the_file(monkeypatch, tmp_path, capsys) -> None:
    values = {"ours_fp32": [0.0, float("nan")], "ours": [0.5, 1.0]}
    monkeypatch.setattr(step_run.step_bits, "losses", lambda training, arm, count: values[arm])
    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    path = tmp_path / "a.json"
    status, found = run(path, "--arms", "ours_fp32,ours", "--parts", "losses")
    assert status == 0 and found["scales"][0]["losses"]["relative_last"] == "nan"
    assert "NaN" not in path.read_text(encoding="utf-8")
    assert "nan apart (relative) at step 2" in capsys.readouterr().out


def test_a_scale_without_memory_leaves_the_next_to_be_measured(monkeypatch, tmp_path, capsys) -> None:
    training = step_run.Training

    def short(scale: Scale, device: torch.device) -> Training:
        if scale.number == 5:
            raise torch.OutOfMemoryError("no 9 GiB")
        return training(scale, device)

    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    monkeypatch.setattr(step_run, "Training", short)
    status, found = run(tmp_path / "a.json", "--scales", "5,4", "--arms", "ours", "--parts", "time")
    assert (status, found["stopped"]) == (1, None)
    first, second = (scale["arms"]["ours"] for scale in found["scales"])
    assert first["error"] == "OutOfMemoryError: no 9 GiB" and second["step_ms"] == [5.0] * 6
    assert "scale 5 left out: no 9 GiB" in capsys.readouterr().out


def test_parts_that_lack_an_arm_are_told(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(Training, "timed_step", lambda self: (5.0, None))
    status, found = run(tmp_path / "a.json", "--arms", "stock,ours", "--parts", "time,losses,trace")
    assert status == 0 and not {"losses", "trace"} & found["scales"][0].keys()
    told = capsys.readouterr().out
    for part in ("losses", "trace"):
        assert f"{part} left out: it needs ours_fp32\n" in told


def test_replicates_take_turns_and_differences_are_paired(monkeypatch, tmp_path) -> None:
    turns = []
    base = {"stock": 9.0, "ours": 4.0}

    def timed_step(self):
        arm = next(name for name, of in self.functions.items() if of is self.sites[0][1].function)
        turns.append(arm)
        return base[arm] + len(turns) // 4, 1024.0 if arm == "ours" else 3072.0

    monkeypatch.setattr(Training, "timed_step", timed_step)
    _, found = run(tmp_path / "a.json", "--arms", "stock,ours", "--parts", "time")
    order = ["stock", "stock", "ours", "ours"]
    assert turns[2:] == 3 * [*order, *reversed(order)]
    stock = found["scales"][0]["arms"]["stock"]
    assert stock["peak_mib_less_ours"] == {"mean": 2048.0, "half_width": 0.0, "count": 6}
    ours = found["scales"][0]["arms"]["ours"]["step_ms"]
    mean = sum(a - b for a, b in zip(stock["step_ms"], ours, strict=True)) / 6
    assert stock["step_ms_less_ours"]["mean"] == pytest.approx(mean, abs=1e-3)


BAD = [
    ("--scales 3", "--scales: must be a whole number from 4 to 10, got '3'"),
    ("--scales 8,x", "--scales: must be a whole number from 4 to 10, got 'x'"),
    ("--width 12", "--width: must be a multiple of 8 from 8 to 1024, got '12'"),
    ("--arms ours,mine", "--arms: expected words of stock, restored, compiled, ours_fp32, ours, got 'mine'"),
    ("--trace-difference ours", "--trace-difference: expected 2 words, got 'ours'"),
    ("--replicates 5", "--replicates: must be a whole number from 6 to 1000, got '5'"),
    ("--parts ,", "--parts: expected words of time, profile, losses, trace, processes, got ''"),
    ("--parts losses --arms stock", "--parts: losses needs the arms ours_fp32 and ours, got stock"),
    ("--output /no/x", "--output: must name a file that can be written, got '/no/x'"),
    ("--output .", "--output: must name a file that can be written, got '.'"),
    ("--colour red", "unrecognized arguments: --colour red"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD)
def test_a_bad_option_gets_one_sentence_and_status_2(arguments, sentence, monkeypatch, capsys) -> None:
    monkeypatch.setattr(step, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as error:
        step.main(arguments.split())
    assert (error.value.code, capsys.readouterr().err) == (2, f"bench: {sentence}\n")


def test_a_default_output_that_cannot_be_written_is_told_before_any_work(monkeypatch, capsys) -> None:
    monkeypatch.setattr(step, "place", lambda device: Path("/no/step.json"))
    monkeypatch.setattr(step, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as error:
        step.main([])
    told = "bench: --output: must be given, since the default cannot be written, got '/no/step.json'\n"
    assert (error.value.code, capsys.readouterr().err) == (2, told)


def test_the_environment_and_the_switches_are_as_they_were(tmp_path) -> None:
    run(tmp_path / "a.json", "--trace-difference", "ours_fp32,ours")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


def test_a_cpu_writes_no_result_into_the_checkout(monkeypatch) -> None:
    options = step.parse_arguments([])
    assert options.scales == [4] and options.output.parent == Path() and options.output.name != "-step.json"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert str(step.place("cuda")).endswith("bench/results/h200-step.json")


def test_every_part_has_its_method() -> None:
    assert all(callable(getattr(step_run.Measured, part)) for part in step_run.PARTS[:-1])
