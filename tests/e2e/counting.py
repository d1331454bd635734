"""A job whose weights say how often each step and each datum counted: after whatever befell it, each counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.e2e import digits
from tests.e2e.digits import coordinator, pods_of
from tests.e2e.kube import Kube

SCRIPT = (Path(__file__).parent / "scripts" / "counts.py").read_text()


def job(name: str, steps: int, pace: float, workers: int, shards: int = 1, **spec: Any) -> dict[str, Any]:
    """scripts/counts.py, of which a container has no file: it is given as a word of its command."""
    more = {"shards": {"replicas": shards}, "checkpoint": {"everySteps": 10, "periodSeconds": 3600}}
    document = digits.job(name, workers=workers, **more)
    for key, value in spec.items():
        document["spec"][key] = {**document["spec"].get(key, {}), **value} if isinstance(value, dict) else value
    (container,) = document["spec"]["workers"]["template"]["spec"]["containers"]
    container["command"], container["args"] = ["python", "-c", SCRIPT, str(steps), str(pace)], []
    return document


def check(weights: Path, steps: int, workers: int) -> None:
    """Each worker has counted each of its steps once, and each datum was trained on once."""
    (book,) = load_file(weights).values()
    assert book[:, 0].tolist() == [steps] * workers, f"steps that counted, by rank: {book[:, 0].tolist()}"
    data = steps * workers
    assert book[:, 1].sum().item() == data * (data - 1) / 2, f"sums of data by rank: {book[:, 1].tolist()}"


def joined(kube: Kube, name: str) -> dict[int, int]:
    """The start of each worker that is a member now, by rank; empty while shard 0 is out of reach."""
    return {it["rank"]: it["start"] for it in (coordinator(kube, name) or {}).get("workers", []) if it["here"]}


def starts(kube: Kube, name: str) -> dict[int, int]:
    """The number of each worker's newest pod, by rank."""
    found: dict[int, int] = {}
    for pod in reversed(pods_of(kube, name, "worker")):
        labels = pod["metadata"]["labels"]
        found[int(labels["psjob.dev/index"])] = int(labels["psjob.dev/number"])
    return found
