"""What the prose linter says on a machine that cannot build it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.cluster.paths import Unavailable
from hack.prose import __main__ as prose


@pytest.fixture(autouse=True)
def without_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has neither vale nor Go."""

    def none() -> str:
        raise Unavailable("no Go")

    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.delenv("PSJOB_FORBID_SKIP", raising=False)
    monkeypatch.setattr(prose, "find_go", none)


def test_lint_skips_prose_by_name_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert prose.main([]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("skipped: prose (") and "install Go 1.26" in said.out and said.err == ""


def test_prose_fails_where_skipping_is_forbidden_or_pages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose.main(["README.md"]) == 1
    monkeypatch.setenv("PSJOB_FORBID_SKIP", "1")
    assert prose.main([]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("install Go 1.26") == 2


def test_a_machine_without_a_c_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prose, "find_go", lambda: "/go")
    monkeypatch.setenv("PATH", "")
    assert prose.main([]) == 0
    assert "install gcc or clang" in capsys.readouterr().out
