"""What a notebook is shown, with a stand-in for IPython: its shell, and a display that can be updated."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from psjob_client.jobs.view import HistoryView, JobView
from psjob_client.sdk import job

JOB = JobView(id="digits", name="digits", where="local", place="/x", phase="Running")


def ipython(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[str]:
    """IPython with this shell; what it has displayed, the last update of each output."""
    shown: list[str] = []
    top, display = ModuleType("IPython"), ModuleType("IPython.display")
    top.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.HTML = str  # type: ignore[attr-defined]

    def show(html: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append(html)
        return SimpleNamespace(update=lambda newer: shown.__setitem__(-1, newer))

    display.display = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", top)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_one_output_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ipython(monkeypatch, SimpleNamespace(kernel=object(), execution_count=1))
    board = job.notebook_board()
    assert board is not None
    board(JOB, HistoryView())
    board(JOB.model_copy(update={"phase": "Complete"}), HistoryView())
    assert len(shown) == 1 and "Complete" in shown[0]


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["no shell", "a terminal"])
def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    ipython(monkeypatch, shell)
    assert job.notebook_board() is None


def test_without_ipython_there_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert job.notebook_board() is None
