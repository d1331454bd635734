"""Opens the page in a browser. Every user of the machine can read its command line, so that names a file of this user, which leads on."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = """<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0;url={address}"><title>psjob</title>
<p>The page is <a href="{address}">here</a>.
"""


@contextmanager
def opened(address: str) -> Iterator[Path]:
    """Opens `address` in a browser; the file that does is there meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="psjob-page-"))  # of mode 0700
    try:
        file = folder / "open.html"
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(made, "w", encoding="utf-8") as to:
            to.write(FILE.format(address=html.escape(address)))
        webbrowser.open(file.as_uri())
        yield file
    finally:
        shutil.rmtree(folder, ignore_errors=True)
