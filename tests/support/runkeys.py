"""A run's keys in tests: the files of its processes, and what a stranger hears of a status port."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from psjob.contract import keys
from psjob.process.config import Keys
from psjob_operator.certificates import certificates

RUN: Mapping[str, bytes] = {name: (f"{name} of a test's run").encode().ljust(keys.SIZE, b".") for name in keys.NAMES}
"""Where a test starts its processes itself."""


def handed(role: str, index: int, number: int = 1, run: Mapping[str, bytes] = RUN) -> Keys:
    """The keys of one process."""
    return Keys(**keys.parse_keys(keys.process_key_file(run, role, index, number)))


def key_file(folder: Path, role: str, index: int, number: int = 1) -> str:
    """The path of one process's key file, written to `folder`."""
    path = folder / f"keys-{role}-{index}-{number}"
    path.write_text(keys.process_key_file(RUN, role, index, number))
    return str(path)


def write_certificates(folder: Path, shards: int, workers: int = 0) -> None:
    """Those of a run, written to `folder` under the names of psjob.contract. `workers`: how many have one."""
    for name, text in certificates(shards, workers).items():
        (folder / name).write_bytes(text)


def of_run(folder: Path) -> dict[str, bytes]:
    """The keys that `psjob run` made, of `.psjob/<run>`."""
    return keys.parse_keys((folder / "keys" / "run").read_text())


def get(
    port: int, path: str, headers: Mapping[str, str] = MappingProxyType({}), seconds: float = 2.0, host: str = "127.0.0.1"
) -> tuple[int, dict[str, Any]]:
    """(code, body) of a request to a status port, which proves nothing except what `headers` say. Raises OSError and ValueError."""
    with closing(http.client.HTTPConnection(host, port, timeout=seconds)) as connection:
        connection.request("GET", path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
