"""`psjob` in the process of the test: what it prints on both streams, and its exit code."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from psjob_client.cli.main import app


def psjob(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`psjob WORDS` in `folder`, as `subprocess.run` tells it."""
    printed, told, given = (io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8", write_through=True) for raw in (b"", b"", stdin.encode()))
    code = 0
    with contextlib.ExitStack() as inside:
        inside.enter_context(contextlib.chdir(folder))
        inside.enter_context(contextlib.redirect_stdout(printed))
        inside.enter_context(contextlib.redirect_stderr(told))
        inside.enter_context(mock.patch.object(sys, "stdin", given))
        inside.enter_context(mock.patch.object(sys, "argv", ["psjob", *words]))
        inside.enter_context(mock.patch.dict(os.environ, COLUMNS="80"))
        try:
            app()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    streams = [stream.buffer.getvalue().decode() for stream in (printed, told)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(list(words), code, *streams)
