"""One stream of a worker's session: answers go out by the stream that asked, from memory that does not change while it is sent."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from psjob.layout import memory
from psjob.shard.block import Cell
from psjob.shard.pending import MOST_NAMED, Served, Waiter
from psjob.shard.table import RowCell
from psjob.wire.event_loop import LARGE, NonBlockingStream, Sending
from psjob.wire.frame import Flag, Header, Kind, dump
from psjob.wire.tcp import Part

if TYPE_CHECKING:
    from psjob.shard.session import Session


_spares = memory.Spares()
"""Room for copies of large answers, until they are sent."""


class ShardLane:
    """The sending side of `stream`; `session` reads. Frames go out in the order in which they were queued."""

    def __init__(self, session: Session, stream: NonBlockingStream) -> None:
        self.session, self.store, self.stream = session, session.store, stream
        self.held = session.held
        self._lent = 0
        """Answers that were put in lent memory."""
        self._body = torch.empty(0, dtype=torch.uint8, device="cpu")

    def end(self) -> None:
        """The stream has ended: nothing waits for it any more."""
        self.store.drop_waiters(self, self.session.rank)
        self.held.clear()

    def room(self, size: int) -> torch.Tensor:
        """Bytes for an encoded body that is received; they stand until the next one of this stream."""
        if self._body.numel() < size:
            self._body = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._body[:size]

    def param(self, cell: Cell, waiter: Waiter) -> None:
        large = cell.block.nbytes >= LARGE and not (waiter.lent and self.store.mode.steady)
        self.stream.put(partial(self._param, cell, waiter), large)

    def rows(self, cell: RowCell, waiter: Waiter) -> None:
        self.session.row_frames.answer(cell, waiter)

    def waiting(self, waiter: Waiter, cell: Served, missing: list[int], seconds: float) -> None:
        body = {"workers": missing[:MOST_NAMED], "more": max(0, len(missing) - MOST_NAMED), "for": cell.name, "seconds": round(seconds, 1)}
        header = self.session.base._replace(kind=Kind.WAITING, view=self.store.view, request=waiter.request)
        self.stream.put_control(header, dump(body))

    def _param(self, cell: Cell, waiter: Waiter) -> Sending | None:
        """The answer, as the block stands when its turn has come."""
        with cell.lock:
            if cell.state is None or self.stream.closed:  # a reply that will not arrive is not to be noted
                return None
            reply = cell.reply(waiter)
            early = self.store.decided is not None and self.store.decided.early
            if cell.staleness is not None and not early:  # else its next push to be decided may be of an older answer
                cell.staleness.answered(waiter.rank, reply, cell.n)
            place = self._lend(cell, waiter, reply)
            answer, spare = self._still(cell, waiter, reply) if place is None else (None, None)
            header = self._answer(cell, waiter)
            none = sorted(cell.none) if waiter.update else []
        parts: list[Part] = []
        if none:
            info = self.session.base._replace(kind=Kind.INFO, view=self.store.view, block=cell.block.index)
            parts += self.stream.framed(info, dump({"none": none}))
        if answer is None:
            return Sending([*parts, header.lent(place or 0, cell.block.nbytes)])
        spares = [] if spare is None else [spare]
        if waiter.update or cell.update is None:  # weights that a worker steps by itself must come back whole
            number, answer, more = self.session.encoded.answer(header, cell.block, answer.view(getattr(torch, cell.block.dtype)), _spares)
            header = header._replace(codec=number)
            spares += [] if more is None else [more]
        parts += self.stream.framed(header, memory.view(answer))
        return Sending(parts, partial(_spares.give, *spares) if spares else None)

    def _answer(self, cell: Cell, waiter: Waiter) -> Header:
        """What an answer says of the block as it stands; called with its lock held."""
        server, mode = self.session.server, self.store.mode
        flags = Flag.CUT if (server.wishes if mode.decided else server.cut_step == waiter.version) else Flag.NONE
        if cell.skipped and (waiter.update or mode.steady):
            flags |= Flag.SKIP
        if waiter.update and flags & Flag.CUT and self.session.rank == self.store.first_expected(cell):
            flags |= Flag.STORE
        return self.session.base._replace(
            view=self.store.view, clock=waiter.clock, request=waiter.request, block=cell.block.index,
            version=(self.store.attempt, cell.n), flags=flags, info=len(cell.none) if waiter.update else 0,
        )  # fmt: skip

    def _lend(self, cell: Cell, waiter: Waiter, reply: torch.Tensor) -> int | None:
        """Where in lent memory the answer lies; None: it goes over the stream."""
        lending = self.session.lending if waiter.lent else None
        if lending is None or _moves(cell, waiter):
            return None
        place = lending.place(cell, reply, self.session.lanes.index(self), self._lent)
        self._lent += 1
        return place

    def _still(self, cell: Cell, waiter: Waiter, reply: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The answer, in memory that stays as it is while it is sent: its own where the rule or the mode holds that still, else a copy.

        With it the spare that holds a large copy.
        """
        assert cell.state is not None
        if reply is not cell.state.weights and reply is not cell.update:
            return reply, None
        holds = (self.store.mode.steady and not _moves(cell, waiter)) or self.store.workers == 1
        if holds and (cell.update is None or reply is cell.update):
            return reply, None
        if cell.block.nbytes < LARGE:
            return reply.clone(), None
        raw = reply.view(torch.uint8)
        spare = _spares.take(raw.numel())
        return spare[: raw.numel()].copy_(raw), spare


def _moves(cell: Cell, waiter: Waiter) -> bool:
    """In sync, does the block wait for others only? A process before this one of the rank has pushed its open clock and died meanwhile."""
    return cell.mode.steady and (waiter.rank, cell.n) in cell.pending
