"""Loops as people write them: from each of its records a started script makes the steps that the undisturbed one makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.tensors.restarted_scripts import restarts, run
from tests.tensors.scripts_of_people import LOOPS, LOST, PUT_BACK, REFUSED, SAYS, scripts

pytestmark = pytest.mark.usefixtures("small_heap_each")
"""What goes over an iterator is looked for in the whole heap."""


@pytest.mark.parametrize("name", LOOPS)
def test_a_restart_makes_the_same_steps(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, LOOPS[name])
    assert found.undisturbed.ending == "through" and len(found.undisturbed.steps) > 3
    assert not found.wrong, found.wrong[0]
    assert found.made > 5 and not found.refused


@pytest.mark.parametrize("name", ["a loop", "batches are left out", "zip", "an evaluation in the body, and one after it"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_given_batches_again_makes_the_same_steps(tmp_path: Path, name: str, rank: int) -> None:
    found = restarts(tmp_path, LOOPS[name], workers=2, rank=rank)
    assert not found.wrong, found.wrong[0]
    assert found.made > 5 and not found.refused


@pytest.mark.parametrize("name", PUT_BACK)
def test_a_count_that_the_script_keeps_somewhere_goes_on(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, PUT_BACK[name], most=3, depth=2)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong or found.undisturbed.ending
    assert found.made > 3 and not found.refused


@pytest.mark.parametrize("name", LOST)
def test_a_count_that_no_record_holds_is_refused(tmp_path: Path, name: str) -> None:
    """But for the place before the first step, where nothing has changed."""
    found = restarts(tmp_path, LOST[name], most=3, depth=1)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong or found.undisturbed.ending
    assert found.refused == 2 and found.made == 3
    assert "own" in run(tmp_path, LOST[name], found.undisturbed.records[4]).ending


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_a_restart_could_not_find_is_refused(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, REFUSED[name])
    assert not found.wrong, found.wrong[0]
    if name in SAYS:
        assert SAYS[name] in found.undisturbed.ending
    else:
        assert found.undisturbed.ending == "through" and found.refused


def test_an_else_of_a_loop_that_is_left_is_told(tmp_path: Path) -> None:
    body = """
for epoch in range(2):
    for batch in loader:
        step(batch)
        if epoch == 1:
            break
    else:
        note(epoch)
"""
    made = run(tmp_path, body)
    (line,) = [told for told in made.told if "`else`" in told]
    assert made.ending == "through" and line.startswith("line 13: this loop over the data is left, and has an `else`")


@pytest.mark.parametrize("cases", [pytest.param(5), pytest.param(2000, marks=(pytest.mark.soak, pytest.mark.timeout(7200)))])
def test_a_restart_of_a_generated_script_makes_the_same_steps_or_is_refused(tmp_path: Path, cases: int) -> None:
    through = 0

    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=cases < 100,
        phases=(Phase.generate,),
    )
    @given(scripts())
    def restart(body: str) -> None:
        nonlocal through
        found = restarts(tmp_path, body)
        assert not found.wrong, f"{found.wrong[0]}\n{body}"
        through += found.undisturbed.ending == "through"

    restart()
    assert through > cases // 3, "most scripts are no nonsense"
