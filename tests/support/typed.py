"""psjob's commands in the process of a test. Building all of them takes a tenth of a second: here that is done once."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import typer
from typer import testing


class CliRunner(testing.CliRunner):
    """Typer's own, which would build the commands for each call."""

    def invoke(self, app: typer.Typer, *args: Any, **kwargs: Any) -> testing.Result:
        with mock.patch.object(testing, "_get_command", built):
            return super().invoke(app, *args, **kwargs)


@functools.cache
def built(app: typer.Typer) -> Any:
    """The command of an app."""
    return typer.main.get_command(app)
