"""What tests may cost, and which rotating tests a run takes (`hack.testing.budget`, `hack.testing.slices`).

- Which test a runner takes next (`hack.testing.turns`).
- Faults that are put into a copy of the sources: how they are drawn and named, and that the tests notice them.
- Edits of programs by others: lines take the place of others, and are counted.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from hack.mutants.byhand import BY_HAND, ByHand
from hack.mutants.faults import drawn, faults, lines
from hack.mutants.idle import idle
from hack.mutants.nearby import distances, module_of
from hack.mutants.running import FIRST, portions
from hack.testing import cost, slices
from hack.testing.budget import Row, judged, lacking, read, slow
from hack.testing.turns import Load, Test, Turns
from tests.programs.edits import SEED, changed, edited, seeded

ROW = Row(tests=10, seconds=10.0, cap=2.0)


def breaches(costs: dict[str, float], row: Row = ROW) -> list[str]:
    return judged(costs, {"tests/unit": row})[1]


def test_within_the_budget_there_is_nothing_to_say_but_the_figures() -> None:
    lines, found = judged({"tests/unit/test_a.py::test_b": 2.1, "tests/unit/test_a.py::test_c": 0.5}, {"tests/unit": ROW})
    assert found == []
    assert lines == ["tests/unit: 2 tests, 2.6 s of 10 tests, 10 s"]


@pytest.mark.parametrize(("folder", "tests", "each", "sentence"), [
    ("unit", 11, 0.1, ""),
    ("unit", 12, 0.1, "tests/unit has 12 tests, 10 are allowed"),
    ("unit", 8, 1.8, ""),
    ("unit", 8, 1.9, "the tests of tests/unit cost 15.2 s of processor time, 10.0 are allowed"),
    ("unit", 1, 2.9, ""),
    ("unit", 1, 3.1, "tests/unit/test_a.py::test_0 costs 3.1 s of processor time, the cap of tests/unit is 2 s a test"),
    ("new", 1, 0.1, "tests/new has no row in tests/budget.toml"),
])  # fmt: skip
def test_what_is_above_the_budget_is_told(folder: str, tests: int, each: float, sentence: str) -> None:
    found = breaches({f"tests/{folder}/test_a.py::test_{index}": each for index in range(tests)})
    assert len(found) == bool(sentence) and all(one.startswith(sentence) for one in found)


def test_a_slower_processor_is_allowed_more_and_a_faster_one_no_less() -> None:
    assert slow([1.5, 2.5]) == 2.0 and slow([0.5, 0.7]) == 1.0 and slow([]) == 1.0
    assert 0.05 < cost.slowness() < 50


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
        ("tests/live/test_stream_pool.py", "tests.live.test_stream_pool"),
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


LIGHT = Load(cores=1 / 3, memory=0.5)
WHOLE = Load(cores=1.0, memory=0.5)
ROOM = Load(cores=2.0, memory=8.0)


def of(*loads: Load) -> list[Test]:
    return [Test("a", load) for load in loads]


def begun(turns: Turns, runner: int) -> int | None:
    """The test that this runner begins where no other is idle."""
    return dict(turns.begin([runner])).get(runner)


def drained(turns: Turns, runners: int) -> list[int]:
    """All tests in the order in which they start, where each takes equally long."""
    order: list[int] = []
    while True:
        taken = turns.begin(range(runners))
        if not taken:
            return order
        order += [index for _, index in taken]
        for runner, _ in taken:
            turns.end(runner)


@pytest.mark.parametrize("seed", range(20))
def test_each_test_runs_once_whoever_ends_first(seed: int) -> None:
    draw = random.Random(seed)
    loads = [Load(draw.choice([0.3, 1.0, 2.0]), 0.1, draw.random(), alone=draw.random() < 0.1) for _ in range(draw.randint(1, 60))]
    turns = Turns([Test(f"file-{index // 4}", load) for index, load in enumerate(loads)], 4, ROOM)
    running: dict[int, int] = {}
    order: list[int] = []
    while turns.left or running:
        for runner, index in turns.begin(set(range(4)).difference(running)):
            running[runner] = index
            order.append(index)
        asked = [loads[other] for other in running.values()]
        assert len(asked) == 1 or sum(load.cores for load in asked) <= ROOM.cores + 1e-6
        assert len(asked) == 1 or not any(load.alone for load in asked)
        assert running, "something always runs while tests are left"
        ended = draw.choice(sorted(running))
        del running[ended]
        turns.end(ended)
    assert sorted(order) == list(range(len(loads)))


def test_tests_that_wait_run_beside_each_other_as_far_as_cores_allow() -> None:
    turns = Turns(of(*[LIGHT] * 12), 12, ROOM)
    assert len(turns.begin(range(12))) == 6


def test_light_tests_do_not_keep_a_heavy_one_out() -> None:
    heavy = Test("heavy", Load(2.0, 0.1, seconds=3.0))
    turns = Turns([*of(*[LIGHT] * 9), heavy], 4, ROOM)
    running = [runner for runner in (0, 1, 2) if begun(turns, runner) is not None]
    assert begun(turns, 3) is None
    started = []
    for runner in running * 3:
        turns.end(runner)
        started += [index for _, index in turns.begin((runner, 3))]
    assert 9 in started[:4], "it starts when the tests that ran before it have ended"


def test_memory_bounds_what_runs_at_once() -> None:
    turns = Turns(of(*[Load(0.1, 3.0)] * 8), 8, ROOM)
    assert len(turns.begin(range(8))) == 2


def test_a_test_above_the_room_runs_when_nothing_else_does() -> None:
    turns = Turns(of(Load(9.0, 99.0), WHOLE), 1, ROOM)
    assert begun(turns, 0) == 0
    turns.end(0)
    assert begun(turns, 0) == 1


def test_what_runs_alone_comes_last_and_has_the_machine() -> None:
    turns = Turns([Test("a", Load(0.1, 0.1, alone=True)), *of(LIGHT, LIGHT)], 2, ROOM)
    first, second = begun(turns, 0), begun(turns, 1)
    assert {first, second} == {1, 2}
    turns.end(0)
    assert begun(turns, 0) is None
    turns.end(1)
    assert begun(turns, 0) == 0
    assert begun(turns, 1) is None


def test_tests_of_one_file_stay_with_one_runner() -> None:
    """Fixtures of a module are made once, where stretches end between files."""
    known = [Test(f"file-{index // 5}", WHOLE) for index in range(20)]
    turns = Turns(known, 2, ROOM)
    order: dict[int, list[str]] = {0: [], 1: []}
    while turns.left:
        for runner in range(2):
            if (index := begun(turns, runner)) is not None:
                order[runner].append(known[index].file)
                turns.end(runner)
    assert not set(order[0]) & set(order[1])


def test_an_idle_runner_takes_the_later_half_of_the_largest_stretch_between_files() -> None:
    known = [Test("long", Load(0.5, 0.1, 100.0)), *[Test(f"short-{index // 2}", Load(0.5, 0.1, 1.0)) for index in range(8)]]
    turns = Turns(known, 2, ROOM)
    assert begun(turns, 0) == 0
    taken = []
    while (index := begun(turns, 1)) is not None:
        taken.append(index)
        turns.end(1)
    assert sorted(taken) == list(range(1, 9))


@pytest.mark.parametrize("runners", range(1, 7))
def test_a_whole_file_is_never_divided(runners: int) -> None:
    known = [Test(f"file-{index // 5}", Load(0.1, 0.1, float(index % 7)), whole=True) for index in range(23)]
    turns = Turns(known, runners, ROOM)
    ran: dict[str, set[int]] = {}
    count = 0
    for turn in range(1000):
        runner = turn * 5 % runners
        if (index := begun(turns, runner)) is not None:
            ran.setdefault(known[index].file, set()).add(runner)
            count += 1
            turns.end(runner)
    assert count == len(known)
    assert all(len(by) == 1 for by in ran.values())


def test_after_a_drop_nothing_is_handed_out() -> None:
    turns = Turns(of(*[WHOLE] * 4), 2, ROOM)
    assert begun(turns, 0) == 0
    assert sorted(turns.drop()) == [1, 2, 3]
    turns.end(0)
    assert begun(turns, 0) is None and turns.left == 0


def test_all_of_no_tests() -> None:
    assert drained(Turns([], 2, ROOM), 2) == []


ROOT = Path(__file__).parents[2]
SOURCE = '''"""Text with 1 + 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    x = 1


def due(self, now: float, more: int = 3) -> bool:
    """Text."""
    if not self.on and (now - self.since) >= 5:
        raise ValueError(f"{now + 1}")
    self.count += 1
    self.tell("é", True)
    self.log("no fault")
    return self.ok
'''


def test_each_fault_changes_one_expression_or_statement() -> None:
    made = [(fault.kind, *(text.strip() for text in lines(SOURCE.encode(), fault))) for fault in faults("a.py", SOURCE.encode())]
    test = "if not self.on and (now - self.since) >= 5:"
    head = "def due(self, now: float, more: int = 3) -> bool:"
    assert made == [
        ("constant", head, head.replace("3", "2")),
        ("constant", head, head.replace("3", "4")),
        ("not", test, test.replace("not ", "")),
        ("and or", test, test.replace("and", "or")),
        ("plus minus", test, test.replace("-", "+")),
        ("comparison", test, test.replace(">=", "<")),
        ("comparison", test, test.replace(">=", ">")),
        ("constant", test, test.replace("5", "4")),
        ("constant", test, test.replace("5", "6")),
        ("statement", "self.count += 1", "pass"),
        ("plus minus", "self.count += 1", "self.count -= 1"),
        ("constant", "self.count += 1", "self.count += 0"),
        ("constant", "self.count += 1", "self.count += 2"),
        ("statement", 'self.tell("é", True)', "pass"),
        ("constant", 'self.tell("é", True)', 'self.tell("é", False)'),
        ("return", "return self.ok", "return None"),
    ]


def test_nearest_tests_are_collected_first() -> None:
    names = [str(number) for number in range(3 * FIRST + 1)]
    groups = portions(names)
    assert [len(group) for group in groups] == [FIRST, 2 * FIRST, 1]
    assert [name for group in groups for name in group] == names
    assert portions([]) == []


def test_a_draw_of_a_seed_stays_when_lines_come_above() -> None:
    def named(source: str, seed: int) -> list[tuple[str, str]]:
        return [lines(source.encode(), fault) for fault in drawn({"a.py": source.encode()}, seed, 5)]

    assert named(SOURCE, 1) == named(SOURCE.replace("from typing", "\n\nfrom typing"), 1) != named(SOURCE, 2)


def test_the_nearest_tests_come_first() -> None:
    importers = {"psjob.a": ["psjob.b", "tests.unit.test_a"], "psjob.b": ["tests.unit.world"], "tests.unit.world": ["tests.unit.test_b"]}
    found = distances(importers, "psjob.a")
    assert found == {"psjob.a": 0, "psjob.b": 1, "tests.unit.test_a": 1, "tests.unit.world": 2, "tests.unit.test_b": 2}
    assert module_of("runtime/src/psjob/modes/__init__.py") == "psjob.modes"


@pytest.mark.parametrize("fault", BY_HAND, ids=lambda fault: fault.what)
def test_a_fault_by_hand_fits_its_file_and_its_tests_are_there(fault: ByHand) -> None:
    assert fault.applied(ROOT) != (ROOT / fault.path).read_bytes()
    assert all((ROOT / test.partition("::")[0]).is_file() for test in fault.tests)


def test_a_test_that_asserts_nothing_is_named() -> None:
    helper = "def checked(x):\n    assert x\n"
    tests = (
        "def test_a():\n    checked(1)\n\ndef test_b():\n    print(1)\n\ndef test_c():\n    with pytest.raises(ValueError):\n        f()\n"
    )
    assert idle({"tests/unit/test_x.py": tests, "tests/helper.py": helper}) == ["tests/unit/test_x.py::test_b"]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("words", [["--table"], ["--random", "300", "--seed", "2", "--ci"]], ids=["by hand", "drawn"])
def test_every_fault_is_noticed(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "hack.mutants", *words], cwd=ROOT, capture_output=True, text=True, timeout=7100)
    print(done.stdout[-20_000:])
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"


PROGRAM = "import torch\nmodel = 1\noptimizer = 2\nfor batch in loader:\n    pass\n"


def test_lines_take_the_place_of_others() -> None:
    edits = [("optimizer = 2\n", "optimizer = 2\nimport psjob as ps\n"), ("in loader:", "in ps.shard(loader):")]
    assert edited(PROGRAM, edits, "it") == PROGRAM.replace("2\n", "2\nimport psjob as ps\n").replace("loader", "ps.shard(loader)")


@pytest.mark.parametrize("old", ["optimiser", "="])
def test_a_line_that_is_not_there_once_is_named(old: str) -> None:
    with pytest.raises(ValueError, match=rf"it has '{old}' [02] times and not once"):
        edited(PROGRAM, [(old, "")], "it")


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("a\nb\nc\n", "a\nb\nc\n", 0),
        ("a\nb\nc\n", "a\nx\nb\nc\n", 1),
        ("a\nb\nc\n", "a\nB\nc\n", 1),
        ("a\nb\nc\n", "a\nc\n", 1),
        ("a\nb\nc\n", "a\nx\ny\nc\n", 2),
        ("a\na\na\n", "b\na\na\na\nb\n", 2),
    ],
)
def test_changed_lines_are_counted(before: str, after: str, lines: int) -> None:
    assert changed(before, after) == lines


def test_a_seed_comes_first_and_after_what_must_come_before() -> None:
    assert seeded("import torch\n") == SEED + "import torch\n"
    assert (
        seeded('"""It."""\nfrom __future__ import annotations\nx = 1\n') == f'"""It."""\nfrom __future__ import annotations\n{SEED}x = 1\n'
    )
