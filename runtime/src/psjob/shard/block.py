"""One block as a shard serves it: weights, optimizer state, the pushes that wait, the pulls that wait.

All methods are called with `lock` held. A block moves on when the mode says that the pushes at hand count; a reply is
given when the version a worker needs exists. In a decided mode both are the coordinator's to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from psjob.layout import memory
from psjob.layout.blocks import FLOATS, Block, live_ranges
from psjob.modes import Push, ServedMode
from psjob.protocol.messages import Decision
from psjob.rules import arrays, reduction
from psjob.rules.base import BEFORE, BlockState, Rule, UpdateFacts
from psjob.shard.pending import Gradient, PendingPush, ServedState, Waiter, free, push_weights
from psjob.shard.push_metrics import BlockStaleness, NonFinitePushes, PushNorms, squares_of
from psjob.shard.snapshot_memory import BlockSnapshot
from psjob.shard.state_memory import BlockMemory

_room = memory.Scratch()


class ParameterBlock(ServedState):
    """`n` is the number of updates decided for this block; without a `bound` it is also the open clock, or nobody waits for one."""

    def __init__(
        self, block: Block, position: int, rule: Rule, mode: ServedMode, reduce: reduction.Reduction = reduction.mean_in_rank_order,
        group: frozenset[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(block.index, position, mode, group)
        self.block, self.rule, self.reduce = block, rule, reduce
        self.state: BlockState | None = None
        self.home: torch.Tensor | None = None
        """Where that which workers are answered with lives: this block's place in memory that the shard lends them."""
        self.kept: BlockMemory | None = None
        """Where this block outlives its process; None: it does not."""
        self.keeps_before = mode.steady and mode.delay > 0
        """Workers compute on the weights of one update ago: one that comes back needs them, and so does a checkpoint."""
        self._noted = False
        """The weights before the update under way are kept."""
        self.update: torch.Tensor | None = None
        self.none: frozenset[int] = frozenset()
        """Tensors of this block for which no worker had a gradient at the last update; said only if the workers step."""
        self.skipped = False
        """The last update was none: a worker found inf, or nobody had a batch. Workers that step by themselves leave it out too."""
        self.stored = 0
        self.lost: set[int] = set()
        """Ranks whose newest push had no effect: the rule needs its staleness, and that is not known."""
        self.content = object()
        """Stands for the bytes of the state: another one after each change of them."""
        self.non_finite = NonFinitePushes()
        """Is told of pushes with NaN or inf, and says whether they are applied."""
        self.limit: float | None = None
        """The largest norm of the mean gradient over all blocks, whatever workers say; None: what they say holds."""
        self.push_norms: PushNorms | None = None
        """Bounds each push before it is reduced; None where it may be of any size."""
        self.staleness: BlockStaleness | None = None
        """Looks at the pushes that count; None where none of them can be late."""
        self.on_measured: Callable[[ParameterBlock, float, float], None] | None = None
        """Told of a reduced gradient that is to be clipped: the sum of its squares, and the limit. None where nothing is clipped."""
        self._clips: tuple[list[PendingPush], torch.Tensor | None] | None = None
        """Pushes that make the next update, and the gradient that they are reduced to, while the norm of all blocks is not known."""
        self._room: torch.Tensor | None = None
        """For that gradient, where it may not be written over a push."""
        self._pin: BlockSnapshot | None = None
        self._spent = 0.0
        """Seconds that the updates took which were made last."""

    @property
    def name(self) -> str:
        return f"block {self.index}"

    def put(self, state: BlockState, n: int, borrowed: bool = False) -> None:
        """Set the block to a known state (initialisation or restore) and forget what waited. What is `borrowed` stays as it is."""
        self.void_snapshot()
        self.content = object()
        old = {} if self.state is None else self.state.slots
        self.state = self.update = None  # frees the old weights first: an answer may still send them, so they are not written over
        self.n, self.stored = n, n
        weights, slots = state.weights, self._with_before(state)
        if self.rule.name != "reduce" and self.home is not None:
            weights = self.home.copy_(weights)
        elif borrowed:
            weights = weights.clone()
        if self.kept is not None:
            slots = {name: self.kept.room(name).copy_(slot) for name, slot in slots.items()}
        elif borrowed:
            slots = {name: old[name].copy_(slot) if name in old else slot.clone() for name, slot in slots.items()}
        self.state = BlockState(weights, slots, state.steps, state.segments, None if self.kept is None else self.kept.room)
        if self.kept is not None:
            self.kept.commit(self.state, n, False)
        if self.rule.name == "reduce":
            self.update = torch.empty_like(weights) if self.home is None else self.home
        self.none = frozenset()
        self._clips = None
        self.pending.clear()
        self.waiters.clear()

    def _with_before(self, state: BlockState) -> dict[str, torch.Tensor]:
        """The state's tensors in this mode: with the weights of one update ago, or without."""
        slots = {name: slot for name, slot in state.slots.items() if name != BEFORE or self.keeps_before}
        if self.keeps_before and BEFORE not in slots:
            slots[BEFORE] = state.weights.clone()
        return slots

    def take_up(self) -> None:
        """Continue with the block as another process has left it. Raises Untaken if it cannot be."""
        assert self.kept is not None
        self.state, self.n, self.skipped = self.kept.found()
        self.state.room = self.kept.room
        self.stored = self.n

    def advance(self, expected: Callable[[ParameterBlock], frozenset[int]], ranks: Iterable[int] | None = None) -> int:
        """Apply what counts, answer who waited; for `ranks` see `answer`. Returns the number of updates made."""
        made, began = 0, time.monotonic()
        while self._clips is None and (taken := self.mode.takes(self.pending.pushes, expected(self), self.n)):
            batch = self.pending.take((push.worker, push.clock) for push in taken.kept)
            limit = self._clip_limit(batch)
            if limit is not None and self.on_measured is not None:
                self._clips = batch, self._clamped(batch, self._reduced(batch, None, apart=True))
                free(batch)  # other blocks' pushes need the room, before this one is answered
                self.on_measured(self, 0.0 if self._clips[1] is None else self._squares(self._clips[1]), limit)
                break
            base = batch[0].push.base
            self._apply(batch, None if base is None else self.n - base)
            free(batch)
            self._moved_on()
            made += 1
            self._hold_if_due()
        if not made:  # a worker has left, or come back further on
            self._hold_if_due()
        else:
            self._spent = time.monotonic() - began
        self.answer(ranks)
        return made

    def clip(self, version: int, factor: float) -> None:
        """Make the update that waits for the norm, its gradient times `factor`, and answer who waited."""
        if self._clips is None or self.n != version:
            raise ValueError(f"{self.name} is at version {self.n}, and update {version} is ordered")
        (batch, reduced), self._clips = self._clips, None
        began = time.monotonic()
        if reduced is not None:
            if factor != 1.0:
                reduced.mul_(factor)
            self._update(batch, reduced, None if batch[0].push.base is None else self.n - batch[0].push.base)
        self._moved_on()
        self._hold_if_due()
        self._spent = time.monotonic() - began
        self.answer()

    def decide(self, decision: Decision) -> None:
        """Make the update that the coordinator has decided on; what it drops has no effect. Nobody is answered yet."""
        batch, dropped = self.decided_on(decision)
        began = time.monotonic()
        if batch:
            self._apply(batch, decision.staleness, decision.weights)
            self._moved_on()
        self._spent = time.monotonic() - began
        free([*batch, *dropped])

    def tensors(self) -> list[torch.Tensor]:
        """Everything of the state that a checkpoint holds."""
        return [] if self.state is None else [self.state.weights, *self.state.slots.values()]

    def reply(self, waiter: Waiter) -> torch.Tensor:
        """What a worker is answered with: the block's own memory, which changes, or a tensor that nobody changes."""
        assert self.state is not None
        if waiter.before:
            return self.state.slots[BEFORE]
        if self.update is not None:
            return self.update if waiter.update else self.state.weights
        told = waiter.info.hyperparameters if waiter.info is not None else ()
        made = self.rule.reply(self.state, told[self.block.group] if told else self.rule.hyperparameters, waiter.rank)
        if made is not self.state.weights:
            self._changing()  # it may have been noted in the state
        return made

    def forget(self, rank: int) -> None:
        """A worker has left: what the rule keeps of it goes."""
        if self.state is not None and self.rule.per_worker:
            self._changing()
            self.rule.forget(self.state, rank)

    def store(self, weights: torch.Tensor, version: int) -> None:
        """Worker-side update: these are the weights of `version`."""
        assert self.state is not None
        if version > self.stored or version == self.n:
            self._changing()
            self.state.weights.copy_(weights)
            self.stored = version
            self._hold_if_due()

    def void_snapshot(self) -> None:
        super().void_snapshot()
        if self._pin is not None:
            self._pin.drop(void=True)
            self._pin = None

    def _apply(self, batch: list[PendingPush], staleness: int | None, weights: Sequence[float] | None = None) -> None:
        reduced = self._clamped(batch, self._reduced(batch, weights, writable=_clamp(batch) is not None))
        if reduced is not None:
            self._update(batch, reduced, staleness)

    def _clip_limit(self, batch: Sequence[PendingPush]) -> float | None:
        """The manifest's limit, or a smaller one of the script."""
        told = next((a.info.clip for a in batch if a.grad is not None), None)
        return min((limit for limit in (self.limit, told) if limit is not None), default=None)

    def _clamped(self, batch: Sequence[PendingPush], reduced: torch.Tensor | None) -> torch.Tensor | None:
        value = _clamp(batch)
        return reduced if reduced is None or value is None else reduced.clamp_(-value, value)

    def _squares(self, reduced: torch.Tensor) -> float:
        return squares_of(reduced)

    def _reduced(
        self, batch: list[PendingPush], weights: Sequence[float] | None, writable: bool = False, apart: bool = False
    ) -> torch.Tensor | None:
        """The gradient of an update; None where the update is none. It lies in memory of a push or of our own.

        `writable`: it may be written to. `apart`: that too, it lies in no push's memory, and is used when other blocks were reduced too.
        """
        assert self.state is not None
        present = [self._bounded(a.push, a.grad) for a in batch if isinstance(a.grad, Gradient)]
        self.skipped = not present or (any(a.skip for a in batch) and self.reduce not in reduction.ROBUST)
        untrained = self.block.dtype not in FLOATS  # of whole numbers and bools nothing is trained, and torch gives them no gradient
        self.none = frozenset(piece.tensor for piece in self.block.pieces) if untrained else frozenset()
        if self.skipped or untrained:
            if self.update is not None:
                self.update.zero_()
            return None
        if self.staleness is not None:
            self.staleness.counted(batch, self.state.weights, self.n, self.block.group)
        reduced = present[0]
        first = next(a.grad for a in batch if isinstance(a.grad, Gradient))
        weights = push_weights(batch) if weights is None and self.reduce is reduction.mean_in_rank_order else weights
        if len(present) > 1 or weights is not None or isinstance(self.reduce, reduction.Own):
            reduced = first.flat if first.own and not apart else self._lasting() if apart else self._sum()
            if weights is None:
                self.reduce(present, reduced)
            else:
                shares = [share for a, share in zip(batch, weights, strict=True) if a.grad is not None]
                torch.mul(present[0], shares[0], out=reduced)
                for grad, share in zip(present[1:], shares[1:], strict=True):
                    arrays.add_scaled(reduced, grad, share)
        if reduced is first.flat and (apart or ((writable or not self.non_finite.passes) and not first.own)):
            reduced = self._lasting().copy_(reduced)  # nobody can change it after it was looked at
        if self.non_finite.bad(reduced, self.n):
            self.non_finite.blame(self.block, batch, reduced)
            if self.non_finite.left_out():
                self.skipped = True
                if self.update is not None:
                    self.update.zero_()
                return None
        return reduced

    def _moved_on(self) -> None:
        """An update was made. Only after this may anybody be answered."""
        if self.keeps_before and not self._noted:  # it has changed no weight
            self._begin_change()
        self._noted = False
        if self.kept is not None and self.state is not None:
            self.kept.commit(self.state, self.n + 1, self.skipped)
        self.n += 1

    def _bounded(self, push: Push, grad: Gradient) -> torch.Tensor:
        if self.push_norms is None:
            return grad.flat
        flat = grad.flat if grad.own else grad.flat.clone()  # its worker could write there between the look and the sum
        return self.push_norms.bounded(push.worker, push.clock, self.name, flat)

    def _update(self, batch: list[PendingPush], reduced: torch.Tensor, staleness: int | None) -> None:
        assert self.state is not None
        none = frozenset.intersection(*(a.info.none for a in batch if a.grad is not None))
        none &= {piece.tensor for piece in self.block.pieces} if none else none
        if self.update is not None:
            self.update.copy_(reduced)
            self.none = none
            return
        info = next(a.info for a in batch if a.grad is not None)
        ranges = None
        if none:
            ranges = live_ranges(self.block, none)
            if not ranges:
                return
        push = batch[0].push
        if staleness is None and self.rule.needs_staleness:
            self.lost.add(push.worker)
            return
        self._begin_change()
        worker = push.worker if len(batch) == 1 else None
        self.rule.apply(self.state, reduced, info.hyperparameters[self.block.group], UpdateFacts(ranges, staleness, worker))

    def _begin_change(self) -> None:
        """What an update changes is kept first, where anybody may need it."""
        assert self.state is not None
        self._changing()
        if self.kept is not None:
            self.kept.begin(self.state)
        if self.keeps_before:
            self.state.slots[BEFORE].copy_(self.state.weights)
            self._noted = True

    def _sum(self) -> torch.Tensor:
        """Room for a sum that may not be written over a gradient; the thread's own, used up before it continues."""
        assert self.state is not None
        return _room(self.block.nbytes).view(self.state.weights.dtype)

    def _lasting(self) -> torch.Tensor:
        """The same, of only this block."""
        assert self.state is not None
        if self._room is None:
            self._room = torch.empty_like(self.state.weights)
        return self._room

    def _changing(self) -> None:
        """The state is about to change: a snapshot that holds it keeps a copy, the only one that an update ever waits for."""
        if self._pin is not None:
            self._pin.keep()
            self._pin = None
        self.content = object()

    def _hold_if_due(self) -> None:
        if self._snapshot is None or self.state is None:
            return
        step, stored, hold = self._snapshot
        if self._comes_to(step):
            return
        if step >= 0 and self.update is not None and self.stored != step:
            return
        if step < 0 and self.update is not None and self.stored < stored:
            return  # a worker has left, but its last weights are still on their way
        self._snapshot = None
        self._pin = hold(self)

    def answer(self, ranks: Iterable[int] | None = None) -> None:
        """Serve the pulls that can be served now: those of all workers, or of `ranks` and of whom the version has reached."""
        ready = self.ready(ranks)
        now = time.monotonic() if ready else 0.0
        for waiter in ready:
            waiter.updated = min(self._spent, now - waiter.since)
            waiter.held = now - waiter.since - waiter.updated
            waiter.to.param(self, waiter)


def _clamp(batch: Sequence[PendingPush]) -> float | None:
    return next((a.info.clamp for a in batch if a.grad is not None), None)
