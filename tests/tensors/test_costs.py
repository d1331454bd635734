"""What a worker sends costs a shard a tenth of a second of a processor at most, for each MiB. Inputs that are slow are grown further."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from psjob.layout.blocks import TensorSpec, check_aliases, check_table
from psjob.protocol.coordinator import decode
from psjob.protocol.records import RecordDelta, RecordsOnStream
from psjob.resume import record
from psjob.shard.believed import known
from psjob.shard.coordinator_disk import read_part
from psjob.shard.coordinator_driver import numbers_of
from psjob.tables import TableSpec
from psjob.wire.frame import Kind, load
from tests.costs import LIMIT_SECONDS, MOST_BYTES, MOST_MEMORY, dearest, memory, more, slowest
from tests.soaking import soak
from tests.tensors.shard_frames import ANSWERS


def a_table(count: int) -> list[dict[str, Any]]:
    return [{"name": f"w{i}", "shape": [1], "dtype": "float32", "group": 0} for i in range(count)]


def read_hello(raw: bytes) -> None:
    """As shard 0 reads what a hello says of the model."""
    body = known(Kind.HELLO, load(raw))
    table = tuple(TensorSpec.from_json(row) for row in body.get("table") or [])
    check_table(table)
    check_aliases(body.get("aliases") or {}, table)
    for spec in list(body.get("tables") or [])[:10_000]:
        TableSpec.from_json(spec)


def read_said(kind: Kind, reader: Callable[[dict[str, Any]], object]) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        reader(known(kind, load(raw)))

    return read


def read_answer(raw: bytes) -> None:
    """As shard 0 reads what another shard answers."""
    decode.decode_shard_message(1, load(raw), 8, read_part)


def read_delta(raw: bytes) -> None:
    stream = RecordsOnStream()
    stream.last = raw[: 64 << 10]
    stream.take(RecordDelta(len(raw) % 100, 0, min(len(raw), 64 << 10), raw[: 32 << 10]))


def a_record(body: dict[str, Any], tensors: int = 1) -> bytes:
    raw = json.dumps(body).encode()
    return record.MAGIC + struct.pack("<IQ", record.FORMAT, len(raw)) + raw + record._write_tensors([torch.zeros(2)] * tensors)


READERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "hello": (read_hello, [
        json.dumps({"table": a_table(2000), "aliases": {f"a{i}": f"w{i}" for i in range(500)}}).encode(),
        json.dumps({"tables": [{"name": f"t{i}", "dim": 4, "rule": "sgd"} for i in range(2000)]}).encode(),
        json.dumps({"table": [[]] * 9000, "aliases": [{}] * 9000, "deep": [[[[{}]]]] * 2000}).encode(),
    ]),
    "digest": (read_said(Kind.DIGEST, decode.digest), [
        json.dumps({"clock": 1, "look": "windows", "kinds": "t" * 4000, "sums": [10**200] * 4000, "names": ["x"] * 4000,
                    "numbers": [{f"n{i}": 1.0 for i in range(4000)}] * 3}).encode(),
    ]),
    "inputs": (read_said(Kind.INPUTS, lambda body: (decode.inputs(body), decode.data(body))), [
        json.dumps({"inputs": [1e300] * 9000, "data": {"site": 1, "number": 1, "loader": "x" * 9000}}).encode(),
    ]),
    "report": (read_said(Kind.REPORT, numbers_of), [json.dumps({f"{i}": 1.0 for i in range(9000)}).encode()]),
    **{f"answer-{answer['did']}": (read_answer, [json.dumps(answer).encode()]) for answer in ANSWERS},
    "delta": (read_delta, [b"\0" * 90_000, bytes(range(256)) * 300]),
    "record": (record.buffers_of, [
        a_record({"buffers": {f"b{i}": {"~tensor": 0} for i in range(30_000)}}),
        a_record({"buffers": {"b": {"~set": list(range(100_000))}}, "unsaved": [f"b{i}" for i in range(30_000)]}),
        a_record({"buffers": {f"b{i}": {"~tensor": i} for i in range(9000)}}, 9000),
        a_record({"buffers": {f"b{i}": 1 for i in range(30_000)}, "unsaved": [f"x{i}" for i in range(30_000)]}),
        a_record({"buffers": {f"b{i}": {"~tuple": [[]]} for i in range(30_000)}}),
    ]),
}  # fmt: skip
"""By name, what reads an input, and inputs to begin with."""


def change(random: Random, one: bytes, other: bytes) -> bytes:
    """As `more`; of a record what was grown is JSON, else most of it is cut off."""
    made = more(random, one, other)
    if made.startswith(record.MAGIC):
        body = made.find(b"}}", 16) if random.random() < 0.5 else -1
        if body > 0:
            length = len(made) - 16 if random.random() < 0.1 else struct.unpack_from("<Q", one, 8)[0] + len(made) - len(one)
            made = made[:8] + struct.pack("<Q", max(0, length)) + made[16:]
    return made


@pytest.mark.parametrize("rounds", [12, soak(400)])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.timeout(3600)
def test_no_input_of_a_mebibyte_costs_more_than_a_tenth_of_a_second(name: str, rounds: int) -> None:
    reader, seeds = READERS[name]
    seed = 1 if rounds < 100 else Random().randrange(1 << 32)
    took, worst = slowest([*seeds, *map(grown, seeds)], change, len, reader, rounds, seed)
    assert took <= LIMIT_SECONDS, f"{took:.3f} s of {len(worst)} bytes: {worst[:300]!r} … {worst[-300:]!r}, seed {seed}"
    held, worst = dearest([*seeds, *map(grown, seeds)], change, len, memory(reader), rounds // 6, seed) if seed > 1 else (0.0, b"")
    assert held <= MOST_MEMORY, f"{held / 2**20:.0f} MiB of {len(worst)} bytes: {worst[:300]!r} … {worst[-300:]!r}, seed {seed}"


def grown(seed: bytes) -> bytes:
    """The same seed with its elements once more until it has a mebibyte, where it is JSON; else as it is."""
    try:
        body = json.loads(seed)
    except ValueError:
        return seed
    times = max(1, (MOST_BYTES - (1 << 17)) // len(seed))
    if "did" in body:
        fill = {key: value for key, value in body.items() if isinstance(value, dict | list) and value}
        if not fill:
            return seed
        key, value = max(fill.items(), key=lambda pair: len(str(pair[1])))
        part = value * times if isinstance(value, list) else {f"{name}{i}": one for i in range(times) for name, one in value.items()}
        big = body | {key: part}
    elif all(isinstance(value, list | str) for value in body.values()):
        big = {key: value * times for key, value in body.items()}
    else:
        big = {f"{key}{i}" if i else key: value for i in range(times) for key, value in body.items()}
    raw = json.dumps(big).encode()
    return raw if len(raw) <= MOST_BYTES else seed
