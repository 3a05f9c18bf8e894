# SPDX-License-Identifier: Apache-2.0
"""The page shows what `python -m steadynorm bench --json` wrote, as of a CPU; and its tables sort."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench.page import __main__ as command_line
from bench.page import html
from page_helpers import HEAD, arm, empty_tree, line_of, lost_and_won, put, texts

RATE = 40e9  # bytes a second


def row(which: str, ours: dict, eager: dict, **fields) -> dict:
    """Of one-32x96 in fp32: 108 MiB."""
    least = (2 if which == "forward" else 5) * (32 * 96**3) * 4
    return {
        "shape": [1, 32, 96, 96, 96], "groups": 8, "layout": "contiguous", "dtype": "fp32",
        "activation": "none", "which": which, "case": "one-32x96-nchw", "tensor_bytes": 32 * 96**3 * 4,
        "least_bytes": least, "floor_us": 1e6 * least / RATE, "errors_of": "all groups",
        "arms": {"ours": ours, "eager": eager}, **fields,
    }  # fmt: skip


def cpu_results(*rows: dict, **head) -> dict:
    kept = {key: HEAD[key] for key in ("commit", "dirty", "date", "versions", "stopped")}
    return {**kept, "device": "Some CPU", "device_type": "cpu", "driver": None, "threads": 2,
            "copy_bytes_per_second": RATE, **head, "rows": list(rows)}  # fmt: skip


ROWS = (
    row("forward", arm(10000.0, rung="native"), arm(5000.0, error_y=40.0)),
    row("training", arm(40000.0, rung="native"), arm(80000.0, error_dx=float("inf"))),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a run on a GPU and one on a CPU."""
    tree = empty_tree(tmp_path)
    put(tree, "a.json", lost_and_won())
    put(tree, "cpu-some.json", cpu_results(*ROWS))
    return tree


def test_a_cpu_has_a_section_of_its_own(root: Path) -> None:
    made = texts(root)
    page = made["performance.md"]
    section = page.split("\n## Some CPU, fp32, activation none\n")[1].split("\n## ")[0]
    assert section.strip().startswith(
        "Run 2: Some CPU, 2 threads, 2026-01-02, commit 0123456789, copy 40 GB/s.\n"
    )
    forward, both = section.split("### Forward + backward")
    # floors: 2 and 5 times 113.2 MB at 40 GB/s
    assert line_of(forward, "one-32x96-nchw")[1:] == [
        "contiguous", "native", "108", "5.66 ms", "10 ms (1.77)", "**5 ms (0.883)**", "1.5", "40", "2",
    ]  # fmt: skip
    assert line_of(both, "one-32x96-nchw")[4:-1] == [
        "14.2 ms",
        "**40 ms (2.83)**",
        "80 ms (5.65)",
        "2.5",
        "inf",
    ]
    assert "- Forward: eager is faster than ours in 1 of 1, up to 2 times: one-32x96-nchw.\n" in section
    assert "- Forward + backward, worst error of dx: ours 2.5, eager inf.\n" in section
    assert re.findall(r"\(performance/(.*)\.png\)", section) == ["some-cpu-fp32-none-contiguous"]
    assert page.index("\n## Some GPU") < page.index("\n## Some CPU")
    assert "- *On a CPU*: time is the wall time" in page
    cells = line_of(page, "2")
    assert cells[3:] == ["torch 2.11.0", "40", "2 of 2", "finished"]  # no driver
    assert line_of(made["README.md"], "one-32x96-nchw") == [
        "one-32x96-nchw", "contiguous", "108", "1.77", "**0.5 (eager)**", "2.83", "2 (eager)",
    ]  # fmt: skip
    assert "fp32, wall time of a call; Some CPU, 2 threads, 2026-01-02" in made["README.md"]


def test_without_a_cpu_the_page_says_nothing_of_one(root: Path) -> None:
    (root / "bench" / "results" / "cpu-some.json").unlink()
    assert "CPU" not in texts(root)["performance.md"]


def test_the_command_on_the_page_measures_the_same_calls(root: Path) -> None:
    shapes = pytest.importorskip("steadynorm.bench.shapes")

    def command() -> list[str]:
        page = texts(root)["performance.md"]
        (line,) = (line for line in page.splitlines() if line.endswith("# run 2"))
        assert line in texts(root)["performance.md"]
        words = shlex.split(line, comments=True)
        assert words[:4] == [".venv/bin/python", "-m", "steadynorm", "bench"]
        at = words.index("--json")
        assert words[at + 1] == "bench/results/cpu-some.json"
        return words[4:at]

    (job,) = shapes.jobs_of(shapes.parse(["--cases", "one-32x96-nchw", "--device", "cpu", "--pass", "forward",
                                          "--dtype", "fp32", "--peers", "eager"]))  # fmt: skip
    jobs = shapes.jobs_of(options := shapes.parse(command()))
    assert jobs[0] == job and [of.which for of in jobs] == ["forward", "training"]
    assert options.peers == ["eager"]
    # Of one's own shapes, in channels_last.
    own = [{**of, "case": None, "shape": [2, 8, 5, 5], "layout": "channels_last"} for of in ROWS]
    put(root, "cpu-some.json", cpu_results(*own))
    (first, _) = shapes.jobs_of(shapes.parse(command()))
    assert (first.shape, first.groups, first.layout) == ((2, 8, 5, 5), 8, "channels_last")
    assert texts(root)["performance.md"].count("| 2x8x5x5, 8 groups |") == 2
    # All cases that are named where none is given.
    all_of = ["--cases", "all", "--device", "cpu", "--pass", "forward", "--dtype", "fp32", "--peers", "eager"]
    rows = [
        {**ROWS[0], "case": of.case, "shape": list(of.shape), "groups": of.groups, "layout": of.layout}
        for of in shapes.jobs_of(shapes.parse(all_of))
    ]
    put(root, "cpu-some.json", cpu_results(*rows))
    assert command()[:2] == ["--cases", "all"]


def test_a_shape_of_the_cases_has_its_name_and_another_its_sizes(root: Path) -> None:
    unnamed = [{key: value for key, value in of.items() if key != "case"} for of in ROWS]
    put(root, "cpu-some.json", cpu_results(*unnamed))
    assert "| one-32x96-nchw |" in texts(root)["performance.md"]


def test_a_call_that_was_left_out_is_a_row_that_failed(root: Path) -> None:
    kept = ("shape", "groups", "layout", "dtype", "activation", "which", "case")
    rows = [{key: of[key] for key in kept} | {"error": "RuntimeError: no memory"} for of in ROWS]
    put(root, "cpu-some.json", cpu_results(*rows))
    section = texts(root)["performance.md"].split("\n## Some CPU")[1].split("\n## ")[0]
    for part, floor in zip(section.split("### Forward + backward"), ("5.66 ms", "14.2 ms"), strict=True):
        assert line_of(part, "one-32x96-nchw")[2:6] == ["**failed**", "108", floor, "error"]
    assert "- ours failed: one-32x96-nchw, forward: RuntimeError: no memory\n" in section


def test_rows_of_several_groups_without_names_are_told(root: Path, capsys) -> None:
    own = [{**ROWS[0], "case": None}, {**ROWS[1], "case": None, "groups": 4}]
    put(root, "cpu-some.json", cpu_results(*own))
    assert command_line.main(["--check"], root) == 1
    assert capsys.readouterr().err == (
        "report: bench/results/cpu-some.json cannot be shown: rows without a case must have one number of "
        "groups, got 8, 4\n"
    )


def test_the_html_has_every_command_and_the_networks(root: Path) -> None:
    head = {key: value for key, value in HEAD.items() if key != "options"}
    inference = {**head, "benchmark": "inference", "size": "full", "replicates": 9, "rows": [
        {"network": "block", "shape": [1, 8], "layout": "contiguous", "error": "OutOfMemoryError: 2 GiB"},
    ]}  # fmt: skip
    (root / "bench" / "results" / "i.json").write_text(json.dumps(inference))
    made = texts(root)
    tree = ElementTree.fromstring(made["performance.html"])
    told = "\n".join(pre.text for pre in tree.iter("pre"))
    for command in ('make bench ARGS="--dtypes bf16', "steadynorm bench --cases one-32x96-nchw",
                    "steadynorm bench inference --replicates 9"):  # fmt: skip
        assert command in told and command in made["performance.md"]
    assert ["block", "1×8", "contiguous", "failed"] in [
        [cell.text for cell in line.findall("td")[:4]] for line in tree.iter("tr")
    ]
    assert line_of(made["performance.md"], "block")[3:5] == ["**failed**", "OutOfMemoryError: 2 GiB"]


DOM = """
function element(tag, attributes, children) {
  var of = {tag: tag, attributes: attributes, children: children, listeners: {}, parentNode: null,
    className: attributes["class"] || "", textContent: attributes.text || "",
    getAttribute: function (n) { return of.attributes[n] === undefined ? null : of.attributes[n]; },
    setAttribute: function (n, v) { of.attributes[n] = v; },
    removeAttribute: function (n) { delete of.attributes[n]; },
    addEventListener: function (n, f) { of.listeners[n] = f; },
    appendChild: function (c) { of.children.splice(of.children.indexOf(c), 1); of.children.push(c); },
    closest: function (t) { return of.tag === t ? of : of.parentNode && of.parentNode.closest(t); },
    all: function (t) {
      return of.children.flatMap(function (c) { return (c.tag === t ? [c] : []).concat(c.all(t)); });
    },
    querySelectorAll: function (t) { return of.all(t.split(" ").pop()); },
    get rows() { return of.children.slice(); }, get cells() { return of.children; },
    get tBodies() { return of.all("tbody"); },
    get cellIndex() { return of.parentNode.children.indexOf(of); }};
  children.forEach(function (c) { c.parentNode = of; });
  return of;
}
function table(values) {
  var heads = [element("th", {"class": "word"}, [element("button", {}, [])]),
               element("th", {}, [element("button", {}, [])])];
  var rows = values.map(function (v) {
    var number = typeof v[1] === "string" ? {"text": v[1]} : {"text": "near", "data-value": String(v[1])};
    return element("tr", {}, [element("td", {text: v[0]}, []), element("td", number, [])]); });
  var head = element("thead", {}, [element("tr", {}, heads)]);
  return element("table", {}, [head, element("tbody", {}, rows)]);
}
var one = table([["b", 10], ["a", "–"], ["d", "9"], ["c", Infinity]]), two = table([["z", 2], ["y", 1]]);
var document = element("document", {}, [one, two]);
function order(of) {
  return of.tBodies[0].rows.map(function (row) { return row.cells[0].textContent; }).join("");
}
function press(of, column) {
  of.all("button")[column].listeners.click();
  return order(of) + " " + order(two);
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_table_sorts_by_numbers_and_words_both_ways_and_alone() -> None:
    presses = "[press(one, 1), press(one, 1), press(one, 0), press(one, 0), press(two, 1), order(one)]"
    marks = "one.all('th').map(function (th) { return th.getAttribute('aria-sort'); })"
    script = f"{DOM}\n{html.SCRIPT}\nconsole.log(JSON.stringify([{presses}, {marks}]));"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=60)
    orders, marked = json.loads(done.stdout)
    # 9, 10, infinity; what has no number comes last, whichever way.
    assert orders == ["dbca zy", "cbda zy", "abcd zy", "dcba zy", "yz yz", "dcba"]
    assert marked == ["descending", None]
