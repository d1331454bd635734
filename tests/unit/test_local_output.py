"""Logs on their way to the user: whole lines, lines that are drawn again, and whose are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from psjob_client.local.run_folder import Follow, parse_logs
from psjob_client.problems import BadInput


def test_a_line_that_is_drawn_again_is_told_once_as_it_was_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follow = Follow(log)
    assert list(follow.lines()) == [] and follow.drawn == ""
    with log.open("ab", buffering=0) as file:
        file.write(b"begin\n\r  0%|   \r 10%|#  ")
        assert list(follow.lines()) == ["begin"] and follow.drawn == " 10%|#  "
        file.write(b"\r100%|###\r\n")
        assert list(follow.lines()) == ["100%|###"] and follow.drawn == ""
        file.write(b"half")
        assert list(follow.lines()) == [] and follow.drawn == "", "a line that is not whole yet is not one that is drawn"
    assert list(follow.lines(whole=True)) == ["half"]


@pytest.mark.parametrize(("text", "found"), [("0", {0}), ("0,2", {0, 2}), ("all", {0, 1, 2}), ("none", set()), ("2, 2", {2})])
def test_workers_are_chosen_by_number(text: str, found: set[int]) -> None:
    assert parse_logs(text, 3) == found


@pytest.mark.parametrize("text", ["", "3", "0,9", "-1", "every", "0,", "٣"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--logs"):
        parse_logs(text, 3)
