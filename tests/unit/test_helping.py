"""What `--help` prints: examples that a shell reads as one command, and a whole sentence for each command."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from psjob_client.cli.help import broken, first_sentence
from psjob_client.cli.main import cli

WIDE = 80


def test_no_sentence_is_cut_off() -> None:
    said = CliRunner().invoke(cli, ["--help"], env={"COLUMNS": str(WIDE)}).stdout
    assert "…" not in said and "..." not in said.partition("Commands:")[2], said
    assert "where it goes on in the background" in " ".join(said.split())


@pytest.mark.parametrize("name", sorted(get_command(cli).commands))  # type: ignore[attr-defined]
def test_examples_are_as_wide_as_a_terminal(name: str) -> None:
    done = CliRunner().invoke(cli, [name, "--help"], env={"COLUMNS": str(WIDE)})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= WIDE, done.stdout
    assert "examples/" not in done.stdout.partition("Example")[2], "who has installed psjob has no checkout"


@given(st.lists(st.sampled_from(["psjob", "run", "--set", "a=b", "'two words'", "|", "x" * 30]), min_size=1, max_size=12))
def test_a_broken_line_is_the_same_command(words: list[str]) -> None:
    command = " ".join(words)
    lines = broken(command, 40)
    assert shlex.split(" ".join(line.removesuffix("\\").strip() for line in lines)) == shlex.split(command)
    assert all(line.endswith(" \\") for line in lines[:-1]) and all(len(line) <= 40 for line in lines)


def test_the_first_sentence() -> None:
    assert first_sentence("Show it; with more words.\n") == "Show it"
    assert first_sentence("Show\nit. Then more.") == "Show it"
