"""A real browser, and run folders for it to show."""

from __future__ import annotations

import functools
import json
import math
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SERIOUS = ("serious", "critical")
EVERY = ("minor", "moderate", *SERIOUS)
SECONDS = 60
"""In which a page is as it should be, on a machine that does other things too."""


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium of this machine. Skips the test, by name, where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs Chromium: python -m hack.cluster deps installs Debian's chromium-headless-shell")
    expect.set_options(timeout=SECONDS * 1000)
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def complaints(page: Page) -> list[str]:
    """What goes to the console as an error from now on, and exceptions."""
    found: list[str] = []
    page.on("console", lambda said: found.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    return found


def barriers(page: Page, weights: Sequence[str] = SERIOUS) -> list[str]:
    """What axe-core finds of these weights that keeps people out, as `rule: element`."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:120]}" for one in found if one["impact"] in weights for node in one["nodes"]]


def drawn(page: Page, selector: str) -> int:
    """Pixels of the first canvas there that are not transparent."""
    script = """canvas => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let at = 3; at < pixels.length; at += 4) count += pixels[at] > 0;
        return count;
    }"""
    return int(page.locator(f"{selector} canvas").first.evaluate(script))


def a_run(folder: Path, name: str, points: int, *, made: float, result: str = "Complete", lr: float = 0.1, **told: Any) -> Path:
    """A run as `psjob run` leaves it (local/record.py), with `points` lines of history and a shard that was restarted.

    Its script is given `lr`. The coordinator has `told` this too.
    """
    run, job = folder / ".psjob" / name, name.partition("-")[0]
    (run / "logs").mkdir(parents=True)
    _write(run / "run.json", {"job": job, "run": name, "pid": 1, "created": made, "ended": made + 70, "result": result, "failure": ""})
    _write(run / "config.json", {"job": job, "mode": "async"})
    container = {"name": "worker", "image": "img:1", "command": ["python", "train.py", "--lr", str(lr)]}
    workers_of = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    spec = {"training": {"mode": "async"}, "shards": {"replicas": 1}, "workers": workers_of}
    _write(run / "job.json", {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": job}, "spec": spec})
    shard = {"index": 0, "attempt": 2, "state": "Finished"}
    _write(run / "status.json", {"run": name, "phase": result, "shards": [shard], "restarts": {"total": 1, "causes": {"Error": 1}}})
    workers = [{"rank": rank, "clock": points - rank, "state": "left", "idle": 0.1 * rank} for rank in range(2)]
    coordinator = {"step": points, "loss": 0.1, "rate": 55.0, "workers": workers, **told}
    _write(run / "live.json", {"time": made + 69, "coordinator": coordinator, "shards": []})
    (run / "history.jsonl").write_text(_history(points))
    shards = [{"role": "shard", "index": 0, "number": number, "name": f"{job}-shard-0-a{number}"} for number in (1, 2)]
    worker = {"role": "worker", "index": 0, "number": 1, "name": f"{job}-worker-0-r1"}
    story: list[dict[str, Any]] = [
        {"what": "phase", "phase": "Pending"}, {"what": "start", **shards[0]}, {"what": "start", **worker},
        {"what": "serving", "name": shards[0]["name"]}, {"what": "phase", "phase": "Running"}, {"what": "end", **shards[0], "signal": 9},
        {"what": "phase", "phase": "Recovering"}, {"what": "start", **shards[1]}, {"what": "serving", "name": shards[1]["name"]},
        {"what": "event", "type": "Warning", "reason": "Restarted", "message": "shard 0 is restored from the last checkpoint (Error)"},
        {"what": "phase", "phase": "Running"}, {"what": "phase", "phase": result},
    ]  # fmt: skip
    (run / "story.jsonl").write_text("".join(json.dumps({"time": made + 5 * at, **line}) + "\n" for at, line in enumerate(story)))
    (run / "logs" / f"{job}-worker-0-r1.log").write_bytes(b"epoch 1\n\xff\xfe <script>document.title='owned'</script>\n")
    return run


def _write(path: Path, what: dict[str, Any]) -> None:
    path.write_text(json.dumps(what))


@functools.cache
def _history(points: int) -> str:
    chance = random.Random(points)
    lines = (
        {
            "time": 1.79e9 + 70 * step / points,
            "step": step,
            "rate": 50 + chance.random(),
            "metrics": {"loss": 2 * math.exp(-step / points) + chance.random() / 10, "accuracy": step / points},
        }
        for step in range(points)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)
