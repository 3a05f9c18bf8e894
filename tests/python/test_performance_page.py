# SPDX-License-Identifier: Apache-2.0
"""The performance page is that of bench/results, and says of them what they hold. Runs without a GPU."""

from __future__ import annotations

import copy
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.page import __main__ as command_line
from bench.page import charts, html, markdown, pictures
from bench.page.results import read
from page_helpers import (
    HEAD,
    OPTIONS,
    README,
    empty_tree,
    line_of,
    lost_and_won,
    put,
    results_of,
    stamped,
    texts,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with a README and no results."""
    return empty_tree(tmp_path)


def test_the_committed_pages_are_those_of_their_data(capsys) -> None:
    assert command_line.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_older_than_its_data_is_named(root: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(pictures, "png", stamped)
    put(root, "a.json", lost_and_won())
    assert command_line.main([], root) == 0
    assert command_line.main(["--check"], root) == 0
    newer = lost_and_won()
    for held in newer["rows"]:
        held["arms"]["ours"]["median_us"] *= 2
    put(root, "a.json", newer)
    capsys.readouterr()
    assert command_line.main(["--check"], root) == 1
    named = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert named == [
        "docs/performance.md", "docs/performance/performance.html", "README.md",
        "docs/performance/some-gpu-bf16-none-contiguous.png",
        "docs/performance/some-gpu-bf16-none-channels_last.png",
    ]  # fmt: skip
    assert command_line.main([], root) == 0
    *wrote, done = capsys.readouterr().out.splitlines()
    assert wrote == [f"report: wrote {name}" for name in named] and "are those of bench/results" in done
    put(root, "a.json", results_of(newer["rows"][0]))  # one layout less
    left_over = "docs/performance/some-gpu-bf16-none-channels_last.png"
    assert left_over in command_line.Page(root).stale()
    assert command_line.main([], root) == 0
    held = sorted(path.name for path in (root / "docs" / "performance").iterdir())
    assert held == ["performance.html", "some-gpu-bf16-none-contiguous.png"]


def test_a_damaged_picture_is_stale(root: Path, monkeypatch) -> None:
    monkeypatch.setattr(pictures, "png", stamped)
    put(root, "a.json", lost_and_won())
    page = command_line.Page(root)
    page.write()
    assert page.stale() == []
    path = next(iter(page.pictures))
    whole = path.read_bytes()
    for damaged in (whole.replace(b"pixels", b"pixals"), whole[:-12], whole[:30], b""):
        path.write_bytes(damaged)
        assert page.stale() == [str(path.relative_to(root))]


def test_without_matplotlib_nothing_is_written(root: Path, monkeypatch, capsys) -> None:
    def missing(figure: charts.Figure, styles: dict) -> bytes:
        raise ImportError("no matplotlib here")

    monkeypatch.setattr(pictures, "png", missing)
    put(root, "a.json", lost_and_won())
    assert command_line.main([], root) == 1
    told = "report: the pictures need matplotlib (requirements/demo.txt), got: no matplotlib here\n"
    assert capsys.readouterr().err == told
    assert not (root / "docs").exists()
    assert (root / "README.md").read_text() == README


def test_only_what_is_between_the_markers_of_the_readme_changes(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    made = texts(root)["README.md"]
    assert made.startswith(
        f"before\n{command_line.BEGIN}\nbf16, cold L2; Some GPU, 2026-01-02, commit 0123456789."
    )
    assert made.endswith(f"\n\n{command_line.END}after\n")
    assert "stale" not in made
    (root / "README.md").write_text(made)
    assert texts(root)["README.md"] == made


@pytest.mark.parametrize("readme", ["", command_line.BEGIN, command_line.END + command_line.BEGIN])
def test_a_readme_without_markers_is_an_error(root: Path, readme: str, capsys) -> None:
    put(root, "a.json", lost_and_won())
    (root / "README.md").write_text(readme)
    assert command_line.main([], root) == 1
    assert "README.md must have the lines" in capsys.readouterr().err


BAD_ROWS = [
    ({"median_us": float("nan")}, "row 0: median_us of ours must be a number above 0, got nan"),
    ({"median_us": "40"}, "row 0: median_us of ours must be a number above 0, got '40'"),
    ({"error_y": "nan"}, "row 0: error_y of ours must be a number or inf, got 'nan'"),
    ({"error_dx": -1.0}, "row 0: error_dx of ours must be a number or inf, got -1.0"),
]


@pytest.mark.parametrize(("damage", "told"), BAD_ROWS)
def test_a_number_that_is_none_is_told_with_its_file(root: Path, damage: dict, told: str, capsys) -> None:
    data = lost_and_won()
    data["rows"][0]["arms"]["ours"].update(damage)
    (root / "bench" / "results" / "a.json").write_text(json.dumps(data))
    assert command_line.main([], root) == 1
    assert capsys.readouterr().err == f"report: bench/results/a.json cannot be shown: {told}\n"
    assert not (root / "docs").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"rows": [', "Expecting value: line 1 column 11 (char 10)"),
        ("[1]", "it must hold an object, got list"),
        ('{"rows": [], "options": {}}', "lacks 'device'"),
        (json.dumps({**lost_and_won(), "options": {}}), "lacks 'dtypes'"),
        (json.dumps({**lost_and_won(), "rows": [{}]}), "lacks 'pass'"),
        (json.dumps({**lost_and_won(), "rows": [{**lost_and_won()["rows"][0], "dtype": "fp8"}]}),
         "row 0: dtype must be one of bf16, fp16, fp32, got 'fp8'"),
        (json.dumps({**lost_and_won(), "rows": [7]}), "'int' object is not subscriptable"),
        (json.dumps({**HEAD, "passed": 7, "failed": 1, "skipped": 2, "kernels": {"reached": 1}}),
         "lacks 'compiled'"),
        (json.dumps({"benchmark": "inference", "size": "full", "rows": [{"network": "a"}]}), "lacks 'arms'"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_with_its_name(root: Path, text: str, told: str, capsys) -> None:
    put(root, "a.json", lost_and_won())
    (root / "bench" / "results" / "b.json").write_text(text)
    assert command_line.main(["--check"], root) == 1
    assert capsys.readouterr().err == f"report: bench/results/b.json cannot be shown: {told}\n"


def test_an_error_without_end_is_shown_and_drawn_on_the_edge(root: Path) -> None:
    data = lost_and_won()
    data["rows"][0]["arms"]["eager"]["error_y"] = float("inf")
    put(root, "a.json", data)
    assert "NaN" not in (path := root / "bench" / "results" / "a.json").read_text()
    assert "Infinity" not in path.read_text()
    made = texts(root)
    assert line_of(made["performance.md"].split("### Forward +")[0], "liger-a")[8] == "inf"
    assert "- Forward, worst error of y: ours 1.5, eager inf.\n" in made["README.md"]
    tree = ElementTree.fromstring(made["performance.html"])
    assert [cell.text for cell in tree.iter("td") if cell.get("data-value") == "Infinity"] == ["inf"]
    (mark,) = (path for path in tree.iter("path") if path.find("title") is not None
               and path.find("title").text == "liger-a, eager: error inf")  # fmt: skip
    assert f" {html.TOP})" in mark.get("transform")


def test_a_run_without_rows_is_listed(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    put(root, "b.json", {**results_of(stopped="interrupted"), "date": "2026-01-03"})
    made = texts(root)["performance.md"]
    assert line_of(made, "2")[5:] == ["0 of 0", "interrupted"]
    assert "# run 1" in made and "# run 2" not in made


def test_pages_that_cannot_be_written_are_told(root: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(pictures, "png", stamped)
    put(root, "a.json", lost_and_won())
    (root / "docs").write_text("in the way")
    assert command_line.main([], root) == 1
    assert "docs could not be written: File exists" in capsys.readouterr().err.replace("/performance", "")


def test_no_results_are_an_error(root: Path, capsys) -> None:
    assert command_line.main([], root) == 1
    assert "must have a file of `make bench`, got none" in capsys.readouterr().err


def test_a_row_that_a_peer_wins_is_shown_and_counted(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    made = texts(root)
    forward, both = made["performance.md"].split("### Forward + backward")
    assert line_of(forward, "liger-a")[5:] == ["40.0 us (4)", "**20.0 us (2)**", "1.5", "900", "1"]
    assert line_of(both, "liger-a")[5:] == ["**40.0 us (4)**", "80.0 us (8)", "2.5", "2.5", "1"]
    for text in (made["performance.md"], made["README.md"]):
        assert "- Forward: eager is faster than ours in 1 of 1, up to 2 times: liger-a.\n" in text
        assert "- Forward + backward: eager is faster in none of 1: 2 to 2 times slower than ours.\n" in text
        assert "- Forward, worst error of y: ours 1.5, eager 900.\n" in text
    assert line_of(made["README.md"], "liger-a") == [
        "liger-a", "contiguous", "2", "4", "**0.5 (eager)**", "4", "2 (eager)",
    ]  # fmt: skip


def test_a_row_that_the_native_kernel_did_not_serve_is_marked(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    made = texts(root)
    cells = line_of(made["performance.md"], "unet3d-512")
    assert cells[2] == "**compiled**"
    assert line_of(made["performance.md"].split("### Forward +")[0], "liger-a")[2] == "native"
    assert "- Not served by the native kernel: 1 of 3 rows." in made["performance.md"]
    assert line_of(made["README.md"], "unet3d-512")[3] == "2 (compiled)"
    assert '<td class="word mark">compiled</td>' in made["performance.html"]


def test_an_arm_that_failed_says_so(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    made = texts(root)["performance.md"]
    assert line_of(made, "unet3d-512")[5:] == ["20.0 us (2)", "error", "0.5", "–", "1"]
    assert "- eager failed: unet3d-512, forward: OOM: no GiB\n" in made


def test_the_newest_run_has_a_row_that_two_runs_have(root: Path) -> None:
    old, new = lost_and_won(), lost_and_won()
    new["rows"] = new["rows"][:1]
    new["rows"][0]["arms"]["ours"]["median_us"] = 10.0
    new.update(date="2026-01-03", commit="fedcba9876543210", dirty=True)
    put(root, "b.json", old)
    put(root, "a.json", new)
    made = texts(root)["performance.md"]
    forward, both = made.split("### Forward + backward")
    assert line_of(forward, "liger-a")[5::4] == ["**10.0 us (1)**", "2"]
    assert line_of(both, "liger-a")[-1] == "1"
    assert line_of(made, "1")[5] == "2 of 3"
    assert line_of(made, "2")[2:6:3] == ["Some GPU, 2026-01-03, commit fedcba9876, modified", "1 of 1"]


def test_each_device_has_tables_and_pictures_of_its_own(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    put(root, "b.json", {**lost_and_won(), "device": "Other GPU"})
    first, second = texts(root)["performance.md"].split("\n## Some GPU, bf16, activation none\n")
    first = first.split("\n## Other GPU, bf16, activation none\n")[1]
    for part, device, run in ((first, "other", "2"), (second, "some", "1")):
        assert line_of(part.split("### Forward +")[0], "liger-a")[-1] == run
        drawn = re.findall(r"\(performance/(.*)\.png\)", part)
        assert drawn == [f"{device}-gpu-bf16-none-{layout}" for layout in ("contiguous", "channels_last")]
    assert texts(root)["README.md"].count("| liger-a |") == 2


def test_of_one_day_the_last_file_by_name_has_the_row(root: Path) -> None:
    late = copy.deepcopy(lost_and_won())
    late["rows"][0]["arms"]["ours"]["median_us"] = 10.0
    put(root, "b.json", late)
    put(root, "a.json", lost_and_won())
    assert [held.times["ours"] for held in read(root / "bench" / "results").rows] == [20.0, 10.0, 40.0]


def test_errors_of_less_than_all_groups_are_told(root: Path) -> None:
    data = lost_and_won()
    data["rows"][0]["errors_of"] = "first group"
    put(root, "a.json", data)
    forward, both = texts(root)["performance.md"].split("### Forward + backward")
    assert "Errors of liger-a: first group." in forward
    assert "Errors of" not in both


def test_files_of_other_kinds_are_named(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    counts = {**HEAD, "passed": 7, "failed": 1, "skipped": 2}
    counts["sanitizer"] = {"memcheck": {"findings": 3}}
    counts["kernels"] = {"compiled": 9, "reached": 8}
    (root / "bench" / "results" / "tests.json").write_text(json.dumps(counts))
    (root / "bench" / "results" / "else.json").write_text("{}")
    made = texts(root)["performance.md"]
    assert "- Some GPU, 2026-01-02, commit 0123456789: 7 passed, 1 failed, 2 skipped; " in made
    assert "8 of 9 compiled kernels reached; findings of compute-sanitizer: memcheck 3 (" in made
    assert "not on this page: else.json." in made


def test_the_command_on_the_page_measures_what_the_run_did() -> None:
    runs = [run for run in read().runs if not run.on_cpu]  # a CPU's have other options
    assert runs
    for run in runs:
        goal, arguments = run.command.split(" ARGS=")
        assert goal == "make bench"
        again = vars(bench.parse_arguments(shlex.split(arguments.strip('"'))))
        again["cases"] = [case.name for case in again["cases"]]
        held = {key: again[key] for key in OPTIONS}
        assert held == {key: run.head["options"][key] for key in OPTIONS}


def test_a_command_names_what_is_not_the_default(root: Path) -> None:
    options = {**OPTIONS, "passes": ["forward"], "no_errors": True, "peers": []}
    put(root, "a.json", results_of(lost_and_won()["rows"][0], options=options))
    assert (
        'make bench ARGS="--dtypes bf16 --activation none --passes forward --no-peers '
        '--cases unet3d-512,liger-a --no-errors --repeat-ms 25"   # run 1\n'
    ) in texts(root)["performance.md"]


def test_the_html_needs_no_other_file_and_has_every_point(root: Path) -> None:
    put(root, "a.json", lost_and_won())
    made = texts(root)["performance.html"]
    assert not re.search(r"https?:|\bsrc=|\bhref=|@import|url\(", made)
    tree = ElementTree.fromstring(made)
    told = [title.text for title in tree.iter("title")]
    assert "liger-a, eager: 50 % of the copy rate, 20.0 us" in told
    assert "liger-a, eager: error 900" in told
    assert len(tree.findall(".//tbody/tr")) == 3
    heads, cells = tree.findall(".//thead/tr/th"), tree.findall(".//tbody/tr/td")
    assert len(cells) == 3 * len(heads)
    # A column sorts by numbers or by text: each cell is of its column's kind.
    for place, cell in enumerate(cells):
        is_word = heads[place % len(heads)].get("class") == "word"
        assert is_word == (cell.get("class") or "").startswith("word")
        if not is_word and cell.get("data-value") is None and cell.text not in ("–", "error"):
            float(cell.text)


def test_a_mark_is_at_its_value() -> None:
    point = charts.Point(4.0, 10.0, "told")
    chart = charts.Chart("t", "y", (1.0, 16.0), (1.0, 100.0), {"ours": [point]}, None, "")
    drawn = html.svg(chart, {"ours": ("#000000", "o")})
    x = (html.LEFT + html.WIDTH - html.RIGHT) / 2
    y = (html.TOP + html.HEIGHT - html.BOTTOM) / 2
    assert f"translate({html.number(x)} {html.number(y)})" in drawn


@pytest.mark.parametrize(
    ("low", "high", "base", "limits"),
    [
        (1.5, 3.0, 2, (1.0, 4.0)),
        (2.0, 4.0, 2, (2.0, 4.0)),
        (0.3, 0.4, 2, (0.25, 0.5)),
        (0.02, 70, 10, (0.01, 100)),
    ],
)
def test_an_axis_ends_at_powers(low: float, high: float, base: int, limits: tuple[float, float]) -> None:
    assert charts.powers(low, high, base) == pytest.approx(limits)


@pytest.mark.parametrize(
    ("limits", "ticks"),
    [
        ((0.1, 1e4), [0.1, 1, 10, 100, 1000, 1e4]),
        ((1.0, 200.0), [1, 10, 100]),
        ((10.0, 200.0), [10, 20, 50, 100, 200]),
    ],
)
def test_an_axis_has_labels_enough(limits: tuple[float, float], ticks: list[float]) -> None:
    assert charts.y_ticks(limits) == pytest.approx(ticks)
    chart = charts.Chart("t", "y", (1.0, 4.0), limits, {}, None, "")
    drawn = re.findall(r'text-anchor="end">([^<]*)<', html.svg(chart, {}))
    assert drawn == [charts.tick_text(value) for value in ticks]
    assert re.findall(r'text-anchor="middle">([\d.]+)<', html.svg(chart, {})) == ["1", "2", "4"]


def test_a_picture_is_the_same_each_time_and_has_no_date(root: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    put(root, "a.json", lost_and_won())
    page = command_line.Page(root)
    figure = next(iter(page.pictures.values()))
    first = pictures.png(figure, page.styles)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):  # a user's own style
        assert pictures.png(figure, page.styles) == first
    assert pictures.read_stamp(first) == pictures.stamp(figure, page.styles)
    assert first.count(b"tEXt") == 1
    assert b"tIME" not in first


def test_ratios_have_three_digits() -> None:
    assert [markdown.figure_of(v) for v in (0.9942, 1.5, 12.34, 719000.0)] == [
        "0.994",
        "1.5",
        "12.3",
        "719000",
    ]
