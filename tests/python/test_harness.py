# SPDX-License-Identifier: Apache-2.0
"""The parts of the GPU test runner and of the benchmark harness that need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]

import check_spills  # noqa: E402
import reports  # noqa: E402
from bench import output, provenance, report  # noqa: E402
from support.cases import read_cases  # noqa: E402

GTEST = """{"tests": 4, "failures": 1, "testsuites": [{"name": "CudaForward", "testsuite": [
 {"name": "IsRight", "status": "RUN", "result": "COMPLETED", "time": "0.1s"},
 {"name": "IsWrong", "status": "RUN", "failures": [{"failure": "a.cpp:3\\nFailure", "type": ""}]},
 {"name": "Waits", "status": "RUN", "result": "SKIPPED", "skipped": [{"message": "one device"}]},
 {"name": "Elsewhere", "status": "NOTRUN", "result": "SUPPRESSED"}]}]}"""

JUNIT = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.gpu" name="test_a[x]" time="0.1"/>
<testcase classname="tests.gpu" name="test_b"><failure message="AssertionError: 1">trace</failure></testcase>
<testcase classname="tests.gpu" name="test_c"><skipped message="no GPU">x</skipped></testcase>
<testcase classname="tests.gpu" name="test_d"/>
<testcase classname="tests.gpu" name="test_d"><error message="failed on teardown">t</error></testcase>
</testsuite></testsuites>"""

MEMCHECK = """========= COMPUTE-SANITIZER
[       OK ] CudaSanitizer.Small (12 ms)
========= Invalid __global__ write of size 4 bytes
=========     at kernel(float *)+0x70
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 12 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at a+0x80 and Read access at a+0x90 [256 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
NCU = """==PROF== Connected to process 7
[ RUN      ] CudaSanitizer.Small
==PROF== Disconnected from process 7
"ID","Process ID","Process Name","Kernel Name","Context","launch__grid_size"
"","","","","",""
"0","7","cuda_test","_Z5applyIfLi3EEvPf","1","132"
"1","7","cuda_test","_Z5statsIfEvPf","1","8"
"""
CUOBJDUMP = """
symbols:
STT_FUNC         STB_GLOBAL STO_ENTRY      _Z5applyIfLi3EEvPf
STT_FUNC         STB_GLOBAL STO_ENTRY      _Z5applyIfLi2EEvPf
STT_FUNC         STB_LOCAL  STV_DEFAULT    helper
STT_OBJECT       STB_GLOBAL STV_DEFAULT    table
"""


def outcomes(found: list[reports.Outcome]) -> dict[str, str]:
    return {o.name: o.outcome for o in found}


def test_gtest_outcomes_leave_out_what_was_filtered() -> None:
    found = reports.from_gtest(GTEST)
    assert outcomes(found) == {
        "CudaForward.IsRight": "passed",
        "CudaForward.IsWrong": "failed",
        "CudaForward.Waits": "skipped",
    }
    assert found[1].message.startswith("a.cpp:3")


def test_junit_counts_a_teardown_error_as_a_failure() -> None:
    assert [o.outcome for o in reports.from_junit(JUNIT)] == ["passed", "failed", "skipped", "failed"]


def test_sanitizer_findings_are_counted_and_named() -> None:
    found = reports.from_sanitizer(MEMCHECK)
    assert (found.total, found.lines) == (12, ["Invalid __global__ write of size 4 bytes"])
    race = reports.from_sanitizer(RACECHECK)
    assert race.total == 1
    assert race.lines[0].startswith("Error: Race reported")
    assert reports.from_sanitizer("========= ERROR SUMMARY: 0 errors").total == 0


def test_sanitizer_that_did_not_finish_is_no_clean_run() -> None:
    assert reports.from_sanitizer("========= COMPUTE-SANITIZER\nKilled").total is None
    refused = reports.from_sanitizer(
        "========= Error: Device not supported. Please refer to the documentation\n"
    )
    assert refused.refusal == "Device not supported"


def test_kernels_reached_are_counted_by_template() -> None:
    compiled = {name: name for name in reports.kernels_in_cuobjdump(CUOBJDUMP)}
    assert set(compiled) == {"_Z5applyIfLi3EEvPf", "_Z5applyIfLi2EEvPf"}
    plain = {
        "_Z5applyIfLi3EEvPf": "void apply<float, 3>(float*)",
        "_Z5applyIfLi2EEvPf": "void apply<float, 2>(float*)",
    }
    reached = reports.kernels_in_ncu(NCU)
    assert reports.coverage(plain, reached) == [{"kernel": "apply", "compiled": 2, "reached": 1}]


USAGE = """Resource usage:
 Common:
  GLOBAL:0
 Function _Z5mergePd:
  REG:40 STACK:0 SHARED:0 LOCAL:0 TEXTURE:0 SURFACE:0 SAMPLER:0 CONSTANT[0]:640
 Function _Z5applyIfEvPf:
  REG:255 STACK:{stack} SHARED:128 LOCAL:{local} TEXTURE:0 SURFACE:0 SAMPLER:0 CONSTANT[0]:640
"""


@pytest.mark.parametrize(("stack", "local", "status"), [(0, 0, 0), (8, 0, 1), (0, 16, 1)])
def test_a_kernel_that_spills_is_named(capsys, stack, local, status) -> None:
    kernels = check_spills.kernels_in(USAGE.format(stack=stack, local=local))
    assert [kernel.name for kernel in kernels] == ["_Z5mergePd", "_Z5applyIfEvPf"]
    assert check_spills.check(kernels) == status
    assert ("_Z5applyIfEvPf: 255 registers" in capsys.readouterr().out) == (status == 1)


def test_a_report_without_kernels_is_no_clean_one() -> None:
    assert check_spills.check(check_spills.kernels_in("Resource usage:\n")) == 1


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("void steadynorm::cuda::apply<float, (Layout)1>(Arguments<float>)", "steadynorm::cuda::apply"),
        (
            "void steadynorm::cuda::(anonymous namespace)::merge<Plan{1, 2}>(double*)",
            "steadynorm::cuda::merge",
        ),
        ("sums(float const*)", "sums"),
    ],
)
def test_base_name_drops_arguments(demangled: str, name: str) -> None:
    assert reports.base_name(demangled) == name


def row(case: str, which: str) -> dict:
    ours = {
        "median_us": 12.5,
        "over_floor": 1.25,
        "error_y": 0.4,
        "error_dx": 2.0,
        "peak_mib": 4.0,
        "rung": "native",
    }
    return {
        "case": case, "dtype": "bf16", "set": "none", "pass": which, "tensor_bytes": 1 << 20,
        "copy": {"median_us": 8.0}, "arms": {"ours": ours, "liger": {"error": "ImportError: x"}},
    }  # fmt: skip


def test_results_are_json_with_a_line_a_row(tmp_path: Path) -> None:
    path = tmp_path / "results" / "h200-x.json"
    output.write_json(path, {"device": "NVIDIA H200", "options": {"peers": []}}, [row("a", "forward")] * 3)
    held = json.loads(path.read_text())
    assert held["device"] == "NVIDIA H200"
    assert len(held["rows"]) == 3
    assert path.read_text().count('{"case"') == 3
    output.write_json(path, {"device": "none"}, [])
    assert json.loads(path.read_text())["rows"] == []


def test_table_is_in_the_cases_order_and_keeps_failed_arms() -> None:
    rows = [row("b", "forward"), row("a", "forward"), row("a", "forward_backward")]
    text = report.table(rows, ["ours", "eager", "liger"], ["a", "b"])
    forward, both = text.split("\n\n")
    lines = forward.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["case", "a", "b"]
    assert "12.5 us (1.25)" in lines[2]
    assert "error" in lines[2]
    assert "peak ours" in both.splitlines()[1]


def test_every_case_has_a_benchmark_name() -> None:
    case = read_cases()[0]
    name = report.benchmark_name("forward", case.layout, "bf16", case.activation, case.name)
    assert name == "cuda/forward/channels_last/bf16/relu/unet3d-64"


def test_device_names_become_file_names() -> None:
    assert provenance.slug("NVIDIA H200") == "h200"
    assert provenance.slug("NVIDIA A100-SXM4-80GB") == "a100-sxm4-80gb"


def bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


def test_options_list_and_page_need_no_pytorch() -> None:
    code = "import sys; sys.modules['torch'] = None; import bench.__main__, bench.page.__main__ as page"
    done = subprocess.run([sys.executable, "-c", f"{code}; sys.exit(page.main(['--check']))"], cwd=ROOT)
    assert done.returncode == 0


def test_bench_lists_without_a_gpu() -> None:
    listed = bench("--list", "--dtypes", "bf16", "--activation", "none", "--cases", "sd15,liger-a")
    assert listed.returncode == 0
    assert len(listed.stdout.splitlines()) == 2 * 5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "bench: needs a CUDA GPU that PyTorch can use, got none"),
        (["--dtypes", "fp8"], "expected words of bf16, fp16, fp32, got 'fp8'"),
        (["--cases", "unknown"], "--cases must name a case of cases/cases.csv, got 'unknown'"),
    ],
)
def test_bench_says_what_is_wrong_and_exits_with_2(arguments: list[str], sentence: str) -> None:
    ended = bench(*arguments)
    assert ended.returncode == 2
    assert sentence in ended.stderr
