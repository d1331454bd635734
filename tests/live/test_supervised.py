"""Whichever thread of a shard breaks, its process ends as a crash, and says which thread and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes, pushing
from tests.soaking import rotating

BREAKS = """
import os, sys
from psjob.process import supervise

def broken(*args):
    raise LookupError("injected")

made = supervise.thread
def thread(target, name, *args):
    return made(broken if name.startswith(os.environ["BREAKS"]) else target, name, *args)
supervise.thread = thread
from psjob.shard.__main__ import main
sys.exit(main())
"""
"""A shard in which the threads of one kind raise as soon as they begin."""
ALONE = {"liveness": 0, "disk": 0, "coordinator": 0, "shard-streams-0": 0, "shard-streams-1": 1, "sigterm": 0, "status": 0,
         "shard-0-lends-accept": 0, "to-coordinator": 1, "coordinator-sender": 1}  # fmt: skip
"""Threads that every shard has from its start, and a shard that has them."""
SERVING = {"stream-apart": 0, "to-shard-1": 0, "spare": 1, "copy": 1, "shard-1-lends-stream": 1}
"""Threads that begin when peers and workers come."""


def rows(threads: Mapping[str, int], *quick: str) -> list[Any]:
    """Those that are `quick`, and the others for `make soak`."""
    return [pytest.param(*row, id=row[0]) if row[0] in quick else rotating(*row, id=row[0]) for row in threads.items()]


def assert_ends_with_sentence(run: Processes, index: int, thread: str) -> None:
    process = run.started[index]
    assert eventually(lambda: process.poll() is not None, 100.0), f"a shard without its thread {thread} goes on"
    assert process.returncode == 1
    problem = run.said(index)["problem"]
    assert problem.startswith(f"thread {thread}") and "failed: LookupError: injected (" in problem and "broken)" in problem, problem
    assert "Traceback" in run.log(index) or thread.startswith("shard-streams"), "the whole trace is in the log"


@pytest.mark.parametrize(("thread", "index"), rows(ALONE, "liveness", "shard-streams-1"))
def test_a_shard_does_not_begin_without_one_of_its_threads(tmp_path: Path, thread: str, index: int) -> None:
    with processes(tmp_path, forked=True) as run:
        run.start(index, program=("-c", BREAKS), BREAKS=thread)
        assert_ends_with_sentence(run, index, thread)


@pytest.mark.parametrize(("thread", "index"), rows(SERVING, "to-shard-1"))
def test_a_shard_does_not_serve_without_one_of_its_threads(tmp_path: Path, thread: str, index: int) -> None:
    with processes(tmp_path, forked=True) as run:
        run.start(1 - index)
        run.start(index, program=("-c", BREAKS), BREAKS=thread)
        with pushing(run):
            assert_ends_with_sentence(run, index, thread)
