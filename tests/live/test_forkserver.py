"""A script that begins again as a fork: it is in all that it can see the script that an exec would have started.

- The process that waits to become a shard or worker that is started again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psjob.process import forkserver
from psjob.process.system import descendants_of
from psjob.worker import rewind
from psjob_client.local import process as processes
from psjob_client.local.process import Spare
from tests.live.live_shards import eventually

SECONDS = 60.0
HEAD = """
import atexit, json, os, select, signal, sys, threading, time
warm = "torch" in sys.modules
from psjob.worker import rewind

run = int(os.environ.get("PSJOB_REWINDS", "0"))

def again():
    rewind.prepare_fork_server(1e9)
    assert run or select.select([rewind._server[1]], [], [], 60)[0]
    rewind.start_again(run, more={"MORE": f"after {run}"})

def seen():
    return dict(
        run=run, pid=os.getpid(), parent=os.getppid(), words=sys.argv, all=sys.orig_argv[1:], path=sys.path[0], folder=os.getcwd(),
        name=__name__, file=globals().get("__file__"), package=__package__, code=seen.__code__.co_filename,
        main=sys.modules["__main__"].seen is seen, score=open("/proc/self/oom_score_adj").read(), torch=warm,
        more=os.environ.get("MORE"), left=os.environ.get("LEFT"), tracked=os.environ.get("WANDB_RUN_ID"),
        term=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, stdin=sys.stdin.read(5), threads=threading.active_count(),
        open=sorted(map(int, os.listdir("/proc/self/fd")))[:3], flags=str(sys.flags),
    )
"""


def run(tmp_path: Path, body: str, *words: str, options: tuple[str, ...] = (), worker: bool = False) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(HEAD + body)
    how = ("-m", "train") if words[:1] == ("-m",) else ("train.py",)
    known = {"PSJOB_REWINDS": "0", **({"PSJOB_ROLE": "worker", "PSJOB_INDEX": "0", "PSJOB_RUN": "r"} if worker else {})}
    return subprocess.Popen(
        [sys.executable, *options, *how, *words], cwd=tmp_path, env={**os.environ, **known}, start_new_session=True, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


ALL = """
print(json.dumps(seen()), flush=True)
atexit.register(lambda: print(json.dumps({"atexit": run}), flush=True))
os.environ["LEFT"] = "by the first"
if run < 2:
    again()
"""


@pytest.mark.parametrize(
    "words",
    [("train.py", "--lr", "1"), pytest.param(("-m",), marks=pytest.mark.rotating)],
)
def test_a_fork_sees_what_the_exec_would_have_shown(tmp_path: Path, words: tuple[str, ...]) -> None:
    process = run(tmp_path, ALL, *words, options=("-u", "-X", "utf8"), worker=True)
    out, err = process.communicate("abcdefghijklmno", SECONDS)
    assert process.returncode == 0, err
    first, second, third, left = map(json.loads, out.splitlines())
    assert left == {"atexit": 2}, "handlers of the processes before are theirs"
    assert [first["run"], second["run"], third["run"]] == [0, 1, 2]
    assert [first["more"], second["more"], third["more"]] == [None, "after 0", "after 1"]
    assert not first["torch"] and second["torch"] and third["torch"]
    assert first["pid"] == process.pid and len({first["pid"], second["pid"], third["pid"]}) == 3
    for one in (second, third):
        for name in first.keys() - {"run", "more", "torch", "pid", "parent", "stdin"}:
            assert one[name] == first[name], name
    assert second["parent"] == third["parent"], "the server"
    assert first["stdin"] == "abcde" and third["tracked"] == "r"


ENDINGS = """
if run == 0:
    again()
print("here", os.getpid(), flush=True)
if sys.argv[1] == "raises":
    def inner(): raise ValueError("no data")
    inner()
if sys.argv[1] == "exits": raise SystemExit(3)
if sys.argv[1] == "says": sys.exit("a sentence")
if sys.argv[1] == "hard": os._exit(5)
if sys.argv[1] == "killed": os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "faults": os.kill(os.getpid(), signal.SIGSEGV)
if sys.argv[1] == "ends": threading.Timer(0.1, lambda: print("a thread ended", flush=True)).start()
if sys.argv[1] == "waits": signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print("waits", flush=True); time.sleep(60)
"""
CODES = {"raises": 1, "exits": 3, "says": 1, "hard": 5, "killed": -9, "faults": -11, "ends": 0}


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how in ("raises", "killed") else pytest.mark.rotating) for how in CODES])
def test_the_worker_ends_as_the_fork_does(tmp_path: Path, how: str) -> None:
    process = run(tmp_path, ENDINGS, how)
    out, err = process.communicate("", SECONDS)
    assert process.returncode == CODES[how], err
    assert ("a thread ended" in out) == (how == "ends")
    if how == "raises":
        assert err.startswith("Traceback (most recent call last):\n  File ") and "forkserver" not in err and "runpy" not in err
        assert "in inner" in err and err.endswith("ValueError: no data\n")
    assert ("a sentence\n" in err) == (how == "says")


def test_a_signal_reaches_the_fork_and_its_end_is_the_workers(tmp_path: Path) -> None:
    process = run(tmp_path, ENDINGS, "waits")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("here") and process.stdout.readline() == "waits\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(SECONDS) == 9
    process.communicate()


@pytest.mark.rotating
def test_no_fork_outlives_the_worker(tmp_path: Path) -> None:
    process = run(tmp_path, ENDINGS, "waits")
    assert process.stdout is not None
    script = int(process.stdout.readline().split()[1])
    (server,) = [pid for pid in descendants_of(process.pid) if pid != script]
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert eventually(lambda: not Path(f"/proc/{script}").exists() and not Path(f"/proc/{server}").exists())


LOST = """
print(run, os.environ["PSJOB_REWINDS"], warm, os.getpid(), flush=True)
if run == 0:
    again()
if run == 1:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


def test_a_worker_whose_server_is_lost_begins_again_by_itself(tmp_path: Path) -> None:
    process = run(tmp_path, LOST)
    out, err = process.communicate("", SECONDS)
    assert process.returncode == 0 and "the process that forks this worker has ended" in err
    first, second, third = (line.split() for line in out.splitlines())
    assert [first[:3], second[:3], third[:3]] == [["0", "0", "False"], ["1", "1", "True"], ["2", "2", "False"]]
    assert first[3] == third[3] == str(process.pid) and second[3] != first[3]


LARGE = """
import dataclasses

@dataclasses.dataclass
class Options:
    rate: float = 0.1

print(run, len(os.environ.get("LARGE", "")), dataclasses.fields(Options)[0].type, flush=True)
if run < 2:
    rewind.prepare_fork_server(1e9)
    assert run or select.select([rewind._server[1]], [], [], 60)[0]
    rewind.start_again(run, more={"LARGE": "x" * 100_000})
"""


def test_a_large_environment_comes_along_and_types_stay_types(tmp_path: Path) -> None:
    """The variables of a namespace with many Services are more than a pipe holds."""
    out, err = run(tmp_path, LARGE).communicate("", SECONDS)
    assert out.splitlines() == ["0 0 <class 'float'>", "1 100000 <class 'float'>", "2 100000 <class 'float'>"], err


@pytest.mark.rotating
def test_a_signal_to_the_group_comes_once(tmp_path: Path) -> None:
    body = """
if run == 0:
    again()
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("waits", flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.5)
sys.exit(10 + len(seen))
"""
    process = run(tmp_path, body)
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(SECONDS) == 11
    process.communicate()


@pytest.mark.rotating
def test_a_fork_that_comes_after_sigterm_is_asked_too(tmp_path: Path) -> None:
    body = """
def stop(*_):
    print("asked", run, flush=True)
    if run == 2: sys.exit(9)
signal.signal(signal.SIGTERM, stop)
if run == 0:
    again()
if run == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("waits", flush=True)
    while not os.path.exists("go"): time.sleep(0.01)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    again()
time.sleep(30)
"""
    process = run(tmp_path, body)
    assert process.stdout is not None and process.stdout.readline() == "waits\n"
    os.kill(process.pid, signal.SIGTERM)
    (tmp_path / "go").write_text("")
    process.communicate(timeout=SECONDS)
    assert process.returncode in (9, -15), "asked before or after its handler stood"


@pytest.mark.rotating
def test_threads_of_linear_algebra_are_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody limits them, as in a pod of one process."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    out, err = run(tmp_path, "print(run, warm)\nif run == 0: again()\n").communicate("", SECONDS)
    assert out.splitlines() == ["0 False", "1 True"], err


@pytest.mark.parametrize(
    ("free", "variable", "python", "trained", "starts"),
    [
        (4 << 30, "ELSE", "", 6.0, 1),
        (4 << 30, "ELSE", "", 4.0, 0),
        (1 << 30, "ELSE", "", 6.0, 0),
        (None, "ELSE", "", 6.0, 0),
        (4 << 30, "MKL_NUM_THREADS", "", 6.0, 0),
        (4 << 30, "ELSE", "-i", 6.0, 0),
    ],
)
def test_a_server_is_started_once_if_it_can_fork_the_same(
    monkeypatch: pytest.MonkeyPatch, free: int | None, variable: str, python: str, trained: float, starts: int
) -> None:
    started: list[int] = []
    monkeypatch.setattr(rewind, "_looked", False)
    monkeypatch.setattr(rewind, "_start", lambda: started.append(1))
    monkeypatch.setattr(rewind.system, "memory_left", lambda: free)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, *([python] if python else []), __file__])
    monkeypatch.delenv("PS_FORK_SERVER", raising=False)
    monkeypatch.setattr(rewind.startup, "ENVIRONMENT", dict(os.environ))
    monkeypatch.setenv(variable, "of the script")
    rewind.prepare_fork_server(trained)
    rewind.prepare_fork_server(trained)
    assert len(started) == starts


@pytest.mark.rotating
def test_without_a_server_the_command_is_executed(tmp_path: Path) -> None:
    """It was killed, or the script had set what libraries read when they are imported."""
    killed = """
import signal
rewind.prepare_fork_server(1e9)
os.kill(rewind._server[0], 9)
time.sleep(0.2)
print(run, warm)
if not run: rewind.start_again(0)
"""
    assert run(tmp_path, killed).communicate("", SECONDS)[0] == "0 False\n1 False\n"
    differs = """
os.environ["OMP_NUM_THREADS"] = "3"
rewind.prepare_fork_server(1e9)
print(run, rewind._server)
if not run: rewind.start_again(0)
"""
    assert run(tmp_path, differs).communicate("", SECONDS)[0] == "0 None\n1 None\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["{script}", "--a"], ([], ["{script}", "--a"])),
        (["-u", "-X", "utf8", "-Wignore", "-BO", "{script}"], (["-u", "-X", "utf8", "-Wignore", "-BO"], ["{script}"])),
        (["-m", "train", "-u"], ([], ["-m", "train", "-u"])),
        (["-c", "print()"], None),
        (["-i", "{script}"], None),
        (["-x", "{script}"], None),
        (["-"], None),
        (["-m"], None),
        ([], None),
        (["{folder}"], None),
        (["{archive}"], None),
        (["nothing.py"], None),
    ],
)
def test_commands_are_split(tmp_path: Path, words: list[str], found: Any) -> None:
    (tmp_path / "train.py").write_text("pass")
    (tmp_path / "app.pyz").write_bytes(b"PK\0\0")
    places = {"script": f"{tmp_path}/train.py", "folder": str(tmp_path), "archive": f"{tmp_path}/app.pyz"}
    wanted = None if found is None else tuple([word.format(**places) for word in part] for part in found)
    assert forkserver.split_command([word.format(**places) for word in words]) == wanted


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
