"""Ranks as real processes that meet as under torchrun: its variables, gloo on loopback. What each did comes back as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psjob.process.startup import spare_the_compiler
from tests.support import warm

SECONDS = 120
Work = Callable[..., Any]


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit status, what it returned (None: nothing) and what it said on stderr."""

    status: int | None
    found: Any
    said: str


def together(ranks: int, work: Work, folder: Path, *words: Any, local: int | None = None) -> list[Ended]:
    """Run `work(*words)` in as many processes, `local` to a node; how each ended. AssertionError where one hangs."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    started: list[Any] = []
    for rank in range(ranks):
        env = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": local or ranks}
        started.append(warm.fork(_rank, {name: str(value) for name, value in env.items()}, work, folder, words, preloaded=warm.COMPILING))
        started[-1].start()
    try:
        for process in started:
            process.join(SECONDS)
            assert process.exitcode is not None, f"rank {started.index(process)} hangs"
    finally:
        for process in started:
            process.kill()
    return [_ended(process.exitcode, folder / f"{rank}.json") for rank, process in enumerate(started)]


def _rank(env: dict[str, str], work: Work, folder: Path, words: tuple[Any, ...]) -> None:
    os.environ |= env | {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    spare_the_compiler()
    said, found = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(said):
            found = work(*words)
    except Exception:
        said.write(traceback.format_exc())
        raise
    finally:
        (folder / f"{env['RANK']}.json").write_text(json.dumps({"found": found, "said": said.getvalue()}))
    sys.stdout.flush()
    os._exit(0)  # as a script's end, without waiting for gloo's threads


def _ended(status: int | None, file: Path) -> Ended:
    written = json.loads(file.read_text()) if file.exists() else {"found": None, "said": ""}
    return Ended(status, **written)
