"""How a worker's gradients are written on the wire: a codec a shard, the residual of each block, and the bytes of the clock in hand.

A push that feeds its error back is encoded once a clock; its bytes are kept until the next one, so that what is sent again is what was
sent. One that does not is encoded again from the gradient, which stands still until its clock is answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from psjob import codecs, contract
from psjob.codecs import Codec, CodecKey
from psjob.layout import memory
from psjob.layout.blocks import Block, Layout
from psjob.process.config import ProcessContext
from psjob.process.errors import Refused
from psjob.wire.frame import Header, WireError

LIMIT: Final = 224 << 20
"""Most bytes of residuals: they go with the resume record, whose limit is 256 MiB."""
SMALL: Final = 64 << 10
log = logging.getLogger("psjob.worker")


@dataclass(frozen=True)
class SentBody:
    """The body of a block's push, as it went out at `clock`; `codec` is its number, 0 where it went as it is."""

    clock: int
    codec: int
    body: torch.Tensor


class WorkerCompression:
    """`push` and `pull` are names by shard; `auto` where the link is still being measured."""

    def __init__(self, place: ProcessContext, layout: Layout) -> None:
        self._config = place.config.compression
        self._seed, self._rank = place.config.seed, place.index
        self._layout = layout
        count = len(place.config.shards)
        self.push = [self._config.push] * count
        self.pull = [self._config.pull] * count
        self._left: dict[int, torch.Tensor] = {}
        """Residuals, by block, in float32: what its pushes have lost to the codec so far."""
        self._kept: dict[int, SentBody] = {}
        self._bodies: dict[int, torch.Tensor] = {}
        """Room for a block's encoded bytes, taken once."""
        self._before: dict[int, torch.Tensor] = {}
        self._seen = [codecs.Goodput() for _ in range(count)]
        self._lock = threading.Lock()
        self._feeding = [threading.Lock() for _ in layout.blocks]
        self._latched = [(-1, codecs.NONE)] * count
        """By shard: a clock, and the codec of all its pushes."""
        self.buffer = memory.Scratch()
        self._none: frozenset[int] = frozenset()
        self._may_skip = False
        self._clock = -1
        self._large = False

    def check(self, beside: int = 0) -> None:
        """Raise Refused if the residuals could not be saved with the `beside` bytes of a rule's state."""
        self._large = max((self._left_bytes(codec) for codec in codecs.CODECS.values() if codec.feeds_back), default=0) + beside > LIMIT
        codec = None if self._config.push == contract.AUTO_CODEC else codecs.named(self._config.push)
        if codec is None or not codec.feeds_back or not self._large:
            return
        raise Refused(
            f"training.compression.push {codec.name} has residuals of up to {self._left_bytes(codec)} bytes that go with a worker's resume "
            f"record, at most {LIMIT - beside} fit{' beside the state of training.updateRule' if beside else ''}; "
            "take bf16 or fp16, which leave nothing for later"
        )

    # -- out -----------------------------------------------------------------------------------

    def begin(self, clock: int, none: frozenset[int], may_skip: bool) -> None:
        """The pushes of `clock` follow. Tensors in `none` have no gradient: their residual stays as it is.

        `may_skip`: the shards may leave this clock out, and then `undo` is called.
        """
        self._clock, self._none, self._may_skip = clock, none, may_skip
        self._before.clear()

    def encode(self, shard: int, header: Header, flat: Callable[[], torch.Tensor]) -> tuple[Header, torch.Tensor]:
        """Header and body of a push of the gradient `flat`; when it is sent again, the same bytes again."""
        block = self._layout.blocks[header.block]
        codec = self._codec(self._name(shard, header.clock), block)
        if codec is None:
            return header, flat()
        if codec.feeds_back:
            with self._feeding[block.index]:
                if header.clock != self._clock:  # it was answered meanwhile; whatever comes now is refused as a duplicate
                    return header, flat()
                kept = self._kept.get(block.index)
                if kept is None or kept.clock != header.clock:
                    kept = self._kept[block.index] = self._feed(codec, header.clock, block, flat())
            return header._replace(codec=kept.codec), kept.body
        body, numbers = self.buffer(codec.bound(block.length, self._config.ratio)), flat()
        size = codec.encode(numbers, body, self._key(header.clock, block.index), self._config.ratio)
        return (header._replace(codec=codec.number), body[:size]) if size else (header, numbers)

    def undo(self) -> None:
        """The clock counted for nothing: the residual is what it was before."""
        for index, before in self._before.items():
            self._left[index].copy_(before)
        self._before.clear()

    # -- in ------------------------------------------------------------------------------------

    def codec_of(self, header: Header) -> Codec | None:
        """What an answer is written in, its size checked; None: as it is. Raises WireError for what was not agreed."""
        block = self._layout.blocks[header.block]
        if not header.codec:
            if header.length != block.nbytes:
                raise WireError(f"PARAM of block {header.block} has {header.length} bytes, expected {block.nbytes}")
            return None
        try:
            codec = codecs.numbered(header.codec)
            codec.check_size(header.length, block.length, self._config.ratio)
        except codecs.CodecError as error:
            raise WireError(f"PARAM of block {header.block}: {error}") from None
        if codec.name not in self.offered() or codec.name not in contract.PULL_CODECS:
            raise WireError(f"PARAM of block {header.block} is in {codec.name}, which was not agreed for weights")
        return codec

    def decode(self, codec: Codec, header: Header, body: torch.Tensor, out: torch.Tensor) -> None:
        """Write an answer's numbers to `out`. Raises WireError."""
        try:
            codec.decode(body, out, self._key(header.clock, header.block), self._config.ratio)
        except codecs.CodecError as error:
            raise WireError(f"PARAM of block {header.block}: {error}") from None

    # -- which codec ---------------------------------------------------------------------------

    def offered(self) -> list[str]:
        """Names for hello: what this job may use."""
        names = {self._config.push, self._config.pull}
        if contract.AUTO_CODEC in names:
            names = {name for _, name in codecs.LADDER} | names - {contract.AUTO_CODEC}
        return [codecs.NONE, *sorted(names - {codecs.NONE})]

    def agreed(self, shard: int, names: list[str], one_host: bool) -> None:
        """A shard has welcomed this worker and knows `names`; nothing is encoded for what stays on this host unless it was asked for."""
        for side in (self.push, self.pull):
            if side[shard] == contract.AUTO_CODEC and one_host:
                side[shard] = codecs.NONE
                log.warning("shard %d is on this host: nothing is encoded for it", shard)
            elif side[shard] not in (*names, contract.AUTO_CODEC, codecs.NONE):
                log.warning("shard %d does not know codec %s; numbers go as they are", shard, side[shard])
                side[shard] = codecs.NONE

    def told(self, shard: int, body: Mapping[str, Any]) -> None:
        """A shard has measured this worker's pushes and says how to write them from now on. Raises WireError."""
        name, bits = body.get("push"), body.get("bits")
        if self.push[shard] != contract.AUTO_CODEC:
            return
        if name not in self.offered() or not isinstance(bits, int | float):
            raise WireError(f"CODEC names {str(name)[:40]!r} for pushes; offered are {', '.join(self.offered())}")
        codec = codecs.named(str(name))
        self.push[shard] = "bf16" if codec is not None and codec.feeds_back and self._large else str(name)
        log.warning("pushes to shard %d: %.3g Gb/s measured, codec %s", shard, bits / 1e9, self.push[shard])

    def measured(self, shard: int, header: Header, seconds: float, lanes: int) -> str | None:
        """An answer came in `seconds` by one of `lanes`; the codec to ask of the shard once its link is measured."""
        with self._lock:
            if self.pull[shard] != contract.AUTO_CODEC:
                return None
            seen = self._seen[shard]
            seen.add(header.clock, header.length, seconds)
            if not seen.enough(header.clock):
                return None
            bits = seen.bits * lanes
            self.pull[shard] = codecs.for_pull(bits)
        log.warning("answers of shard %d: %.3g Gb/s measured, codec %s", shard, bits / 1e9, self.pull[shard])
        return self.pull[shard]

    # -- saved with the worker -----------------------------------------------------------------

    @property
    def small(self) -> bool:
        """The residuals are small enough to be saved at every clock."""
        return sum(left.numel() for left in self._left.values()) * 4 <= SMALL

    @property
    def feeds(self) -> bool:
        """Pushes leave something out for the next ones."""
        return bool(self._left)

    def feeds_back(self, shard: int, block: int, clock: int) -> bool:
        """Would a push of this block leave something out? It is then made once, at the step."""
        codec = self._codec(self._name(shard, clock), self._layout.blocks[block])
        return codec is not None and codec.feeds_back

    def state(self) -> dict[str, Any]:
        """What a restart must put back, for the resume record; tensors are not copies."""
        return {"left": dict(self._left), "push": list(self.push), "pull": list(self.pull)} if self.offered() != [codecs.NONE] else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Put back what `state` gave. Of another codec or number of shards only what still fits is taken."""
        feeds = any(codecs.CODECS[name].feeds_back for name in self.offered() if name != codecs.NONE)
        for index, left in dict(saved.get("left", {})).items() if feeds else ():
            block = self._layout.blocks[index] if 0 <= index < len(self._layout.blocks) else None
            if block is not None and left.shape == (block.length,) and left.dtype == torch.float32:
                self._left[index] = left.clone()
        for side, names in ((self.push, saved.get("push", ())), (self.pull, saved.get("pull", ()))):
            if len(names) == len(side):
                side[:] = [name if mine == contract.AUTO_CODEC else mine for mine, name in zip(side, names, strict=True)]

    # -- inside --------------------------------------------------------------------------------

    def _codec(self, name: str, block: Block) -> Codec | None:
        return None if name == contract.AUTO_CODEC else codecs.for_block(codecs.named(name), block, self._config.ratio)

    def _key(self, clock: int, block: int) -> CodecKey:
        return CodecKey(self._seed, clock, block, self._rank)

    def _name(self, shard: int, clock: int) -> str:
        with self._lock:
            if self._latched[shard][0] != clock:
                self._latched[shard] = (clock, self.push[shard])
            return self._latched[shard][1]

    def _feed(self, codec: Codec, clock: int, block: Block, flat: torch.Tensor) -> SentBody:
        left = self._left.get(block.index)
        if left is None:
            left = self._left[block.index] = torch.zeros(block.length, dtype=torch.float32, device="cpu")
        if self._may_skip:
            self._before[block.index] = left.clone()
        aside = []
        for piece in block.pieces if self._none else ():
            if piece.tensor in self._none:
                part = left[piece.block_offset : piece.block_offset + piece.length]
                aside.append((part, part.clone()))
                part.zero_()
        left.add_(flat)
        body = self._bodies.get(block.index)
        if body is None:
            body = self._bodies[block.index] = torch.empty(codec.bound(block.length, self._config.ratio), dtype=torch.uint8, device="cpu")
        size = codec.encode(left, body, self._key(clock, block.index), self._config.ratio)
        if size:
            kept = SentBody(clock, codec.number, body[:size])
        else:
            kept = SentBody(clock, 0, left.to(flat.dtype, copy=True))
            left.zero_()
        for part, was in aside:
            part.copy_(was)
        return kept

    def _left_bytes(self, codec: Codec) -> int:
        ratio = self._config.ratio
        return sum(4 * block.length for block in self._layout.blocks if codecs.for_block(codec, block, ratio) is not None)
