"""`psjob simulate`: the runtime's simulator, which has the modes and rules; its words are passed on as they are."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from psjob_client.local.errors import BadInput

PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def simulate(context: typer.Context) -> None:
    """Compare modes and rules on a virtual clock: `psjob simulate --help` has the ways."""
    if importlib.util.find_spec("psjob") is None:
        raise BadInput("psjob simulate needs the runtime beside it; install it into the same environment: pip install psjob")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "psjob.simulate", *(context.args or ["--help"])])
