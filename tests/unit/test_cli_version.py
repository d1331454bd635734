"""The version, however it is asked for; and what the operator's options refuse."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import typer

from psjob_client.cli import main
from psjob_operator import __main__ as operator
from tests.typed import CliRunner


@pytest.mark.parametrize(
    ("app", "words", "name"),
    [(main.cli, ["version"], "psjob"), (main.cli, ["--version"], "psjob"), (operator.app, ["--version"], "psjob-operator")],
)
def test_the_version_is_one_line(app: typer.Typer, words: list[str], name: str) -> None:
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and told.output == f"{name} {version('psjob-operator')}\n"


@pytest.mark.parametrize("user", ["root", "0", "-1", "2147483648", ""])
def test_a_shard_user_that_is_none_is_refused_in_a_sentence(user: str) -> None:
    told = CliRunner().invoke(operator.app, ["run", f"--shard-user={user}"])
    assert told.exit_code == 2 and "--shard-user" in told.output and "must be a number from 1 to 2147483647, or namespace" in told.output
