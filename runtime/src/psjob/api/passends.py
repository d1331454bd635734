"""What variables held where passes over data were over: a restarted script runs the lines behind these passes again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from psjob.api import values

NEWEST: Final = 32
"""Passes of one place in the script of which numbers are kept."""
Found = dict[str, dict[str, Any]]
"""By function under way, and by name in it: `epoch`, `stopper.best`."""
Kept = Mapping[str, Mapping[str, Any]]
"""That of a record."""


class PassEnds:
    """By place in the script: all plain values as its last pass was over or left, and the numbers as each of its newest passes was."""

    def __init__(self) -> None:
        self._last: dict[str, Found] = {}
        self._numbers: dict[str, dict[int, Found]] = {}

    def note(self, site: str, number: int, found: Found, runs_again: bool) -> None:
        """Pass `number` is over, or left. `runs_again`: so do the lines behind it after a restart."""
        self._last[site] = {function: {name: values.copied(value) for name, value in those.items()} for function, those in found.items()}
        ends = self._numbers.setdefault(site, {})
        if runs_again:
            ends[number] = {function: _numbers(those) for function, those in found.items()}
        if len(ends) > NEWEST:
            del ends[min(ends)]

    def take(self, site: str, number: int, state: Mapping[str, Any], plain: Kept) -> Found:
        """What the lines behind pass `number` of this place find, by what a record holds: its `state`, and the script's `plain` values."""
        last = self._last.setdefault(site, over(plain, state.get("ended", {}).get(site, {})))
        ends = self._numbers.setdefault(site, {int(each): found for each, found in state.get("ends", {}).get(site, [])})
        if not ends:
            return last
        return over(last, ends.get(number, ends[min(ends)] if number < min(ends) else {}))

    def state(self, changed: Found, held: Callable[[Found], Found]) -> dict[str, Any]:
        """For a record. Values that are as in `changed`, the script's own of now, are left out."""
        return {
            "ended": {site: held(values.changed(found, changed)) for site, found in self._last.items()},
            "ends": {site: [[number, found] for number, found in ends.items()] for site, ends in self._numbers.items()},
        }


def over(found: Kept, newer: Kept) -> Found:
    """The values of both; those of `newer` where both have one."""
    return {function: {**found.get(function, {}), **newer.get(function, {})} for function in {*found, *newer}}


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if type(value) in (int, float, bool)}
