# SPDX-License-Identifier: Apache-2.0
"""Every Python block of docs/ runs, each on its own."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start(1))
            yield pytest.param(page, line, match[1], id=f"{page.name}:{line + 1}")


@pytest.mark.usefixtures("ladder")  # a block may turn rungs off
@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_a_block_of_the_docs_runs(page, line, code):
    # Blank lines before it, so that a traceback names the line of the page.
    exec(compile("\n" * line + code, str(page), "exec"), {"__name__": "docs"})


def test_the_docs_have_blocks():
    assert any(blocks())
