"""One stream of a worker, and what all its streams share: answers go out by the stream that asked, from memory that stands still.

A stream agrees once on how its pushes are written, and how it is answered. Gradients that overlap sent before their step was made are held
until a push names them. A worker of this host and the shard lend each other memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psjob import codecs, contract
from psjob.codecs import Codec, CodecError, CodecKey
from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.layout.memory import LentSpan
from psjob.process import system
from psjob.process.config import ProcessContext
from psjob.protocol.messages import ShardMessage
from psjob.protocol.streams import PairFacts, offered_streams
from psjob.shard.block import ParameterBlock
from psjob.shard.pending import MOST_NAMED, Gradient, Lent, ServedState, Waiter
from psjob.shard.store import Store
from psjob.shard.table import ServedTable
from psjob.wire.event_loop import LARGE, NonBlockingStream, Sending
from psjob.wire.frame import HELD_SECONDS, MOST_HELD, MOST_UPDATED, UPDATED_SECONDS, Flag, Header, Kind, WireError, dump
from psjob.wire.shared_memory import Region, SharedMemoryBroker
from psjob.wire.tcp import Part

MOST_SLOTS = 64
MOST_CORES = 1 << 16
_spares = memory.Spares()
"""Room for copies of large answers, until they are sent."""


@dataclass
class ShardJobFacts:
    """What a shard knows of the whole job, which holds for all its workers."""

    snapshot_step: int = -1
    """Answers at this version ask for their worker's record."""
    record_requested: bool = False
    """In a decided mode: every answer asks for its worker's record."""
    final: bool = False
    """The job is over."""
    waiting_for: str | None = None
    """A sentence on whom held answers wait for."""


@dataclass(frozen=True)
class ShardContext:
    """What the streams of workers have of their shard. `answer` carries a word to the coordinator, wherever it runs."""

    place: ProcessContext
    run: bytes
    store: Store
    job: ShardJobFacts
    broker: SharedMemoryBroker | None
    """Where workers of this host come for the memory that this shard lends."""
    tell: Callable[[ShardMessage], None]
    initialised: Callable[[], None]
    """Every block and table has its first values."""


class WorkerState:
    """One worker's process as this shard has it, for everything that reads or answers one of its streams."""

    def __init__(self, context: ShardContext, stream: NonBlockingStream, header: Header, hello: dict[str, Any]) -> None:
        """Raises WireError for a hello that asks for what no worker has."""
        self.context, self.store = context, context.store
        self.rank, self.hello = header.worker, hello
        self.incarnation = (header.start, header.rewinds)
        broker = context.broker
        self.by_folder = stream.is_remote and broker is not None and broker.in_folder and context.place.pairs_with(header.worker)
        """This worker is in another pod of this node, and reaches the broker by a volume that both mount."""
        self.encoded = StreamCodecs(context.place, header.worker, hello, self.by_folder or not stream.is_remote)
        self.done = threading.Event()
        self.restored_by = -1
        self.base = Header(
            Kind.PARAM, run=context.run, attempt=self.store.attempt, worker=self.rank, start=header.start, rewinds=header.rewinds
        )
        """What every frame to this worker has in common."""
        self.held = EarlyPushes(self.store.budget // self.store.workers)
        self.cores = _cores_of(hello)
        self.lanes: list[ShardLane] = []
        self.most_lanes = 1
        """Streams that it may open, the first included; as it was welcomed."""
        self.lending: Lending | None = None
        """If this worker's blocks lie, from when it has come for memory that this shard lends until the session is over."""
        self.row_transports = transports_of(hello, "rowTransports")

    def streams(self) -> int:
        """How many it is offered, as the manifest and the blocks of this shard are now."""
        config, store = self.context.place.config, self.store
        if config.streams is not None:
            return config.streams
        nbytes = sum(cell.block.nbytes for cell in store.cells.values())
        one_host, own = not self.stream.is_remote, system.cores()
        pair = PairFacts(config.workers, len(config.shards), self.cores or own, own, nbytes, one_host, one_host and store.lends)
        return offered_streams(pair)

    @property
    def stream(self) -> NonBlockingStream:
        """The one that hello came by."""
        return self.lanes[0].stream

    @property
    def near(self) -> bool:
        """May this worker and the shard lend each other memory?"""
        place = self.context.place
        return self.by_folder or (not self.stream.is_remote and (place.config.sharing == "host" or place.index == self.rank))

    def offer(self, ticket: str, size: int) -> dict[str, Any]:
        """What tells this worker where to come for `size` bytes with `ticket`."""
        told = {"name": self.context.broker.address if self.context.broker is not None else "", "token": ticket, "bytes": size}
        return told | {"inFolder": True} if self.by_folder else told


class ShardLane:
    """The sending side of `stream`; the session reads. Frames go out in the order in which they were queued.

    `rows` answers lookups, on the first stream of the worker.
    """

    def __init__(self, worker: WorkerState, stream: NonBlockingStream, rows: Callable[[ServedTable, Waiter], None]) -> None:
        self.worker, self.store, self.stream, self.rows = worker, worker.store, stream, rows
        self._job = worker.context.job
        self.held = worker.held
        self._lent = 0
        """Answers that were put in lent memory."""
        self._body = torch.empty(0, dtype=torch.uint8, device="cpu")

    def end(self) -> None:
        """The stream has ended: nothing waits for it any more."""
        self.store.drop_waiters(self, self.worker.rank)
        self.held.clear()

    def room(self, size: int) -> torch.Tensor:
        """Bytes for an encoded body that is received; they stand until the next one of this stream."""
        if self._body.numel() < size:
            self._body = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._body[:size]

    def param(self, cell: ParameterBlock, waiter: Waiter) -> None:
        large = cell.block.nbytes >= LARGE and not (waiter.lent and self.store.mode.steady)
        self.stream.put(partial(self._param, cell, waiter), large)

    def waiting(self, waiter: Waiter, cell: ServedState, missing: list[int], seconds: float) -> None:
        body = {"workers": missing[:MOST_NAMED], "more": max(0, len(missing) - MOST_NAMED), "for": cell.name, "seconds": round(seconds, 1)}
        header = self.worker.base._replace(kind=Kind.WAITING, term=self.store.term, request=waiter.request)
        self.stream.put_control(header, dump(body))

    def _param(self, cell: ParameterBlock, waiter: Waiter) -> Sending | None:
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
            info = self.worker.base._replace(kind=Kind.INFO, term=self.store.term, block=cell.block.index)
            parts += self.stream.framed(info, dump({"none": none}))
        if answer is None:
            return Sending([*parts, header.lent(place or 0, cell.block.nbytes)])
        spares = [] if spare is None else [spare]
        if waiter.update or cell.update is None:  # weights that a worker steps by itself must come back whole
            number, answer, more = self.worker.encoded.answer(header, cell.block, answer.view(getattr(torch, cell.block.dtype)), _spares)
            header = header._replace(codec=number)
            spares += [] if more is None else [more]
        parts += self.stream.framed(header, memory.view(answer))
        return Sending(parts, partial(_spares.give, *spares) if spares else None)

    def _answer(self, cell: ParameterBlock, waiter: Waiter) -> Header:
        """What an answer says of the block as it stands; called with its lock held."""
        job, mode = self._job, self.store.mode
        flags = Flag.SNAPSHOT if (job.record_requested if mode.decided else job.snapshot_step == waiter.version) else Flag.NONE
        if cell.skipped and (waiter.update or mode.steady):
            flags |= Flag.SKIP
        if waiter.update and flags & Flag.SNAPSHOT and self.worker.rank == self.store.first_expected(cell):
            flags |= Flag.STORE
        return self.worker.base._replace(
            term=self.store.term, clock=waiter.clock, request=waiter.request, block=cell.block.index,
            version=(self.store.attempt, cell.n), flags=flags, info=len(cell.none) if waiter.update else 0,
            generation=min(MOST_HELD, int(waiter.held / HELD_SECONDS)), table=min(MOST_UPDATED, int(waiter.updated / UPDATED_SECONDS)),
        )  # fmt: skip

    def _lend(self, cell: ParameterBlock, waiter: Waiter, reply: torch.Tensor) -> int | None:
        """Where in lent memory the answer lies; None: it goes over the stream."""
        lending = self.worker.lending if waiter.lent else None
        if lending is None or _moves(cell, waiter):
            return None
        place = lending.place(cell, reply, self.worker.lanes.index(self), self._lent)
        self._lent += 1
        return place

    def _still(self, cell: ParameterBlock, waiter: Waiter, reply: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The answer, in memory that stays as it is while it is sent: its own where the rule or the mode holds that still, else a copy.

        With it the spare that holds a large copy.
        """
        assert cell.state is not None
        if reply is not cell.state.weights and reply is not cell.update and not waiter.before:
            return reply, None
        holds = (self.store.mode.steady and not _moves(cell, waiter)) or self.store.workers == 1
        if holds and (cell.update is None or reply is cell.update):
            return reply, None
        if cell.block.nbytes < LARGE:
            return reply.clone(), None
        raw = reply.view(torch.uint8)
        spare = _spares.take(raw.numel())
        return spare[: raw.numel()].copy_(raw), spare


def _moves(cell: ParameterBlock, waiter: Waiter) -> bool:
    """In sync, does the block wait for others only? A process before this one of the rank has pushed its open clock and died meanwhile."""
    return cell.mode.steady and (waiter.rank, cell.n) in cell.pending


class StreamCodecs:
    """`hello` is the worker's; `one_host`: the stream never leaves this machine. Used by the threads of all its lanes."""

    def __init__(self, place: ProcessContext, rank: int, hello: dict[str, Any], one_host: bool) -> None:
        self._config, self._seed, self._rank = place.config.compression, place.config.seed, rank
        wanted = {self._config.push, self._config.pull}
        if contract.AUTO_CODEC in wanted:
            wanted |= {name for _, name in codecs.LADDER}
        offered = hello.get("codecs", [])
        listed = offered if isinstance(offered, list) else []
        self.agreed = [codecs.NONE, *sorted(name for name in codecs.CODECS if name in wanted and name in listed)]
        self._numbers = {codec.number for name, codec in codecs.CODECS.items() if name in self.agreed}
        self.push = self._named(hello.get("push"), self._config.push, one_host)
        self.pull = self._named(hello.get("pull"), self._config.pull, one_host)
        self._seen = codecs.Goodput()
        self._lock = threading.Lock()

    # -- pushes --------------------------------------------------------------------------------

    def codec_of(self, header: Header, block: Block) -> Codec | None:
        """What a push is written in, its size checked; None: as it is. Raises WireError for what was not agreed."""
        if not header.codec:
            return None
        if header.codec not in self._numbers:
            raise WireError(f"codec {header.codec} was not agreed in hello; {', '.join(self.agreed)} were")
        codec = codecs.numbered(header.codec)
        if header.flags & (Flag.ABSENT | Flag.SKIP | Flag.STORE | Flag.HELD) or codecs.for_block(codec, block, self._config.ratio) is None:
            raise WireError(f"push of block {header.block} ({block.length} elements of {block.dtype}) cannot be in {codec.name}")
        try:
            codec.check_size(header.length, block.length, self._config.ratio)
        except CodecError as error:
            raise WireError(f"push of block {header.block}: {error}") from None
        return codec

    def decode(self, codec: Codec, header: Header, body: torch.Tensor, out: torch.Tensor) -> None:
        """Write a push's numbers to `out`. Raises WireError for a body that no worker can have written."""
        try:
            codec.decode(body, out, CodecKey(self._seed, header.clock, header.block, self._rank), self._config.ratio)
        except CodecError as error:
            raise WireError(f"push of block {header.block}: {error}") from None

    def measured(self, header: Header, seconds: float, lanes: int) -> dict[str, Any] | None:
        """A push came in `seconds` after its header, by one of `lanes`; once that makes a measurement, what to tell the worker."""
        with self._lock:
            if self.push != contract.AUTO_CODEC:
                return None
            self._seen.add(header.clock, header.length, seconds)
            if not self._seen.enough(header.clock):
                return None
            bits = self._seen.bits * lanes
            name = codecs.for_push(bits)
            self.push = name if name in self.agreed else codecs.NONE
        return {"push": self.push, "bits": round(bits)}

    # -- answers -------------------------------------------------------------------------------

    def chosen(self, name: object) -> None:
        """The worker has measured its link and wants weights so from now on. Raises WireError for what was not agreed."""
        if name not in self.agreed or name not in contract.PULL_CODECS:
            raise WireError(f"CODEC asks for weights in {str(name)[:40]!r}; agreed are {', '.join(self.agreed)}")
        self.pull = str(name)

    def answer(
        self, header: Header, block: Block, numbers: torch.Tensor, spares: memory.Spares
    ) -> tuple[int, torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """(codec's number, body, which of `spares` holds it) of an answer; None: it is `numbers` itself."""
        codec = None if self.pull == contract.AUTO_CODEC else codecs.for_block(codecs.named(self.pull), block, self._config.ratio)
        if codec is None:
            return 0, numbers, None
        spare = spares.take(codec.bound(block.length, self._config.ratio))
        body = spare[: codec.bound(block.length, self._config.ratio)]
        size = codec.encode(numbers, body, CodecKey(self._seed, header.clock, header.block, self._rank), self._config.ratio)
        return (codec.number, body[:size], spare) if size else (0, numbers, spare)

    # -- inside --------------------------------------------------------------------------------

    def _named(self, said: object, asked: str, one_host: bool) -> str:
        """What this stream begins with: what the job asks for, or where that is left open what the worker chose before."""
        name = asked if asked != contract.AUTO_CODEC else str(said)
        if name in self.agreed:
            return name
        return contract.AUTO_CODEC if asked == contract.AUTO_CODEC and not one_host else codecs.NONE


def said_of(streams: Iterable[StreamCodecs]) -> str | None:
    """How the workers' numbers travel, such as `push int8, pull bf16`; several names where they differ, None where all go as they are."""
    known = list(streams)
    sides = [("push", sorted({stream.push for stream in known})), ("pull", sorted({stream.pull for stream in known}))]
    if all(names in ([], [codecs.NONE]) for _, names in sides):
        return None
    return ", ".join(f"{side} {'+'.join(names)}" for side, names in sides)


class EarlyPushes:
    """Of one worker, and used by the threads that read its streams: at most one gradient a block, and `most` bytes together."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._by_block: dict[int, tuple[int, int, Gradient]] = {}
        self._lock = threading.Lock()

    def keep(self, header: Header, gradient: Gradient) -> None:
        """Hold what came by an EARLY frame, if there is room and no later one of its block is here; else give it back."""
        with self._lock:
            clock, number, _ = self._by_block.get(header.block, (-1, -1, None))
            if (clock, number) < (header.clock, header.request):
                self._drop(header.block)
                size = _nbytes(gradient)
                if self._bytes + size <= self._most:
                    self._by_block[header.block] = (header.clock, header.request, gradient)
                    self._bytes += size
                    return
        gradient.free()

    def take(self, header: Header) -> Gradient:
        """The gradient that a HELD push names. Raises WireError if it is not here; the worker then pushes the block whole."""
        with self._lock:
            clock, number, gradient = self._by_block.pop(header.block, (-1, 0, None))
            self._bytes -= 0 if gradient is None else _nbytes(gradient)
        if gradient is None or (clock, number) != (header.clock, header.part):
            raise WireError(f"push of block {header.block} names early data {header.part} of step {header.clock}, which is not held here")
        return gradient

    def drop(self, block: int, clock: int) -> None:
        """Other contents of the block come, or none: what was held up to that clock is not the push."""
        with self._lock:
            if self._by_block.get(block, (clock + 1,))[0] <= clock:
                self._drop(block)

    def clear(self) -> None:
        """A stream has ended, and the others do."""
        with self._lock:
            for block in list(self._by_block):
                self._drop(block)

    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._bytes

    def _drop(self, block: int) -> None:
        held = self._by_block.pop(block, None)
        if held is not None:
            self._bytes -= _nbytes(held[2])
            held[2].free()


def _nbytes(gradient: Gradient) -> int:
    return gradient.flat.numel() * gradient.flat.element_size()


class Lending:
    """Made when a worker has come for the handover. `gradients` is what it lends.

    In a steady mode every answer lies where the block itself lives, for all workers alike. In sync no block moves before every worker
    has pushed again, and a worker pushes when its script is done with the weights. So they need no second buffer. Otherwise an
    answer is copied to one of a lane's slots, in turn. The worker takes a lane's answers in the order in which they are sent. It asks
    for no more at a time than there are slots, so the one that comes next is one that it has read.
    """

    def __init__(self, store: Store, span: LentSpan, fd: int, lanes: int, slots: int) -> None:
        self.gradients = Region.borrow(fd, span.size)
        self._span = span
        self._blocks: dict[int, Lent] = {}
        self._slots, self._largest = slots, max(store.largest, 1)
        self.answers = store.region or Region.lend(lent_bytes(store, lanes, slots))
        self._room = None if store.region is not None else memory.lent(self.answers, 0, self.answers.size, "uint8")

    def gradient(self, header: Header, block: Block) -> Lent:
        """The gradient of a push where its worker has it. Raises WireError for any other place than the block's."""
        if header.part != self._span.offsets[block.index]:
            raise WireError(f"push of block {block.index} lies at byte {header.part}, expected {self._span.offsets[block.index]}")
        lent = self._blocks.get(block.index)
        if lent is None:
            lent = self._blocks[block.index] = Lent(memory.lent(self.gradients, header.part, block.length, block.dtype))
        return lent

    def place(self, cell: ParameterBlock, answer: torch.Tensor, lane: int, number: int) -> int | None:
        """Offset of answer `number` of a lane in what this shard lends, copied there where it must be; None: it is not to be lent."""
        if self._room is None:
            return self._span.offsets[cell.block.index] if answer is cell.home else None
        offset = (lane * self._slots + number % self._slots) * self._largest
        self._room[offset : offset + cell.block.nbytes].view(answer.dtype).copy_(answer)
        return offset


def _cores_of(hello: Mapping[str, Any]) -> int:
    """Cores of a worker; 0: it says nothing. Raises WireError for a number that no machine has."""
    cores = hello.get("cores", 0)
    if type(cores) is not int or not 0 <= cores <= MOST_CORES:
        raise WireError(f"a worker has 0..{MOST_CORES} cores, got {str(cores)[:40]}")
    return cores


def slots_of(hello: Mapping[str, Any]) -> int:
    """How many answers a worker takes at a time. Raises WireError for a number that no worker has."""
    slots = hello.get("slots", 1)
    if type(slots) is not int or not 1 <= slots <= MOST_SLOTS:
        raise WireError(f"a worker takes 1..{MOST_SLOTS} answers at a time, got {str(slots)[:40]}")
    return slots


def transports_of(hello: Mapping[str, Any], what: str) -> list[str]:
    """How a worker's blocks, or its rows, may come and go. Raises WireError for what is no list of names."""
    ways = hello.get(what, [])
    if not isinstance(ways, list) or not all(isinstance(way, str) for way in ways):
        raise WireError(f"{what} of a worker's hello are {str(ways)[:40]!r}, expected a list of names such as shared and tcp")
    return ways


def lent_bytes(store: Store, lanes: int, slots: int) -> int:
    """Size of the memory of a worker's answers."""
    return store.region.size if store.region is not None else lanes * slots * max(store.largest, 1)
