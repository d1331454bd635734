"""What a script reports is written to the trackers that it has open.

- A library's module of psjob begins as the library is imported, or at once where it was.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

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


LIBRARY = "library_of_this_test"
HOME = "home_of_this_test"


@pytest.fixture
def _library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / LIBRARY).mkdir()
    (tmp_path / LIBRARY / "__init__.py").write_text("from library_of_this_test.inner import value\n")
    (tmp_path / LIBRARY / "inner.py").write_text("value = 1\n")
    text = f"import {LIBRARY}\n\ndef begin():\n    {LIBRARY}.value += 1\n"
    (tmp_path / f"{HOME}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if not isinstance(each, startup.ImportWatch)])
    monkeypatch.setattr(startup, "HOMES", {LIBRARY: HOME})
    yield
    for name in (LIBRARY, f"{LIBRARY}.inner", HOME):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("first", [True, False])
def test_it_begins_when_the_library_is_there(first: bool) -> None:
    if first:
        __import__(LIBRARY)
    startup.begin_with_libraries()
    startup.begin_with_libraries() if not first else None
    __import__(LIBRARY)
    assert sys.modules[LIBRARY].value == 2
    assert sys.modules[LIBRARY].__spec__ is not None
    assert not any(isinstance(each, startup.ImportWatch) for each in sys.meta_path[1:]), "one finder"


@pytest.mark.usefixtures("_library")
def test_a_library_that_is_not_installed_is_still_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "HOMES", {"no_such_library_of_this_test": HOME})
    startup.begin_with_libraries()
    with pytest.raises(ModuleNotFoundError, match="no_such_library_of_this_test"):
        __import__("no_such_library_of_this_test")
