"""What the scripts `psjob`, `kubectl-psjob` and `kubectl_complete-psjob` call."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys

ONLY_THESE, FILES_TOO = ":4", ":0"
"""Last line for kubectl: complete from what stands above it alone, or file names where nothing does."""


def main() -> None:
    """The command line. Ctrl-C while it is still being imported ends the process, as any command, without a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from psjob_client.cli.main import app

    signal.signal(signal.SIGINT, before)
    app()


def complete_command_line() -> None:
    """Completion of `kubectl psjob`: kubectl gives the words behind `psjob`, and takes one candidate a line and a directive."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = sys.argv[1:] or [""]
    os.environ |= {"_PSJOB_COMPLETE": "complete_bash", "COMP_WORDS": shlex.join(["psjob", *words]), "COMP_CWORD": str(len(words))}
    from psjob_client.cli.main import cli

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli(prog_name="psjob")
    found = said.getvalue().split()
    print("\n".join([*found, ONLY_THESE if found else FILES_TOO]))
