"""What the scripts `psjob` and `kubectl-psjob` call."""

from __future__ import annotations

import signal


def main() -> None:
    """The command line. Ctrl-C while it is still being imported ends the process, as any command, without a traceback."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from psjob_client.cli.main import app

    signal.signal(signal.SIGINT, before)
    app()
