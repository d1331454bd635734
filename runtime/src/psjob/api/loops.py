"""Where a script stands in its loops over `ps.epochs`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob.process.errors import Refused


class Loops:
    """Loops are numbered in the order in which they begin, epochs from 0 in each.

    A restarted script begins the same loops again: those that were over are given nothing, the one that was under way goes on at its epoch.
    `passes` are how many passes over data had begun at some moment.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.under_way = -1
        """The loop that was asked last and is not over."""
        self._epoch = 0
        self._passes = 0
        """At the beginning of that epoch."""
        self._open: dict[int, Any] = {}
        """Passes that were open then, and where they were."""
        self._ends: list[int] = []
        """Passes at the end of each loop that is over."""
        self._kept_loop = -1
        self._kept_epoch = 0
        self._kept_passes = 0
        self._kept_ends: list[int] = []
        self._kept_open: dict[int, Any] = {}
        self.continued: list[tuple[int, int]] = []
        """Of `Places`, as a record of the epoch has it."""

    def begin(self, passes: int) -> int:
        """Number of the loop that begins now; those before it are over."""
        if self.under_way >= 0:
            self.end(self.under_way, passes)
        number = self.begun
        self.begun += 1
        return number

    def was_over(self, number: int) -> int | None:
        """Passes at the end of a loop that the record says is over, else None."""
        return self._kept_ends[number] if number < len(self._kept_ends) else None

    def was_at(self, number: int) -> tuple[int, int] | None:
        """Where this loop goes on: its epoch, and the passes at that epoch's beginning; None if it begins at its beginning."""
        return (self._kept_epoch, self._kept_passes) if number == self._kept_loop else None

    @property
    def kept_open(self) -> Mapping[int, Any]:
        """Passes that were open at the beginning of the epoch that `load` has found, and where."""
        return self._kept_open

    def give(self, number: int, epoch: int, passes: int, open_yet: Mapping[int, Any]) -> None:
        """The script is given this epoch of a loop. `passes` had begun by then, and those in `open_yet` are open."""
        self.under_way, self._epoch, self._passes, self._open = number, epoch, passes, dict(open_yet)

    def end(self, number: int, passes: int) -> None:
        """The loop is over, or left."""
        if number < len(self._ends):
            return
        self._ends += [passes] * (number + 1 - len(self._ends))
        self.under_way = -1

    def state(self, continued: Sequence[tuple[int, int]] = ()) -> dict[str, Any] | None:
        """For a resume record, with what `Places` calls continued; None for a script without such loops."""
        if not self.begun:
            return None
        return {
            "loop": self.under_way,
            "epoch": self._epoch,
            "passes": self._passes,
            "open": [[number, dict(place)] for number, place in self._open.items()],
            "ends": list(self._ends),
            "continued": [list(each) for each in continued],
        }

    @property
    def at_epoch(self) -> dict[str, Any]:
        """Where the script was in its data at the beginning of the epoch that `load` has found, as `Places.load` takes it."""
        return {"begun": self._kept_passes, "asking": -1, "open": list(self._kept_open.items()), "behind": []}

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first loop: go on from what `state` gave. Raises Refused on anything else."""
        try:
            self._kept_loop, self._kept_epoch, self._kept_passes = int(state["loop"]), int(state["epoch"]), int(state["passes"])
            self._kept_ends = [int(passes) for passes in state["ends"]]
            self.continued = [(int(new), int(number)) for new, number in state["continued"]]
            self._kept_open = {int(number): dict(place) for number, place in state["open"]}
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the epochs is not in shape: {error!r}") from None
