"""What tests may cost, and which rotating tests a run takes (`hack.testing.budget`, `hack.testing.slices`)."""

from __future__ import annotations

import pytest

from hack.testing import cost, slices
from hack.testing.budget import Row, judged, lacking, read, slow

ROW = Row(tests=10, seconds=10.0, cap=2.0)


def breaches(costs: dict[str, float], row: Row = ROW) -> list[str]:
    return judged(costs, {"tests/unit": row})[1]


def test_within_the_budget_there_is_nothing_to_say_but_the_figures() -> None:
    lines, found = judged({"tests/unit/test_a.py::test_b": 2.1, "tests/unit/test_a.py::test_c": 0.5}, {"tests/unit": ROW})
    assert found == []
    assert lines == ["tests/unit: 2 tests, 2.6 s of 10 tests, 10 s"]


def test_more_tests_than_allowed_are_told() -> None:
    assert breaches({f"tests/unit/test_a.py::test_{index}": 0.1 for index in range(11)}) == []
    (sentence,) = breaches({f"tests/unit/test_a.py::test_{index}": 0.1 for index in range(12)})
    assert sentence.startswith("tests/unit has 12 tests, 10 are allowed")


def test_more_processor_time_than_allowed_is_told() -> None:
    costs = {f"tests/unit/test_a.py::test_{index}": 1.4 for index in range(8)}
    (sentence,) = breaches(costs)
    assert sentence.startswith("the tests of tests/unit cost 11.2 s of processor time, 10.0 are allowed")


def test_one_test_above_the_cap_is_named() -> None:
    (sentence,) = breaches({"tests/unit/test_a.py::test_b": 2.3})
    assert sentence == "tests/unit/test_a.py::test_b costs 2.3 s of processor time, the cap of tests/unit is 2 s a test"


def test_a_slower_processor_is_allowed_more_and_a_faster_one_no_less() -> None:
    assert slow([1.5, 2.5]) == 2.0 and slow([0.5, 0.7]) == 1.0 and slow([]) == 1.0
    assert 0.05 < cost.slowness() < 50


def test_a_folder_without_a_row_is_told() -> None:
    (sentence,) = breaches({"tests/new/test_a.py::test_b": 0.1})
    assert sentence.startswith("tests/new has no row in tests/budget.toml")


def test_a_whole_run_that_has_lost_tests_is_told() -> None:
    costs = {f"tests/unit/test_a.py::test_{index}": 0.1 for index in range(5)}
    rows = {"tests/unit": ROW, "tests/live": ROW, "*": ROW}
    (sentence,) = lacking(costs, rows)
    assert sentence.startswith("tests/live has 0 tests, fewer than half of the 10 of its row")
    costs.popitem()
    assert len(lacking(costs, rows)) == 2


def test_the_budget_of_the_repository_is_read() -> None:
    tiers = read()
    assert set(tiers) == {"unit", "test", "rest"}
    assert set(tiers["unit"]) <= set(tiers["test"])


def test_six_runs_after_different_remainders_take_every_rotating_test() -> None:
    names = [f"tests/live/test_a.py::test_b[{index}]" for index in range(600)]
    drawn = [{name for name in names if slices.slice_of(name) == slices.current(commits)} for commits in range(100, 106)]
    assert set().union(*drawn) == set(names)
    assert sum(map(len, drawn)) == len(names)
    assert all(60 <= len(part) <= 140 for part in drawn)


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("runtime/src/psjob/wire/frame.py", "psjob.wire.frame"),
        ("operator/src/psjob_operator/plan/__init__.py", "psjob_operator.plan"),
        ("tests/live/test_tcp.py", "tests.live.test_tcp"),
        ("docs/cli.md", None),
    ],
)
def test_a_file_is_known_by_its_module(path: str, module: str | None) -> None:
    assert slices.module_of(path) == module


def test_a_change_concerns_tests_that_import_it_themselves_or_by_helpers_of_the_tests() -> None:
    imports = {
        "tests.live.test_direct": {"psjob.wire.frame"},
        "tests.live.helper": {"psjob.wire.frame"},
        "tests.live.test_by_helper": {"tests.live.helper"},
        "tests.live.test_other": {"psjob.wire.tcp"},
    }
    assert slices.importers(["psjob.wire.frame"], imports) == {"tests.live.test_direct", "tests.live.test_by_helper"}
    assert slices.importers(["tests.live.test_other"], imports) == {"tests.live.test_other"}
    assert slices.importers([], imports) == set()
