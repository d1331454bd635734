"""A script's end is known as good or bad before its process is gone, however it ends; its exit status stays its own.

- A process leaves its last words whole, and one that is stuck is refused.
- A process group that was left in a script of a job: the job's last words name the line and what to do.
- Whichever thread of a shard breaks, its process ends as a crash, and says which thread and why.
- A process of multiprocessing begins again in place, with what its parent had sent; real processes of each kind.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import multiprocessing.queues
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psjob import contract
from psjob.process.errors import Refused
from psjob.worker import exits, rewind
from tests.live.live_shards import eventually
from tests.live.shard_processes import Processes, processes, pushing
from tests.support import warm
from tests.support.soaking import rotating

HEAD = f"""
import atexit, importlib.util, os, sys, threading
from sys import exit as bound_before
spec = importlib.util.spec_from_file_location("exits", {exits.__file__!r})
exits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits)
atexit.register(lambda: print("last handler"))
exits.watch_exit(lambda: True, lambda: print("left"))
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
"""No torch: this part of the runtime needs none."""

GOOD = {
    "end": "pass",
    "sys.exit": "sys.exit()",
    "sys.exit 0": "sys.exit(0)",
    "raised": "raise SystemExit",
    "raised None": "raise SystemExit((lambda: None)())",
    "raised 0": "raise SystemExit(0)",
    "bound before": "bound_before(0)",
    "exit": "exit(0)",
    "caught": "try: sys.exit(3)\nexcept SystemExit: pass",
    "false": "sys.exit(False)",
}
BAD = {
    "sys.exit": ("sys.exit(3)", 3),
    "raised": ("raise SystemExit(4)", 4),
    "words": ("raise SystemExit('no data')", 1),
    "sys.exit words": ("sys.exit('no data')", 1),
    "bound before": ("bound_before(5)", 5),
    "quit": ("quit(6)", 6),
    "deep": ("def f(): raise SystemExit(7)\nf()", 7),
    "an exception": ("1 / 0", 1),
    "in a handler": ("try: 1 / 0\nexcept ZeroDivisionError: raise SystemExit(8)", 8),
    "interrupted": ("raise KeyboardInterrupt", 130),
}


def run(tmp_path: Path, body: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(HEAD + body + "\n")
    return subprocess.run([sys.executable, *(words or (str(script),))], capture_output=True, text=True, timeout=60, cwd=tmp_path)


@pytest.mark.parametrize("how", GOOD)
def test_a_good_end_is_told_once(tmp_path: Path, how: str) -> None:
    ran = run(tmp_path, GOOD[how])
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "last handler", "left"]


@pytest.mark.parametrize("how", BAD)
def test_a_bad_end_is_never_told_and_keeps_its_status(tmp_path: Path, how: str) -> None:
    body, code = BAD[how]
    ran = run(tmp_path, body)
    assert ran.stdout == "last handler\n"
    assert ran.returncode in (code, -2 if code == 130 else code), ran.stderr
    assert ran.stderr.count("no data") == body.count("no data")


def test_a_module_ends_as_a_script_does(tmp_path: Path) -> None:
    assert run(tmp_path, "pass", "-m", "script").stdout.count("left") == 1
    assert "left" not in run(tmp_path, "raise SystemExit(1)", "-m", "script").stdout


def test_a_forked_copy_says_nothing(tmp_path: Path) -> None:
    """A child that user code forked ends by itself; only the worker leaves the job."""
    ran = run(tmp_path, "if os.fork() == 0: sys.exit(0)\nos.wait()")
    assert ran.returncode == 0
    assert ran.stdout.count("left") == 1


def unwatched(tmp_path: Path, body: str, word: str) -> subprocess.CompletedProcess[str]:
    """A script with an argument, whose body asks for the watch itself."""
    script = tmp_path / "other.py"
    script.write_text("".join(line for line in HEAD.splitlines(keepends=True) if "exits.watch_exit" not in line) + body)
    return run(tmp_path, "", str(script), word)


CHILD = """
import multiprocessing
def work(how):
    exits.watch_exit(lambda: True, lambda: print("child left", flush=True))
    if how == "raises": raise ValueError("no data")
    if how == "exits": sys.exit(3)
    if how == "exits well": sys.exit(0)
process = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1],))
process.start()
process.join()
sys.exit(process.exitcode)
"""


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("exits well", 0), ("exits", 3), ("raises", 1)])
def test_a_process_of_multiprocessing_leaves_if_it_ends_well(tmp_path: Path, how: str, code: int) -> None:
    ran = unwatched(tmp_path, CHILD, how)
    assert ran.returncode == code, ran.stderr
    assert ran.stdout.count("child left") == (code == 0)


TERM = """
import signal
def stop(number, frame): print("stop", flush=True)
def ours(number, frame): print("ours", flush=True)
if sys.argv[1] == "before": signal.signal(signal.SIGTERM, stop)
seen = exits.Terminations(ours)
if sys.argv[1] == "ours": signal.signal(signal.SIGTERM, ours)
if sys.argv[1] == "after": assert signal.signal(signal.SIGTERM, stop) is signal.SIG_DFL
if sys.argv[1] == "other": signal.signal(signal.SIGUSR1, stop)
wanted = {"before": stop, "after": stop, "ours": ours, "other": signal.SIG_DFL}[sys.argv[1]]
assert signal.getsignal(signal.SIGTERM) is wanted
assert not seen.met
os.kill(os.getpid(), signal.SIGUSR1 if sys.argv[1] == "other" else signal.SIGTERM)
print("met" if seen.met else "not met")
assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is wanted and signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
"""


@pytest.mark.parametrize(
    ("when", "told"),
    [("before", ["stop", "met"]), ("after", ["stop", "met"]), ("ours", ["ours", "not met"]), ("other", ["stop", "not met"])],
)
def test_a_scripts_own_answer_to_sigterm_is_noted(tmp_path: Path, when: str, told: list[str]) -> None:
    ran = unwatched(tmp_path, TERM, when)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [*told, "last handler"]


def test_a_fork_that_never_ends_is_a_crash(tmp_path: Path) -> None:
    body = "exits.CHILD_SECONDS = 0.2\npid = os.getpid()\natexit._clear()\n"
    body += "import time\natexit.register(lambda: os.getpid() == pid or time.sleep(60))\n"
    body += "exits.watch_exit(lambda: True, lambda: print('left'))\nraise SystemExit(0)"
    ran = run(tmp_path, body)
    assert ran.returncode == 1 and "left" not in ran.stdout
    assert "counts as a crash" in ran.stderr


LOSES = """
import atexit, sys, threading, time
from psjob.worker import exits
exits.DEVICE_SECONDS = 0.3
how = sys.argv[1]
if how == "hangs":
    atexit.register(time.sleep, 3600)
elif how == "waits":
    with exits.device_answers("cuda:0 (a GPU)"):
        time.sleep(3600)
elif how == "answers":
    with exits.device_answers("cuda:0 (a GPU)"), exits.device_answers(""):
        pass
    time.sleep(0.6)
    raise SystemExit
elif how == "again":
    exits.end_if_device_lost()
    exits.note_lost_device("cuda:0 (a GPU) is lost", "look")
    exits.note_lost_device("and so is another", "")
    exits.end_if_device_lost()
atexit.register(print, "handler")
exits.lose_device("cuda:0 (a GPU) is lost", "look")
raise RuntimeError("CUDA error")
"""


@pytest.mark.parametrize(
    ("how", "code", "said", "handled"),
    [
        ("plainly", contract.EXIT_DEVICE_LOST, "cuda:0 (a GPU) is lost", True),
        ("hangs", contract.EXIT_DEVICE_LOST, "cuda:0 (a GPU) is lost", True),
        ("again", contract.EXIT_DEVICE_LOST, "cuda:0 (a GPU) is lost", False),
        ("waits", contract.EXIT_DEVICE_LOST, "cuda:0 (a GPU) is lost: it has not answered for 0.3 s", False),
        ("answers", 0, "", False),
    ],
)
def test_a_process_without_its_gpu_ends_in_time_and_says_why(tmp_path: Path, how: str, code: int, said: str, handled: bool) -> None:
    """After its exit handlers, if these come to an end; before it would begin again in place."""
    words = tmp_path / "words"
    done = subprocess.run(
        [sys.executable, "-c", LOSES, how],
        env={**os.environ, contract.ENV_TERMINATION_LOG: str(words)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.count("handler")) == (code, handled), done.stderr
    assert said in done.stderr
    if said:
        left = json.loads(words.read_text())
        assert left.keys() == {"error"} and left["error"].startswith(said)


STUCK = """
from psjob.process.errors import refused_after
with refused_after({seconds}, "it must return"):
    {code}
print("continued")
"""


def ended(folder: Path, seconds: float, code: str) -> tuple[int, str, Path]:
    words = folder / "words"
    done = subprocess.run(
        [sys.executable, "-c", STUCK.format(seconds=seconds, code=code)],
        env={**os.environ, contract.ENV_TERMINATION_LOG: str(words)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, words


def test_code_that_does_not_come_back_is_refused(tmp_path: Path) -> None:
    code, told, words = ended(tmp_path, 0.2, "while True: pass")
    assert (code, told) == (contract.EXIT_REFUSED, "psjob: it must return\n")
    assert json.loads(words.read_text()) == {"error": "it must return", "refused": True}


def test_code_that_comes_back_goes_on(tmp_path: Path) -> None:
    code, told, words = ended(tmp_path, 30, "pass")
    assert (code, told) == (0, "continued\n") and not words.exists()


def test_a_message_is_whole_whenever_another_thread_ends_the_process(tmp_path: Path) -> None:
    program = """
import os, random, threading, time
from psjob.process.errors import leave_message
def say():
    while True:
        leave_message({"problem": "x" * random.choice((1, 3000))})
threading.Thread(target=say, daemon=True).start()
time.sleep(0.05 + random.random() / 100)
os._exit(1)
"""
    path = tmp_path / "end"
    for _ in range(20):
        subprocess.run([sys.executable, "-c", program], env={**os.environ, contract.ENV_TERMINATION_LOG: str(path)}, timeout=60)
        assert set(json.loads(path.read_text())["problem"]) == {"x"}


CATCHES = """
import atexit, sys
from psjob.process.errors import refuse
atexit.register(print, "closed")
for _ in range(int(sys.argv[1])):
    try:
        refuse("no")
    except BaseException as error:
        print(type(error).__name__)
raise SystemExit(3)
"""


@pytest.mark.parametrize(("times", "printed"), [(1, "SystemExit\nclosed\n"), (3, "SystemExit\n")])
def test_what_was_refused_ends_with_its_status_whatever_the_script_catches(tmp_path: Path, times: int, printed: str) -> None:
    """Once, and at once if the script continues and asks again."""
    own = {contract.ENV_ROLE: "worker", contract.ENV_TERMINATION_LOG: str(tmp_path / "end")}
    words = [sys.executable, "-c", CATCHES, str(times)]
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (contract.EXIT_REFUSED, printed)
    assert done.stderr == "psjob: no (<string>:7)\n"
    # Launchers, parents and test runners hide the status of what they start.
    assert json.loads((tmp_path / "end").read_text()) == {"error": "no (<string>:7)", "refused": True}


@pytest.mark.rotating
def test_a_left_in_process_group_is_the_failure_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nimport psjob as ps\n\ntorch.distributed.init_process_group('gloo')\nmodel = torch.nn.Linear(1, 1)\n"
        "model, opt = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
    )
    code, told = warm.run(tmp_path, ["run", "train.py", "--workers", "1", "--no-progress"])
    assert code == 1 and "environment variable RANK expected" in told
    assert "train.py:4 needs a process group of torch.distributed, and psjob starts none" in told.splitlines()[-1]
    # The remedy works.
    code, shown = warm.run(tmp_path, ["convert", "--write", "train.py"])
    assert code == 0, shown
    assert "init_process_group" not in (tmp_path / "train.py").read_text()


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
    assert eventually(lambda: process.poll() is not None, 100.0), f"a shard without its thread {thread} continues"
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


def twice(folder: Path, words: list[str], out: Any, lock: Any) -> None:
    """Begin again once, in place; what the first start did to its arguments is not there in the second."""
    begun = rewind.sent_by_waiter()
    assert begun is not None
    words.append("late")
    with lock, open(folder / "starts", "a") as file:
        file.write(f"{os.getpid()}\n")
    if (folder / "starts").read_text().count("\n") < 3:
        command = begun.words()
        os.execv(command[0], command)
    parent = multiprocessing.parent_process()
    out.put((words, multiprocessing.current_process().name, parent is not None and parent.is_alive()))


def asked() -> str:
    """What `sent` says here."""
    try:
        return str(rewind.sent_by_waiter())
    except Refused as refused:
        return str(refused)


def answering(out: Any) -> None:
    out.put(asked())


def answer(how: str, target: Callable[[Any], None]) -> str:
    """What a process says that multiprocessing has started in this way."""
    context = multiprocessing.get_context(how)
    out: multiprocessing.queues.Queue[str] = context.Queue()
    child = context.Process(target=target, args=(out,))
    child.start()
    said = out.get(timeout=60)
    child.join(60)
    return said


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
@pytest.mark.parametrize("size", [1, 500_000])
def test_a_child_begins_again_as_it_began(tmp_path: Path, how: str, size: int) -> None:
    context = multiprocessing.get_context(how)
    out: multiprocessing.queues.Queue[Any] = context.Queue()
    lock = context.Lock()
    child = context.Process(target=twice, args=(tmp_path, ["given"] * size, out, lock), name="the trainer")
    child.start()
    words, name, has_parent = out.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert words == ["given"] * size + ["late"] and name == "the trainer" and has_parent
    assert (tmp_path / "starts").read_text() == f"{child.pid}\n" * 3


def place(folder: Path) -> Any:
    return SimpleNamespace(run="r", rank=0, index=0, number=1, config_path=str(folder), config=SimpleNamespace(shards=()))


def holding(folder: Path, out: Any) -> None:
    rewind.claim_place(place(folder))
    out.put("held")
    time.sleep(120)


def test_one_process_of_a_worker_holds_its_place_until_it_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out: multiprocessing.queues.Queue[str] = context.Queue()
    child = context.Process(target=holding, args=(tmp_path, out))
    child.start()
    assert out.get(timeout=60) == "held"
    with pytest.raises(Refused, match="another process of worker 0 has attached"):
        rewind.claim_place(place(tmp_path))
    child.kill()
    rewind.claim_place(place(tmp_path))  # it is given the time that it takes to go
    rewind.claim_place(place(tmp_path))
    child.join(60)
    rewind._let_go()


def test_the_first_process_was_sent_nothing() -> None:
    assert rewind.sent_by_waiter() is None


def test_a_fork_that_answers_its_parent_is_refused() -> None:
    said = answer("fork", answering)
    assert "was forked and has a Queue of its parent" in said and "get_context('spawn').Process" in said


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_process_of_a_pool_is_refused(how: str) -> None:
    context = multiprocessing.get_context(how)
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        assert "is a process of a pool" in executor.submit(asked).result(60)
    with context.Pool(1) as pool:
        assert "is a process of a pool" in pool.apply_async(asked).get(60)


def locked(out: Any) -> None:
    multiprocessing.current_process()._kwargs = {"lock": threading.Lock()}  # type: ignore[attr-defined]
    answering(out)


def test_what_cannot_be_sent_once_more_is_refused() -> None:
    assert "Its target and arguments cannot be sent once more (TypeError" in answer("spawn", locked)
