"""A script's end is known as good or bad before its process is gone, however it ends; its exit status stays its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from psjob.worker import exits

HEAD = f"""
import atexit, importlib.util, os, sys, threading
from sys import exit as bound_before
spec = importlib.util.spec_from_file_location("exits", {exits.__file__!r})
exits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits)
atexit.register(lambda: print("last handler"))
exits.watch(lambda: True, lambda: print("left"))
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
    script.write_text("".join(line for line in HEAD.splitlines(keepends=True) if "exits.watch" not in line) + body)
    return run(tmp_path, "", str(script), word)


CHILD = """
import multiprocessing
def work(how):
    exits.watch(lambda: True, lambda: print("child left", flush=True))
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
    body += "exits.watch(lambda: True, lambda: print('left'))\nraise SystemExit(0)"
    ran = run(tmp_path, body)
    assert ran.returncode == 1 and "left" not in ran.stdout
    assert "counts as a crash" in ran.stderr
