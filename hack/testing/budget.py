"""A pytest plugin: what tests may cost, so that a tier does not grow unseen (`tests/budget.toml`).

Cost is processor time, of a test and of what it starts, on the machine of the budgets. On another machine, and where two threads share a
core, a processor is slower: runners measure by how much, and costs are divided by that. With `--budget`, a run fails when a folder has 10 %
more tests or costs 50 % more than its row says, or when one test costs 50 % more than the cap of its folder.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pytest

from hack.testing.runners import CPU, SLOWNESS

FILE = Path(__file__).resolve().parents[2] / "tests" / "budget.toml"
TOLERANCE = 1.1
"""Of the number of tests, which is the same in each run."""
COST_TOLERANCE = 1.5
"""Of processor time. What memory costs is not in `cost.slowness`: the same tests took from 160 to 320 s on machines of one kind."""
FEWEST = 0.5
"""Of the tests that its row allows, so many at least are in a folder: fewer, and a mark or a glob has lost some."""


@dataclass(frozen=True)
class Row:
    """Of one folder: tests, their processor seconds together, and of one of them at most."""

    tests: int
    seconds: float
    cap: float


def judged(costs: Mapping[str, float], rows: Mapping[str, Row]) -> tuple[list[str], list[str]]:
    """A line for each folder with its figures, and a sentence for each breach. `costs` are processor seconds by node id."""
    folders: dict[str, dict[str, float]] = defaultdict(dict)
    for nodeid, seconds in costs.items():
        folders[_folder(nodeid)][nodeid] = seconds
    lines, breaches = [], []
    for folder in sorted(folders):
        found, row = folders[folder], rows.get(folder, rows.get("*"))
        total = sum(found.values())
        limits = f" of {row.tests} tests, {row.seconds:.0f} s" if row else ""
        lines.append(f"{folder}: {len(found)} tests, {total:.1f} s{limits}")
        if row is None:
            breaches.append(f"{folder} has no row in tests/budget.toml; add one with what its tests cost")
            continue
        if len(found) > row.tests * TOLERANCE:
            breaches.append(
                f"{folder} has {len(found)} tests, {row.tests} are allowed; leave rows to `rotating`, or raise the budget and say why"
            )
        if total > row.seconds * COST_TOLERANCE:
            breaches.append(
                f"the tests of {folder} cost {total:.1f} s of processor time, {row.seconds:.1f} are allowed; make them cheaper, "
                "move some to `rotating`, or raise the budget and say why"
            )
        above = {nodeid: seconds for nodeid, seconds in found.items() if seconds > row.cap * COST_TOLERANCE}
        breaches += [
            f"{nodeid} costs {seconds:.1f} s of processor time, the cap of {folder} is {row.cap:g} s a test"
            for nodeid, seconds in sorted(above.items(), key=lambda item: -item[1])
        ]
    return lines, breaches


def slow(told: Sequence[float]) -> float:
    """By what costs are divided: the mean of what runners have measured. A processor that is faster saves nothing."""
    return max(1.0, fmean(told)) if told else 1.0


def _folder(nodeid: str) -> str:
    """Of a row: `tests/unit` of `tests/unit/test_plan.py::test_it`."""
    return "/".join(nodeid.split("/")[:2])


def lacking(costs: Mapping[str, float], rows: Mapping[str, Row]) -> list[str]:
    """A sentence for each folder with a row of its own of which a whole run had too few tests."""
    found = Counter(map(_folder, costs))
    return [
        f"{folder} has {found[folder]} tests, fewer than half of the {row.tests} of its row in tests/budget.toml; find what lost them, or "
        "lower the row and say why"
        for folder, row in rows.items()
        if folder != "*" and found[folder] < FEWEST * row.tests
    ]


def read(file: Path = FILE) -> dict[str, dict[str, Row]]:
    """The rows by tier and folder."""
    tiers = tomllib.loads(file.read_text())
    return {tier: {folder: Row(**row) for folder, row in rows.items()} for tier, rows in tiers.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget")
    group.addoption("--budget", metavar="TIER", help="fail where tests cost more than tests/budget.toml allows this tier")
    group.addoption("--costs", type=int, default=0, metavar="N", help="with --runners: show the N tests that cost most processor time")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    tier, costs = session.config.getoption("budget"), session.config.stash.get(CPU, {})
    if tier is None:
        return
    if not costs:
        session.config.stash[TOLD] = (["not checked: tests are measured with --runners only"], [])
        return
    rows, slower = read()[tier], slow(session.config.stash.get(SLOWNESS, []))
    lines, breaches = judged({nodeid: seconds / slower for nodeid, seconds in costs.items()}, rows)
    if slower > 1:
        lines.insert(0, f"this processor is {slower:.2f} times as slow as that of the budgets; costs are divided by that")
    some = ("slice", "lf", "deselect")
    whole = not session.config.option.keyword and all(session.config.getoption(word, None) in (None, False) for word in some)
    breaches += lacking(costs, rows) if whole else []
    session.config.stash[TOLD] = (lines, breaches)
    if breaches and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


TOLD = pytest.StashKey[tuple[list[str], list[str]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count, costs = terminalreporter.config.getoption("costs"), terminalreporter.config.stash.get(CPU, {})
    if count and costs:
        terminalreporter.section("most processor time")
        for nodeid, seconds in sorted(costs.items(), key=lambda item: -item[1])[:count]:
            terminalreporter.line(f"{seconds:8.2f} s {nodeid}")
    lines, breaches = terminalreporter.config.stash.get(TOLD, ([], []))
    if lines:
        terminalreporter.section("processor time")
        for line in lines:
            terminalreporter.line(line)
    if breaches:
        terminalreporter.section("over the budget")
        for line in breaches:
            terminalreporter.line(line)
