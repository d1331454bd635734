"""The line above a comparison says what its numbers say, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_client.compare.outcome import Comparison, SideOutcome, verdict_sentences


def side(title: str, *losses: float, seconds: float = 1.0, diverged: bool = False, repeats: int = 1) -> SideOutcome:
    """A side that reports these losses, `seconds` after one another. Each is held so long that the smoothed loss is there too."""
    curve = [(seconds * (30 * at + more), float(30 * at + more), loss) for at, loss in enumerate(losses) for more in range(30)]
    final = {"loss": losses[-1]} if losses else {}
    curves = {"loss": curve} if losses else {}
    return SideOutcome(title, "", "Complete", 1.0, 1.0, curves, final, diverged=diverged, repeats=repeats)


def of(*sides: SideOutcome, unit: str = "s", wanted: float | None = None) -> str:
    return verdict_sentences(Comparison("job", unit, {}, "", sides, wanted))


FAST, SLOW, BAD = side("fast", 2.0, 1.0), side("slow", 2.0, 1.0, seconds=2.0), side("bad", 1.0, 5.0, diverged=True)


def test_who_was_first_and_by_how_much() -> None:
    assert re.fullmatch(r"First at loss 1\b.*: fast, after \d+ s; then slow \d+ s \(2 times as long\)\.", of(SLOW, FAST))
    assert of(SLOW, FAST) == of(FAST, SLOW), "whoever was trained first"


@pytest.mark.parametrize(
    ("sides", "wanted", "words"),
    [
        ((FAST,), None, ""),
        ((BAD, replace(BAD, title="worse")), None, "No side has learned: in none of them did the smoothed loss fall."),
        ((side("a"), side("b")), None, "No side reported a loss twice, so that none can be said to be better."),
        ((FAST, BAD), None, r"Only fast came down to loss 1, after \d+ s. bad diverged."),
        ((FAST, SLOW), 0.5, "No side came down to loss 0.5."),
        ((FAST, replace(FAST, title="twin")), None, r"fast and twin came down to loss 1 at the same time: \d+ s."),
    ],
)
def test_each_way_it_can_end(sides: tuple[SideOutcome, ...], wanted: float | None, words: str) -> None:
    assert re.fullmatch(words, of(*sides, wanted=wanted)), of(*sides, wanted=wanted)


def test_a_small_difference_of_single_runs_is_called_one() -> None:
    near = side("near", 2.0, 1.0, seconds=1.05)
    assert "too close" in of(FAST, near)
    assert "too close" not in of(FAST, SLOW) and "too close" not in of(FAST, near, unit="mean steps")
    assert "too close" not in of(replace(FAST, repeats=3), replace(near, repeats=3))


def test_the_lowest_last_loss_is_named_only_if_one_has_it() -> None:
    deep = side("deep", 2.0, 1.0, 0.5, seconds=3.0)
    assert "deep ended at the lowest loss, 0.5." in of(FAST, deep)
    assert "lowest" not in of(FAST, SLOW)


LOSSES = st.lists(st.floats(0.01, 9), min_size=2, max_size=4)


@given(st.lists(st.tuples(LOSSES, st.floats(0.1, 10)), min_size=2, max_size=6))
def test_it_is_true_of_the_numbers(given: list[tuple[list[float], float]]) -> None:
    sides = [side(f"s{number}", *losses, seconds=seconds) for number, (losses, seconds) in enumerate(given)]
    found = Comparison("job", "s", {}, "", sides)
    times = {one.title: at for one in sides if (at := found.time_to(one)) is not None}
    words = verdict_sentences(found)
    if (first := re.match(r"First at loss \S+: (.+?), after", words)) is not None:
        named = set(re.findall(r"s\d+", first[1]))
        assert named <= {title for title, at in times.items() if at == min(times.values())} and len(times) > 1
    elif words.startswith("Only "):
        assert list(times) == [words.split()[1]]
    else:
        assert len(set(times.values())) <= 1
    if (lowest := re.search(r"(s\d+) (?:also )?ended at the lowest loss", words)) is not None:
        learned = {one.title: one.final["loss"] for one in sides if one.verdict == "learned"}
        assert learned[lowest[1]] == min(learned.values())
