# SPDX-License-Identifier: Apache-2.0
"""tests/run.py counts what the runners report, and counts a runner that reports nothing as a failure."""

from __future__ import annotations

import sys

import pytest

import run

CTEST = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="(empty)" tests="7">
  <testcase name="Passes" classname="Passes" status="run"/>
  <testcase name="Fails" status="fail"><failure message=""/></testcase>
  <testcase name="TimesOut" status="fail"><failure message="Timeout"/></testcase>
  <testcase name="Skips" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
  <testcase name="Gone" status="notrun"><skipped message="Unable to find executable"/></testcase>
  <testcase name="NoFile" status="notrun"><skipped message="Required Files Missing"/></testcase>
  <testcase name="Disabled" classname="Disabled" status="disabled"/>
</testsuite>
"""
PYTEST = """<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="4">
  <testcase classname="a" name="passes"/>
  <testcase classname="a" name="fails"><failure message="x"/></testcase>
  <testcase classname="a" name="errors"><error message="x"/></testcase>
  <testcase classname="a" name="skips"><skipped message="x"/></testcase>
</testsuite></testsuites>
"""
GREEN = '<testsuite><testcase name="passes"/></testsuite>'


@pytest.mark.parametrize(
    ("text", "count", "names"),
    [
        (CTEST, run.Count(1, 4, 2), ["Fails", "TimesOut", "Gone", "NoFile"]),
        (PYTEST, run.Count(1, 2, 1), ["a::fails", "a::errors"]),
        (GREEN, run.Count(1, 0, 0), []),
    ],
)
def test_report_is_counted(tmp_path, text, count, names):
    path = tmp_path / "report.xml"
    path.write_text(text)
    assert run.read_report(path) == (count, names)


@pytest.mark.parametrize(
    ("text", "status", "count"),
    [
        (GREEN, 0, run.Count(1, 0, 0)),
        (GREEN, 3, run.Count(1, 1, 0)),  # an exit status that no failed test explains
        (PYTEST, 1, run.Count(1, 2, 1)),
        ("<testsuite/>", 0, run.Count(0, 1, 0)),  # no test
        ("<testsuite>", 0, run.Count(0, 1, 0)),  # half a report
        (None, 0, run.Count(0, 1, 0)),  # none
    ],
)
def test_runner_cannot_fail_unseen(tmp_path, text, status, count):
    report = tmp_path / "report.xml"
    report.write_text(GREEN)  # of an earlier run: must not be believed
    write = "" if text is None else f"open({str(report)!r}, 'w').write({text!r});"
    assert (
        run.run_counted("runner", [sys.executable, "-c", f"{write} raise SystemExit({status})"], report)
        == count
    )
