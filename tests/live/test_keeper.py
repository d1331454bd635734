"""The first process of a shard: what it holds, which servers it replaces, and how it ends.

- What a shard's probes say of its process: alive while it makes progress, however slow the disk is, and not alive when it hangs.
- A shard writes to its checkpoints and its termination message alone: it starts, trains and commits where all else is read-only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from psjob import contract
from psjob.checkpoint import manifest
from psjob.shard.keeper import MOST_IN_VAIN
from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes, pushing, serving
from tests.support import warm

SERVER = """
import os, signal, sys, time
from psjob.shard import keeper
from psjob.shard.keeper import BEATS, PROGRESS, SERVES, SILENCE, STATE, WEIGHTS, Keeper
from psjob.shard.__main__ import load_server

LIVES = 15

def say(*words):
    print(*words, flush=True)

def serve(keeping, held):
    if held is None:
        weights, state = keeping.lend(WEIGHTS, 4096), keeping.lend(STATE, 4096)
    else:
        weights, state = held.take()
        say("after", held.died)
    words = state.words(0, 16)
    words[LIVES] += 1
    say("life", words[LIVES])
    return CASE(keeping, words, weights)

def killed(words, number=signal.SIGKILL):
    words[PROGRESS] += 1
    words[SERVES] = 1
    os.kill(os.getpid(), number)
    time.sleep(60)
"""


def started(folder: Path, case: str, after: str = "0", first: str = "") -> warm.Started:
    """A keeper whose servers do `case`, of `keeping`, `words` and `weights`. `first` is run in the keeper."""
    body = "\n".join(f"    {line}" for line in case.strip().splitlines())
    code = f"{SERVER}\n{first}\ndef CASE(keeping, words, weights):\n{body}\n\nsys.exit(Keeper(load_server).run(serve))"
    return warm.start_python(folder, ("-c", code), {"PS_FORK_SERVER": after}, folder / "out", folder / "err")


def ended(folder: Path, case: str) -> tuple[int, list[str]]:
    """How it ends, and what was said."""
    process = started(folder, case)
    code = process.wait(60)
    return code, (folder / "out").read_text().split("\n")[:-1]


def test_a_server_that_is_killed_is_replaced_and_finds_its_memory(tmp_path: Path) -> None:
    case = """
if words[LIVES] < 4:
    killed(words, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)[words[LIVES] - 1])
return 40 + words[LIVES]
"""
    said = ["life 1", "after SIGKILL", "life 2", "after SIGSEGV", "life 3", "after SIGABRT", "life 4"]
    assert ended(tmp_path, case) == (44, said)


def test_without_an_update_between_it_is_replaced_three_times(tmp_path: Path) -> None:
    case = """
words[SERVES] = 1
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, said = ended(tmp_path, case)
    assert code == -signal.SIGKILL and said.count(f"life {MOST_IN_VAIN + 1}") == 1 and said[-1] == f"life {MOST_IN_VAIN + 1}"


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("killed(words, signal.SIGTERM)", -signal.SIGTERM),
        ("words[SERVES] = 1\nreturn 76", 76),
        ("words[SERVES] = 1\nraise SystemExit(3)", 3),
        ("words[SERVES] = 1\nkeeping.drop()\nkilled(words)", -signal.SIGKILL),
    ],
    ids=["does not serve", "was asked to end", "ends by itself", "refuses", "dropped its memory"],
)
def test_it_ends_as_a_server_that_is_not_to_be_replaced(tmp_path: Path, case: str, code: int) -> None:
    assert ended(tmp_path, case) == (code, ["life 1"])


def test_sigterm_reaches_the_server_and_nobody_takes_its_place(tmp_path: Path) -> None:
    process = started(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: killed(words))\nsay('waits')\ntime.sleep(60)")
    out = tmp_path / "out"
    assert eventually(lambda: out.exists() and "waits" in out.read_text())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGKILL
    assert out.read_text().split("\n")[:-1] == ["life 1", "waits"]


def test_memory_that_is_lent_anew_takes_the_place_of_the_old(tmp_path: Path) -> None:
    case = """
if words[LIVES] == 1:
    first = weights.words(0, 1)
    first[0] = 11
    for size in (8192, 1 << 20):
        keeping.lend(WEIGHTS, size).words(0, 1)[0] = size
        state = keeping.lend(STATE, 4096).words(0, 16)
    state[LIVES] = 1
    killed(state)
say("found", weights.size, weights.words(0, 1)[0])
return 0
"""
    assert ended(tmp_path, case) == (0, ["life 1", "after SIGKILL", "life 2", f"found {1 << 20} {1 << 20}"])


def test_memory_that_is_dropped_before_the_import_leaves_the_keeper_idle(tmp_path: Path) -> None:
    case = """
def ticks():
    return sum(map(int, open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[11:13]))
keeping.drop()
time.sleep(0.3)  # the import would be due
before = ticks()
time.sleep(1)
say("busy" if ticks() - before > 10 else "idle")
return 3
"""
    assert started(tmp_path, case, after="0.2").wait(60) == 3
    assert (tmp_path / "out").read_text().split("\n")[1] == "idle"


@pytest.mark.parametrize(
    ("end", "code"),
    [("return 7", 7), ("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)", -signal.SIGTERM)],
    ids=["by itself", "by a signal from outside"],
)
def test_a_server_that_ends_is_not_held_up_by_an_import(tmp_path: Path, end: str, code: int) -> None:
    first = """
def load_server():
    say("imports")
    for _ in range(600):
        try:
            time.sleep(0.1)
        except Exception:
            say("a library hides what ends an import")
    say("imported")
"""
    process = started(tmp_path, f"time.sleep(1)\n{end}", after="0.1", first=first)
    assert process.wait(30) == code
    assert (tmp_path / "out").read_text().split("\n")[:-1] == ["life 1", "imports"]


def test_a_server_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    case = """
if words[LIVES] == 2:
    return 5
words[SERVES], words[SILENCE] = 1, 400
for _ in range(20):
    time.sleep(0.1)
    words[BEATS] += 1
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""
    assert ended(tmp_path, case) == (5, ["life 1", "after a hang", "life 2"])


TIMEOUT = 2.0
READS = 7.0
"""Seconds that the first read of a block's bytes takes: one system call."""
SLOW = f"""
import os, sys, time
read, left = os.readv, [{READS}]

def slow(fd, buffers):
    if ".safetensors" in os.readlink(f"/proc/self/fd/{{fd}}") and left:
        time.sleep(left.pop())
    return read(fd, buffers)

os.readv = slow
from psjob.shard.__main__ import main
sys.exit(main())
"""
HANGS = """
import os, sys, threading, time
from psjob.shard import control

made = control.Control.__init__

def init(self, *given):
    made(self, *given)
    threading.Thread(target=hang, args=(self,), daemon=True).start()

def hang(self):
    while not os.path.exists(os.environ["HANGS"]):
        time.sleep(0.05)
    self._handling.acquire()

control.Control.__init__ = init
from psjob.shard.__main__ import main
sys.exit(main())
"""
"""When a file is there, a lock is taken and never given back."""


def checkpointed(run: Processes) -> bool:
    coordinator = run.get(0)[1].get("coordinator") or {}
    return bool((coordinator.get("checkpoint") or {}).get("step"))


def test_a_shard_that_reads_for_longer_than_its_timeout_is_alive_and_says_how_far_it_is(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        run.start(0)
        lost = run.start(1)
        with pushing(run):
            assert eventually(lambda: checkpointed(run), 60.0)
            lost.kill()
            lost.wait()
            run.start(1, attempt=2, term=2, program=("-c", SLOW))
            looks: list[tuple[int, int, dict[str, Any]]] = []

            def serves() -> bool:
                health, status, started = run.get(1, contract.HEALTH_PATH)[0], run.get(1)[1], run.get(1, contract.STARTED_PATH)[0]
                if health:
                    looks.append((health, started, status))
                time.sleep(0.1)
                return status.get("state") == "serving"

            assert eventually(serves, 60.0)
    assert {health for health, _, _ in looks} == {200}
    reading = [status for _, _, status in looks if (status.get("transfer") or {}).get("doing") == "reading"]
    assert len(reading) > 1 and {status["state"] for status in reading} == {"restoring"}
    assert max(status["transfer"]["total"] for status in reading) > 0
    after = [started for _, started, status in looks if status in reading]
    assert set(after) == {200}, "it is asked: from here on its health counts, and a restore may take hours"


def test_a_shard_that_nobody_could_ask_has_not_started(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True) as run:
        run.start(1)
        assert eventually(lambda: run.get(1, contract.STARTED_PATH)[0] == 503, 60.0), "there is no coordinator"
        assert run.get(1, contract.HEALTH_PATH)[0] == 200
        run.start(0)
        assert eventually(lambda: run.get(1, contract.STARTED_PATH)[0] == 200, 60.0)
        assert run.get(0, contract.STARTED_PATH)[0] == 200


def test_a_shard_whose_control_hangs_on_a_lock_is_not_alive(tmp_path: Path) -> None:
    sign = tmp_path / "hang"
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        run.start(0, program=("-c", HANGS), HANGS=str(sign))
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 60.0)
        sign.touch()
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 503, 30.0)
        assert run.get(0, contract.HEALTH_PATH)[1] == {"alive": False}, "which is all that a stranger hears"
        assert "reports no progress; this shard answers" in run.log(0)


def test_a_stopped_shard_gives_no_answer_and_is_alive_again_when_it_goes_on(tmp_path: Path) -> None:
    with processes(tmp_path, forked=True, shardTimeoutSeconds=TIMEOUT) as run:
        process = run.start(0)
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 60.0)
        os.kill(serving(process), signal.SIGSTOP)
        assert run.get(0, contract.HEALTH_PATH)[0] == 0
        time.sleep(2 * TIMEOUT)
        os.kill(serving(process), signal.SIGCONT)
        assert eventually(lambda: run.get(0, contract.HEALTH_PATH)[0] == 200, 30.0)
        assert process.poll() is None


BOOT = """
import os, sys
os.execvp("unshare", ["unshare", "--mount", "bash", "-c", sys.argv[1], "-", sys.argv[2], sys.executable, "-m", "psjob.shard"])
"""
READ_ONLY = """
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
for folder in / /tmp "$HOME" "$PWD"; do
  mount -o remount,bind,ro "$(findmnt -nT "$folder" -o TARGET | tail -1)"
  if touch "$folder/psjob-probe"; then echo "$folder can be written" >&2; exit 9; fi
done 2>/dev/null
shift
exec "$@"
"""
"""As a pod's: the folder with the checkpoints is a volume of its own, and /dev/shm too."""


@pytest.mark.nodes
def test_a_shard_trains_and_commits_in_a_read_only_image(tmp_path: Path) -> None:
    lacking = [word for word in ("unshare", "findmnt", "mount") if shutil.which(word) is None]
    if os.geteuid() != 0 or lacking or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("a mount namespace needs root, unshare, mount and findmnt")
    with processes(tmp_path, shards=1) as run:
        shard = run.start(0, program=("-c", BOOT, READ_ONLY, str(tmp_path)))
        assert eventually(lambda: run.get(0, contract.STARTED_PATH)[0] == 200 or shard.poll() is not None, 60)
        assert shard.poll() is None, run.log(0)

        def step() -> int:
            found = manifest.newest_manifest(run.run, None)[0] if run.run.exists() else None
            return found.step if found is not None else 0

        with pushing(run):
            assert eventually(lambda: step() > 5 or shard.poll() is not None, 60)
        assert shard.poll() is None, run.log(0)
        shard.terminate()
        shard.wait(30)
        assert "Read-only" not in run.log(0)
