"""Faults that are put into a copy of the sources: how they are drawn and named, and that the tests notice them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hack.mutants.byhand import BY_HAND, ByHand
from hack.mutants.faults import drawn, faults, lines
from hack.mutants.idle import idle
from hack.mutants.nearby import distances, module_of
from hack.mutants.running import FIRST, portions

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
