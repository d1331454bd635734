"""One stream of a worker's session: answers go out by the stream that asked, from memory that does not change while it is sent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from psjob.layout import memory
from psjob.process import supervise
from psjob.shard.cell import Cell
from psjob.shard.held import EarlyPushes
from psjob.shard.rows import RowCell
from psjob.shard.waiting import MOST_NAMED, Waiter
from psjob.wire.frame import Flag, Header, Kind, dump
from psjob.wire.tcp import Stream, StreamClosed

if TYPE_CHECKING:
    from psjob.shard.session import Session


class ShardLane:
    """The sending side of `stream`; `session` reads. Frames go out in the order in which they were queued."""

    def __init__(self, session: Session, stream: Stream) -> None:
        self.session, self.store, self.stream = session, session.store, stream
        self._out: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.held = EarlyPushes()
        self._lent = 0
        """Answers that were put in lent memory."""
        self._collected: list[bytes] = []
        """Answers without payload that the reading thread will send: it has frames at hand that it handles first."""
        self._collects = False
        self._collecting = threading.Lock()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._sender = supervise.thread(self._send_loop, f"to-worker-{session.rank}")

    def start(self) -> None:
        self._sender.start()

    def end(self) -> None:
        """The stream has ended: nothing waits for it any more."""
        self.store.drop_waiters(self, self.session.rank)
        self.held.clear()
        self._out.put(None)

    def next(self) -> Header:
        """The header of the next frame. Before it waits for one, what was answered meanwhile is sent, all at once. Raises as Stream."""
        if not self.stream.ahead():
            with self._collecting:
                collected, self._collected, self._collects = self._collected, [], False
            if collected:
                self.stream.write(b"".join(collected))
        header = self.stream.recv_header(None)
        self._collects = True
        return header

    def put(self, act: Callable[[], None]) -> None:
        """Let the sending thread do `act` in its turn."""
        self._out.put(act)

    def tell(self, header: Header, raw: bytes) -> None:
        """Queue a control frame."""
        self._out.put(lambda: self.stream.send_control(header, raw))

    def param(self, cell: Cell, waiter: Waiter) -> None:
        if not self._told(cell, waiter):
            self._out.put(lambda: self._send_param(cell, waiter))

    def _told(self, cell: Cell, waiter: Waiter) -> bool:
        """Answer at once, by a frame without payload, where the block itself is lent and nothing is before it.

        It costs less than to wake the sending thread. Called with the cell's lock held, by whichever thread has moved the block on.
        """
        if not (waiter.lent and self.store.mode.steady and self._out.empty()) or cell.none:
            return False
        place = self._lend(cell, waiter, cell.reply(waiter))
        if place is None:
            return False
        raw = self._answer(cell, waiter).lent(place, cell.block.nbytes).pack()
        with self._collecting:
            if self._collects:
                self._collected.append(raw)
                return True
        try:
            sent = self.stream.offer(raw)
        except StreamClosed:
            return True
        if sent and self.stream.unsent:
            self._out.put(self.stream.flush)
        return sent

    def rows(self, cell: RowCell, waiter: Waiter) -> None:
        self.session.row_frames.answer(cell, waiter)

    def waiting(self, waiter: Waiter, cell: Cell | RowCell, missing: list[int], seconds: float) -> None:
        body = {"workers": missing[:MOST_NAMED], "more": max(0, len(missing) - MOST_NAMED), "for": cell.name, "seconds": round(seconds, 1)}
        header = self.session.base._replace(kind=Kind.WAITING, view=self.store.view, request=waiter.request)
        self.tell(header, dump(body))

    def _send_param(self, cell: Cell, waiter: Waiter) -> None:
        with cell.lock:
            if cell.state is None or self.stream.closed:  # a reply that will not arrive is not to be noted
                return
            reply = cell.reply(waiter)
            early = self.store.decided is not None and self.store.decided.early
            if cell.staleness is not None and not early:  # else its next push to be decided may be of an older answer
                cell.staleness.answered(waiter.rank, reply, cell.n)
            place = self._lend(cell, waiter, reply)
            answer = self._still(cell, waiter, reply) if place is None else None
            header = self._answer(cell, waiter)
            none = sorted(cell.none) if waiter.update else []
        if none:
            raw_none = dump({"none": none})
            self.stream.send_control(self.session.base._replace(kind=Kind.INFO, view=self.store.view, block=cell.block.index), raw_none)
        if answer is None:
            self.stream.send_lent(header, place or 0, cell.block.nbytes)
            return
        if waiter.update or cell.update is None:  # weights that a worker steps by itself must come back whole
            number, answer = self.session.encoded.answer(header, cell.block, answer.view(getattr(torch, cell.block.dtype)))
            header = header._replace(codec=number)
        self.stream.send(header, memory.view(answer))

    def _answer(self, cell: Cell, waiter: Waiter) -> Header:
        """What an answer says of the block as it stands; called with its lock held."""
        server, mode = self.session.server, self.store.mode
        flags = Flag.CUT if (server.wishes if mode.decided else server.cut_step == waiter.version) else Flag.NONE
        if cell.skipped and (waiter.update or mode.steady):
            flags |= Flag.SKIP
        if waiter.update and flags & Flag.CUT and self.session.rank == self.store.first_expected(cell.n):
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

    def _still(self, cell: Cell, waiter: Waiter, reply: torch.Tensor) -> torch.Tensor:
        """The answer, in memory that stays as it is while it is sent: its own where the rule or the mode holds that still, else a copy."""
        assert cell.state is not None
        if reply is not cell.state.weights and reply is not cell.update:
            return reply
        holds = (self.store.mode.steady and not _moves(cell, waiter)) or self.store.workers == 1
        if holds and (cell.update is None or reply is cell.update):
            return reply
        raw = reply.view(torch.uint8)
        if self._scratch.numel() < raw.numel():
            self._scratch = torch.empty(raw.numel(), dtype=torch.uint8)
        self._scratch[: raw.numel()].copy_(raw)
        return self._scratch[: raw.numel()]

    def _send_loop(self) -> None:
        while (act := self._out.get()) is not None:
            try:
                act()
            except StreamClosed:
                self.stream.close()
                return


def _moves(cell: Cell, waiter: Waiter) -> bool:
    """In sync, does the block wait for others only? A process before this one of the rank has pushed its open clock and died meanwhile."""
    return cell.mode.steady and (waiter.rank, cell.n) in cell.pending
