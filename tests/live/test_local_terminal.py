"""`psjob run` in a real terminal: the live part below, lines of the chosen workers above, and bars that the script draws itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hack.terminal import terminal
from tests.live.local_standin import environment, manifest

DRAWS = """
import os, sys, time
run, rank = os.path.dirname(os.environ["PSJOB_CONFIG"]), os.environ["PSJOB_INDEX"]
print(f"worker {rank} begins", flush=True)
for part in range(0, 101, 5):
    sys.stderr.write(f"\\r{part:3}%|{'#' * part}{'-' * (100 - part)}| of {rank}")
    sys.stderr.flush()
    time.sleep(0.05)
while not os.path.exists("looked"):
    time.sleep(0.05)
sys.stderr.write("\\n")
print(f"worker {rank} is done", flush=True)
open(os.path.join(run, f"left-{rank}"), "w").close()
"""


def watched(folder: Path, columns: int, *words: str) -> tuple[list[list[str]], list[str]]:
    """Every screen that was seen while the job ran, and all lines at its end."""
    job, seen = manifest(folder), []
    (folder / "worker.py").write_text(DRAWS)
    command = [sys.executable, "-m", "psjob_client.cli.main", "run", str(job), *words]
    with terminal(columns) as shown:
        env = {**environment(folder), **shown.environment}
        with subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=shown.theirs, stderr=shown.theirs) as process:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                seen.append(shown.shown())
                if is_whole(seen[-1], script="none" not in words):
                    (folder / "looked").touch()
                time.sleep(0.05)
            process.kill()
        shown.end()
        assert process.returncode == 0, shown.all()
        return seen, shown.all()


def is_whole(screen: list[str], script: bool) -> bool:
    """Does the live part show all that the tests look for? On a busy machine the shards are asked late."""
    drawn = any(line.startswith("script") and "%|#" in line for line in screen)
    return any("shards      0-1 serving" in line for line in screen) and (drawn or not script)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_live_part_stands_below_and_is_gone_at_the_end(tmp_path: Path, columns: int) -> None:
    seen, lines = watched(tmp_path, columns)
    live = [screen for screen in seen if any(line.startswith("tiny  Running  step ") for line in screen)]
    assert live and any("shards      0-1 serving" in screen for screen in live)
    assert any(line.startswith("script") and "%|###" in line for screen in live for line in screen), "its bar moves"
    assert all(len(line) <= columns for screen in seen for line in screen)
    assert not any(line.startswith(("shards  ", "workers  ", "script  ")) for line in lines)
    own = [line for line in lines if line.startswith(("worker ", "100%"))]
    assert own[0] == "worker 0 begins" and own[-1] == "worker 0 is done" and own[1].startswith("100%|#####"), lines
    assert sum("the lines of worker 0 follow" in line for line in lines) == 1


@pytest.mark.parametrize(("logs", "told"), [("all", {"0", "1"}), ("1", {"1"}), ("none", set())])
def test_the_lines_of_chosen_workers_are_shown(tmp_path: Path, logs: str, told: set[str]) -> None:
    _, lines = watched(tmp_path, 100, "--logs", logs)
    begun = {line for line in lines if line.endswith(" begins")}
    assert begun == {f"{rank}: worker {rank} begins" if len(told) > 1 else f"worker {rank} begins" for rank in told}
    assert not any("follow" in line for line in lines)
