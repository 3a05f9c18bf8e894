# SPDX-License-Identifier: Apache-2.0
"""python -m steadynorm info | check, and the way to bench."""

import json
import subprocess
import sys

import pytest
import torch

import steadynorm
from steadynorm import __main__ as program
from steadynorm import compiled, functional, rungs

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def few_cases(monkeypatch):
    chosen = [
        program.Case("volume", (2, 24, 6, 10, 9), 8, activation="silu"),
        program.Case("far mean", (2, 8, 9, 7), 2, layout="channels_last", mean=1e5),
        program.Case("half", (2, 8, 9, 7), 2, "fp16", parameter_dtype="bf16", per_sample=True),
        program.Case("constant", (2, 8, 9, 7), 2, mean=0.1, deviation=0),
    ]
    monkeypatch.setattr(program, "cases", lambda: chosen)


def test_runs_as_a_module():
    found = subprocess.run(
        [sys.executable, "-m", "steadynorm", "info"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("steadynorm ")
    assert found.stderr == ""


def test_info_tells_what_is_built(capsys):
    assert program.main(["info"]) == 0
    text = capsys.readouterr().out
    for word in (
        f"steadynorm {steadynorm.__version__}",
        f"torch {torch.__version__}",
        f"native library: {rungs.native.path}",
        f"built for torch {rungs.native.build['torch']}",
        "  loaded",
        f"threads: {torch.get_num_threads()}",
        "rung native",
    ):
        assert word in text


def test_every_case_of_check_is_within_its_bound(capsys, tmp_path):
    report = tmp_path / "check.json"
    status = program.main(["check", "--device", "cpu", "--seed", "7", "--json", str(report)])
    text = capsys.readouterr().out
    assert status == 0, text
    assert "BROKEN" not in text
    document = json.loads(report.read_text(encoding="utf-8"))
    assert document["ok"] is document["complete"] is True
    assert document["seed"] == 7
    rows = document["results"]
    assert {row["output"] for row in rows} == {"y", "dx", "dweight", "dbias", "rounding"}
    assert {row["dtype"] for row in rows} == {"fp32", "bf16", "fp16"}
    assert {row["layout"] for row in rows} == {"contiguous", "channels_last"}
    assert {row["activation"] for row in rows} == {"none", "relu", "silu", "gelu", "gelu_tanh"}
    assert {row["rung"] for row in rows} == {"native"}
    assert max(row["mean"] for row in rows) >= 1e5
    assert f"{len(rows)} results, 0 beyond their bound" in text


def test_check_is_reproducible(few_cases, capsys):
    def table(seed):
        assert program.main(["check", "--device", "cpu", "--seed", seed]) == 0
        return capsys.readouterr().out.splitlines()[3:-1]

    assert table("1") == table("1")
    assert table("1") != table("2")


def test_check_without_the_native_rung_compiles_nothing(few_cases, ladder, capsys, tmp_path):
    rungs.native_rung.off = "turned off by a test"
    ladder.setattr(compiled, "BACKEND", lambda *_: pytest.fail("compiled"))
    report = tmp_path / "check.json"
    assert program.main(["check", "--device", "cpu", "--json", str(report)]) in (0, 1)
    assert ": eager (turned off by a test)" in capsys.readouterr().out
    rows = json.loads(report.read_text(encoding="utf-8"))["results"]
    assert {row["rung"] for row in rows} == {"eager"}
    assert compiled.rung.off is None
    rungs._last.rung = None  # `native` looks at it


@pytest.mark.parametrize("output", ["y", "dx", "rounding", "nan"])
def test_a_broken_bound_gives_status_1(few_cases, capsys, monkeypatch, tmp_path, output):
    right = functional.group_norm

    def wrong(x, *arguments, **options):
        if output == "dx" and x.requires_grad:
            x = x * 1.0
            x.register_hook(lambda grad: grad * 1.01)
        y = right(x, *arguments, **options)
        if output == "y":
            return y * (1 + 2**-15)
        if output == "nan":
            return y * float("nan")
        if output == "rounding" and options["out_dtype"] == torch.bfloat16:
            return (y.view(torch.int16) + 1).view(torch.bfloat16)
        return y

    monkeypatch.setattr(functional, "group_norm", wrong)
    report = tmp_path / "check.json"
    assert program.main(["check", "--device", "cpu", "--json", str(report)]) == 1
    text = capsys.readouterr().out
    assert "BROKEN" in text
    document = json.loads(report.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert document["ok"] is False
    broken = {row["output"] for row in document["results"] if not row["ok"]}
    assert {"nan": "y"}.get(output, output) in broken
    assert " 0 beyond their bound" not in text


def test_an_interrupted_check_keeps_what_it_has(few_cases, capsys, monkeypatch, tmp_path):
    measured = program.run
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(program, "run", interrupted)
    report = tmp_path / "check.json"
    assert program.main(["check", "--device", "cpu", "--json", str(report)]) == 130
    document = json.loads(report.read_text(encoding="utf-8"))
    assert document["complete"] is document["ok"] is False
    assert {row["name"] for row in document["results"]} == {"volume", "far mean"}
    assert "stopped before the end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: command"),
        (["check", "--device", "tpu"], "no device 'tpu' here, only cpu"),
        (["check", "--seed", "x"], "invalid int value: 'x'"),
        (["check", "--json", "/no/such/folder/x.json"], "can't write /no/such/folder/x.json: No such file"),
        (["chekc"], "invalid choice: 'chekc'"),
    ],
)
def test_bad_arguments_are_one_sentence_and_status_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["check", "--help"],
        ["info", "--help"],
        ["bench", "--help"],
        ["bench", "inference", "--help"],
    ],
)
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        program.main(arguments)
    assert stopped.value.code == 0
    assert f"usage: {' '.join(['python -m steadynorm', *arguments[:-1]])} " in capsys.readouterr().out
