"""What a worker has asked of one shard and is owed, and what of it goes out again to a shard that comes back. Pure, and on the hot path."""

from __future__ import annotations

from collections.abc import Set

from psjob.modes import ServedMode
from psjob.wire.frame import Flag, Header, Kind


class Requests:
    """Of one shard."""

    def __init__(self) -> None:
        self.outstanding: dict[int, Header] = {}
        """Pushes and pulls that wait for their answer, by number; what they carry can be gathered again until then."""
        self.unsent = 0
        """Requests of the clock in hand that are still to be made."""
        self.acked = 0
        """Clocks whose pushes have all been answered."""
        self._number = 0
        self._clock = -1
        self._pushed: dict[int, Header] = {}
        """Every push of the newest clock, answered or not: a shard of a later attempt needs them all."""

    def number(self) -> int:
        """A number for a request."""
        self._number += 1
        return self._number

    def ask(self, header: Header) -> Header:
        """Note a request that is to be answered; the header with its number."""
        header = header._replace(request=self.number())
        self.outstanding[self._number] = header
        self.unsent -= 1
        if header.kind is not Kind.PULL:
            if header.clock != self._clock:
                self._clock, self._pushed = header.clock, {}
            self._pushed[self._number] = header
        return header

    def settle(self, number: int) -> bool:
        """A request is answered; is it the last one that was owed?"""
        request = self.outstanding.pop(number, None)
        if request is not None and not self.outstanding and not self.unsent and request.kind is not Kind.PULL:
            self.acked = request.clock + 1
        return not self.outstanding

    def attempt_rose(self, clock: int) -> None:
        """Another attempt of the shard has come, and the worker stands at `clock`.

        What the attempt before answered of the open clock is lost with it; without it this clock would never be whole.
        """
        if (self._clock == clock and self.unsent) or self._pushed.keys() & self.outstanding.keys():
            self.outstanding |= self._pushed

    def again(self, complete: int, opened: Set[int], mode: ServedMode, reduces: bool) -> list[Header]:
        """What goes out again to a shard that has `complete` clocks, and of the next one the blocks `opened`, in order of its number.

        A push that the shard has is only asked for: as a PULL, or for rows as a LOOKUP of none.
        """
        return [self._anew(old, complete, opened, mode, reduces) for _, old in sorted(self.outstanding.items())]

    @staticmethod
    def _anew(old: Header, complete: int, opened: Set[int], mode: ServedMode, reduces: bool) -> Header:
        taken = old.kind is not Kind.PULL and (old.clock < complete or (old.clock == complete and old.block in opened))
        if not taken:
            return old
        version = (0, mode.version_for(old.clock))
        if old.kind is Kind.ROW_PUSH:
            return old._replace(kind=Kind.LOOKUP, flags=Flag.NONE, block=0, info=0, version=version)
        return old._replace(kind=Kind.PULL, flags=Flag.STORE if reduces else Flag.NONE, version=version)
