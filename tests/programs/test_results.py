"""The results that docs/programs.md shows are of the programs of the table."""

from __future__ import annotations

import pytest

from tests.programs import page
from tests.programs.packages import version
from tests.programs.running import table


def test_results_are_of_this_table() -> None:
    """The page cannot say more, or other things, than the table: `python -m tests.programs NAME` runs what differs."""
    results = page.kept()
    assert results.keys() <= table().keys()
    for name, result in results.items():
        program = table()[name]
        assert (result["package"], result["version"], result["source"]) == (program.package, version(program.package), program.source), name
        assert {"sync"} <= result["modes"].keys() <= set(page.MODES), name
        for mode, said in result["modes"].items():
            assert bool(said) == bool(program.wrong_in(mode)), f"{name}: {mode}: {said!r}"


def _lines(own: bool) -> None:
    for name, program in table().items():
        if program.own is own and name in page.kept():
            assert page.kept()[name]["lines"] == program.lines() <= 5, name


def test_results_have_the_lines_that_change() -> None:
    _lines(own=True)


@pytest.mark.soak
def test_results_have_the_lines_that_change_in_fetched_programs() -> None:
    _lines(own=False)


def test_most_programs_are_right_in_sync_and_after_kills() -> None:
    """Of the versions that are pinned: a page of other versions would be of other programs."""
    right = [
        one for one in page.kept().values() if page.is_right(one, ("sync", "shard", "worker")) and one["version"] == version(one["package"])
    ]
    assert len(right) >= 25
    assert len({one["package"] for one in right}) >= 10
    assert sum(one["lines"] <= page.FEW for one in right) >= 20


def test_in_async_a_program_trains_or_says_why_not() -> None:
    said = {name: one["modes"]["async"] for name, one in page.kept().items()}
    assert {name: each for name, each in said.items() if each and not each.startswith("refused: ")} == {}
