"""The live part of the terminal, as a person sees it: eight states of a job at three widths.

`python -m tests.unit.test_screen` draws the files in `tests/unit/screens` again. Look at what it has changed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hack.terminal import terminal
from psjob_client.local import console
from psjob_client.local.console import BAR
from psjob_client.local.monitor import RunWatch
from psjob_operator.api.status import JobStatus

SCREENS = Path(__file__).parent / "screens"
NOW = 1_000_000.0
WIDTHS = (80, 100, 120)


def shards(*states: str, attempts: dict[int, int] | None = None) -> list[dict[str, Any]]:
    return [{"index": index, "attempt": (attempts or {}).get(index, 1), "state": state} for index, state in enumerate(states)]


def workers(*clocks: int, **more: Any) -> list[dict[str, Any]]:
    return [{"rank": rank, "start": 1, "state": "joined", "clock": clock, **more} for rank, clock in enumerate(clocks)]


WAITING = "shards [1] are restoring, for 3 s: 240 of 510 MB of the checkpoint of step 1150"
PROBLEM = (
    "cannot write v000001-c000007-shard001-a1.safetensors in .psjob/hello-1129-120000-abcdef: ENOSPC, the volume is full: free space on it"
)
RUNNING = {"step": 1200, "loss": 0.2134, "rate": 45.21, "totalSteps": 3680, "eta": 54.8, "checkpoint": {"step": 1150, "time": NOW - 2}}
STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pending": ({"phase": "Pending", "shards": shards("Starting", "Starting")}, {}),
    "first steps": ({"phase": "Running", "shards": shards("Serving")}, {"step": 3, "rate": 12.0, "workers": workers(3)}),
    "running": ({"phase": "Running", "shards": shards("Serving", "Serving")}, {**RUNNING, "workers": workers(1200, 1201)}),
    "a shard is back": (
        {"phase": "Recovering", "shards": shards("Serving", "Starting", attempts={1: 2}), "restarts": {"total": 1}},
        {
            **RUNNING,
            "workers": workers(1200, 1200),
            "waiting": "shards [1] are restoring, for 3 s: 240 of 510 MB of the checkpoint of step 1150",
        },
    ),
    "a worker is away": (
        {"phase": "Recovering", "shards": shards("Serving", "Serving"), "restarts": {"total": 1}},
        {
            **RUNNING,
            "workers": [*workers(1200, 1200), {"rank": 2, "start": 2, "state": "absent", "clock": 1200}],
            "waiting": "worker 2 has not joined, for 2 s",
        },
    ),
    "async": ({"phase": "Running", "shards": shards("Serving", "Serving")}, {**RUNNING, "workers": workers(1200, 1244, 1201, 1390)}),
    "many": (
        {"phase": "Running", "shards": shards(*["Serving"] * 31, "Lost", attempts={31: 3})},
        {**RUNNING, "workers": workers(*range(1200, 1328, 2))},
    ),
    "no checkpoint can be written": (
        {"phase": "Running", "shards": shards("Serving", "Serving")},
        {
            **RUNNING,
            "checkpointProblem": PROBLEM,
            "workers": [*workers(1200), {"rank": 1, "start": 1, "state": "left", "clock": 1200}],
        },
    ),
}


def drawn(state: str, width: int) -> str:
    """What the terminal shows, after lines of the script, while the job is in this state."""
    status, told = STATES[state]
    watch = RunWatch(30.0, b"", progress={"coordinator": told})
    with terminal(width) as it, os.fdopen(os.dup(it.theirs), "w") as out, patch.dict(os.environ, it.environment), patch("sys.stdout", out):
        shown = console.Display("hello", progress=True)
        with patch("time.time", lambda: NOW):
            shown.output("epoch 0: loss 0.51")
            for _ in range(2):  # the second is drawn over the first
                shown._shown = 0.0
                shown.refresh(JobStatus.model_validate(status), watch)
        out.flush()
        it.settle()
        lines = it.shown()
        shown.close()
    return "".join(line + "\n" for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("state", STATES)
def test_a_screen_is_as_it_was_approved(state: str, width: int) -> None:
    found = drawn(state, width)
    assert found == (SCREENS / f"{state.replace(' ', '-')}-{width}.txt").read_text(), f"\n{found}"
    assert found.startswith("epoch 0: loss 0.51\nhello  ") and found.count("hello  ") == 1
    assert all(len(line) <= width for line in found.splitlines())


def test_nothing_that_is_waited_for_is_cut_off() -> None:
    for state, (_, told) in STATES.items():
        for text in (told.get("waiting"), told.get("checkpointProblem")):
            assert text is None or "".join(text.split()) in "".join(drawn(state, 80).split()), state


def test_the_bar_is_as_full_as_the_job_is_far() -> None:
    far = [line for line in drawn("running", 100).splitlines() if "━" in line]
    assert len(far) == 1 and len(far[0].strip()) == BAR


def main() -> None:
    SCREENS.mkdir(exist_ok=True)
    for state in STATES:
        for width in WIDTHS:
            (SCREENS / f"{state.replace(' ', '-')}-{width}.txt").write_text(drawn(state, width))


if __name__ == "__main__":
    main()
