"""Frames about rows that cannot be: refused before anything is made room for, and the shard serves on."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob.wire.frame import LENT_ANSWERS, LENT_PUSHES, LOOKUP_BYTES, MAX_PUSH_BYTES, Flag, Kind
from tests.live.live_shards import Shards, Worker, eventually, serving

ROWS, DIM = 50, 4
ROW = 8 + 4 * DIM


@pytest.fixture(scope="module", params=["tcp", "auto"])
def training(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[tuple[Shards, Worker]]:
    """With memory that rows lie in, and without."""
    with serving(tmp_path_factory.mktemp("rows"), workers=1, shards=1, transport=request.param) as shards:
        model = nn.ModuleDict({"user": ps.Embedding(ROWS, DIM)})
        worker = Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=0.1))
        worker.attach()
        yield shards, worker
        worker.die()


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


CASES: dict[str, tuple[dict[str, Any], bytes | int]] = {
    "lookup in a table that is not there": ({"kind": Kind.LOOKUP, "table": 9}, ids(1)),
    "lookup of half an id": ({"kind": Kind.LOOKUP}, ids(1)[:7]),
    "lookup of too many ids": ({"kind": Kind.LOOKUP}, 8 * (LOOKUP_BYTES // (4 * DIM) + 1)),
    "lookup of ids beyond the last row": ({"kind": Kind.LOOKUP}, ids(1, ROWS)),
    "lookup of a negative id": ({"kind": Kind.LOOKUP}, ids(-1, 2)),
    "lookup of ids that repeat": ({"kind": Kind.LOOKUP}, ids(3, 3)),
    "lookup of ids that descend": ({"kind": Kind.LOOKUP}, ids(4, 3)),
    "push of half a row": ({"kind": Kind.ROW_PUSH}, ROW - 1),
    "push of a gigabyte": ({"kind": Kind.ROW_PUSH}, (MAX_PUSH_BYTES // ROW + 1) * ROW),
    "push with numbers that were not told": ({"kind": Kind.ROW_PUSH, "info": 99}, ids(1) + bytes(4 * DIM)),
    "push of a later clock": ({"kind": Kind.ROW_PUSH, "clock": 7}, ids(1) + bytes(4 * DIM)),
    "push that ends outside of lent memory": ({"kind": Kind.ROW_PUSH, "flags": Flag.LENT, "part": LENT_PUSHES - 8}, ROW),
    "push that begins far outside of it": ({"kind": Kind.ROW_PUSH, "flags": Flag.LENT, "part": (1 << 64) - 64}, ROW),
    "push at an odd byte": ({"kind": Kind.ROW_PUSH, "flags": Flag.LENT, "part": 4}, ROW),
    "push of lent ids that repeat": ({"kind": Kind.ROW_PUSH, "flags": Flag.LENT, "part": 1 << 20}, 2 * ROW),
    "lookup into a place that is not lent": ({"kind": Kind.LOOKUP, "flags": Flag.PLACE, "part": LENT_ANSWERS}, ids(1)),
    "lookup into an odd place": ({"kind": Kind.LOOKUP, "flags": Flag.PLACE, "part": 4}, ids(1)),
    "lookup of ids in lent memory": ({"kind": Kind.LOOKUP, "flags": Flag.LENT}, 8),
    "first values in lent memory": ({"kind": Kind.ROW_INIT, "flags": Flag.LENT}, ROW),
    "first values while training": ({"kind": Kind.ROW_INIT}, ids(1) + bytes(4 * DIM)),
    "an answer from a worker": ({"kind": Kind.ROWS}, ids(1)),
    "the ids of a table that is not there": ({"kind": Kind.ROW_IDS, "table": 9}, b""),
    "the ids above half an id": ({"kind": Kind.ROW_IDS}, ids(1)[:7]),
    "the ids above two ids": ({"kind": Kind.ROW_IDS}, ids(1, 2)),
    "the ids above a gigabyte of ids": ({"kind": Kind.ROW_IDS}, 1 << 30),
    "the ids above one in lent memory": ({"kind": Kind.ROW_IDS, "flags": Flag.LENT}, 8),
    "the ids in a place of lent memory": ({"kind": Kind.ROW_IDS, "flags": Flag.PLACE}, b""),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_frame_that_cannot_be_ends_its_stream_alone(training: tuple[Shards, Worker], name: str) -> None:
    shards, worker = training
    fields, payload = CASES[name]
    server, link = shards.servers[0], worker.session.links[0]
    assert eventually(lambda: link.welcomed and bool(link.lanes))
    bad, pushes = server.bad_connections, server.store.counters.applied
    worker.session.exchange.tell_hyperparameters([{"lr": 0.1}], [])
    header = link.dated(worker.session.header(fields["kind"]))
    header = header._replace(**{"info": worker.session.exchange._info[0]} | {k: v for k, v in fields.items() if k != "kind"})
    body = b"" if isinstance(payload, int) else payload
    stream = link.lanes[0].stream
    stream.write(header._replace(length=payload if isinstance(payload, int) else len(body)), body)
    assert eventually(lambda: server.bad_connections == bad + 1), "the shard took it"
    assert server.store.counters.applied == pushes
    before = worker.model["user"](torch.arange(ROWS)).detach()  # by the stream that was dialled anew
    assert torch.isfinite(before).all()
