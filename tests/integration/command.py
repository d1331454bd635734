"""The `psjob` command in this process: what it prints, and its exit code, without the seconds that Python takes to import it anew."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from psjob_client.cli.main import app


def psjob(*words: str, kubeconfig: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`psjob WORDS` as a shell would run it, with that kubeconfig in the environment."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["psjob", *words])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        patch.setenv("KUBECONFIG", str(kubeconfig))
        try:
            app()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(["psjob", *words], code, out.getvalue(), err.getvalue())
