"""Who waits for whom while the programs of a test cluster are built."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hack.cluster import build, paths
from hack.cluster.paths import Part


def test_a_part_that_another_process_builds_is_waited_for_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_go", lambda *words: "go")
    made: list[str] = []
    held, begun = threading.Event(), threading.Event()

    def slow(part: Part, go: str, quiet: bool) -> None:
        made.append(part.name)
        begun.set()
        held.wait(60)
        part.folder.mkdir()

    monkeypatch.setattr(build, "_build_part", slow)
    first = threading.Thread(target=build.build, args=("kwok",))
    first.start()
    assert begun.wait(60)
    second = threading.Thread(target=build.build, args=("kwok",), kwargs={"quiet": True})
    second.start()
    said = ""
    while "\n" not in said:
        held.wait(0.01)
        said += capsys.readouterr().out
    assert said == "another process builds kwok; waiting for it\n"
    held.set()
    first.join(60)
    second.join(60)
    assert made == ["kwok"] and not build.missing("kwok")


def test_the_control_plane_waits_for_no_part_of_real_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    for part in paths.parts("integration"):
        part.folder.mkdir(parents=True)
    monkeypatch.setattr(build, "_build_part", lambda *words: pytest.fail("nothing is to be built"))
    build.build("integration")
    assert not build.missing("integration") and "node" in build.missing("e2e")
