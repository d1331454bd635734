"""Checkpoints on a disk that somebody else has written to: files, manifests, admission tables and records are read, or named as damaged."""

from __future__ import annotations

import contextlib
import json
import zlib
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
from psjob.resume import record
from tests.support.fuzzing import Change, JsonChange, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes, written
from tests.tensors import checkpoint_parts as parts
from tests.tensors.checkpoint_rows import World

MOST = CHUNK + (4 << 20)
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
        manifest.newest(folder, parts.RUN)


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

    fuzz(cases, make, read, MOST)


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
                files.check(path, fact)
            if facts_too:
                with contextlib.suppress(CheckpointProblem):
                    read_whole(tmp_path, _refitted(made, refitted(path)))
        finally:
            path.write_bytes(whole[fact.name])

    def make(random: Random) -> tuple[int, list[Change], bool]:
        changes = [(how, at % random.choice((16, 200, 1 << 16)), value) for how, at, value in byte_changes(random)]
        return random.randrange(1 << 16), changes, random.random() < 0.2

    fuzz(cases, make, read, MOST)


def refitted(path: Path) -> FileFact:
    """The facts of a file as it is now."""
    with files.opened(path) as reader:
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

    fuzz(cases, json_changes, read, MOST)


@counts(50, 50_000)
def test_a_changed_claim_is_nobodys_or_read(tmp_path: Path, cases: int) -> None:
    claim.claim(tmp_path, 3, "shard-0")
    path = tmp_path / "CLAIM-000003"
    raw = path.read_bytes()

    def read(case: tuple[list[JsonChange], list[Change] | None]) -> None:
        path.write_bytes(written(changed_json(json.loads(raw), case[0])) if case[1] is None else changed_bytes(raw, case[1]))
        found = claim.highest(tmp_path)
        assert found is not None and found[0] == 3 and len(found[1]) <= claim.MAX_OWNER

    fuzz(cases, lambda random: (json_changes(random), byte_changes(random) if random.random() < 0.5 else None), read, MOST)


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

    fuzz(cases, lambda random: (json_changes(random), byte_changes(random) if random.random() < 0.5 else None), read, MOST)


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
