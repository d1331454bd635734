"""What the frames of a worker with a key cost shard 0, through its whole stream: a MiB of each kind, and small ones by thousands."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from psjob.protocol.records import PIECE
from psjob.shard.acceptor import Acceptor, HelloRoom
from psjob.shard.believed import FIELDS
from psjob.shard.checks import MOST_SAID
from psjob.wire.auth import Peer
from psjob.wire.frame import HEADER_BYTES, MAX_BODY, MAX_JSON, MAX_VALUES, Flag, Header, Kind, run_digest
from tests.costs import LIMIT_SECONDS, MOST_BYTES, MOST_MEMORY, dearest, more
from tests.fuzzing import EDGES
from tests.soaking import rotating, soak
from tests.tensors.shard_frames import BODIES, RAW, WORKER, Standing
from tests.tensors.whole_shard import HELLO, RUN, WholeShard, frame

EACH_SECONDS = 0.001
"""Of a frame beside its bytes: some ten microseconds for the shortest, and half a millisecond for a lookup of rows."""


class Sent(NamedTuple):
    """A frame, sent `times` over. `clock`: above the worker's own, one more each time where it `counts`."""

    kind: Kind
    body: bytes
    fields: tuple[tuple[str, Any], ...] = ()
    clock: int = 0
    counts: bool = False
    times: int = 1


Input = tuple[Sent, ...]


def size(value: Input) -> int:
    return sum(sent.times * (HEADER_BYTES + len(sent.body)) for sent in value)


def frames(value: Input) -> int:
    return sum(sent.times for sent in value)


def small(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


SAME = (("part", len(RAW[Kind.RECORD])), ("version", (zlib.crc32(RAW[Kind.RECORD]), len(RAW[Kind.RECORD]))))
STEPS = tuple(
    Sent(kind, RAW[kind], clock=clock) for clock in range(100) for kind in (Kind.PUSH, Kind.ROW_PUSH)
)  # fmt: skip
"""Whole steps, of the job's block and its table."""
SEEDS: dict[Kind, list[Input]] = {
    Kind.HELLO: [(Sent(Kind.HELLO, small(HELLO)),)],
    Kind.INFO: [
        (Sent(Kind.INFO, small(BODIES[Kind.INFO]), (("info", 2),)),),
        (Sent(Kind.INFO, small(BODIES[Kind.INFO] | {"none": [0, 1, 2], "hyperparameters": [{}] * 60, "rows": [{}]})),),
    ],
    Kind.STEP_LOST: [(Sent(Kind.STEP_LOST, small({"rank": 0, "step": 1})),)],
    Kind.MEASURED: [(Sent(Kind.MEASURED, small({"idle": 0.5, "waits": "x" * 100})),)],
    **{kind: [(Sent(kind, small(BODIES[kind])),)]
       for kind in (Kind.REPORT, Kind.CHECKPOINT, Kind.STOP, Kind.STIRRED, Kind.INPUTS, Kind.DIGEST, Kind.CODEC)},
    **{kind: [(Sent(kind, b""),)] for kind in (Kind.MARK, Kind.LEAVE, Kind.PULL, Kind.STATE)},
    Kind.PUSH: [
        (Sent(Kind.PUSH, RAW[Kind.PUSH], counts=True, times=20),),
        (Sent(Kind.PUSH, b"", (("flags", Flag.ABSENT),), counts=True, times=50),),
        (Sent(Kind.PUSH, RAW[Kind.PUSH], times=20),),
        (Sent(Kind.EARLY, RAW[Kind.EARLY], (("request", 1),)), Sent(Kind.PUSH, b"", (("flags", Flag.HELD), ("part", 1)))),
    ],
    Kind.EARLY: [(Sent(Kind.EARLY, RAW[Kind.EARLY], times=20),)],
    Kind.INIT: [(Sent(Kind.INIT, RAW[Kind.INIT]),)],
    Kind.RECORD: [(Sent(Kind.RECORD, b"x" * 70_000),), (Sent(Kind.RECORD, RAW[Kind.RECORD], times=20),)],
    Kind.RECORD_DELTA: [
        (Sent(Kind.RECORD, RAW[Kind.RECORD]), Sent(Kind.RECORD_DELTA, b"", SAME, times=20)),
    ],
    Kind.RECORD_PIECE: [
        (Sent(Kind.RECORD_PIECE, b"x" * PIECE, (("version", (1, 1 << 20)),)),),
        (Sent(Kind.RECORD_PIECE, b"", (("version", (1, 1 << 20)),), times=20),),
    ],
    Kind.LOOKUP: [(Sent(Kind.LOOKUP, b"".join(i.to_bytes(8, "little") for i in range(50)), times=10),), (Sent(Kind.LOOKUP, b"", times=9),)],
    Kind.ROW_PUSH: [STEPS, (Sent(Kind.ROW_PUSH, RAW[Kind.ROW_PUSH], counts=True, times=20),)],
    Kind.ROW_INIT: [(Sent(Kind.ROW_INIT, RAW[Kind.ROW_INIT]),)],
    Kind.ROW_IDS: [(Sent(Kind.ROW_IDS, b"", times=20),), (Sent(Kind.ROW_IDS, RAW[Kind.ROW_IDS], times=20),)],

}  # fmt: skip
"""By kind, inputs to begin with."""


def grown(value: Input) -> list[Input]:
    """A MiB of the last frame, sent again and again; and one whose lists and texts are as long as that, where it is JSON."""
    sent, before = value[-1], size(value[:-1])
    room = MOST_BYTES - before - HEADER_BYTES
    found = [(*value[:-1], sent._replace(times=room // (HEADER_BYTES + len(sent.body))))]
    try:
        body = json.loads(sent.body)
    except ValueError:
        return found
    for name, part in body.items():
        for filled in (part, [part], [[]], [{}], [0], ["x"], {"a": 0}):
            long = long_of(filled, room - len(sent.body))
            if long is not None:
                found.append((*value[:-1], sent._replace(body=json.dumps(body | {name: long}, separators=(",", ":")).encode(), times=1)))
    return found


def long_of(part: Any, room: int) -> Any:
    times = room // (len(json.dumps(part, separators=(",", ":"))) + 1)
    if isinstance(part, str | list):
        return part * times if part else None
    return {f"{key}{number}": value for number in range(times // 3) for key, value in part.items()} if isinstance(part, dict) else None


def change(random: Random, one: Input, other: Input) -> Input:
    """More frames, longer ones, other fields of their headers, or those of two inputs."""
    made = list(one)
    at = random.randrange(len(made))
    sent = made[at]
    draw = random.random()
    if draw < 0.5:
        made[at] = sent._replace(body=more(random, sent.body, b"".join(part.body for part in other)), times=1)
    elif draw < 0.75:
        room = MOST_BYTES - size(one)
        times = sent.times + random.choice((1, 10, 100, room // (HEADER_BYTES + len(sent.body))))
        made[at] = sent._replace(times=max(1, times), counts=random.random() < 0.5)
    elif draw < 0.9:
        name = random.choice(("flags", "block", "part", "request", "info", "version", "clock", "table", "generation"))
        value = random.choice((*range(8), *EDGES))
        if name == "version":
            fields = {**dict(sent.fields), "version": (random.choice((0, 1)), value % (1 << 64))}
        elif name == "clock":
            fields, made[at] = dict(sent.fields), sent._replace(clock=random.choice((-1, 0, 1, 63)))
        else:
            bits = {"flags": 8, "info": 16, "table": 16, "part": 64}.get(name, 32)
            fields = {**dict(sent.fields), name: value % (1 << bits)}
        made[at] = made[at]._replace(fields=tuple(fields.items()))
    else:
        made += other
    return tuple(made[-200:])


class Taken:
    """What a shard that stands takes for inputs of a kind."""

    def __init__(self, folder: Path, kind: Kind, mode: str) -> None:
        self.kind = kind
        self.standing = Standing(folder, mode)

    def seconds(self, value: Input) -> float:
        """By which its frames are above what a MiB may take: a share of it that is 1 at the limit."""
        return self._send(value).spent / (LIMIT_SECONDS + EACH_SECONDS * max(0, frames(value) - 1))

    def memory(self, value: Input) -> float:
        tracemalloc.start()
        try:
            self._send(value)
            return float(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    def _send(self, value: Input) -> WholeShard:
        self.standing.again()
        shard = self.standing.shard
        row, recovery = shard.server.store.admission.rows[0], shard.server.store.recovery
        clock = row.complete

        def packed(base: Header) -> list[tuple[bytes, bytes]]:
            found = []
            for sent in value:
                for number in range(sent.times):
                    header = base._replace(kind=sent.kind, info=1, clock=clock + sent.clock + (number if sent.counts else 0))
                    header = header._replace(length=len(sent.body))._replace(**dict(sent.fields))
                    found.append((header.pack(), sent.body))
            return found

        def say(base: Header) -> list[Any]:
            if self.kind is Kind.HELLO:
                return [packed(base)]
            hello = HELLO | {"recovery": recovery, "mode": shard.place.config.mode}
            return [frame(Kind.HELLO, hello, base), frame(Kind.INFO, BODIES[Kind.INFO], base, info=1), packed(base)]

        shard.spent = 0.0
        shard.converse(WORKER, say)
        return shard


@pytest.fixture(autouse=True)
def only_errors() -> Iterator[None]:
    """A line of the log for each of thousands of refusals is no news."""
    log = logging.getLogger("psjob")
    before = log.level
    log.setLevel(logging.ERROR)
    torch.set_num_threads(1)
    yield
    log.setLevel(before)


def shown(value: Input) -> str:
    return "; ".join(f"{sent.times} × {sent._replace(body=sent.body[:200])} of {len(sent.body)} bytes" for sent in value)


def test_every_kind_of_frame_that_a_shard_reads_is_grown() -> None:
    told = {word for field in FIELDS for word in re.findall(r"[A-Z_]+", field.frame) if word in Kind.__members__}
    assert {Kind[word] for word in told} <= SEEDS.keys() | {Kind.EARLY}


def begin(kind: Kind, rounds: int) -> list[Input]:
    """Inputs to begin with: in a short test as many as there is time for."""
    large = [value for seed in SEEDS[kind] for value in grown(seed) if size(value) <= MOST_BYTES]
    return [*SEEDS[kind], *(large if rounds > 50 else large[:1])]


@pytest.mark.parametrize(("kind", "rounds"), [*(rotating(kind, 3) for kind in SEEDS), *(soak(kind, 60) for kind in SEEDS)])
@pytest.mark.timeout(3600)
def test_no_frames_of_a_mebibyte_cost_more_than_a_tenth_of_a_second(tmp_path: Path, kind: Kind, rounds: int) -> None:
    taken = Taken(tmp_path, kind, "async")
    seed = 1 if rounds < 50 else Random().randrange(1 << 32)
    try:
        took, worst = dearest(begin(kind, rounds), change, size, taken.seconds, rounds, seed)
        held = max(map(taken.memory, [worst, *begin(kind, rounds)])) if seed > 1 else 0.0
    finally:
        taken.standing.close()
    assert frames(worst) and took <= 1, f"{took:.2f} times the limit: {shown(worst)}, seed {seed}"
    assert held <= MOST_MEMORY, f"{held / 2**20:.0f} MiB for {kind.name}, seed {seed}"


def test_the_hello_of_a_job_that_trains_is_as_large_as_its_model(tmp_path: Path) -> None:
    """A longer one is refused with its limit, when that many bytes have come. Other shards' hellos are one frame."""
    shard = WholeShard(tmp_path)
    shard.begin()
    worker, peer = Header(Kind.HELLO, run=run_digest(RUN), view=1, attempt=1, start=1), Peer("shard", 1, 1)
    part = (worker._replace(flags=Flag.MORE, length=MAX_JSON).pack(), b" " * MAX_JSON)
    try:
        room = shard.server.hello_room()
        assert room.bytes < 2 * MAX_JSON and room.values < 110_000
        answer = shard.converse(WORKER, lambda base: [part, part])
        assert f"HELLO of at least {2 * MAX_JSON} bytes is above the limit of {room.bytes}".encode() in answer
        acceptor = Acceptor(replace(shard.place, config=replace(shard.place.config, shards=shard.place.config.shards * 2)))
        acceptor.open(shard.server.meet, shard.server.refuse, HelloRoom)
        shard.acceptor = acceptor
        assert f"above the limit of {MAX_JSON}".encode() in shard.converse(peer, lambda base: [part, part])
        assert acceptor._room() == HelloRoom(MAX_BODY, MAX_VALUES), "before the model is known a worker may tell of any"
    finally:
        shard.close()


def say(hello: dict[str, Any], kind: Kind, body: Any) -> Callable[[Header], list[Any]]:
    return lambda base: [frame(Kind.HELLO, hello, base), frame(kind, body, base)]


def test_what_a_worker_says_has_no_more_values_than_it_can_have_to_say(tmp_path: Path) -> None:
    """It is refused before its JSON is read, by its bytes or its values; the stream ends with the limit."""
    shard = WholeShard(tmp_path)
    shard.begin()
    try:
        for kind, (most, values) in MOST_SAID.items():
            many = json.dumps({"x": [0] * (values + 1)}, separators=(",", ":")).encode()
            hello = HELLO | {"recovery": shard.server.store.recovery}
            answer = shard.converse(WORKER, say(hello, kind, many))
            assert f"has more than {values} values".encode() in answer, kind
            long = json.dumps({"x": "y" * min(most, MOST_BYTES)}).encode()
            answer = shard.converse(WORKER, say(hello, kind, long))
            assert f"{kind.name} of {len(long)} bytes is above the limit of {min(most, MOST_BYTES)}".encode() in answer
            right = BODIES.get(kind, {})
            answer = shard.converse(WORKER, say(hello, kind, right))
            assert b"limit" not in answer and b"more than" not in answer, (kind, answer)
            if shard.spoilt:  # by STOP
                shard.close()
                shard = WholeShard(tmp_path / kind.name)
                shard.begin()
    finally:
        shard.close()
