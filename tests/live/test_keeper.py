"""The first process of a shard: what it holds, which servers it replaces, and how it ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from psjob.shard.keeper import MOST_IN_VAIN
from tests.live.live_shards import eventually
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
