"""How a process leaves with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psjob import contract
from psjob.process.errors import leave_message


def test_a_shorter_message_replaces_a_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "end"
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(path))
    for body in ({"problem": "x" * 500}, {"problem": "y"}):
        leave_message(body)
        assert json.loads(path.read_text()) == body
    assert path.stat().st_size == len(json.dumps(body))
