"""What a target of the Makefile says before it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hack import needs
from hack.cluster.paths import ASSETS, REPO
from hack.needs import Need, Target, told

HERE = Need("tea", lambda: True, "boil water")
GONE = Need("milk", lambda: False, "buy milk")
SAID_OTHERWISE = ("deps", "test-all")
"""The first says itself what it lacks; the second calls others, which do."""
OTHER = Need("sugar", lambda: False, "ask next door")


@pytest.mark.parametrize(
    ("target", "lines", "works"),
    [
        (Target((HERE,)), ["make x needs tea: all there."], True),
        (Target(may=(HERE,)), ["make x does all of its work with tea: all there."], True),
        (Target((HERE, GONE)), ["make x needs tea, milk.", "missing: milk. Next step: buy milk."], False),
        (
            Target((HERE,), (GONE,)),
            [
                "make x needs tea. make x does all of its work with milk.",
                "not here: milk; what needs it is left out or skipped, by name. To have it, buy milk.",
            ],
            True,
        ),
        (Target((GONE,), (OTHER,)), None, False),
        (Target(), ["make x needs nothing that `make install` does not bring."], True),
    ],
)
def test_what_is_missing_comes_with_the_next_step(target: Target, lines: list[str] | None, works: bool) -> None:
    said, can = told("x", target)
    assert can is works
    assert said == lines if lines else len(said) == 3 and "buy milk" in said[1] and "ask next door" in said[2]


def test_targets_with_needs_say_them_before_they_start() -> None:
    rules = re.findall(r"^([a-z0-9-]+):[^\n]*\n((?:\t.*\n)*)", (REPO / "Makefile").read_text(), re.MULTILINE)
    first = {name: body.strip().partition("\n")[0].strip() for name, body in rules}
    for name, target in needs.TARGETS.items():
        if (target.must or target.may) and name not in SAID_OTHERWISE:
            assert first[name] == f"@python -m hack.needs {name}", f"make {name} does not say first what it needs"
        else:
            assert name in first, f"there is no make {name}"
    for name, line in first.items():
        said = re.match(r"@python -m hack\.needs (\S+)", line)
        assert said is None or said[1] in needs.TARGETS, f"make {name} asks for the needs of {said and said[1]}"


@pytest.mark.parametrize(("assets", "go", "can"), [("", True, True), ("", False, False), ("envtest", False, True), ("envtest", True, True)])
def test_an_api_server_is_built_by_go_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assets: str, go: bool, can: bool) -> None:
    for name in ASSETS:
        (tmp_path / "envtest").mkdir(exist_ok=True)
        (tmp_path / "envtest" / name).touch()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / assets) if assets else "")
    monkeypatch.setenv("PSJOB_CACHE", str(tmp_path))
    monkeypatch.delenv("PSJOB_KUBERNETES", raising=False)
    monkeypatch.setattr(needs, "_go", lambda: go)
    lines, works = told("test-cluster", needs.TARGETS["test-cluster"])
    assert works is can
    assert can or "KUBEBUILDER_ASSETS" in lines[1]


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert needs.main(["tea"]) == 2
    assert "tea: name one of test-unit, test, test-cluster" in capsys.readouterr().err
