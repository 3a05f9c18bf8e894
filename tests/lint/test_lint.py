# SPDX-License-Identifier: Apache-2.0
"""Each lint check finds a planted violation, names its place, and is quiet without it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lint import lint

ROOT = Path(__file__).resolve().parent.parent.parent
SPDX = "// SPDX-License-Identifier: Apache-2.0\n"
HEADER = SPDX + "#pragma once\n"
CLEAN = (
    "include/steadynorm/types.h",
    "src/core/numeric.h",
    "src/cuda/plan.h",
    "src/cpu/vec.h",
    "src/torch/ops.h",
)


@pytest.fixture
def plant(tmp_path):
    """A small clean tree; plant(name, text) adds a file and returns the tree."""

    def add(name: str, text: str) -> lint.Tree:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return lint.Tree(tmp_path)

    for name in CLEAN:
        add(name, HEADER)
    return add


WORK, HOME = "/" + "work/", "/" + "home/"  # in pieces: this file is linted too

# rule, file, text, and what the finding must say; None: no finding
# fmt: off
PLANTED = [
    ("include_direction", "src/core/a.cpp", '#include "cpu/vec.h"', "src/core/a.cpp:1: src/core must not"),
    ("include_direction", "src/core/a.cpp", "\n#include <cuda_runtime.h>", "src/core/a.cpp:2: src/core must"),
    ("include_direction", "src/core/a.cpp", "#include <torch/library.h>", "must not include <torch"),
    ("include_direction", "src/core/a.cpp", '#include "core/numeric.h"\n#include <cmath>', None),
    ("include_direction", "src/core/a.cpp", '// #include "cpu/vec.h"', None),
    ("include_direction", "include/steadynorm/a.h", '#include "core/numeric.h"', "must not include src/core"),
    ("include_direction", "src/cpu/a.cpp", '#include "../cuda/plan.h"', "must not include src/cuda"),
    ("include_direction", "src/cpu/a.cpp", '#include "vec.h"\n#include <immintrin.h>', None),
    ("include_direction", "src/cuda/a.cu", '#include "cpu/vec.h"', "must not include src/cpu"),
    ("include_direction", "src/cuda/a.cu", '#include "plan.h"\n#include <cuda_bf16.h>', None),
    ("include_direction", "src/torch/a.cpp", '#include "core/numeric.h"', "must not include src/core"),
    ("include_direction", "src/torch/a.cpp", '#include <ATen/ATen.h>\n#include "steadynorm/types.h"', None),
    ("include_direction", "src/torch/a.cpp", "#include <Python.h>", "must not include <Python.h>"),
    ("include_direction", "src/python/a.cpp", "#include <ATen/Tensor.h>\n#include <Python.h>", None),
    ("include_direction", "src/reference/a.cpp", '#include "core/numeric.h"', "must not include src/core"),
    ("include_direction", "src/core/a.cpp", '#include "core/absent.h"', "core/absent.h is not in the tree"),
    ("include_direction", "src/other/a.cpp", "", "belongs to no layer"),
    ("file_length", "src/core/a.cpp", "\n" * 451, "src/core/a.cpp: 451 lines"),
    ("file_length", "src/core/a.cpp", "\n" * 450, None),
    ("file_length", "cases/a.csv", "\n" * 451, None),
    ("one_macro", "src/core/a.cpp", "#define LANES 16", "src/core/a.cpp:1: macro LANES"),
    ("one_macro", "src/core/a.cpp", "  #  define STEADYNORM_HD inline", None),
    ("one_macro", "src/core/a.h", "int x;", "src/core/a.h: no #pragma once"),
    ("no_float_atomics", "src/cuda/a.cu", "\natomicAdd(&sum[c], partial);", "src/cuda/a.cu:2: atomicAdd("),
    ("no_float_atomics", "src/cuda/a.cu", "atomicAdd_system(sum, 1.0f);", "atomicAdd_system("),
    ("no_float_atomics", "src/cuda/a.cu", "const unsigned ticket = atomicAdd(counter + g, 1u);", None),
    ("no_float_atomics", "src/cuda/a.cu", 'asm("red.global.add.f32 [%0], %1;");', "red.global.add.f32"),
    ("no_float_atomics", "src/cpu/a.cpp", "std::atomic<float> sum;", "atomic<float"),
    ("no_float_atomics", "src/cuda/a.cu", "// atomicAdd(&sum, x) would be faster", None),
    ("no_environment", "src/cpu/a.cpp", 'std::getenv("THREADS");', "src/cpu/a.cpp:1: getenv"),
    ("no_environment", "src/torch/a.cpp", "environ;", "src/torch/a.cpp:1: environ"),
    ("spdx", "src/core/a.cpp", "int x;", "src/core/a.cpp: no SPDX"),
    ("spdx", "tools/a.py", "x = 1", "tools/a.py: no SPDX"),
    ("spdx", "Makefile", "all:", "Makefile: no SPDX"),
    ("spdx", "cases/a.csv", "name,shape", None),
    ("no_machine_path", "docs/a.md", f"see {WORK}notes", f"docs/a.md:1: {WORK}"),
    ("no_machine_path", "tools/a.py", f"x\ny = '{HOME}someone/x'", f"tools/a.py:2: {HOME}"),
    ("no_machine_path", "docs/a.md", "network/work/x and https://a.org/home/x", None),
    ("file_size", "bench/results/a.json", " " * 1_000_000, "bench/results/a.json: 1000000 bytes"),
]
# fmt: on


@pytest.mark.parametrize(("rule", "name", "text", "expected"), PLANTED)
def test_rule_finds_what_was_planted(plant, rule, name, text, expected):
    problems = lint.TREE_RULES[rule](plant(name, text))
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert expected in problems[0]


@pytest.mark.parametrize("rule", lint.TREE_RULES)
def test_rule_passes_a_clean_tree(plant, rule):
    assert lint.TREE_RULES[rule](plant("src/core/a.cpp", SPDX)) == []


def test_every_rule_has_a_planted_violation():
    assert {rule for rule, *_, expected in PLANTED if expected} == set(lint.TREE_RULES)


needs_clang_format = pytest.mark.skipif(not shutil.which("clang-format"), reason="no clang-format")
needs_clang_tidy = pytest.mark.skipif(not shutil.which("clang-tidy"), reason="no clang-tidy")


@needs_clang_format
def test_clang_format_finds_a_misplaced_space(plant):
    plant(".clang-format", (ROOT / ".clang-format").read_text())
    assert lint.clang_format(plant("src/core/a.cpp", "int x;\n"), "--dry-run", "--Werror") == []
    assert "a.cpp:1" in lint.clang_format(plant("src/core/a.cpp", "int  x ;\n"), "--dry-run", "--Werror")[0]


@needs_clang_tidy
def test_clang_tidy_finds_a_use_after_move_and_a_bug_in_a_header(plant):
    plant(".clang-tidy", (ROOT / ".clang-tidy").read_text())
    plant(
        "CMakeLists.txt",
        "cmake_minimum_required(VERSION 3.25)\nproject(a CXX)\nadd_library(a src/core/a.cpp)\n",
    )
    plant("src/core/bad.h", "#pragma once\ninline int* nothing() { return 0; }\n")
    clean = "#include <string>\nint size(const std::string& text) { return static_cast<int>(text.size()); }\n"
    assert lint.clang_tidy(plant("src/core/a.cpp", clean), jobs=1) == []
    moved = "#include <utility>\nstd::string take(std::string a) { auto b = std::move(a); return a + b; }\n"
    problems = "\n".join(
        lint.clang_tidy(plant("src/core/a.cpp", clean + moved + '#include "bad.h"\n'), jobs=1)
    )
    assert "bugprone-use-after-move" in problems
    assert "modernize-use-nullptr" in problems


@pytest.mark.skipif(subprocess.run([sys.executable, "-m", "ruff", "-V"]).returncode != 0, reason="no ruff")
def test_ruff_finds_an_unused_import_and_a_misplaced_space(plant):
    plant("pyproject.toml", (ROOT / "pyproject.toml").read_text())
    tree = plant("a.py", "x = 1\n")
    assert lint.ruff(tree, "check", "--quiet") == lint.ruff(tree, "format", "--check") == []
    tree = plant("a.py", "import os\nx  =  1\n")
    assert any("F401" in line for line in lint.ruff(tree, "check", "--output-format=concise"))
    assert any("a.py" in line for line in lint.ruff(tree, "format", "--check"))


def test_a_violation_reaches_the_exit_status_and_the_report(plant, tmp_path):
    plant("src/core/a.cpp", SPDX + "#define LANES 16\n")
    command = [
        sys.executable,
        ROOT / "tests/lint/lint.py",
        "--root",
        tmp_path,
        "--junitxml",
        tmp_path / "report.xml",
    ]
    result = subprocess.run(
        [*command, "--only", "one_macro", "--only", "spdx"], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "src/core/a.cpp:2: macro LANES" in result.stdout
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase")}
    assert cases["one_macro"].find("failure") is not None
    assert cases["spdx"].find("failure") is None
