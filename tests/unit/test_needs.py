"""What a target of the Makefile says before it starts."""

from __future__ import annotations

import re

import pytest

from hack import needs
from hack.cluster.paths import REPO
from hack.needs import Need, Target, told

HERE = Need("tea", lambda: True, "boil water")
GONE = Need("milk", lambda: False, "buy milk")
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
    ],
)
def test_what_is_missing_comes_with_the_next_step(target: Target, lines: list[str] | None, works: bool) -> None:
    said, can = told("x", target)
    assert can is works
    assert said == lines if lines else len(said) == 3 and "buy milk" in said[1] and "ask next door" in said[2]


def test_targets_with_needs_say_them_before_they_start() -> None:
    rules = re.findall(r"^([a-z0-9-]+):[^\n]*\n((?:\t.*\n)+)", (REPO / "Makefile").read_text(), re.MULTILINE)
    first = {name: body.strip().splitlines()[0] for name, body in rules}
    for name in needs.TARGETS:
        assert first[name].strip() == f"@python -m hack.needs {name}", f"make {name} does not say first what it needs"


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert needs.main(["tea"]) == 2
    assert "tea: name one of test, lint" in capsys.readouterr().err
