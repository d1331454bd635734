"""A mistake made from Python ends at the user's line: one exception that can be caught, and no chain through psjob or asyncio."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import psjob as ps

MOST_LINES = 12
MOST_IN_A_CELL = 16
"""With the lines around the user's, and a line on hidden frames."""
MOST_FRAMES = 2
"""Of psjob, below the user's line: the call, and where it is refused."""

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a wrong name": (lambda: ps.Client.local().get("trian"), ps.NoSuchJob, "`client.list()` shows"),
    "a wrong name of logs": (lambda: list(ps.Client.local().logs("trian")), ps.NoSuchJob, "no job"),
    "a handle of nothing": (lambda: ps.Client.local().job("trian"), ps.NoSuchJob, "no job"),
    "no folder": (lambda: ps.Client.local("nowhere").list(), ps.JobProblem, "is no folder"),
    "no cluster": (lambda: ps.Client.kube(kubeconfig="nowhere").list(), ps.Unreachable, "runs of this machine: `psjob.Client.local()`"),
    "a lambda": (lambda: ps.Client.local().train(lambda: None), ps.CannotShip, "write it with `def`"),
    "a wrong value": (lambda: ps.Client.local().train(["true"], workers=-1), ps.BadManifest, "spec.workers.replicas"),
    "a wrong file": (lambda: ps.Client.local().submit("nowhere.yaml"), ps.BadManifest, "nowhere.yaml"),
    "epochs": (lambda: ps.epochs(-1), ps.Refused, "takes a number of epochs"),
    "attach": (lambda: ps.attach(torch.nn.Linear(1, 1), None), ps.Refused, ""),
    "shard": (lambda: ps.shard(3), ps.Refused, ""),  # type: ignore[arg-type]
    "state": (lambda: (ps.state(twice=1), ps.state(twice=2)), ps.Refused, "twice"),
    "pipeline": (lambda: ps.pipeline(print, print), ps.Refused, "takes a torch Module"),  # type: ignore[arg-type]
    "mirror": (lambda: ps.mirror(torch.nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), "star"), ps.Refused, "star"),
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("PSJOB_ROLE", raising=False)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_exception_whose_traceback_is_short(mistake: str) -> None:
    call, kind, says = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind and says in str(error)
    assert "--" not in str(error) and "`psjob " not in str(error), "Python is not told of commands"
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert error.__traceback__ is not None
    frames = traceback.extract_tb(error.__traceback__)[2:]  # without this test and the lambda
    assert 1 <= len(frames) <= MOST_FRAMES and all("/psjob" in frame.filename for frame in frames), frames
    told = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    assert len("".join(told).splitlines()) <= MOST_LINES
    assert told[-1].startswith(f"psjob.{kind.__name__}: ")


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """IPython's own shell, which is told that it has a kernel."""
    shell = InteractiveShell.instance()
    shell.kernel = object()
    shell.colors = "nocolor"
    hook = sys.excepthook
    yield shell
    sys.excepthook = hook
    InteractiveShell.clear_instance()


def test_a_cell_with_a_mistake_shows_the_users_line(notebook: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    for code, name in (("psjob.Client.local().get('trian')", "NoSuchJob"), ("psjob.epochs(-1)", "Refused")):
        done = notebook.run_cell(f"import psjob\n{code}")
        assert type(done.error_in_exec).__name__ == name, "the kernel lives on"
        lines = capsys.readouterr().out.splitlines()
        assert code in "\n".join(lines) and len(lines) <= MOST_IN_A_CELL, lines
        shown = [line for line in lines if line.startswith("File ")]
        assert len(shown) <= 1 and "sdk/blocking.py" not in shown[0] and "api/" not in shown[0], "only where it was raised"


def test_a_cell_can_catch_it(notebook: InteractiveShell) -> None:
    done = notebook.run_cell("import psjob\ntry:\n    psjob.epochs(-1)\nexcept psjob.Refused as refused:\n    told = str(refused)\ntold")
    assert "takes a number of epochs" in str(done.result)
