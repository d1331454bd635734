"""A worker's pod that hangs on a real node: started again in time, counted, and what it said of where it stood."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import digits
from tests.e2e.digits import complete, coordinator, pod_of
from tests.e2e.kube import Kube, processes, tool, wait_for

pytestmark = [pytest.mark.soak, pytest.mark.serial]
LIMIT = 5
WITHIN = 8.0
"""Seconds from the hang to the worker's next pod, with that limit."""
SCRIPT = (Path(__file__).parent / "scripts" / "hangs.py").read_text()


def job(name: str, how: str) -> dict[str, Any]:
    """scripts/hangs.py, of which a container has no file: it is given as a word of its command."""
    document = digits.job(name)
    document["spec"]["workers"]["progressDeadlineSeconds"] = LIMIT
    (container,) = document["spec"]["workers"]["template"]["spec"]["containers"]
    container["command"], container["args"] = ["python", "-c", SCRIPT, how], []
    return document


def hang(kube: Kube, name: str, how: str, said: Path) -> float:
    """Wait until worker 1 hangs; when that was. A pod's first process is not stopped by itself, so that is done from outside."""
    if how != "stopped":
        words = wait_for("worker 1 to hang", lambda: [w for w in said.read_text().splitlines() if w.startswith("hangs at")] or None, 120)
        return float(words[0].split()[-1])
    wait_for("some steps", lambda: ((coordinator(kube, name) or {}).get("step") or 0) > 5, 120, story=lambda: kube.story(name))
    (process,) = processes(pod_of(kube, name, "worker", 1), "hangs at")
    os.kill(process, signal.SIGSTOP)
    return time.time()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["busy", "held", "stopped"])
def test_a_worker_that_hangs_is_started_again(kube: Kube, how: str) -> None:
    name = "hangs"
    kube.apply(job(name, how))
    first = wait_for("worker 1 to run", lambda: running(kube, name), 180, story=lambda: kube.story(name))
    with tempfile.NamedTemporaryFile() as log:
        words = [tool("kubectl"), "--kubeconfig", kube.kubeconfig, "-n", kube.namespace, "logs", "-f", first]
        follower = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            hung = hang(kube, name, how, Path(log.name))
            again = wait_for("its next pod", lambda: newer(kube, name, first), 60, story=lambda: kube.story(name))
            follower.wait(60)
        finally:
            follower.kill()
            follower.wait()
        told = Path(log.name).read_text()
    made = datetime.fromisoformat(again["metadata"]["creationTimestamp"].replace("Z", "+00:00")).timestamp()
    print(f"{how}: its next pod was made {made - hung:.0f} s after it began to hang")
    assert made - hung < WITHIN
    assert ('"<string>", line' in told) is (how != "stopped"), told
    status = complete(kube, name)
    assert status["restarts"]["causes"] == {"Hung": 1} and status["restarts"]["counted"] == 1


def running(kube: Kube, name: str) -> str | None:
    """The name of worker 1's pod once it runs."""
    pods = digits.pods_of(kube, name, "worker", 1)
    return pods[0]["metadata"]["name"] if pods and pods[0]["status"].get("phase") == "Running" else None


def newer(kube: Kube, name: str, first: str) -> dict[str, Any] | None:
    """Worker 1's pod once it is another one than `first`."""
    pods = digits.pods_of(kube, name, "worker", 1)
    return pods[0] if pods and pods[0]["metadata"]["name"] != first else None
