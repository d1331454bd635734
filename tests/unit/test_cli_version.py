"""The version, however it is asked for."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from psjob_client.cli import main
from psjob_operator import __main__ as operator


@pytest.mark.parametrize(
    ("app", "words", "name"),
    [(main.cli, ["version"], "psjob"), (main.cli, ["--version"], "psjob"), (operator.app, ["--version"], "psjob-operator")],
)
def test_the_version_is_one_line(app: typer.Typer, words: list[str], name: str) -> None:
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0 and told.output == f"{name} {version('psjob-operator')}\n"
