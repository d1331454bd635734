"""The data path of a worker: one clock's gradients out as blocks, and what answers them back into the model.

The script's thread pushes and pulls; a link's thread calls `payload` when it sends a request again and `land` when an answer
comes. What both sides use is guarded by the worker's condition. A worker has a share of the gradients that a shard may hold: all
shares together are the shard's budget.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from psjob.layout import memory
from psjob.layout.blocks import Block, Layout
from psjob.layout.packing import Pack, Packs
from psjob.process.config import Config
from psjob.protocol.streams import StreamTrial
from psjob.protocol.worker import events as e
from psjob.wire.frame import Flag, Header, Kind
from psjob.wire.tcp import Stream
from psjob.worker.compression import WorkerCompression
from psjob.worker.connection import ShardConnection, WorkerLane, read_answers
from psjob.worker.exits import SessionEnd
from psjob.worker.rows import RowGrads, Rows
from psjob.worker.sharing import SLOTS, Sharing
from psjob.worker.step_parts import COPY_OUT, OWN

Gradients: TypeAlias = Sequence[torch.Tensor | None] | None
"""By row of the table; None: the rank is absent, or the parameter has no gradient."""
Groups: TypeAlias = list[dict[str, Any]]
"""The rule's hyperparameters, by parameter group."""
WAITS_FOR = "the shards' answer"


class Exchange:
    """`memory`: where blocks are as they leave and as they land. `packs` are the script's thread's own; each lane has its own, since all
    may gather at once.

    `deferred`: `push` comes back when all is under way. `finish` waits for its answers; nothing reads the targets before. The gradients
    that were pushed must not change until then: a shard that comes back is sent them again.

    `overlaps`: gradients are sent before their step too, as `Overlap` does. `delay`: so many pushes may be under way while the script
    computes, as `Delayed` does.
    """

    def __init__(
        self, rows: Rows, memory: ModelMemory | None = None, deferred: bool = False, overlaps: bool = False, delay: int = 0
    ) -> None:  # fmt: skip
        state = self.state = rows.state
        self.links, self.rows = rows.links, rows
        self.memory = ModelMemory() if memory is None else memory
        self.deferred, self.overlaps, self.delay = deferred, overlaps, delay
        self.beside = deferred or overlaps or delay > 0
        """Blocks are sent by threads of the lanes even where there is one lane: bytes are sent while others are made."""
        self.lends = self.memory.lends and not deferred and (state.mode.steady or not overlaps)
        """Blocks may lie in memory that this worker and a shard of its host lend each other."""
        self.watched = True
        """The script may wait for less than a link's last answer; where it does not, the others wake nobody."""
        self.credit, self.early_credit = credits(state.place.config, overlaps)
        """Bytes on their way between this worker and one shard, or one block: a shard holds at most so much of it that waits for others."""
        self.packs = self.make_packs()
        self.nbytes = state.layout.nbytes
        self.versions: dict[int, tuple[int, int]] = {}
        self.skipped = False
        """The shards made no update of the last clock, so a worker that steps by itself makes none either."""
        self.sources: Sequence[torch.Tensor | None] = ()
        self.targets: Sequence[torch.Tensor] = ()
        """Where blocks are copied to as they land; the script waits in a call of ours meanwhile."""
        self.meanwhile: Callable[[], None] | None = None
        """Done once, in the script's thread, when the next requests are sent, before their answers are waited for."""
        self.clip = GradientClip()
        """What the shards are to do with the mean gradient of this step."""
        self.may_skip = False
        """A GradScaler is at work: some worker may have found inf, and then this clock counts for nothing."""
        self.finite = FiniteCheck(rows)
        self.compression = WorkerCompression(state.place, state.layout)
        self.sharing = self.memory.share(state.layout, state.mode.steady)
        self.trial = StreamTrial()
        """Whether one stream for each shard carries blocks, or all."""
        self.trial.over = state.place.config.streams is not None or self.beside
        self.present = 1
        """Processes of this worker whose gradients are in a push."""
        self.scale = 1.0
        """What the gradients of the clock in hand, or of the last one, are multiplied by."""
        self._info = 0
        """The number of the newest hyperparameters that the shards were told."""
        self._infos: dict[int, dict[str, Any]] = {}
        """By number, those that pushes under way may name, the oldest first."""

    # -- the script's thread -------------------------------------------------------------------

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        """Push one clock and wait for what the mode promises: fresh weights, or the reduced gradient, put into `targets`.

        `grads` is None for an absent rank; a single None is a parameter without a gradient. A target may be the gradient of
        its row. Raises SessionEnd.
        """
        if self.deferred:
            self.finish()
        before, spent = self.state.parts.to(COPY_OUT), self.state.parts.exchanged
        for block in self.state.blocks if grads is not None and not skip else ():
            self.memory.gather(block.index, grads or ())
        make = self.begin(grads, hyperparameters, skip, scale)
        if self.deferred:
            self._send(make, targets)
        else:
            self._ask(make, targets)
            self.sources = ()  # all is answered: nothing is sent again, and the script may drop its gradients
            if self.skipped:
                self.compression.undo()
        self.state.parts.to(before)
        if not self.trial.over and any(len(link.lanes) > 1 for link in self.links):
            self.trial.took(self.state.parts.exchanged - spent)
        self.state.stepped()

    def begin(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float) -> Callable[[Block], Header]:
        """Begin a clock: the shards get its hyperparameters, and what comes back makes the push of a block."""
        self.state.check()
        info = self.tell_hyperparameters(hyperparameters, without_gradient(grads))
        return self.open(self.state.clock, grads, skip, scale, info, self.versions)

    def open(
        self, clock: int, grads: Gradients, skip: bool, scale: float, info: int, bases: Mapping[int, tuple[int, int]]
    ) -> Callable[[Block], Header]:  # fmt: skip
        """As `begin`, of a clock whose hyperparameters the shards have as `info`. `bases`: by block, the version it was computed on."""
        flags = Flag.ABSENT if grads is None else (Flag.SKIP if skip else Flag.NONE)
        self.sharing.begin(grads, scale != 1.0)
        self.sources, self.scale = grads or (), scale
        self.compression.begin(clock, frozenset(without_gradient(grads)), self.may_skip or self.finite.may_skip)
        self.skipped = False
        self.rows.push(flags, info, self.newest_version)
        return lambda block: self.state.header(
            Kind.PUSH, block=block.index, clock=clock, flags=flags, info=info, version=bases.get(block.index, (0, 0))
        )

    def pull(self, parameters: Sequence[torch.Tensor], hyperparameters: Groups) -> None:
        """Take the weights as the shards reply to a worker with these hyperparameters. Raises SessionEnd."""
        state = self.state
        if not (state.reduces or state.mode.inner_steps):  # who steps by itself would copy every page anew
            self.sharing.adopt(parameters)
        info, version = self.tell_hyperparameters(hyperparameters, []), (0, state.mode.version_for(state.clock - 1))
        self._ask(lambda block: state.header(Kind.PULL, block=block.index, clock=state.clock, info=info, version=version), parameters)
        versions = [n for _, n in self.versions.values()]
        state.handle(e.Pulled(min(versions, default=state.clock), max(versions, default=state.clock)))
        state.check()

    def finish(self) -> None:
        """Wait until all that was asked has landed. Raises SessionEnd."""
        self._await_answers()
        if self.deferred:
            self.sources = ()  # nothing is sent again
            count_change(self.targets)

    def catch_up(self) -> None:
        """Wait until the model's weights are those of the last step. Raises SessionEnd."""
        self.finish()

    def join(self, seconds: float) -> None:
        """Wait for threads of the data path itself, which end soon once the session has ended."""

    def act_meanwhile(self) -> None:
        """Do what `meanwhile` asks for, once."""
        if (act := self.meanwhile) is not None:
            self.meanwhile = None
            act()

    def send_info(self, link: ShardConnection) -> None:
        """Tell a shard the hyperparameters that pushes name."""
        for number, body in list(self._infos.items()):
            link.send_json(self.state.header(Kind.INFO, info=number), body, everywhere=True)

    @property
    def behind(self) -> int:
        """Pushes that the script has made and whose answers its weights are not yet, between two steps."""
        return 0

    # -- both sides ----------------------------------------------------------------------------

    def stage(self, link: ShardConnection, header: Header) -> tuple[int, int] | None:
        """Bring what a request carries into lent memory; its place there, of length 0 where it carries nothing. None: send it.

        A push waits until nobody reads the block's last answer.
        """
        if header.kind is Kind.PUSH:
            self.memory.release(header.block)
        beyond = not self.sharing.steady and len(link.outstanding) > SLOTS  # for those answers there is no room
        if not link.shared or header.kind not in (Kind.PUSH, Kind.PULL) or beyond or self._answered(header):
            return None
        offset, length = self.sharing.place(header.block)
        if header.kind is not Kind.PUSH or header.flags:
            return offset, 0
        return (offset, length) if self.sharing.stage(header.block, self.sources, self.scale) else None

    def payload(
        self, link: ShardConnection, header: Header, pack: Pack, scale: float | None = None
    ) -> tuple[Header, torch.Tensor | None]:  # fmt: skip
        """A request as it goes to a link's shard, with what it carries, the same however often it is sent; None: nothing.

        `scale`: what its gradient is multiplied by, if not by what the clock in hand says.
        """
        if header.kind not in (Kind.PUSH, Kind.EARLY) or header.flags:
            return header, None
        by, early = self.scale if scale is None else scale, header.kind is Kind.EARLY
        return self.compression.encode(link.index, header, lambda: self._unscaled(header.block, pack, by, early))

    def order(self, block: int) -> int:
        """How early a block is to be sent among those that could be; of equal ones the first asked for goes first."""
        return 0

    def outgoing(self, lane: WorkerLane, header: Header, pack: Pack) -> tuple[Header, torch.Tensor | None] | None:
        """The frame that a queued request has become, as its lane sends it now; None: it is not wanted any more."""
        return None if self._answered(header) else self.payload(lane.link, header, pack)

    def _answered(self, header: Header) -> bool:
        """Is this a push that was queued twice, and answered meanwhile? Its gradients are gone."""
        return header.kind is Kind.PUSH and not header.flags and not self.sources

    def sent(self, header: Header) -> None:
        """The lane is through with what `outgoing` gave it."""

    def land(self, link: ShardConnection, stream: Stream, header: Header, pack: Pack) -> float:
        """Bring an answer's payload into the targets: in how many seconds it was copied. Raises as Stream.recv_into."""
        began = time.monotonic()
        if header.flags & Flag.LENT and self.sharing.land(header):
            return time.monotonic() - began
        codec = self.compression.codec_of(header)
        pieces = self.memory.pieces(pack, self.targets) if codec is None else None
        if pieces is not None:
            stream.recv_parts(header, pieces)
            self._measured(link, header, time.monotonic() - began)
            return 0.0
        flat, put = self.memory.landing(header.block, pack, self.targets)
        if codec is not None:
            body = self.compression.buffer(header.length)
            stream.recv_into(header, memory.view(body))
            received = time.monotonic()
            self.compression.decode(codec, header, body, flat)
        else:
            began = time.monotonic()
            stream.recv_into(header, memory.view(flat))
            received = time.monotonic()
            self._measured(link, header, received - began)
        put()
        return time.monotonic() - received

    def _measured(self, link: ShardConnection, header: Header, seconds: float) -> None:
        if header.flags & Flag.LENT:
            return
        asked = self.compression.measured(link.index, header, seconds, len(link.lanes))
        if asked is not None:
            link.send_json(self.state.header(Kind.CODEC), {"pull": asked})

    def note(self, header: Header) -> None:
        """An answer has landed; called with the condition held."""
        if self.memory.landed(header.block):
            self.versions[header.block] = header.version
            self.skipped |= bool(header.flags & Flag.SKIP)

    def newest_version(self) -> int:
        """The newest version of any block that has landed."""
        return max((n for _, n in self.versions.values()), default=0)

    def make_packs(self) -> Packs:
        """A pack for each block, all in one buffer: for one thread at a time."""
        return Packs(self.state.layout)

    # -- inside --------------------------------------------------------------------------------

    def _unscaled(self, block: int, pack: Pack, scale: float, early: bool) -> torch.Tensor:
        flat = self.memory.leaving(block, pack, self.sources)
        # Until the step begins `scaled` is of the gradient before.
        return flat if scale == 1.0 or (self.sharing.scaled(block) and not early) else torch.mul(flat, scale, out=pack.flat)

    def _ask(self, make: Callable[[Block], Header], targets: Sequence[torch.Tensor]) -> None:
        """Send a request for each block, as many at a time as a link has credit for, and wait until every one is answered."""
        self._send(make, targets)
        self.state.parts.to(OWN)
        self.act_meanwhile()
        self._await_answers()
        count_change(targets)

    def _await_answers(self) -> None:
        self.watched = False
        try:
            read_answers(self.state, self.links)
            self.state.wait(lambda: not any(link.outstanding for link in self.links), WAITS_FOR)
        finally:
            self.watched = True
        self.memory.settle(block.index for block in self.state.blocks)

    def _send(self, make: Callable[[Block], Header], targets: Sequence[torch.Tensor]) -> None:
        """Send a request for each block, as many at a time as a link has credit for."""
        self.expect(targets)
        steady = self.state.mode.steady
        for block in self.state.blocks:
            link = self.links[self.state.owner[block.index]]
            self.sharing.refresh(block.index)  # before its answer lands: what comes over a stream is the worker's own until its next push
            if not (link.shared and steady):  # what is lent fills no queue
                self.await_credit(link, block.nbytes)
            self.request(link, make, block)

    def expect(self, targets: Sequence[torch.Tensor]) -> None:
        """Each block is asked for from now on, and lands in `targets`. Raises SessionEnd."""
        state = self.state
        state.check()
        self.targets = targets
        self.sharing.aim(targets)
        of_link = Counter(state.owner[block.index] for block in state.blocks)
        with state.cond:
            for link in self.links:
                link.requests.unsent = of_link[link.index]
            self.memory.expect()

    def request(self, link: ShardConnection, make: Callable[[Block], Header], block: Block) -> None:
        """Send one of the requests for which `expect` has been called."""
        with self.state.cond:
            header = link.ask(make(block))
        link.send_block(header)

    def await_credit(self, link: ShardConnection, nbytes: int, apart: Set[int] = frozenset()) -> None:
        """Wait until `nbytes` more may be on their way; blocks in `apart` have a credit of their own.

        In a decided mode, and where a norm is waited for, nothing is answered before all of a push is there, so nothing is waited for here.
        The shards have refused what they have no room for.
        """
        if self.answers_wait:
            return
        blocks = self.state.layout.blocks

        def room() -> bool:
            used = sum(blocks[h.block].nbytes for h in link.outstanding.values() if h.block < len(blocks) and h.block not in apart)
            return used == 0 or used + nbytes <= self.credit

        with self.state.cond:
            now = room()
        if not now:
            self.wait(room)

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for what shards answer. Raises SessionEnd."""
        self.state.wait(done, WAITS_FOR)

    @property
    def answers_wait(self) -> bool:
        """Is no block of the push that is sent answered before all of it is there?"""
        return self.state.mode.decided or self.clip.norm is not None

    def tell_hyperparameters(self, hyperparameters: Groups, none: list[int]) -> int:
        """Let every shard know what the pushes that follow are made with; the version by which they name it."""
        body: dict[str, Any] = {"hyperparameters": hyperparameters, "none": none, "rows": list(self.rows.hyperparameters)}
        if self.clip.norm is not None:
            body["clip"] = self.clip.norm
        if self.clip.value is not None:
            body["clamp"] = self.clip.value
        if self.finite.found is not None:
            body["nonFinite"] = self.finite.found
        if self.present > 1:
            body["processes"] = self.present
        if body != self._infos.get(self._info):
            self._info += 1
            self._infos[self._info] = body
            for old in [number for number in self._infos if number < self._info - self.delay]:
                del self._infos[old]
            for link in self.links:
                link.send_json(self.state.header(Kind.INFO, info=self._info), body, everywhere=True)
        return self._info


def without_gradient(grads: Gradients) -> list[int]:
    """Rows of the parameters that have none; of an absent rank nothing is said."""
    return [] if grads is None else [row for row, grad in enumerate(grads) if grad is None]


class ModelMemory:
    """Where blocks are as they leave and as they land: in the tensors of the model. Those who have them elsewhere say so."""

    lends = True
    """They may lie in memory that this worker and a shard of its host lend each other."""

    def share(self, layout: Layout, steady: bool) -> Sharing:
        """What this worker and the shards of its host lend each other."""
        return Sharing(layout, steady)

    def release(self, block: int) -> None:
        """Wait until nobody reads the memory in which the block's last answer lay. A shard may write there after the next push."""

    def gather(self, block: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to copy the block's gradient out of these, by row of the table, where it does not leave from there."""

    def leaving(self, block: int, pack: Pack, sources: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The block's gradient, 1-D, from where it lies or gathered into `pack`."""
        direct = pack.direct(sources)
        return pack.gather(sources) if direct is None else direct

    def expect(self) -> None:
        """Answers to all blocks land from now on; called with the condition held."""

    def pieces(self, pack: Pack, targets: Sequence[torch.Tensor]) -> Sequence[memoryview] | None:
        """The targets themselves, where an answer can be received straight into them; None: it goes by `landing`."""
        return pack.pieces(targets)

    def landing(self, block: int, pack: Pack, targets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """If the block's answer is received, and what puts it into the targets from there."""
        direct = pack.direct(targets)
        return (pack.flat, lambda: pack.scatter(targets)) if direct is None else (direct, lambda: None)

    def landed(self, block: int) -> bool:
        """An answer has landed: did it count? Called with the condition held."""
        return True

    def settle(self, blocks: Iterable[int]) -> None:
        """What the calling thread begins from now on sees these blocks, which have landed."""


def count_change(tensors: Sequence[torch.Tensor]) -> None:
    """Let autograd know that these were written to."""
    try:
        torch.autograd.graph.increment_version(list(tensors))
    except RuntimeError:  # some versions of torch refuse tensors made in inference mode, which have no version
        torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


@dataclass(frozen=True)
class GradientClip:
    """Each element is at most `value` from 0, then its norm over all parameters at most `norm`; None: any."""

    norm: float | None = None
    value: float | None = None

    def within(self, other: GradientClip) -> GradientClip:
        """Both, one after the other: the smaller limits."""
        return GradientClip(_least(self.norm, other.norm), _least(self.value, other.value))


def _least(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


CREDIT = 32 << 20
"""Bytes on their way between a worker and a shard that keep both ways full: more is not taken of the share for what is pushed at a step."""


def credits(config: Config, overlap: bool) -> tuple[int, int]:
    """Bytes of pushes that wait for an answer, and of early data, that a shard may hold of one worker.

    One block of each push always goes, however small the share. Early data has what the pushes leave, and none without `overlap`.
    """
    share = config.gradients // config.workers
    pushes = min(CREDIT, share // 2 if overlap else share)
    return pushes, share - pushes if overlap else 0


class FiniteCheck:
    """Of one worker: all blocks of all shards then skip the same step, as they do for a GradScaler."""

    def __init__(self, rows: Rows) -> None:
        self._state, self._rows, self._what = rows.state, rows, rows.state.place.config.non_finite
        self.may_skip = self._what == "skip"
        self.found: int | None = None
        """In the step in hand: the place of the first tensor with such a number in the model, or after its tensors that of the table."""

    def skips(self, grads: Gradients, rows: Sequence[RowGrads | None], skip: bool) -> bool:
        """Is this step to be skipped? `skip`: it is, whatever is found. Raises SessionEnd (refused) with the step and the tensor."""
        self.found = None
        if self._what == "pass" or grads is None or skip:
            return skip
        self.found = _first_bad([*grads, *(None if part is None else part.grads for part in rows)])
        if self.found is None:
            return False
        if self._what == "refuse":
            rank = self._state.place.index
            names = [*(spec.name for spec in self._state.layout.table), *(f"table {spec.name}" for spec in self._rows.specs)]
            raise SessionEnd(
                "refused",
                f"worker {rank}, step {self._state.clock}: the gradient of {names[self.found]} holds NaN or inf, and training.nonFinite "
                "is refuse (skip leaves such a step out, pass applies it)",
            )
        return True


def _first_bad(tensors: Sequence[torch.Tensor | None]) -> int | None:
    """The place of the first tensor that holds NaN or inf."""
    floats = [(place, tensor) for place, tensor in enumerate(tensors) if tensor is not None and tensor.is_floating_point()]
    with torch.no_grad():
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for _, tensor in floats:
            by_device.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
        # A sum of all is finite only if each number is; one wait for a device, however many tensors.
        if all(bool(torch.isfinite(torch.stack(sums)).all()) for sums in by_device.values()):
            return None
        return next((place for place, tensor in floats if not bool(torch.isfinite(tensor).all())), None)
