# SPDX-License-Identifier: Apache-2.0
"""The rules of the tree, clang-format, clang-tidy and ruff; each is one check, and each names what it found.

Exit status 1 if a check fails. --fix formats in place instead.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPP = {".h", ".cpp", ".cuh", ".cu"}
CODE = CPP | {".py", ".cmake", ".sh"}
# Files with a comment syntax: by suffix, or by name when there is no telling suffix.
COMMENTABLE = CODE | {".toml", ".yml", ".yaml", ".txt", ".in"}
COMMENTABLE_NAMES = {"Makefile", "CMakeLists.txt", ".clang-format", ".clang-tidy", ".gitignore", "run"}

LINES_AIM, LINES_LIMIT = 400, 450
BYTES_LIMIT = 1_000_000
SHOWN = 50  # findings printed for one check; the report has all
SPDX = "SPDX-License-Identifier: Apache-2.0"
THE_MACRO = "STEADYNORM_HD"  # marks a function for host and device

# Layer -> (layers it may include, system headers it may include beside C++'s own).
STANDARD = r"[a-z_0-9]+"
INTRINSICS = r"\w*intrin\.h|cpuid\.h|arm_neon\.h|experimental/simd"
LAYERS = {
    "include/steadynorm": ({"include/steadynorm"}, r"$^"),
    "src/core": ({"src/core", "include/steadynorm"}, r"$^"),
    "src/reference": ({"src/reference", "include/steadynorm"}, r"$^"),
    "src/cpu": ({"src/cpu", "src/core", "include/steadynorm"}, INTRINSICS),
    "src/cuda": (
        {"src/cuda", "src/core", "include/steadynorm"},
        r"cuda\w*\.h|math_constants\.h|cooperative_groups(/\w+)?\.h|(cub|cuda)/.+",
    ),
    "src/torch": ({"src/torch", "include/steadynorm"}, r"(torch|ATen|c10)/.+|sys/mman\.h"),
    "src/python": ({"src/python"}, r"(torch|ATen|c10)/.+|Python\.h"),
}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
DEFINE = re.compile(r"^\s*#\s*define\s+(\w+)", re.MULTILINE)
ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\b|\b(?:setenv|putenv|environ)\b")
# An atomic addition of anything but an integer literal, in CUDA, PTX or C++.
ATOMIC_CALL = re.compile(r"\batomic(?:Add|Sub)\w*\s*\((?![^;]*,\s*\d+[uUlL]*\s*\))")
ATOMIC_FLOAT = re.compile(
    r"\b(?:atom|red)\.[\w.:]*add[\w.:]*\.b?f\d+|\batomic(?:_ref)?\s*<\s*(?:float|double|__half)"
)
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(?:work|home|root|tmp/wt)/")
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
TIDY_COUNT = re.compile(r"\d+ warnings? (generated|treated)")

Problems = list[str]


class Tree:
    """The files of a source tree: those that git knows or would add, else all that are not built."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True) if (root / ".git").exists() else None
        if listed is not None and listed.returncode == 0:
            names = sorted(set(filter(None, listed.stdout.split("\0"))))
        else:
            names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
            names = [name for name in names if not name.startswith(("build/", "out/", ".venv/", ".git/"))]
        self.names = [name for name in names if (root / name).is_file()]

    def select(self, suffixes: set[str], *folders: str) -> list[str]:
        inside = tuple(folder + "/" for folder in folders)
        return [n for n in self.names if Path(n).suffix in suffixes and (not inside or n.startswith(inside))]

    def read(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8", errors="replace")

    def code(self, name: str) -> str:
        """C++ text with comments blanked, line numbers kept."""

        def blank(match: re.Match[str]) -> str:
            return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

        return COMMENT_OR_STRING.sub(blank, self.read(name))


def found(name: str, text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
    for match in pattern.finditer(text):
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        yield f"{name}:{text.count(chr(10), 0, start) + 1}", match


# --- Rules of the tree --------------------------------------------------------------------------------------


def layer_of(name: str) -> str | None:
    return next((layer for layer in LAYERS if name.startswith(layer + "/")), None)


def check_includes(tree: Tree) -> Problems:
    """core <- backends <- bindings: a layer includes only what is below it."""
    problems = []
    known = set(tree.names)
    for name in tree.select(CPP, "include", "src"):
        layer = layer_of(name)
        if layer is None:
            problems.append(f"{name}: belongs to no layer; the layers are {', '.join(LAYERS)}")
            continue
        allowed, system = LAYERS[layer]
        for where, match in found(name, tree.code(name), INCLUDE):
            quoted, header = match[1] == '"', match[2]
            folders = [Path(name).parent] * quoted + [Path("src"), Path("include")]
            paths = (os.path.normpath(folder / header) for folder in folders)
            target = next((path for path in paths if path in known), None)
            if target is not None:
                if layer_of(target) not in allowed:
                    problems.append(f"{where}: {layer} must not include {target}")
            elif quoted:
                problems.append(f"{where}: {header} is not in the tree")
            elif not re.fullmatch(f"{STANDARD}|{system}", header):
                problems.append(f"{where}: {layer} must not include <{header}>")
    return problems


def check_length(tree: Tree) -> Problems:
    """A file of code has at most 450 lines; 400 is the aim."""
    problems = []
    for name in tree.select(CODE):
        lines = tree.read(name).count("\n")
        if lines > LINES_LIMIT:
            problems.append(f"{name}: {lines} lines, at most {LINES_LIMIT}")
        elif lines > LINES_AIM:
            print(f"  note: {name}: {lines} lines, aim under {LINES_AIM}")
    return problems


def check_macros(tree: Tree) -> Problems:
    """One macro, the host and device marker; headers use #pragma once."""
    problems = []
    for name in tree.select(CPP, "include", "src"):
        code = tree.code(name)
        for where, match in found(name, code, DEFINE):
            if match[1] != THE_MACRO:
                problems.append(f"{where}: macro {match[1]}; the only one is {THE_MACRO}")
        if Path(name).suffix in {".h", ".cuh"} and "#pragma once" not in code:
            problems.append(f"{name}: no #pragma once")
    return problems


def check_atomics(tree: Tree) -> Problems:
    """Sums have a fixed order: no atomic addition but of an integer literal, to a counter."""
    problems = []
    for name in tree.select(CPP, "include", "src"):
        for pattern in (ATOMIC_CALL, ATOMIC_FLOAT):
            for where, match in found(name, tree.code(name), pattern):
                problems.append(f"{where}: {match[0].strip()}: atomic sums have no order")
    return problems


def check_environment(tree: Tree) -> Problems:
    """No environment variable is read in C++."""
    problems = []
    for name in tree.select(CPP, "include", "src"):
        problems += [f"{where}: {match[0]}" for where, match in found(name, tree.code(name), ENVIRONMENT)]
    return problems


def check_spdx(tree: Tree) -> Problems:
    """A file that can hold a comment has the licence in its first five lines."""
    problems = []
    for name in tree.names:
        path = Path(name)
        if path.suffix in COMMENTABLE or path.name in COMMENTABLE_NAMES:
            text = tree.read(name)
            if text.strip() and SPDX not in "".join(text.split("\n", 5)[:5]):
                problems.append(f"{name}: no {SPDX} in the first five lines")
    return problems


def check_machine_paths(tree: Tree) -> Problems:
    """No path that exists on one machine only."""
    problems = []
    for name in tree.names:
        path = tree.root / name
        if path.stat().st_size < BYTES_LIMIT and b"\0" not in path.read_bytes()[:4096]:
            problems += [f"{w}: {m[0]}" for w, m in found(name, tree.read(name), MACHINE_PATH)]
    return problems


def check_size(tree: Tree) -> Problems:
    """Results, pictures and everything else: under 1 MB a file."""
    sizes = [(name, (tree.root / name).stat().st_size) for name in tree.names]
    return [f"{name}: {size} bytes, under {BYTES_LIMIT}" for name, size in sizes if size >= BYTES_LIMIT]


TREE_RULES: dict[str, Callable[[Tree], Problems]] = {
    "include_direction": check_includes,
    "file_length": check_length,
    "one_macro": check_macros,
    "no_float_atomics": check_atomics,
    "no_environment": check_environment,
    "spdx": check_spdx,
    "no_machine_path": check_machine_paths,
    "file_size": check_size,
}

# --- Tools --------------------------------------------------------------------------------------------------


class ToolMissing(Exception):
    pass


def require(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise ToolMissing(f"{program} is not installed (Debian package {package})")
    return path


def run_tool(command: list[str], root: Path) -> Problems:
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode == 0:
        return []
    lines = [line for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    return lines or [f"{command[0]}: exit status {result.returncode}"]


def clang_format(tree: Tree, *mode: str) -> Problems:
    files = tree.select(CPP)
    lines = run_tool([require("clang-format", "clang-format"), *mode, *files], tree.root) if files else []
    return [line for line in lines if "error" in line] or lines


def ruff(tree: Tree, *command: str) -> Problems:
    if subprocess.run([sys.executable, "-m", "ruff", "--version"], capture_output=True).returncode != 0:
        raise ToolMissing(f"ruff is not installed in {sys.executable} (requirements/test.txt)")
    return run_tool([sys.executable, "-m", "ruff", *command, "."], tree.root)


def clang_tidy(tree: Tree, jobs: int) -> Problems:
    """Host sources below the binding, with the flags of a build of their own, whatever else is configured."""
    program = require("clang-tidy", "clang-tidy")
    build = tree.root / "build" / "lint"
    options = ["-DSTEADYNORM_CUDA=OFF", "-DSTEADYNORM_TORCH=OFF", "-DSTEADYNORM_TESTS=OFF"]
    options += ["-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    problems = run_tool(["cmake", "-S", ".", "-B", str(build), *options], tree.root)
    if problems:
        return problems
    files = [entry["file"] for entry in json.loads((build / "compile_commands.json").read_text())]
    command = [program, "-p", str(build), "--quiet", "--extra-arg=-Wno-unknown-warning-option"]
    with ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda file: run_tool([*command, file], tree.root), files)
        # How many warnings other people's headers would have given is no finding.
        return [line for lines in results for line in lines if not TIDY_COUNT.match(line)]


# --- Report -------------------------------------------------------------------------------------------------


def write_junit(path: Path, results: dict[str, tuple[str, Problems]]) -> None:
    suite = ElementTree.Element("testsuite", name="lint", tests=str(len(results)))
    for name, (outcome, problems) in results.items():
        case = ElementTree.SubElement(suite, "testcase", classname="lint", name=name)
        if outcome == "failed":
            failure = ElementTree.SubElement(case, "failure", message=f"{len(problems)} problems")
            failure.text = "\n".join(problems)
        elif outcome == "skipped":
            ElementTree.SubElement(case, "skipped", message=problems[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent.parent)
    parser.add_argument("--only", action="append", help="run this check only (repeatable)")
    parser.add_argument("--fix", action="store_true", help="format in place")
    parser.add_argument("--jobs", type=int, default=2, help="clang-tidy processes at once")
    parser.add_argument("--junitxml", type=Path, help="write a JUnit report")
    parser.add_argument("--allow-missing", action="store_true", help="a check without its tool is skipped")
    arguments = parser.parse_args()
    tree = Tree(arguments.root)

    if arguments.fix:
        problems = clang_format(tree, "-i") + ruff(tree, "check", "--fix", "--quiet") + ruff(tree, "format")
        print(*problems, sep="\n")
        return 1 if problems else 0

    checks: dict[str, Callable[[Tree], Problems]] = {
        **TREE_RULES,
        "clang_format": lambda tree: clang_format(tree, "--dry-run", "--Werror"),
        "clang_tidy": lambda tree: clang_tidy(tree, arguments.jobs),
        "ruff_check": lambda tree: ruff(tree, "check", "--quiet", "--output-format=concise"),
        "ruff_format": lambda tree: ruff(tree, "format", "--check", "--output-format=concise"),
    }
    results = {}
    for name in arguments.only or checks:
        try:
            problems = checks[name](tree)
            outcome = "failed" if problems else "passed"
        except ToolMissing as missing:
            problems = [str(missing)]
            outcome = "skipped" if arguments.allow_missing else "failed"
        results[name] = (outcome, problems)
        print(f"{outcome:8} {name}", flush=True)
        for line in problems[:SHOWN]:
            print(f"  {line}")
        if len(problems) > SHOWN:
            print(f"  and {len(problems) - SHOWN} more")
    if arguments.junitxml:
        write_junit(arguments.junitxml, results)
    failed = sum(outcome == "failed" for outcome, _ in results.values())
    print(f"lint: {len(results)} checks, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
