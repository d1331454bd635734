"""What one worker's stream agreed on: how its pushes are written, and how it is answered."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from psjob import codecs, contract
from psjob.codecs import Codec, CodecError, CodecKey, choice
from psjob.layout import memory
from psjob.layout.blocks import Block
from psjob.process.config import Place
from psjob.wire.frame import Flag, Header, WireError


class Encoded:
    """`hello` is the worker's; `one_host`: the stream never leaves this machine. Used by the threads of all its lanes."""

    def __init__(self, place: Place, rank: int, hello: dict[str, Any], one_host: bool) -> None:
        self._config, self._seed, self._rank = place.config.compression, place.config.seed, rank
        wanted = {self._config.push, self._config.pull}
        if contract.AUTO_CODEC in wanted:
            wanted |= {name for _, name in choice.LADDER}
        offered = hello.get("codecs", [])
        listed = offered if isinstance(offered, list) else []
        self.agreed = [codecs.NONE, *sorted(name for name in codecs.CODECS if name in wanted and name in listed)]
        self._numbers = {codec.number for name, codec in codecs.CODECS.items() if name in self.agreed}
        self.push = self._named(hello.get("push"), self._config.push, one_host)
        self.pull = self._named(hello.get("pull"), self._config.pull, one_host)
        self._seen = choice.Goodput()
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
            name = choice.for_push(bits)
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


def said_of(streams: Iterable[Encoded]) -> str | None:
    """How the workers' numbers travel, such as `push int8, pull bf16`; several names where they differ, None where all go as they are."""
    known = list(streams)
    sides = [("push", sorted({stream.push for stream in known})), ("pull", sorted({stream.pull for stream in known}))]
    if all(names in ([], [codecs.NONE]) for _, names in sides):
        return None
    return ", ".join(f"{side} {'+'.join(names)}" for side, names in sides)
