"""docs/contributing/founding.md: its commands are there, and those that are quick give the figures that it names."""

from __future__ import annotations

import functools
import re
import shlex

import pytest

from bench.measures import MEASURES
from psjob_client.cli.main import cli
from tests.docs.pages import CELLS, COMMANDS, ROOT
from tests.typed import CliRunner

REFERENCE = (ROOT / "docs/cli.md").read_text()
"""Generated of the commands."""
PLANNED = [(words, figure) for words, figure in COMMANDS if words.startswith("psjob plan-topology --preset")]


@functools.cache
def printed(words: str) -> str:
    done = CliRunner().invoke(cli, shlex.split(words)[1:])
    assert done.exit_code == 0, done.output
    return done.output


def test_every_line_has_a_command_or_says_that_it_is_not_here() -> None:
    assert len(CELLS) > 90
    for cells in CELLS[5:]:
        assert all(cells), cells
        assert cells[-2] in ("command", "not here") or re.search(r"`[^`]+`|\]\(", cells[-2]), cells


@pytest.mark.parametrize(("words", "figure"), PLANNED)
def test_a_quick_command_prints_the_figures_of_its_line(words: str, figure: str) -> None:
    wanted = re.findall(r"`([^`]+)`", figure)
    assert all(one in printed(words) for one in wanted), (wanted, printed(words))


def test_commands_name_what_there_is() -> None:
    for words, _ in COMMANDS:
        first, *rest = shlex.split(words)
        if first == "psjob":
            name = " ".join(["psjob", *rest[: 2 if rest[0] == "simulate" else 1]])
            page = re.split(rf"^## {name}$", REFERENCE, flags=re.MULTILINE)[1].split("\n## ")[0]
            options = {word.split("=")[0] for word in rest if word.startswith("--")}
            assert all(f"{option} " in page or f"{option}`" in page or f"{option}," in page for option in options), words
            files = [word for word in rest if word.startswith("examples/")]
            assert all((ROOT / file).is_file() for file in files), words
        elif first == "pytest":
            tests = re.findall(r"^def (test_\w+)", (ROOT / rest[0]).read_text(), re.MULTILINE)
            assert rest[1:] in ([], ["-m", "soak"]) or any(rest[2] in name for name in tests), words
        else:
            assert {word for word in rest[2:] if not word.startswith("--") and word != "TensorFlow"} <= {
                measure.name for measure in MEASURES
            }, words
