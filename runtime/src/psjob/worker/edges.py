"""When a process of a worker makes its resume record, and which it has at hand for the step that comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psjob.resume import composite

SMALL = 64 << 10
"""A record of at most this many bytes is made at every edge, a larger one where a cut or a stop wants it."""


class Edges:
    """Of one process. Processes meet at steps alone: a record of any moment between two of them is a place to go on from."""

    def __init__(self) -> None:
        self.wanted = False
        """The worker needs a record at the next edge, however large."""
        self._small = True
        self._made: tuple[int, bytes] | None = None

    def edge(self, clock: int, make: Callable[[], bytes], large: bool) -> None:
        """The script stands between two steps."""
        if self.wanted or (self._small and not large):
            record = make()
            self._small = len(record) <= SMALL
            self._made = clock, record
        else:
            self._made = None

    def at(self, clock: int) -> bytes | None:
        """The newest record of this clock."""
        return self._made[1] if self._made is not None and self._made[0] == clock else None


def all_of(records: Mapping[int, bytes | None], processes: int) -> bytes | None:
    """The record of the worker; None where one of its processes has none for this clock."""
    made = [record for local in range(processes) if (record := records.get(local)) is not None]
    return composite.joined(made) if len(made) == processes else None


def are_small(records: Mapping[int, bytes | None]) -> bool:
    """Are these made at every edge?"""
    return all(record is not None and len(record) <= SMALL for record in records.values())
