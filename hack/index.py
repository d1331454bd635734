"""Serves a folder of wheels as a package index (PEP 503) on 127.0.0.1, so that pip finds them by their names."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hack.cluster.torchsite import plain


@contextlib.contextmanager
def serving(wheels: Path) -> Iterator[str]:
    """The address of the index, for `pip install --index-url`, while this is entered."""
    with tempfile.TemporaryDirectory() as root:
        for wheel in wheels.glob("*.whl"):
            folder = Path(root, plain(wheel.name.partition("-")[0]))
            folder.mkdir(exist_ok=True)
            (folder / wheel.name).symlink_to(wheel.resolve())
        with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=root)) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}/"
            finally:
                server.shutdown()
                thread.join()


class Pages(SimpleHTTPRequestHandler):
    """A folder's listing is a page of links, as PEP 503 wants it. Nothing is logged."""

    def log_message(self, format: str, *args: Any) -> None:
        return
