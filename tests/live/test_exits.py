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


def test_a_fork_that_never_ends_is_a_crash(tmp_path: Path) -> None:
    body = "exits.CHILD_SECONDS = 0.2\npid = os.getpid()\natexit._clear()\n"
    body += "import time\natexit.register(lambda: os.getpid() == pid or time.sleep(60))\n"
    body += "exits.watch(lambda: True, lambda: print('left'))\nraise SystemExit(0)"
    ran = run(tmp_path, body)
    assert ran.returncode == 1 and "left" not in ran.stdout
    assert "counts as a crash" in ran.stderr
