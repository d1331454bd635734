"""Shards beside workers: bytes of each machine's network against 2M(m-1)/m, and the own part's speed against that of the others.

On one host each index stands for a machine: worker i and shard i share memory, all else is TCP. A machine's network is its worker's
streams to the other shards and its shard's to the other workers, each way. The speed of a part is its bytes both ways over the seconds in
which its worker brings gradients to their place or their stream, and takes answers from there; waits for others are in neither.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clock
import psjob_run
import torch

import psjob as ps
from psjob.api import attach as attaching

TENSORS, EACH = 48, 262_144
MODEL = TENSORS * EACH * 4
MACHINES = (2, 3, 4)
WARM_UP, STEPS = 4, 20
MOST_BYTES, LEAST_SPEED = 1.02, 3.0
ROADS = {"colocated": ("Colocated", "auto"), "shared": (None, "auto"), "tcp": (None, "tcp")}


def main() -> None:
    words = clock.asked(__doc__)
    if words.part:
        ours()
        return
    rows = []
    for machines in MACHINES:
        notes = {road: job(machines, road) for road in ROADS}
        mine = notes["colocated"]
        formula = 2 * MODEL * (machines - 1) / machines
        loads = [network(mine, machine, way) / formula for machine in range(machines) for way in (0, 1)]
        note = f"{max(loads) * formula / 1e6:.1f} MB, the least machine and way {min(loads):.4f}; a model of {MODEL / 1e6:.1f} MB"
        rows.append(clock.row(f"{machines} machines: bytes per step over 2M(m-1)/m, at most", max(loads), "x", most=MOST_BYTES, note=note))
        own, others = speed(mine, own=True), speed(mine, own=False)
        shared, tcp = (speed(notes[road], own=None) for road in ("shared", "tcp"))
        rows.append(clock.row(f"{machines} machines: own part's speed", own, "GB/s", note=f"all by shared memory {shared:.1f}"))
        rows.append(clock.row(f"{machines} machines: the others' speed", others, "GB/s", note=f"all by TCP {tcp:.1f}"))
        rows.append(clock.row(f"{machines} machines: own part over the others", own / others, "x", least=LEAST_SPEED))
        steps = {road: 1e3 * statistics.median(found[0]["seconds"]) for road, found in notes.items()}
        note = f"steps of {steps['colocated']:.0f} ms, {steps['tcp']:.0f} all by TCP, {steps['shared']:.0f} all by shared memory"
        rows.append(clock.row(f"{machines} machines: rate over that of TCP", steps["tcp"] / steps["colocated"], "x", note=note))
    clock.answer_rows(rows)


def job(machines: int, road: str) -> list[dict[str, Any]]:
    """What the workers of a job have noted, by rank."""
    placement, transport = ROADS[road]
    of_shards = {"placement": placement} if placement else {}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(__file__).resolve()), "--part", "ours"]
        psjob_run.run(folder, command, 240.0, machines, machines, of_shards=of_shards, training={"mode": "sync", "transport": transport})
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(machines)]


def network(notes: list[dict[str, Any]], machine: int, way: int) -> float:
    """Bytes a step that a machine has received (way 0) or sent (way 1)."""
    others = [other for other in range(len(notes)) if other != machine]
    moved = sum(notes[machine]["carried"][other][way] + notes[other]["carried"][machine][1 - way] for other in others)
    return float(moved / STEPS)


def speed(notes: list[dict[str, Any]], own: bool | None) -> float:
    """GB/s of a part, the median of the workers; None: of all parts together."""

    def of(rank: int) -> float:
        shards = [shard for shard in range(len(notes)) if own is None or (shard == rank) == own]
        part = sum(notes[rank]["bytes"][shard] for shard in shards)
        return float(2 * STEPS * part / sum(notes[rank]["busy"][shard] for shard in shards) / 1e9)

    return statistics.median(map(of, range(len(notes))))


def ours() -> None:
    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.zeros(EACH) for _ in range(TENSORS)])
    attached, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=clock.RATE))
    for parameter in attached.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert attaching.current is not None
    session = attaching.current.session
    busy: dict[int, float] = defaultdict(float)

    def timed(act: Callable[..., None], shard: int | None) -> Callable[..., None]:
        def call(*words: Any) -> None:
            began = time.perf_counter()
            act(*words)
            busy[words[0].index if shard is None else shard] += time.perf_counter() - began

        return call

    setattr(session.exchange, "land", timed(session.exchange.land, None))  # noqa: B010 (methods cannot be assigned to)
    for link in session.links:
        setattr(link, "send_block", timed(link.send_block, link.index))  # noqa: B010
    clock.rounds(optimizer.step, WARM_UP, 0)
    busy.clear()
    before = [link.carried for link in session.links]
    found = clock.rounds(optimizer.step, 0, STEPS)
    after = [link.carried for link in session.links]
    carried = [[now[way] - then[way] for way in (0, 1)] for now, then in zip(after, before, strict=True)]
    parts = Counter({link.index: 0 for link in session.links})
    for block in session.blocks:
        parts[session.owner[block.index]] += block.nbytes
    shards = range(len(session.links))
    clock.check((float(parameter[at].detach()) for parameter in attached.parameters() for at in (0, -1)), clock.moved(found, WARM_UP))
    noted = {"seconds": found, "carried": carried, "busy": [busy[it] for it in shards], "bytes": [parts[it] for it in shards]}
    Path(f"{ps.rank()}.json").write_text(json.dumps(noted))


if __name__ == "__main__":
    main()
