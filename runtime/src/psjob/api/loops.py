"""Where a script stands in its loops over `ps.epochs`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from psjob.api.places import NOWHERE
from psjob.process.errors import Refused

AFTER: Final = -1
"""In place of an epoch: behind the loop, which is over."""


class Loops:
    """Loops are numbered in the order in which they begin, epochs from 0 in each.

    A restarted script begins the same loops again: those that were over are given nothing, the one that was under way goes on at its epoch.
    `passes` are how many passes over data had begun at some moment.
    """

    def __init__(self) -> None:
        self.begun = 0
        self._loop = -1
        self._epoch = AFTER
        """Of that loop, the one from which a restart goes on."""
        self.under_way = -1
        """The loop that was asked last and is not over; -1: none is."""
        self._at: Mapping[str, Any] = NOWHERE
        """Where `Places` were then."""
        self._ends: list[int] = []
        """Passes at the end of each loop that is over."""
        self._over = 0
        """So many of them were when that epoch began."""
        self._kept_loop = -1
        self._kept_epoch = AFTER
        self.kept_at: Mapping[str, Any] = NOWHERE
        """Where `Places` were at the beginning of the epoch that `load` has found."""
        self._kept_ends: list[int] = []

    def begin(self, passes: int) -> int:
        """Number of the loop that begins now; those before it are over."""
        if self.under_way >= 0:
            self._end(self.under_way, passes)
        number = self.begun
        self.begun += 1
        return number

    def was_over(self, number: int) -> int | None:
        """Passes at the end of a loop that the record says is over, else None."""
        return self._kept_ends[number] if number < len(self._kept_ends) else None

    def was_at(self, number: int) -> tuple[int, int] | None:
        """Where this loop goes on: its epoch, or AFTER, and the passes then; None if it begins at its beginning or was over before."""
        return (self._kept_epoch, int(self.kept_at["begun"])) if number == self._kept_loop else None

    def give(self, number: int, epoch: int, passes: int, at: Mapping[str, Any] | None) -> None:
        """The script is given this epoch of a loop, or none: AFTER.

        `at`: what `Places.begin_epoch` gives; None: a restart cannot go on here, and does from the beginning before.
        """
        self.under_way = number
        if epoch == AFTER:
            self.under_way = -1
            self._end(number, passes)
        if at is not None:
            self._loop, self._epoch, self._at, self._over = number, epoch, at, len(self._ends)

    def _end(self, number: int, passes: int) -> None:
        if number >= len(self._ends):
            self._ends += [passes] * (number + 1 - len(self._ends))

    @property
    def state(self) -> dict[str, Any] | None:
        """For a resume record; None for a script without such loops."""
        if not self.begun:
            return None
        return {"loop": self._loop, "epoch": self._epoch, "at": dict(self._at), "ends": self._ends[: self._over]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Before the first loop: go on from what `state` gave. Raises Refused on anything else."""
        try:
            self._kept_loop, self._kept_epoch, self.kept_at = int(state["loop"]), int(state["epoch"]), dict(state["at"])
            int(self.kept_at["begun"])
            self._kept_ends = [int(passes) for passes in state["ends"]]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"the resume record is damaged: its place in the epochs is not in shape: {error!r}") from None
