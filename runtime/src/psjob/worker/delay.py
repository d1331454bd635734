"""Delay: a worker computes on the weights that it has while up to `delay` of its pushes are under way (τ of Li et al. 2014, OSDI, §3).

`push` copies the gradients, puts the newest weights that have come into the model, and comes back. A thread makes the pushes, one after the
other: the next one begins when the one before is answered, so to a shard the worker looks like any other. Answers wait where they come
until the next step takes them, so that the model's weights change inside of a step only.

In sync the delay is 1 and all is decided: step c is computed on the weights after c - 1 updates, whenever they came. A worker that begins
again from a record that was taken with a push under way takes those weights first, which shards keep for it, and the answer then.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from psjob.layout.blocks import Block, Layout
from psjob.layout.packing import Pack
from psjob.process import supervise
from psjob.protocol.worker import events as e
from psjob.wire.frame import Flag, Header, Kind
from psjob.worker.exchange import Exchange, Gradients, Groups, count_change, without_gradient
from psjob.worker.exits import SessionEnd
from psjob.worker.rows import Rows
from psjob.worker.staging import Staging, arena, pieces
from psjob.worker.step_parts import COPY_BACK, COPY_OUT

TICK_SECONDS: Final = 0.5
_STAGED: Final = torch.empty(0, dtype=torch.uint8, device="cpu")
"""In place of a gradient that has been copied: the script may drop its own."""


@dataclass(frozen=True)
class Turn:
    """One clock's requests. What `begin` gives makes that of a block."""

    clock: int
    begin: Callable[[], Callable[[Block], Header]]
    """Called when the answers to the turn before have come."""
    held: bool = False
    """The gradients are not yet where they leave."""
    clips: bool = False
    """No block is answered before the norm of all is known."""


class Delayed(Exchange):
    """As `Exchange`, for a mode with a delay. `began_behind` says whether this process begins with a push of its record's under way."""

    def __init__(self, rows: Rows, memory: DelayedStaging, began_behind: Callable[[], bool] = lambda: False) -> None:
        super().__init__(rows, memory, delay=rows.state.mode.delay)
        self.staging, self._began_behind = memory, began_behind
        self._targets: Sequence[torch.Tensor] = ()
        """The model's parameters."""
        self._turns: deque[Turn] = deque()
        """Handed to the thread and not answered. The first one is under way."""
        self._done = self._taken = 0
        """Clocks whose answers have come, and whose answers the model's weights are."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # -- the script's thread -------------------------------------------------------------------

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        state, clock = self.state, self.state.clock
        self.meanwhile = None  # what is recorded of the next boundary is said to have this push under way
        state.check()
        self.wait(lambda: self._done > clock - self.delay)
        if self.skipped:
            self.compression.undo()
        bases = dict(self.versions)  # the gradients are of these
        before = state.parts.to(COPY_BACK)
        self._take(targets)
        state.parts.to(COPY_OUT)
        staged = None if grads is None else [None if grad is None else _STAGED for grad in grads]
        held = self.delay > 1 and grads is not None and not skip
        if grads is not None and not skip:
            for block in state.blocks:
                self.staging.hold(clock, block.index, grads) if held else self.staging.gather(block.index, grads)
            self.staging.keep_back()
        state.parts.to(before)
        info = self.tell_hyperparameters(hyperparameters, without_gradient(grads))

        def begin() -> Callable[[Block], Header]:
            return self.open(clock, staged, skip, scale, info, bases)

        # With a delay of 1 no push is under way: what tables are given goes with this one, in this thread.
        made = begin() if self.delay == 1 else None
        self._hand(Turn(clock, begin if made is None else lambda: made, held, self.clip.norm is not None))
        state.stepped()

    def pull(self, parameters: Sequence[torch.Tensor], hyperparameters: Groups) -> None:
        state = self.state
        info, version, clock = self.tell_hyperparameters(hyperparameters, []), (0, state.mode.version_for(state.clock - 1)), state.clock

        def asked(flags: int) -> Callable[[Block], Header]:
            return lambda block: state.header(
                Kind.PULL, block=block.index, clock=clock, info=info, version=version, flags=flags
            )  # fmt: skip

        behind = clock > 0 and state.mode.steady and self._began_behind()
        self._done = self._taken = clock - 1
        self._hand(Turn(clock - 1, lambda: asked(Flag.BEFORE if behind else Flag.NONE)))
        self.finish()
        self._take(parameters)
        if behind:
            self._done = self._taken = clock - 1
            self._hand(Turn(clock - 1, lambda: asked(Flag.NONE)))
        self._targets = parameters

    def finish(self) -> None:
        self.wait(lambda: not self._turns)

    def catch_up(self) -> None:
        self.finish()
        self._take(self._targets)

    def join(self, seconds: float) -> None:
        with self.state.cond:
            self.state.cond.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    @property
    def behind(self) -> int:
        if os.getpid() != self._pid:
            return 0  # a fork has no push under way
        with self.state.cond:
            return self._done + len(self._turns) - self._taken

    def _take(self, targets: Sequence[torch.Tensor]) -> None:
        """Put the newest weights that have come whole into the model."""
        self._targets = targets
        with self.state.cond:
            answered = self._done
        if answered == self._taken:
            return
        if self.state.mode.steady:
            self._check_versions()
        self.versions.update(self.staging.put_in(answered - 1, targets))
        self._taken = answered
        count_change(targets)

    def _check_versions(self) -> None:
        """In sync a block that was asked for is at this worker's clock, unless the push of a process before this one has moved it on."""
        versions = [n for _, n in self.staging.versions(self.state.clock - 1)]
        self.state.handle(e.Pulled(min(versions, default=self.state.clock), max(versions, default=self.state.clock)))
        self.state.check()

    def _hand(self, turn: Turn) -> None:
        with self.state.cond:
            self._turns.append(turn)
            self.state.cond.notify_all()
        if self._thread is None:
            self._thread = supervise.start_thread(self._run, "pushes")

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        state = self.state
        while True:
            with state.cond:
                while not self._turns and not state.over:
                    state.cond.wait(TICK_SECONDS)
                if state.over:
                    return
                turn = self._turns[0]
            try:
                self._make(turn)
            except SessionEnd:
                return  # it is noted, and the script's next call carries it out
            with state.cond:
                self.sources = ()  # nothing is sent again
                self._done = turn.clock + 1
                self._turns.popleft()
                state.cond.notify_all()

    def _make(self, turn: Turn) -> None:
        """Send a turn's requests, as many at a time as a link has credit for, and wait until every one is answered."""
        state, make = self.state, turn.begin()
        self.staging.turn(turn.clock)
        self.expect(())
        for block in state.blocks:
            if turn.held:
                self.staging.bring(turn.clock, block.index)
            link = self.links[state.owner[block.index]]
            if not (link.shared and state.mode.steady):  # what is lent fills no queue
                self.await_credit(link, block.nbytes)
            self.request(link, make, block)
        self.watched = False
        try:
            self.wait(lambda: not any(link.outstanding for link in self.links))
        finally:
            self.watched = True

    def wait(self, done: Callable[[], bool]) -> None:
        if threading.current_thread() is not self._thread:
            super().wait(done)
            return
        state = self.state
        with state.cond:
            while not done():
                if state.over:
                    raise SessionEnd("stopped")
                state.cond.wait(TICK_SECONDS)

    @property
    def answers_wait(self) -> bool:
        if threading.current_thread() is not self._thread:
            return super().answers_wait
        return self.state.mode.decided or self._turns[0].clips

    def note(self, header: Header) -> None:
        self.staging.note(header.block, header.version)
        self.skipped |= bool(header.flags & Flag.SKIP)


class DelayedStaging(Staging):
    """As `Staging`, on any device. An answer stays where it came, one place for each push that may be under way, until it is taken."""

    def __init__(self, layout: Layout, device: torch.device, delay: int) -> None:
        super().__init__(layout, device, lands=True)
        self._delay = delay
        self._places: list[dict[int, Pack]] = [{} for _ in range(delay)]
        """By turn: memory for answers that lie in none that is lent."""
        self._came: list[dict[int, Pack]] = [{} for _ in range(delay)]
        """By turn: where the blocks' answers lie."""
        self._versions: list[dict[int, tuple[int, int]]] = [{} for _ in range(delay)]
        self._at = 0
        """The turn whose answers come now."""
        self._held = [arena(layout, device, layout.blocks) for _ in range(delay if delay > 1 else 0)]
        self._held_pieces = [pieces(layout, packs) for packs in self._held]
        self._held_at: dict[tuple[int, int], torch.cuda.Event | None] = {}

    def turn(self, clock: int) -> None:
        """Answers that come from now on are those of a clock."""
        self._at = clock % self._delay
        self._came[self._at], self._versions[self._at] = {}, {}

    def hold(self, clock: int, block: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to copy the gradients of a block to where they wait for their turn."""
        at = clock % self._delay
        for row in dict.fromkeys(piece.tensor for piece in self.layout.blocks[block].pieces):
            self.put(row, gradients[row], block, self._held_pieces[at])
        self._held_at[at, block] = self.all_put()

    def bring(self, clock: int, block: int) -> None:
        """Bring the gradients that were held to where they leave."""
        at = clock % self._delay
        event = self._held_at.pop((at, block))
        if event is not None:
            event.synchronize()
        self._gradients[block].flat.copy_(self._held[at][block].flat)
        self._copied[block] = None

    def expect(self) -> None:
        """Nothing lands in the model before `put_in`."""

    def weights(self, block: int) -> torch.Tensor:
        self.release(block)
        places = self._places[self._at]
        if block not in places:
            places |= arena(self.layout, self.device, [self.layout.blocks[block]])
        return places[block].flat

    def landing(self, block: int, pack: Pack, targets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        flat, at = self.weights(block), self._at
        return flat, lambda: self._came[at].__setitem__(block, self._places[at][block])

    def arrive(self, block: int, targets: Sequence[torch.Tensor], source: Pack) -> None:
        self._came[self._at][block] = source

    def note(self, block: int, version: tuple[int, int]) -> None:
        """The block's answer has come, and is of this version."""
        self._versions[self._at][block] = version

    def versions(self, clock: int) -> list[tuple[int, int]]:
        """Those of the answers of a clock."""
        return list(self._versions[clock % self._delay].values())

    def put_in(self, clock: int, targets: Sequence[torch.Tensor]) -> dict[int, tuple[int, int]]:
        """Begin to copy the answers of a clock into the model; what the calling thread begins next sees them. Returns their versions."""
        at = clock % self._delay
        self._into.fence()
        for block, source in self._came[at].items():
            self.take(block, targets, source)
        self.settle(self._came[at])
        return dict(self._versions[at])
