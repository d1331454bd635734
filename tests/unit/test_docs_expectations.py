"""docs/expectations.md: each yes names a test that exists, each partly and no has a reason, and the first sentence counts them."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/expectations.md").read_text()
HEADING = ("expectation", "psjob", "test, or what is missing")
ROWS = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in PAGE.splitlines() if line.startswith("| ")]
LINES = [row for row in ROWS if row != HEADING and not row[0].startswith("---")]


def test_the_first_sentence_counts_the_lines() -> None:
    counts = Counter(verdict for _, verdict, _ in LINES)
    assert set(counts) <= {"yes", "partly", "no"}
    said = f"Of {len(LINES)} expectations psjob meets {counts['yes']}, {counts['partly']} partly and {counts['no']} not at all."
    assert PAGE.split("\n\n")[1] == said


def test_a_line_is_there_once() -> None:
    assert len(LINES) >= 45 and len({line[0] for line in LINES}) == len(LINES)


@pytest.mark.parametrize(("what", "verdict", "why"), LINES, ids=[line[0] for line in LINES])
def test_a_yes_has_a_test_and_all_else_has_a_reason(what: str, verdict: str, why: str) -> None:
    named = re.fullmatch(r"`(\w+/\w+\.py)::(test_\w+)`", why)
    if verdict != "yes":
        assert named is None and why.endswith(".") and len(why.split()) >= 5, f"{what}: say what is missing"
        return
    assert named is not None, f"{what}: name one test as `folder/file.py::function`"
    file = ROOT / "tests" / named[1]
    assert file.is_file(), f"{what}: {file} is not there"
    functions = {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert named[2] in functions, f"{what}: {named[1]} has no {named[2]}"


def test_both_lists_of_pages_name_the_page() -> None:
    assert "(expectations.md)" in (ROOT / "docs/index.md").read_text()
    assert "(docs/expectations.md)" in (ROOT / "README.md").read_text()
