"""A worker of the job that was taken over, and has its key: it changes what a worker may change and no more.

- A worker with a valid key that says what its config does not: shards go by the config.
- Generated sessions of a worker with a valid key: the weights, the other worker's steps and shard 0's health stay what they are to be.
- Frames about rows that cannot be: refused before anything is made room for, and the shard serves on.
- A worker that was taken over, with its own valid key: what it says beyond its part changes nothing for the others.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob import rules
from psjob.contract import HEALTH_PATH
from psjob.layout import memory
from psjob.protocol.coordinator import events
from psjob.shard import coordinator_driver
from psjob.shard.acceptor import SPARE
from psjob.shard.checks import MOST_AHEAD, info_of, rule_problem
from psjob.shard.pending import MOST_WAITING
from psjob.shard.status_server import status
from psjob.wire import event_loop, reading
from psjob.wire.frame import (
    LENT_ANSWERS,
    LENT_PUSHES,
    LOOKUP_BYTES,
    MAX_JSON,
    MAX_LEVELS,
    MAX_PUSH_BYTES,
    Flag,
    Header,
    Kind,
    WireError,
    load,
    run_digest,
)
from psjob.wire.handshake import greet
from psjob.wire.reading import StreamClosed
from psjob.wire.tcp import Stream
from psjob.worker.exchange import GradientClip
from psjob.worker.session import WorkerSession
from tests.live.hostile import LIMIT as SESSIONS_LIMIT
from tests.live.hostile import LR as SESSIONS_LR
from tests.live.hostile import World
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, aside, at_once, eventually, serving, together
from tests.live.training import push_filled
from tests.support.soaking import soak

LR, LIMIT, STEPS = 0.1, 0.5, 3


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 8, bias=False))


def pair_of_workers(shards: Shards) -> list[Worker]:
    made = [model(), model()]
    return [Worker(shards, rank, each, torch.optim.SGD(each.parameters(), lr=LR)) for rank, each in enumerate(made)]


def moved(worker: Worker) -> float:
    """By how much the weights have moved from the initial ones, all together."""
    changes = [(p.detach() - q.detach()).flatten() for p, q in zip(worker.model.parameters(), model().parameters(), strict=True)]
    return float(torch.cat(changes).norm())


def steps(gradient: Callable[[int], float], made: int = STEPS) -> Callable[[Worker], None]:
    def act(worker: Worker) -> None:
        for _ in range(made):
            push_filled(worker, gradient(worker.rank))

    return act


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    "told", [GradientClip(), GradientClip(norm=1e9), GradientClip(value=1e9)], ids=["nothing", "a larger norm", "a value"]
)
def test_the_manifests_norm_holds_whatever_a_worker_says(tmp_path: Path, told: GradientClip, transport: str) -> None:
    with serving(tmp_path, max_grad_norm=LIMIT, transport=transport) as shards:
        workers = pair_of_workers(shards)
        workers[0].job.clipping.take = lambda pair: told  # type: ignore[method-assign]
        all_well(workers, steps(lambda rank: 1e6 if rank == 0 else 0.0))
    assert moved(workers[1]) == pytest.approx(LR * LIMIT * STEPS, rel=1e-3)


def test_a_smaller_norm_of_the_script_holds(tmp_path: Path) -> None:
    with serving(tmp_path, max_grad_norm=LIMIT) as shards:
        workers = pair_of_workers(shards)
        for worker in workers:
            worker.job.clipping.take = lambda pair: GradientClip(norm=LIMIT / 5)  # type: ignore[method-assign]
        all_well(workers, steps(lambda rank: 1e6))
    assert moved(workers[1]) == pytest.approx(LR * LIMIT / 5 * STEPS, rel=1e-3)


def test_elements_are_clamped_before_the_manifests_norm(tmp_path: Path) -> None:
    with serving(tmp_path, max_grad_norm=1e5) as shards:
        workers = pair_of_workers(shards)
        for worker in workers:
            worker.job.clipping.ask(worker.job.pairs, GradientClip(value=0.01))
        all_well(workers, steps(lambda rank: 1e6, made=1))
    for p, q in zip(workers[1].model.parameters(), model().parameters(), strict=True):
        torch.testing.assert_close(p, q - LR * 0.01)


def test_a_worker_counts_for_as_many_processes_as_it_may_have(tmp_path: Path) -> None:
    with serving(tmp_path, processes=2) as shards:
        body = {"hyperparameters": [], "none": []}
        assert info_of(shards.servers[0].store, 1, body | {"processes": 2}).processes == 2
        with pytest.raises(WireError, match="a push of 3 processes, and a worker of this job has 2 at most"):
            info_of(shards.servers[0].store, 1, body | {"processes": 3})


def test_the_manifests_rule_and_its_numbers_hold_whatever_a_worker_says(tmp_path: Path) -> None:
    with serving(tmp_path, mode="async", update_rule="dc-asgd", rule_options={"lam": 0.5}, shards=1, workers=1) as shards:
        worker = pair_of_workers(shards)[0]
        together([worker], steps(lambda rank: 1.0, made=1))
        store = shards.servers[0].store
        group = {**rules.named("dc-asgd").hyperparameters, "lr": LR, "lam": 1e30}
        (taken,) = info_of(store, 0, {"hyperparameters": [group], "none": []}).hyperparameters
        assert taken["lam"] == 0.5 and taken["lr"] == LR


@pytest.mark.parametrize(
    ("config", "said", "problem"),
    [
        ({"mode": "async", "update_rule": "dc-asgd"}, "sgd", "the manifest says dc-asgd"),
        ({"mode": "async", "update_rule": "dc-asgd"}, "dc-asgd", None),
        ({"mode": "local"}, "sgd", "the manifest says outer-nesterov"),
        ({"update_at": "shard"}, "reduce", "updateAt: shard"),
        ({"update_at": "worker"}, "reduce", None),
        ({}, "adam", None),
    ],
)
def test_a_hello_names_the_manifests_rule(tmp_path: Path, config: dict[str, str], said: str, problem: str | None) -> None:
    with serving(tmp_path, shards=1, **config) as shards:
        found = rule_problem(shards.config, 0, said)
    assert found is None if problem is None else problem in str(found)


def test_a_push_is_based_on_no_weights_that_are_to_come(tmp_path: Path) -> None:
    """Its staleness would be below 0, and a push that is always newest is never dropped."""
    with serving(tmp_path, mode="threshold", shards=1, workers=1, transport="tcp") as shards:
        worker = pair_of_workers(shards)[0]
        seen: list[int | None] = []
        exchange = worker.session.exchange

        def act(worker: Worker) -> None:
            cells = shards.servers[0].store.cells.values()
            for cell in cells:
                apply = cell._apply
                cell._apply = lambda batch, late, weights=None, apply=apply: (seen.append(late), apply(batch, late, weights))[1]  # type: ignore
            claimed = dict.fromkeys(exchange.versions, (1, 1 << 40))
            exchange.versions.update(claimed)
            steps(lambda rank: 1.0, made=1)(worker)

        all_well([worker], act)
    assert seen and all(late == 0 for late in seen)


@pytest.mark.parametrize("kind", [Kind.STEP_LOST, Kind.MEASURED])
def test_a_job_without_stages_hears_nothing_of_stages(tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    """A lost step of a stage sends all workers back to the last checkpoint."""
    with serving(tmp_path, shards=1) as shards:
        workers = pair_of_workers(shards)

        def act(worker: Worker) -> None:
            if worker.rank == 1:
                worker.session.links[0].send_json(worker.session.header(kind), {"rank": 0, "step": 0})
                assert eventually(lambda: shards.servers[0].bad_connections > 0)
            steps(lambda rank: 1.0)(worker)

        all_well(workers, act)
        assert f"sends {kind.name}, and this job has no stages" in caplog.text


def test_what_a_worker_reports_waits_at_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a flood of it would take the memory of shard 0: to send a word costs less than to hear it."""
    monkeypatch.setattr(coordinator_driver, "MOST_UNHEARD", 40)
    with serving(tmp_path, shards=1, transport="tcp") as shards:
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        most, heard, feed = [0], [0], coordinator.feed

        def slowly(event: Any) -> None:
            most[0] = max(most[0], coordinator.pending.qsize())
            if isinstance(event, events.Reported):
                heard[0] += 1
                time.sleep(0.001)
            feed(event)

        monkeypatch.setattr(coordinator, "feed", slowly)

        def act(worker: Worker) -> None:
            for number in range(300 if worker.rank == 1 else 0):
                worker.session.links[0].send_json(worker.session.header(Kind.REPORT), {"flood": float(number)})
            steps(lambda rank: 1.0)(worker)

        all_well(pair_of_workers(shards), act)
        assert heard[0] == 300, "all of it is heard"
        assert 0 < most[0] < 60


def looks_at_nothing(session: WorkerSession) -> None:
    session.exchange.finite.skips = lambda grads, rows, skip: skip  # type: ignore[method-assign]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("mode", "update_at"), [("sync", None), ("sync", "worker"), ("async", None)])
def test_shards_leave_out_what_a_worker_lets_pass(tmp_path: Path, mode: str, transport: str, update_at: str | None) -> None:
    with serving(tmp_path, non_finite="skip", mode=mode, transport=transport, update_at=update_at) as shards:
        workers = pair_of_workers(shards)
        looks_at_nothing(workers[1].session)
        all_well(workers, steps(lambda rank: float("nan") if rank else 1.0))
        found = status(shards.servers[0])["nonFinite"]
        assert found == {"pushes": STEPS, "worker": 1, "step": 0, "tensor": found["tensor"]}
    for worker in workers:
        assert all(p.isfinite().all() for p in worker.model.parameters())
    if mode == "sync":
        assert moved(workers[0]) == 0.0
    else:
        assert moved(workers[0]) > 0.0


def test_shards_end_a_job_that_refuses_what_a_worker_lets_pass(tmp_path: Path) -> None:
    with serving(tmp_path, non_finite="refuse") as shards:
        workers = pair_of_workers(shards)
        looks_at_nothing(workers[1].session)
        act = steps(lambda rank: float("nan") if rank else 1.0)
        training = aside(lambda: together(workers, act))
        ended = eventually(lambda: 77 in shards.codes.values())
        for worker in workers:
            worker.die()
        training.join(SECONDS)
        assert ended and any("worker 1's gradient of" in str(server.termination_message.get("error")) for server in shards.servers)
        assert all(p.isfinite().all() for worker in workers for p in worker.model.parameters())


STEP_SECONDS = 5.0
"""For one step of the honest worker on a busy machine; alone it takes some milliseconds."""
WAYS: dict[str, dict[str, Any]] = {
    "sync": {"max_grad_norm": SESSIONS_LIMIT, "non_finite": "skip", "shards": 1},
    "script": {"non_finite": "skip", "max_push_norm": SESSIONS_LIMIT, "shards": 2},
    "async": {"mode": "async", "max_push_norm": SESSIONS_LIMIT, "non_finite": "skip", "shards": 1},
}
"""By name, a config. In `script` no norm is the manifest's: a worker may ask for one by itself."""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("way", "sessions"),
    [("sync", 80), ("script", 60), ("async", 60), soak("sync", 2000), soak("script", 1500), soak("async", 1500)],
)
def test_a_hostile_worker_has_its_own_part_and_no_more(tmp_path: Path, way: str, sessions: int) -> None:
    seed = 0 if sessions <= 80 else Random().randrange(1 << 32)
    random, world = Random(f"{way} {seed}"), World(tmp_path, WAYS[way])
    mode = WAYS[way].get("mode", "sync")
    # Blocks are measured together by the manifest's norm, and one by one by that of a push, of which a step has two.
    most = SESSIONS_LR * (SESSIONS_LIMIT if way == "sync" else SESSIONS_LIMIT * 2**0.5)
    try:
        world.begin()
        for number in range(sessions):
            sent = world.hostile(random)
            try:
                took = world.honest_step(mode)
                assert took <= STEP_SECONDS
                if world.stores[0].admission.rows[1].left_at is not None or world.stores[0].restore_id != world.restore_id:
                    world.begin()
                world.check(most if mode == "sync" else 2 * most)
                if number % 20 == 0:
                    assert healthy(world)
            except BaseException as error:
                error.add_note(f"{way}, seed {seed}, session {number}: {sent!r:.4000}")
                raise
    finally:
        world.close()
    assert world.restarted <= 2 + sessions // 10, "what a worker can do to all is rare here"


def healthy(world: World) -> bool:
    """Shard 0 answers who asks whether it lives."""
    address = f"http://127.0.0.1:{world.health.server_port}{HEALTH_PATH}"
    with urllib.request.urlopen(address, timeout=STEP_SECONDS) as answer:
        return bool(answer.status == 200)


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
    header = header._replace(**{"info": worker.session.exchange._info} | {k: v for k, v in fields.items() if k != "kind"})
    body = b"" if isinstance(payload, int) else payload
    stream = link.lanes[0].stream
    stream.write(header._replace(length=payload if isinstance(payload, int) else len(body)), body)
    assert eventually(lambda: server.bad_connections == bad + 1), "the shard took it"
    assert server.store.counters.applied == pushes
    before = worker.model["user"](torch.arange(ROWS)).detach()  # by the stream that was dialled anew
    assert torch.isfinite(before).all()


RATE = 0.5


def attached(shards: Shards, workers: int, overlap: bool | None = None) -> list[Worker]:
    """Workers that have joined."""
    made = []
    for rank in range(workers):
        torch.manual_seed(3)
        net = nn.Linear(8, 4, bias=False)
        made.append(Worker(shards, rank, net, torch.optim.SGD(net.parameters(), lr=RATE), overlap=overlap))
    at_once(*(worker.attach for worker in made))
    return made


def step(worker: Worker, value: float = 1.0) -> None:
    push_filled(worker, value)


def weights(shards: Shards) -> torch.Tensor:
    states = [cell.state for server in shards.servers for cell in server.store.cells.values()]
    return torch.cat([state.weights.reshape(-1).clone() for state in states if state is not None])


def says(worker: Worker, kind: Kind, payload: torch.Tensor | bytes | None = None, **fields: Any) -> None:
    """Send one frame of the worker's own to shard 0. Raises StreamClosed if it has hung up."""
    lane = worker.session.links[0].main
    if lane is None:
        raise StreamClosed("shard 0 has hung up")
    header: Header = worker.session.header(kind, **fields)
    raw = b"" if payload is None else payload if isinstance(payload, bytes) else bytes(memory.view(payload))
    lane.stream.send(header._replace(length=len(raw)), raw)


@pytest.mark.parametrize("version", [0, 1 << 40])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_worker_gives_weights_where_the_shards_make_them(tmp_path: Path, mode: str, version: int) -> None:
    with serving(tmp_path, workers=2, shards=1, mode=mode, transport="tcp") as shards:
        good, bad = attached(shards, 2)
        before, broken = weights(shards), shards.servers[0].bad_connections
        says(bad, Kind.PUSH, torch.full((32,), 1e30), block=0, flags=Flag.STORE, version=(0, version))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert torch.equal(weights(shards), before)
        assert good.session.machine.ending is None


def test_weights_of_steps_to_come_are_refused_where_workers_step(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, update_at="worker", transport="tcp") as shards:
        (worker,) = attached(shards, 1)
        before, broken = weights(shards), shards.servers[0].bad_connections
        says(worker, Kind.PUSH, torch.full((32,), 1e30), block=0, flags=Flag.STORE, version=(0, 5))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert torch.equal(weights(shards), before)


def test_the_runs_first_buffers_are_rank_0s(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        _, bad = attached(shards, 2)
        coordinator = shards.servers[0].coordinator
        assert coordinator is not None
        known = coordinator.machine.state.initial
        says(bad, Kind.RECORD, b"not rank 0's", clock=-1)
        says(bad, Kind.REPORT, b'{"mark": 1.0}')
        assert eventually(lambda: "mark" in str(coordinator.machine.state.progress.__dict__))
        assert coordinator.machine.state.initial == known and known


def test_an_absent_push_need_name_no_hyperparameters(tmp_path: Path) -> None:
    """The lowest rank's are taken, and one without a gradient has told none."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, good = attached(shards, 2)
        before = weights(shards)
        says(bad, Kind.PUSH, block=0, flags=Flag.ABSENT, info=77)
        at_once(lambda: step(good))
        assert torch.allclose(weights(shards), before - RATE) and not shards.codes


@pytest.mark.parametrize(("reduction", "moves"), [("median", True), ("trimmed_mean", True), ("mean", False)])
def test_a_minority_that_skips_does_not_hold_up_a_robust_reduction(tmp_path: Path, reduction: str, moves: bool) -> None:
    with serving(tmp_path, workers=3, shards=1, transport="tcp", reduction=reduction) as shards:
        bad, *good = attached(shards, 3)
        before = weights(shards)
        says(bad, Kind.PUSH, block=0, flags=Flag.SKIP, info=bad.session.exchange.tell_hyperparameters([{"lr": RATE, "momentum": 0.0}], []))
        at_once(*(lambda worker=worker: step(worker) for worker in good))  # type: ignore[misc]
        assert torch.allclose(weights(shards), before - RATE) if moves else torch.equal(weights(shards), before)


def test_a_bounded_push_is_what_was_measured(tmp_path: Path) -> None:
    """On one host its worker could write into a gradient that it lends, after the shard's look at it."""
    with serving(tmp_path, workers=2, shards=1, max_push_norm=1.0, transport="auto") as shards:
        first, second = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        assert cell.push_norms is not None
        seen: list[int] = []
        bounded = cell.push_norms.bounded

        def look(worker: int, clock: int, name: str, numbers: torch.Tensor) -> torch.Tensor:
            seen.append(numbers.data_ptr())
            return bounded(worker, clock, name, numbers)

        cell.push_norms.bounded = look  # type: ignore[method-assign]
        at_once(lambda: step(first, 1e-3), lambda: step(second, 1e-3))
        at_once(lambda: step(first, 1e-3), lambda: step(second, 1e-3))
        lent = {lent.flat.data_ptr() for it in shards.servers[0].sessions.values() if it.lending for lent in it.lending._blocks.values()}
        assert len(seen) == 4
        assert len(lent) == 2 and not lent & set(seen)


@pytest.mark.parametrize("kind", [Kind.PULL, Kind.PUSH])
def test_who_asks_again_and_again_for_what_is_to_come_loses_its_stream(tmp_path: Path, kind: Kind) -> None:
    """Each push of the others would look at all that wait."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, good = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        before, broken = weights(shards), shards.servers[0].bad_connections
        info = bad.session.exchange.tell_hyperparameters([{"lr": RATE, "momentum": 0.0}], [])
        for number in range(MOST_WAITING + 1):
            says(bad, kind, block=0, request=1000 + number, version=(1, 1), flags=Flag.ABSENT if kind is Kind.PUSH else 0, info=info)
        assert eventually(lambda: shards.servers[0].bad_connections > broken)
        assert cell.waiters.of(0) <= MOST_WAITING
        if kind is Kind.PUSH:
            at_once(lambda: step(good))
            assert torch.allclose(weights(shards), before - RATE)


def test_who_asks_for_a_step_that_it_cannot_come_to_loses_its_stream(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        bad, _ = attached(shards, 2)
        (cell,) = shards.servers[0].store.cells.values()
        broken = shards.servers[0].bad_connections
        says(bad, Kind.PULL, block=0, request=1000, version=(1, MOST_AHEAD))
        assert eventually(lambda: cell.waiters.of(0) == 1)
        says(bad, Kind.PULL, block=0, request=1001, version=(1, MOST_AHEAD + 1))
        assert eventually(lambda: shards.servers[0].bad_connections > broken)


def test_answers_that_nobody_reads_are_not_kept_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "QUEUED", 200)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        _, bad = attached(shards, 2)
        lane = bad.session.links[0].main
        assert lane is not None
        lane.stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        session = shards.servers[0].sessions[1]
        with session.lanes[0].stream._send_lock:  # as if the peer had stopped reading
            with contextlib.suppress(StreamClosed):  # it is hung up on, maybe before it has asked for all
                for number in range(300):
                    says(bad, Kind.PULL, block=0, request=1000 + number)
            assert eventually(lambda: session.lanes[0].stream.closed)
            assert len(session.lanes[0].stream._queue) <= 200


def test_no_more_is_read_of_a_worker_that_reads_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "BEHIND", 50)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        good, bad = attached(shards, 2)
        stream = shards.servers[0].sessions[1].lanes[0].stream
        with stream._send_lock:  # as if the peer had stopped reading
            for number in range(300):
                says(bad, Kind.PULL, block=0, request=1000 + number)
            assert eventually(lambda: stream._pauses) and len(stream._queue) <= 50
        stream.pump()
        assert eventually(lambda: not stream._queue and not stream._pauses) and not stream.closed
        at_once(lambda: step(good), lambda: step(bad))


def test_one_key_takes_no_more_places_than_its_process_needs(tmp_path: Path) -> None:
    """It begins streams, proves itself on each and says no hello; the others come in as ever."""
    with serving(tmp_path, workers=2, shards=1, transport="tcp", streams=1) as shards:
        place, begun = shards.place(1), []
        for _ in range(40):
            sock = socket.create_connection(shards.address(0))
            stream = Stream(sock)
            greet(stream, place, 0, SECONDS)
            begun.append(stream)
        held = lambda: sum(1 for stream in begun if not gone(stream.sock))  # noqa: E731
        assert eventually(lambda: held() <= 1 + SPARE)
        attached(shards, 2)
        for stream in begun:
            stream.close()


def test_one_key_has_one_hello_of_many_frames_at_a_time(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp", streams=4) as shards:
        first, second, small = (begins(shards, Flag.MORE if large else Flag.NONE) for large in (True, True, False))
        assert eventually(lambda: gone(first.sock))
        assert not gone(second.sock) and not gone(small.sock)
        attached(shards, 2)
        for stream in (first, second, small):
            stream.close()


def test_a_hello_has_to_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes as fast as it has to."""
    monkeypatch.setattr(reading, "HELLO_WHOLE_SECONDS", 0.6)
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        stream, sent = begins(shards, Flag.MORE), 0
        with pytest.raises(StreamClosed):
            while sent < 100:
                time.sleep(0.05)
                stream.write(bytes(8000))
                sent += 1
        assert 8 <= sent < 60
        attached(shards, 2)


def begins(shards: Shards, flags: Flag) -> Stream:
    """A stream of worker 1 by which a mebibyte of hello is to come, and the first bytes of it have."""
    stream = Stream(socket.create_connection(shards.address(0)))
    greet(stream, shards.place(1), 0, SECONDS)
    hello = Header(Kind.HELLO, run=run_digest(shards.place(1).run), worker=1, start=1, flags=flags, length=MAX_JSON)
    stream.write(hello, bytes(1000))
    return stream


@pytest.mark.parametrize(
    ("body", "says_why"),
    [
        ({"none": [], "hyperparameters": [{}] * 70}, "70 parameter groups, the model has 1"),
        ({"none": [0, 0], "hyperparameters": []}, "2 tensors have no gradient, the model has 1"),
        ({"none": [], "hyperparameters": [], "long": "x" * (2 * MAX_JSON)}, f"above the limit of {MAX_JSON}"),
    ],
    ids=["groups", "none", "frames"],
)
def test_what_pushes_are_made_with_is_no_longer_than_the_job(
    tmp_path: Path, body: dict[str, Any], says_why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(tmp_path, workers=2, shards=1, transport="tcp") as shards:
        _, bad = attached(shards, 2)
        lane = bad.session.links[0].main
        assert lane is not None
        with contextlib.suppress(StreamClosed):  # it may be hung up on before all is sent
            lane.stream.send_json(bad.session.header(Kind.INFO, info=9), body)
        assert eventually(lambda: says_why in caplog.text), caplog.text


def gone(sock: socket.socket) -> bool:
    """The other side has closed."""
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("levels", [MAX_LEVELS, 900])
def test_a_body_that_is_nested_deep_is_no_control_body(levels: int) -> None:
    nested = b'{"rule": ' + b"[" * levels + b"]" * levels + b"}"
    with pytest.raises(WireError, match="nested deeper than 32 levels"):
        load(nested)
    assert load(b'{"rule": ' + b"[" * (MAX_LEVELS - 2) + b"]" * (MAX_LEVELS - 2) + b"}")
    assert load(b'{"table": [' + b",".join([b'{"shape": [1, 2]}'] * 200) + b"]}")
