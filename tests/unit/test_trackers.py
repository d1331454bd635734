"""What a script reports is written to the trackers that it has open."""

from __future__ import annotations

import threading
import types

import pytest

from psjob.api import trackers
from psjob.process import startup


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_looked", 0)
    monkeypatch.setattr(trackers, "_told", 0)
    monkeypatch.setattr(trackers, "_broken", set())
    trackers._writers.clear()


def test_a_tracker_that_fails_does_not_end_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        @property
        def run(self) -> object:
            raise OSError("no room")

    monkeypatch.setitem(trackers.sys.modules, "wandb", Broken())  # type: ignore[arg-type]
    trackers.tell_trackers({"loss": 1.0}, 1)
    trackers.tell_trackers({"loss": 1.0}, 2)
    assert [record.getMessage() for record in caplog.records] == ["wandb takes no more numbers of the job: OSError: no room"]


def test_a_worker_that_starts_again_names_the_same_run() -> None:
    environ: dict[str, str] = {}
    startup.one_run("digits-1", environ)
    assert environ == {"WANDB_RUN_ID": "digits-1", "WANDB_RESUME": "allow"}
    own = {"WANDB_RUN_ID": "mine"}
    startup.one_run("digits-1", own)
    assert own == {"WANDB_RUN_ID": "mine"}


class Mlflow:
    """The calls of MLflow that are made, and a server that is slow."""

    def __init__(self) -> None:
        self.entities = types.SimpleNamespace(Metric=lambda *words: words)
        self.told: list[tuple[str, list[tuple[str, float, int, int]]]] = []
        self.answers = threading.Event()

    def active_run(self) -> object:
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="one"), data=types.SimpleNamespace(tags={}))

    def MlflowClient(self) -> Mlflow:
        return self

    def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
        self.answers.wait(10)
        self.told.append((run, metrics))


def test_a_slow_server_of_mlflow_does_not_hold_up_training(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Mlflow()
    monkeypatch.setitem(trackers.sys.modules, "mlflow", slow)  # type: ignore[arg-type]
    for step in range(300):
        trackers.tell_trackers({"loss": float(step)}, step)
    assert not slow.told
    slow.answers.set()
    assert trackers.hand_over()["MLFLOW_RUN_ID"] == "one"
    assert [metric[3] for _run, metrics in slow.told for metric in metrics] == list(range(300))
