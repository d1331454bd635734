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
