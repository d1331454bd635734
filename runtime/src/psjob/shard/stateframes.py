"""Optimizer state of a worker's blocks on this shard, for `opt.state_dict()`."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from psjob.layout import memory
from psjob.shard.block import Cell
from psjob.wire.event_loop import Sending
from psjob.wire.frame import Header, Kind, WireError, dump

if TYPE_CHECKING:
    from psjob.shard.session import Session

MORE_STATES = 16
"""A worker that asks again, on a step that it repeats, asks for a few twice."""


class StateFrames:
    """The STATE frames of one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._count = 0
        """Blocks whose state was asked for and not sent yet."""

    def asked(self, header: Header) -> None:
        """Answer with the state of a block that is no one worker's: slots one after the other, counters as JSON first.

        It is copied when its turn to be sent has come: at most one copy a worker is held. Raises WireError for too many at a time.
        """
        session = self._session
        cell = session.store.cell(header.block)
        if self._count >= len(session.store.cells) + MORE_STATES:
            raise WireError(f"worker {session.rank} has asked for the state of {self._count} blocks and taken none")
        with self._lock:
            self._count += 1
        session.stream.put(partial(self._answer, header, cell), True)

    def _answer(self, header: Header, cell: Cell) -> Sending | None:
        with self._lock:
            self._count -= 1
        with cell.lock:
            if cell.state is None:
                return None  # a restore has come between, which ends this stream
            copy = cell.state.shared().copy()
        session = self._session
        head = dump({"slots": {name: t.numel() * t.element_size() for name, t in copy.slots.items()}, **copy.counts()})
        parts = [memoryview(len(head).to_bytes(4, "little") + head), *(memory.view(t) for t in copy.slots.values())]
        answer = session.base._replace(kind=Kind.STATE, view=session.store.view, request=header.request, block=header.block)
        return Sending(session.stream.framed_parts(answer, parts))
