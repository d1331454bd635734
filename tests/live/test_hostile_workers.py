"""A worker of the job that was taken over, and has its key: it changes what a worker may change and no more.

- A worker with a valid key that says what its config does not: shards go by the config.
- Generated sessions of a worker with a valid key: the weights, the other worker's steps and shard 0's health stay what they are to be.
- Frames about rows that cannot be: refused before anything is made room for, and the shard serves on.
"""

from __future__ import annotations

import struct
import threading
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
from psjob.protocol.coordinator import events
from psjob.shard import coordinator_driver
from psjob.shard.checks import info_of, rule_problem
from psjob.shard.status_server import status
from psjob.wire.frame import LENT_ANSWERS, LENT_PUSHES, LOOKUP_BYTES, MAX_PUSH_BYTES, Flag, Kind, WireError
from psjob.worker.exchange import GradientClip
from psjob.worker.session import WorkerSession
from tests.live.hostile import LIMIT as SESSIONS_LIMIT
from tests.live.hostile import LR as SESSIONS_LR
from tests.live.hostile import World
from tests.live.live_shards import SECONDS, Shards, Worker, all_well, eventually, serving, together
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
            for p in worker.model.parameters():
                p.grad = torch.full_like(p, gradient(worker.rank))
            worker.optimizer.step()

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
                cell._apply = lambda batch, lag, weights=None, apply=apply: (seen.append(lag), apply(batch, lag, weights))[1]  # type: ignore
            claimed = dict.fromkeys(exchange.versions, (1, 1 << 40))
            exchange.versions.update(claimed)
            steps(lambda rank: 1.0, made=1)(worker)

        all_well([worker], act)
    assert seen and all(lag == 0 for lag in seen)


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
        training = threading.Thread(target=together, args=(workers, act), daemon=True)
        training.start()
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
    header = header._replace(**{"info": worker.session.exchange._info[0]} | {k: v for k, v in fields.items() if k != "kind"})
    body = b"" if isinstance(payload, int) else payload
    stream = link.lanes[0].stream
    stream.write(header._replace(length=payload if isinstance(payload, int) else len(body)), body)
    assert eventually(lambda: server.bad_connections == bad + 1), "the shard took it"
    assert server.store.counters.applied == pushes
    before = worker.model["user"](torch.arange(ROWS)).detach()  # by the stream that was dialled anew
    assert torch.isfinite(before).all()
