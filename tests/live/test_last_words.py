"""A process leaves its last words whole, and one that is stuck is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from psjob import contract

STUCK = """
from psjob.process.errors import refused_after
with refused_after({seconds}, "it must return"):
    {code}
print("went on")
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
    assert (code, told) == (0, "went on\n") and not words.exists()


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
    """Once, and at once if the script goes on and asks again."""
    own = {contract.ENV_ROLE: "worker", contract.ENV_TERMINATION_LOG: str(tmp_path / "end")}
    words = [sys.executable, "-c", CATCHES, str(times)]
    done = subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (contract.EXIT_REFUSED, printed)
    assert done.stderr == "psjob: no (<string>:7)\n"
    # Launchers, parents and test runners hide the status of what they start.
    assert json.loads((tmp_path / "end").read_text()) == {"error": "no (<string>:7)", "refused": True}
