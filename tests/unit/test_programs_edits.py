"""Edits of programs by others: lines take the place of others, and are counted."""

from __future__ import annotations

import pytest

from tests.programs.edits import SEED, changed, edited, seeded

PROGRAM = "import torch\nmodel = 1\noptimizer = 2\nfor batch in loader:\n    pass\n"


def test_lines_take_the_place_of_others() -> None:
    edits = [("optimizer = 2\n", "optimizer = 2\nimport psjob as ps\n"), ("in loader:", "in ps.shard(loader):")]
    assert edited(PROGRAM, edits, "it") == PROGRAM.replace("2\n", "2\nimport psjob as ps\n").replace("loader", "ps.shard(loader)")


@pytest.mark.parametrize("old", ["optimiser", "="])
def test_a_line_that_is_not_there_once_is_named(old: str) -> None:
    with pytest.raises(ValueError, match=rf"it has '{old}' [02] times and not once"):
        edited(PROGRAM, [(old, "")], "it")


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a\nb\nc\n", "a\nb\nc\n", 0),
        ("a\nb\nc\n", "a\nx\nb\nc\n", 1),
        ("a\nb\nc\n", "a\nB\nc\n", 1),
        ("a\nb\nc\n", "a\nc\n", 1),
        ("a\nb\nc\n", "a\nx\ny\nc\n", 2),
        ("a\na\na\n", "b\na\na\na\nb\n", 2),
    ],
)
def test_changed_lines_are_counted(before: str, after: str, lines: int) -> None:
    assert changed(before, after) == lines


def test_a_seed_comes_first_and_after_what_must_come_before() -> None:
    assert seeded("import torch\n") == SEED + "import torch\n"
    assert (
        seeded('"""It."""\nfrom __future__ import annotations\nx = 1\n') == f'"""It."""\nfrom __future__ import annotations\n{SEED}x = 1\n'
    )
