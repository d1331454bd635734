"""Whole streams of a shard, whose peer has a key and changes what it sends, or has none: the stream ends, the shard does not.

- Checkpoints on a disk that somebody else has written to: files, manifests, admission tables and records are read, or named as damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from psjob.checkpoint import claim, files, manifest, states
from psjob.checkpoint.disk import CHUNK, CheckpointProblem, Damage
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.manifest import Manifest, read_initial, read_records
from psjob.checkpoint.states import open_blocks, read_admission, read_tables
from psjob.layout.blocks import assign
from psjob.protocol.records import PIECE as RECORD_PIECE
from psjob.resume import record
from psjob.resume.record import ResumeRecord, pack
from psjob.wire import auth
from psjob.wire.frame import Header, Kind
from psjob.wire.reading import AHEAD, PIECE
from tests.support.fuzzing import EDGES, Change, JsonChange, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes, written
from tests.tensors import checkpoint_parts as parts
from tests.tensors.checkpoint_parts import World
from tests.tensors.whole_shard import ANSWERS, BODIES, HELLO, INFO, PEER_HELLO, RAW, RUN, SHARD, WORKER, Standing, WholeShard, frame, heard


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


MOST_OF_A_FILE = CHUNK + (4 << 20)
"""Bytes of memory for a checkpoint here, of some ten KiB: what is read goes by the size of the file, never by what is said in it."""
DAMAGED = (CheckpointProblem, ValueError)
"""What ends the reading of a checkpoint, and no process."""


@pytest.fixture
def made(tmp_path: Path) -> Manifest:
    """A checkpoint with rows, committed."""
    torch.set_num_threads(1)
    world = World(tmp_path)
    world.push()
    world.checkpoint()
    assert world.made is not None
    return world.made


def read_whole(folder: Path, found: Manifest) -> None:
    """All that shard 0 and the coordinator read of it, onto as many shards and onto three."""
    with contextlib.suppress(CheckpointProblem):
        read_records(folder, found)
        read_initial(folder, found)
    for shards in (2, 3):
        with contextlib.suppress(*DAMAGED):
            mine = [index for index, owner in enumerate(assign(found.layout, shards)) if owner == 0]
            states.state_bytes(found, mine)
            states.read_states(folder, found, mine)
        with contextlib.suppress(*DAMAGED):
            read_tables(folder, found, 0, shards)
    with contextlib.suppress(*DAMAGED):
        tables = {shard: read_admission(folder, found, shard) for shard in range(found.shards)}
        open_blocks(found, {shard: rows for shard, rows in tables.items() if rows is not None})
    with contextlib.suppress(CheckpointProblem):
        manifest.newest_manifest(folder, parts.RUN)


@counts(100, 100_000)
def test_a_changed_manifest_is_damaged_or_read(tmp_path: Path, made: Manifest, cases: int) -> None:
    """Also one whose own hash is right. Nothing that it says makes a reader take room, time or an exception that is none of its own."""
    raw = (tmp_path / made.name).read_bytes()
    body = json.loads(raw)

    def read(case: tuple[list[JsonChange], list[Change] | None, bool]) -> None:
        if case[1] is not None:
            text = changed_bytes(raw, case[1])
        else:
            odd = changed_json(body, case[0])
            if isinstance(odd, dict):
                odd.pop("sha256", None)
                with contextlib.suppress(ValueError):
                    odd["sha256"] = manifest._hash(odd)
            text = written(odd)
        try:
            found = manifest.decode(text, made.name)
        except CheckpointProblem:
            return
        if case[2]:
            read_whole(tmp_path, found)

    def make(random: Random) -> tuple[list[JsonChange], list[Change] | None, bool]:
        in_bytes, whole = random.random() < 0.1, random.random() < 0.2  # to read a whole checkpoint takes ten times as long
        return json_changes(random), byte_changes(random) if in_bytes else None, whole

    fuzz(cases, make, read, MOST_OF_A_FILE)


@counts(100, 100_000)
def test_a_changed_file_is_damaged_or_read(tmp_path: Path, made: Manifest, cases: int) -> None:
    """Of tensors, with and without the facts that it should have; the facts may have been changed along with it."""
    plain = [made.fact(name) for name in sorted(fact.name for fact in made.listed() if not fact.name.endswith(".json"))]
    whole = {fact.name: (tmp_path / fact.name).read_bytes() for fact in plain}

    def read(case: tuple[int, list[Change], bool]) -> None:
        place, changes, facts_too = case
        fact = plain[place % len(plain)]
        path = tmp_path / fact.name
        raw = changed_bytes(whole[fact.name], changes)
        path.write_bytes(raw)
        try:
            for expect in (None, fact):
                with contextlib.suppress(CheckpointProblem):
                    files.read_blocks(path, None, expect)
            with contextlib.suppress(CheckpointProblem):
                files.check_file(path, fact)
            if facts_too:
                with contextlib.suppress(CheckpointProblem):
                    read_whole(tmp_path, _refitted(made, refitted(path)))
        finally:
            path.write_bytes(whole[fact.name])

    def make(random: Random) -> tuple[int, list[Change], bool]:
        changes = [(how, at % random.choice((16, 200, 1 << 16)), value) for how, at, value in byte_changes(random)]
        return random.randrange(1 << 16), changes, random.random() < 0.2

    fuzz(cases, make, read, MOST_OF_A_FILE)


def refitted(path: Path) -> FileFact:
    """The facts of a file as it is now."""
    with files.opened_checkpoint_file(path) as reader:
        spans = {}
        for name, entry in reader.entries.items():
            raw = path.read_bytes()[reader._data + entry.begin : reader._data + entry.end]
            spans[name] = files.ByteRange(reader._data + entry.begin, len(raw), zlib.crc32(raw))
        return FileFact(path.name, path.stat().st_size, zlib.crc32(path.read_bytes()[: reader._data]), spans)


def _refitted(made: Manifest, fact: FileFact) -> Manifest:
    """The manifest with other facts of one file."""

    def other(it: Any) -> Any:
        return fact if isinstance(it, FileFact) and it.name == fact.name else it

    rows = None if made.rows is None else replace(made.rows, files=tuple(map(other, made.rows.files)))
    return replace(
        made, files=tuple(map(other, made.files)), rows=rows, records=other(made.records), buffers=other(made.buffers),
        tables={shard: other(it) for shard, it in made.tables.items()},
    )  # fmt: skip


@counts(75, 50_000)
def test_a_changed_admission_table_is_damaged_or_read(tmp_path: Path, made: Manifest, cases: int) -> None:
    path = tmp_path / made.tables["0"].name
    body = json.loads(path.read_bytes())

    def read(changes: list[JsonChange]) -> None:
        raw = written(changed_json(body, changes))
        path.write_bytes(raw)
        fact = FileFact(path.name, len(raw), zlib.crc32(raw), {})
        with contextlib.suppress(CheckpointProblem):
            rows = read_admission(tmp_path, replace(made, tables={"0": fact}), 0)
            assert rows is not None
            open_blocks(made, {0: rows})

    fuzz(cases, json_changes, read, MOST_OF_A_FILE)


@counts(50, 50_000)
def test_a_changed_claim_is_nobodys_or_read(tmp_path: Path, cases: int) -> None:
    claim.claim_term(tmp_path, 3, "shard-0")
    path = tmp_path / "CLAIM-000003"
    raw = path.read_bytes()

    def read(case: tuple[list[JsonChange], list[Change] | None]) -> None:
        path.write_bytes(written(changed_json(json.loads(raw), case[0])) if case[1] is None else changed_bytes(raw, case[1]))
        found = claim.highest(tmp_path)
        assert found is not None and found[0] == 3 and len(found[1]) <= claim.MAX_OWNER

    fuzz(cases, lambda random: (json_changes(random), byte_changes(random) if random.random() < 0.5 else None), read, MOST_OF_A_FILE)


@counts(200, 100_000)
def test_a_changed_record_is_damaged_or_read(cases: int) -> None:
    """What a worker continues from: its JSON with tags, and its tensors."""
    stateful = {
        "a": {1: (2, 3), "s": {4}, "t": torch.ones(3), "f": float("inf"), "b": b"xy"},
        "c": [torch.zeros(2, 2), 1 + 2j, torch.float32],
    }
    whole = record.pack(record.ResumeRecord({"x": 1}, 7, {"m": torch.ones(4)}, stateful, [{"lr": 0.1, "betas": (0.9, 0.99)}]))
    size = int.from_bytes(whole[8:16], "little")
    body, rest = json.loads(whole[16 : 16 + size]), whole[16 + size :]

    def read(case: tuple[list[JsonChange], list[Change] | None]) -> None:
        if case[1] is None:
            text = written(changed_json(body, case[0]))
            raw = whole[:8] + len(text).to_bytes(8, "little") + text + rest
        else:
            raw = changed_bytes(whole, case[1])
        with contextlib.suppress(ValueError):
            record.unpack(raw)

    fuzz(cases, lambda random: (json_changes(random), byte_changes(random) if random.random() < 0.5 else None), read, MOST_OF_A_FILE)


@pytest.mark.parametrize("shards", [-1, manifest.MAX_SHARDS + 1, 1 << 62])
def test_a_manifest_of_more_shards_than_can_be_is_damaged(made: Manifest, shards: int) -> None:
    """Who restores it counts to that number."""
    body = json.loads(manifest.encode(made)) | {"shards": shards}
    del body["sha256"], body["rows"]
    raw = written(body | {"sha256": manifest._hash(body)})
    with pytest.raises(Damage, match=f"{shards}.* is not a whole number"):
        manifest.decode(raw, made.name)


@pytest.mark.parametrize(
    "row", [[7, 1, None, 1, 0, "0"], [-1, 1, None, 1, 0, "0"], [0, 1e999, None, 1, 0, "0"], [0, 1, None, 1, 0, "f" * 4000]]
)
def test_an_admission_table_of_others_than_the_jobs_workers_is_damaged(tmp_path: Path, made: Manifest, row: list[Any]) -> None:
    """Of another rank, of a clock that is no number, of more blocks than there are."""
    raw = written({"format": 1, "rows": [row]})
    (tmp_path / "a.json").write_bytes(raw)
    odd = replace(made, tables={"0": FileFact("a.json", len(raw), zlib.crc32(raw), {})})
    with pytest.raises(Damage, match="an admission table"):
        read_admission(tmp_path, odd, 0)
