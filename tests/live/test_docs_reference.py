"""The examples of `psjob.Client`'s verbs, in docs/reference.md and in `help`: each runs as a doctest, over real jobs of this machine."""

from __future__ import annotations

import doctest
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psjob import Client, Job

SCRIPT = """
import sys, time, torch
import psjob as ps

model = torch.nn.Linear(8, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while ps.step() < 368:
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ps.report(loss=0.021, test_accuracy=0.978)
    time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
print("accuracy 0.978", flush=True)
"""
CALM = ("train", "submit", "job", "get", "list", "events", "metrics", "timeline", "checkpoints", "wait", "logs", "watch", "load_weights")
"""Verbs whose examples speak of a job that has ended, or start one."""
STEERING = ("checkpoint", "suspend", "resume", "delete")
"""Verbs whose examples speak of a job that runs, in an order that leaves one for the next."""


def manifest(pause: float) -> dict[str, Any]:
    worker = {"name": "worker", "image": "none", "command": ["python", "train.py", str(pause)]}
    spec = {"ps": {"shards": 1}, "workers": {"replicas": 1, "template": {"spec": {"containers": [worker]}}}}
    return {"apiVersion": "psjob.dev/v1alpha1", "kind": "PSTrainingJob", "metadata": {"name": "digits"}, "spec": spec}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("train.py").write_text(SCRIPT)
    with Client.local() as local:
        yield local
        for job in local.list():
            local.delete(job.id)


OF_A_JOB = ("get", "events", "metrics", "logs", "watch", "wait", "load_weights", "save")
"""Verbs of a handle whose examples speak of a job that has ended; those that steer have the client's examples."""


def shown(client: Client, name: str, kind: type = Client) -> None:
    """Run the example of a verb."""
    text = inspect.getdoc(getattr(kind, name)) or ""
    space = {"client": client, "Client": Client} if kind is Client else {"job": client.job("digits")}
    example = doctest.DocTestParser().get_doctest(text, space, name, None, None)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0, name


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_examples_of_a_job_that_has_ended(client: Client) -> None:
    shown(client, "local")
    shown(client, "kube")
    client.submit(manifest(0.0)).wait(timeout=120)
    for name in OF_A_JOB:
        shown(client, name, Job)
    for name in sorted(CALM, key=("train", "submit").__contains__):
        if name == "submit":
            Path("job.yaml").write_text(json.dumps(manifest(0.0)))
        shown(client, name)


@pytest.mark.rotating
@pytest.mark.timeout(300)
def test_examples_of_a_job_that_runs(client: Client) -> None:
    client.submit(manifest(0.015)).wait(phases=["Running"], timeout=120)
    for name in STEERING:
        shown(client, name)


def test_no_verb_is_without_one() -> None:
    verbs = {
        name
        for name, value in vars(Client).items()
        if not name.startswith("_") and (inspect.isfunction(value) or name in ("local", "kube"))
    }
    assert verbs - {"close"} == {"local", "kube", *CALM, *STEERING}
