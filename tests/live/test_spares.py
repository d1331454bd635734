"""The process that waits to become a shard or worker that is started again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from psjob.process import forkserver
from psjob_client.local import process as processes
from psjob_client.local.process import Spare
from tests.live.live_shards import eventually

SCRIPT = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv, sys.path[0], os.environ["RANK"], "torch" in sys.modules, os.getcwd(), os.getppid()]))
sys.exit(7)
"""


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    monkeypatch.setattr(processes, "ROOM", 0)
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 30.0)  # a busy machine has no second for it
    made = Spare({**os.environ, "PS_FORK_SERVER": "5"}, tmp_path)
    yield made
    made.close()


def test_it_becomes_a_worker_and_ends_as_that(tmp_path: Path, spare: Spare) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    spare.keep(True, 10.0)
    spare.keep(False, 14.0)
    spare.keep(True, 20.0)
    spare.keep(True, 24.9)
    assert spare._process is None, "the job has not been running for five seconds"
    spare.keep(True, 25.0)
    assert eventually(spare._imported)
    process = spare.take([sys.executable, "train.py", "-x"], {**spare._environment, "RANK": "3"}, tmp_path, tmp_path / "log")
    assert process is not None and process.wait(60) == 7
    seen = json.loads((tmp_path / "log").read_text())
    assert seen == [process.pid, ["train.py", "-x"], str(tmp_path), "3", True, str(tmp_path), os.getpid()]
    assert spare._process is None and spare.take(["python", "train.py"], os.environ, tmp_path, tmp_path / "log") is None


@pytest.mark.rotating
def test_one_that_cannot_be_that_command_is_ended(tmp_path: Path, spare: Spare) -> None:
    spare.keep(True, 0.0)
    spare.keep(True, 5.0)
    assert eventually(spare._imported)
    assert spare._process is not None
    pid = spare._process.pid
    assert spare.take(["bash", "run.sh"], os.environ, tmp_path, tmp_path / "log") is None
    assert not Path(f"/proc/{pid}").exists() and spare._process is None


@pytest.mark.parametrize(("after", "free", "started"), [("1", 8 << 30, True), ("1", 1 << 30, False), ("never", 8 << 30, False)])
def test_one_is_started_if_there_is_room(monkeypatch: pytest.MonkeyPatch, after: str, free: int, started: bool) -> None:
    begun: list[int] = []
    monkeypatch.setattr(processes, "free_memory", lambda: free)
    monkeypatch.setattr(Spare, "_start", lambda self: begun.append(1))
    made = Spare({"PS_FORK_SERVER": after}, Path())
    now = time.time()
    made.keep(True, now)
    made.keep(True, now + 2.0)
    assert bool(begun) == started


@pytest.mark.parametrize(
    ("words", "more", "same"),
    [
        (["python", "train.py"], {"RANK": "1"}, True),
        ([sys.executable, "-m", "psjob.shard"], {"OMP_NUM_THREADS": "7"}, True),
        ([sys.executable, "-m", "psjob.shard"], {"ATEN_CPU_CAPABILITY": "default"}, False),
        (["python", "train.py"], {"OMP_NUM_THREADS": "7"}, False),
        (["python", "train.py"], {"PYTHONPATH": "/elsewhere"}, False),
        (["python", "-u", "train.py"], {}, False),
        (["python", "-m", "psjob.agent", "python", "train.py"], {}, False),
        (["python", "nothing.py"], {}, False),
        (["bash", "train.py"], {}, False),
        (["nowhere", "train.py"], {}, False),
    ],
)
def test_it_is_that_command_only_if_a_new_start_would_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], more: dict[str, str], same: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    assert forkserver._is_same(words, str(tmp_path), {"A": "1"}, {"A": "1", "PATH": path, **more}, "/") == same
