"""Whole streams of a shard, whose peer has a key and changes what it sends, or has none: the stream ends, the shard does not."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from psjob.protocol.records import PIECE as RECORD_PIECE
from psjob.resume.record import ResumeRecord, pack
from psjob.wire import auth
from psjob.wire.frame import Header, Kind
from psjob.wire.reading import AHEAD, PIECE
from tests.support.fuzzing import EDGES, Change, JsonChange, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes, written
from tests.tensors.shard_frames import ANSWERS, BODIES, INFO, RAW, SHARD, WORKER, Standing
from tests.tensors.whole_shard import HELLO, PEER_HELLO, RUN, WholeShard, frame, heard


@pytest.fixture(autouse=True)
def only_errors() -> Iterator[None]:
    """A line of the log for each of thousands of refusals is no news."""
    log = logging.getLogger("psjob")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


MOST = 4 * (AHEAD + 2 * PIECE) + (20 << 20)
"""Bytes of memory for one stream: no case sends a MiB, and a body is allocated PIECE by PIECE as it comes. A hello may tell of a model of
2^31 numbers, which is 2,048 blocks: the shard keeps some KiB of each before one of their bytes has come."""
FRAMES = 6
"""Changed frames of one stream, at most."""
Plan = tuple[Kind, Any, dict[str, int], list[JsonChange] | None, list[Change] | None, list[Change] | None]
"""A frame's type and body, fields of its header, changes of its JSON, of its payload's bytes and of its header's."""
FIELDS = {"flags": 8, "codec": 8, "table": 16, "info": 16, "part": 64, "request": 32, "length": 64, "term": 32, "attempt": 32, "start": 32,
          "rewinds": 32, "generation": 32, "block": 32, "crc": 32, "worker": -32, "clock": -64}  # fmt: skip
"""Bits of each, below zero where it has a sign."""


def plan(random: Random, bodies: dict[Kind, Any]) -> Plan:
    """One frame, changed a little or not at all."""
    kind = random.choice([*bodies, *RAW])
    fields: dict[str, int] = {}
    for name in random.sample(sorted(FIELDS), random.choice((0, 0, 1, 1, 2))):
        bits = abs(FIELDS[name])
        value = random.choice(EDGES) % (1 << bits)
        fields[name] = value - (1 << bits) if FIELDS[name] < 0 and value >> bits - 1 else value
    if random.random() < 0.2:
        fields["flags"] = random.randrange(256)
    body = bodies.get(kind)
    in_json = json_changes(random) if body is not None and random.random() < 0.6 else None
    in_payload = byte_changes(random) if random.random() < 0.2 else None
    return kind, body, fields, in_json, in_payload, byte_changes(random) if random.random() < 0.1 else None


def packed(made: Plan, base: Header, clock: int) -> tuple[bytes, bytes]:
    """(header, payload), as `whole_shard.Say` gives them."""
    kind, body, fields, in_json, in_payload, in_header = made
    payload = RAW[kind] if kind in RAW else written(body if in_json is None else changed_json(body, in_json))
    if in_payload is not None:
        payload = changed_bytes(payload, in_payload)
    header = base._replace(kind=kind, info=1, clock=clock).sized(payload)._replace(**fields)
    head = header.pack()
    return (head if in_header is None else changed_bytes(head, in_header)), payload


@pytest.fixture(params=["async", "sync"])
def standing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Standing]:
    torch.set_num_threads(1)
    made = Standing(tmp_path, request.param)
    yield made
    made.close()


@counts(500, 100_000)
def test_a_worker_with_a_key_that_sends_changed_frames_ends_its_stream(standing: Standing, cases: int) -> None:
    """Of a hello that is right, and of what follows it. The shard serves whoever comes next."""

    def make(random: Random) -> tuple[list[JsonChange] | None, list[Plan]]:
        hello = json_changes(random) if random.random() < 0.3 else None
        return hello, [plan(random, BODIES) for _ in range(random.randrange(1, FRAMES + 1))]

    def read(case: tuple[list[JsonChange] | None, list[Plan]]) -> int:
        changes, plans = case
        shard = standing.shard
        restore_id, clock = shard.server.store.restore_id, shard.server.store.admission.rows[0].complete
        hello = HELLO | {"restore_id": restore_id, "mode": shard.place.config.mode}

        def say(base: Header) -> list[tuple[bytes, bytes]]:
            first = frame(Kind.HELLO, written(hello if changes is None else changed_json(hello, changes)), base)
            return [first, frame(Kind.INFO, INFO, base, info=1), *(packed(one, base, clock) for one in plans)]

        shard.converse(WORKER, say)
        standing.again()
        return len(plans)

    fuzz(cases // 2, make, read, MOST)
    shard = standing.shard
    hello = HELLO | {"restore_id": shard.server.store.restore_id, "mode": shard.place.config.mode}
    answered = shard.converse(WORKER, lambda base: [frame(Kind.HELLO, hello, base)])
    assert heard(answered)[0].kind is Kind.WELCOME, answered


ODD_LISTS: list[dict[str, Any]] = [
    {"transports": 5}, {"transports": ["shared", 5]}, {"rowTransports": None}, {"rowTransports": {"shared": 1}}, {"has": "x"},
    {"has": 1e999},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_LISTS, ids=str)
def test_a_hello_whose_lists_are_none_does_not_reach_the_coordinators_thread(tmp_path: Path, odd: dict[str, Any]) -> None:
    """It would end shard 0: what its streams' threads refuse costs a stream, what its own meets costs the run."""
    shard = WholeShard(tmp_path)
    record = pack(ResumeRecord({"x": "y" * (RECORD_PIECE + 1)}, 0, {}, {}, []))
    shard.begin(record)
    if "has" in odd:
        odd = {"has": [-1, zlib.crc32(record), len(record), odd["has"]]}
    hello = HELLO | {"restore_id": shard.server.store.restore_id} | odd
    try:
        found = heard(shard.converse(WORKER, lambda base: [frame(Kind.HELLO, hello, base)]))
        assert [header.kind for header in found][:1] == [Kind.WELCOME if "has" in odd else Kind.ERROR]
    finally:
        shard.close()


@counts(150, 50_000)
def test_a_shard_with_a_key_that_sends_changed_answers_ends_its_stream(tmp_path: Path, cases: int) -> None:
    """Each is a hello and some answers to the coordinator."""
    standing = Standing(tmp_path, "async", shards=2)

    def make(random: Random) -> tuple[list[JsonChange] | None, list[tuple[Any, list[JsonChange] | None]]]:
        answers = [(random.choice(ANSWERS), json_changes(random) if random.random() < 0.8 else None) for _ in range(random.randrange(1, 5))]
        return json_changes(random) if random.random() < 0.3 else None, answers

    def read(case: tuple[list[JsonChange] | None, list[tuple[Any, list[JsonChange] | None]]]) -> int:
        changes, answers = case

        def say(base: Header) -> list[tuple[bytes, bytes]]:
            hello = PEER_HELLO if changes is None else changed_json(PEER_HELLO, changes)
            said = [body if odd is None else changed_json(body, odd) for body, odd in answers]
            return [frame(Kind.HELLO, hello, base), *(frame(Kind.PEER, written(body), base) for body in said)]

        standing.shard.converse(SHARD, say)
        standing.again()
        return len(answers)

    try:
        fuzz(cases, make, read, MOST)
    finally:
        standing.close()


@counts(125, 50_000)
def test_a_stranger_hears_nothing_of_the_run(tmp_path: Path, cases: int) -> None:
    """First words that are changed, or of somebody else: the shard answers with at most one sentence, which names no run."""
    shard = WholeShard(tmp_path)

    def make(random: Random) -> tuple[list[Change], bytes]:
        return byte_changes(random), random.randbytes(random.choice((0, 1, 32, 200)))

    def read(case: tuple[list[Change], bytes]) -> None:
        changes, more = case
        raw = shard.converse(WORKER, lambda base: [], lambda first: changed_bytes(first, changes) + more)
        if raw.startswith(auth.MAGIC):
            raw = raw[auth.CHALLENGE_BYTES :]
        assert len(raw) < 2000 and RUN.encode() not in raw
        assert all(header.kind is Kind.ERROR for header in heard(raw, sealed=False))

    try:
        fuzz(cases, make, read, MOST)
    finally:
        shard.close()
