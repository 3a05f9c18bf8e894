# SPDX-License-Identifier: Apache-2.0
"""`python -m steadynorm bench step`: its network, its options, and short runs on the CPU."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from steadynorm.bench import step, step_arms, step_run
from steadynorm.bench.step_arms import ARMS, Arm
from steadynorm.bench.step_items import GROUP_NORM_ROWS
from steadynorm.bench.step_training import Scale, Training
from support.cases import read_cases

SHORT = ["--scales", "4", "--width", "8", "--replicates", "2", "--steps", "1", "--loss-steps", "2"]


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


def test_a_step_holds_what_was_published_for_the_two_forms_of_ours() -> None:
    """Of another implementation of the same step on an MI300A: 38.5 and 42.8 GiB, 5.57 and 6.10 GiB."""
    for number, arm, gib in (
        (8, "ours", 38.5),
        (8, "ours_fp32", 42.8),
        (7, "ours", 5.57),
        (7, "ours_fp32", 6.10),
    ):
        assert Scale(number).need_bytes(arm) / 2**30 == pytest.approx(gib, rel=0.1)


def test_too_little_memory_is_told_with_the_next_smaller_scale() -> None:
    scales, arms = [Scale(8), Scale(7)], ["stock", "ours"]
    assert step.check_memory(scales, arms, 80 * 2**30) is None  # stock's need is more: it may fail, and tells
    assert step.check_memory(scales, ["stock"], 80 * 2**30) is not None
    told = step.check_memory(scales, arms, 24 * 2**30)
    assert told == (
        "scale 8 needs about 39.4 GiB of device memory, got 24 GiB free; scale 7 fits: --scales 7"
    )
    assert step.check_memory([Scale(7)], arms, 2 * 2**30).endswith("; scale 6 fits: --scales 6")
    assert step.check_memory([Scale(7)], arms, 1).endswith("free")


def test_a_gpu_with_too_little_memory_ends_the_command_before_any_work(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    path = tmp_path / "step.json"
    assert step.main(["--output", str(path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("step: scale 8 needs about") and told.err.count("\n") == 1
    assert told.out == "" and not path.exists()


def test_every_part_of_a_short_run_is_in_its_file(tmp_path, capsys) -> None:
    arms = "stock,restored,ours_fp32,ours"
    status, found = run(tmp_path / "step.json", "--arms", arms, "--processes", "2")
    assert status == 0 and found["stopped"] is None and found["volume"] == "synthetic"
    assert found["options"]["scales"] == [4] and found["device"] == "CPU"
    (scale,) = found["scales"]
    assert (scale["size"], scale["levels"], scale["sites"]) == (16, 2, 6)
    for arm in arms.split(","):
        of = scale["arms"][arm]
        assert len(of["step_ms"]) == 2 and min(of["step_ms"]) > 0 and of["step_ms_interval"]["count"] == 2
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
    assert len(arms["ours"]["step_ms"]) == 2
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


def test_replicates_take_turns_and_differences_are_paired(monkeypatch, tmp_path) -> None:
    turns = []
    base = {"stock": 9.0, "ours": 4.0}

    def timed_step(self):
        arm = next(name for name, of in self.functions.items() if of is self.sites[0][1].function)
        turns.append(arm)
        return base[arm] + len(turns) // 4, 1024.0 if arm == "ours" else 3072.0

    monkeypatch.setattr(Training, "timed_step", timed_step)
    _, found = run(tmp_path / "a.json", "--arms", "stock,ours", "--parts", "time", "--replicates", "3")
    order = ["stock", "stock", "ours", "ours"]
    assert turns[2:] == [*order, *reversed(order), *order]
    stock = found["scales"][0]["arms"]["stock"]
    assert stock["peak_mib_less_ours"] == {"mean": 2048.0, "half_width": 0.0, "count": 3}
    ours = found["scales"][0]["arms"]["ours"]["step_ms"]
    mean = sum(a - b for a, b in zip(stock["step_ms"], ours, strict=True)) / 3
    assert stock["step_ms_less_ours"]["mean"] == pytest.approx(mean, abs=1e-3)


BAD = [
    (["--scales", "3"], "argument --scales: expected an integer from 4 to 10, got 3"),
    (["--scales", "8,x"], "argument --scales: expected an integer from 4 to 10, got x"),
    (["--width", "12"], "argument --width: expected a multiple of 8 from 8 to 1024, got 12"),
    (
        ["--arms", "ours,mine"],
        "argument --arms: expected words of stock, restored, compiled, ours_fp32, ours, ",
    ),
    (["--trace-difference", "ours"], "argument --trace-difference: expected 2 words of stock, restored, "),
    (["--replicates", "1"], "argument --replicates: expected an integer from 2 to 1000, got 1"),
    (["--parts", ""], "argument --parts: expected words of time, profile, losses, trace, processes, got ''"),
    (["--colour", "red"], "unrecognized arguments: --colour red"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(bad) for bad, _ in BAD])
def test_a_bad_option_gets_one_sentence_and_status_2(arguments, sentence, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        step.main(arguments)
    told = capsys.readouterr().err
    assert error.value.code == 2
    assert told.startswith(f"step: {sentence}") and told.count("\n") == 1


def test_the_environment_and_the_switches_are_as_they_were(tmp_path) -> None:
    run(tmp_path / "a.json", "--trace-difference", "ours_fp32,ours")
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


def test_a_cpu_writes_no_result_into_the_checkout(monkeypatch) -> None:
    options = step.parse_arguments([])
    assert options.scales == [4] and step.default_output(options) == Path("cpu-step.json")
    options.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert str(step.default_output(options)).endswith("bench/results/h200-step.json")


def test_every_part_has_its_method() -> None:
    assert all(callable(getattr(step_run.Measured, part)) for part in step_run.PARTS[:-1])
