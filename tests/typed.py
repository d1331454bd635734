"""`typer.testing.CliRunner` for psjob's commands, which takes a tenth of a second to build: here they are built once."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import typer
from typer import testing


class CliRunner(testing.CliRunner):
    """Carries out commands in this process."""

    def invoke(self, app: typer.Typer, *args: Any, **kwargs: Any) -> testing.Result:
        with mock.patch.object(testing, "_get_command", _built):
            return super().invoke(app, *args, **kwargs)


@functools.cache
def _built(app: typer.Typer) -> Any:
    return typer.main.get_command(app)
