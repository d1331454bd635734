"""How many steps a script will make in all, by its epochs and the length of its data: what an ETA is made of. Pure."""

from __future__ import annotations

CHANGE = 0.01
"""Part by which an estimate has changed before it is told again."""


class Totals:
    """Steps of a loop over `ps.epochs`. The first epoch is estimated by its data, the others by the one before."""

    def __init__(self) -> None:
        self.by_script = False
        """The script tells the number itself."""
        self._epochs: int | None = None
        self._epoch = self._began = 0
        self._of_an_epoch: float | None = None
        self._rounds: int | None = 0
        """Batches of this worker in the epoch's passes so far; None: a pass has no length."""
        self._skipped = self._given = 0
        """Batches before the place where a restart has gone on, and those given since."""
        self._told: float | None = None

    def begin_epoch(self, epochs: int | None, epoch: int, clock: int) -> None:
        """Epoch number `epoch` of `epochs` begins, or goes on after a restart. `clock`: steps that this worker has made."""
        follows = epochs == self._epochs and epoch == self._epoch + 1
        self._of_an_epoch = float(clock - self._began) if follows and clock > self._began and not self._skipped else None
        self._epochs, self._epoch, self._began = epochs, epoch, clock
        self._rounds, self._skipped, self._given = 0, 0, 0

    def begin_pass(self, rounds: int | None, place: int) -> None:
        """A pass over so many batches of this worker begins, or goes on at its batch `place`."""
        self._rounds = None if rounds is None or self._rounds is None else self._rounds + rounds
        self._skipped += place

    def give(self) -> None:
        """The script is given a batch."""
        self._given += 1

    def total(self, clock: int) -> int | None:
        """Steps in all; None: not known yet, or never."""
        if not self._epochs:
            return None
        of_an_epoch, before = self._of_an_epoch, float(self._began)
        if of_an_epoch is None:
            made = clock - self._began
            if not self._rounds or not self._given or not made:
                return None
            steps = made / self._given  # a step may take several batches
            of_an_epoch, before = self._rounds * steps, self._began - self._skipped * steps
        return max(clock, round(before + (self._epochs - self._epoch) * of_an_epoch))

    def news(self, clock: int) -> int | None:
        """The total, if it is another than was told last."""
        if self.by_script or (found := self.total(clock)) is None:
            return None
        least = 0.0 if clock == self._began else CHANGE  # at an epoch's beginning it is known
        if self._told is not None and abs(found - self._told) <= least * self._told:
            return None
        self._told = found
        return found
