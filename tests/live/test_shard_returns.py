"""Workers that return, leave early or have odd groups: every step counts once, and the last weights are the job's.

- Streams that break and processes that die at the worst moment: what was swallowed is said again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.protocol.messages import SetUp
from psjob.protocol.shard.events import Action, Event, Ordered, Phase
from psjob.shard.server import Server
from psjob.wire import tcp
from psjob.wire.auth import ShardIdentity
from psjob.wire.frame import Header, Kind
from psjob.wire.tcp import Stream
from psjob.worker.exits import SessionEnd
from tests.live import live_shards
from tests.live.live_shards import (
    NEVER,
    SECONDS,
    Rewound,
    Shards,
    Worker,
    all_well,
    aside,
    at_once,
    coordinator,
    eventually,
    serving,
    severed,
)
from tests.live.training import counting, final, numbers, step
from tests.support.relay import shard_answers

EVERY_2 = replace(NEVER, every_steps=2, keep=100)


@pytest.fixture(autouse=True, params=[False, True], ids=["plain", "overlap"])
def both_ways(last_words: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(live_shards, "OVERLAP", request.param)


def large(shards: Shards, start: int = 1) -> Worker:
    """A counting worker whose record is too large to be handed in at each step."""
    model = nn.Linear(40, 40)
    model.register_buffer("statistics", torch.zeros(40_000))
    for p in model.parameters():
        nn.init.zeros_(p)
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0), start=start)


def rounds(worker: Worker, begin: int, end: int) -> None:
    """What `ps.shard` and the script do, a batch a step."""
    for turn in range(begin, end):
        worker.edge(turn)
        step(worker)


def test_an_async_worker_without_a_record_makes_its_steps_again_without_effect(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = large(shards)
        first.attach()
        rounds(first, 0, 5)
        first.job.wait()
        first.die()
        again = large(shards, start=2)
        again.attach()
        assert (again.session.clock, again.job.made) == (5, 0)
        rounds(again, 0, 8)
        assert again.leave() == 0 and final(shards) == {8.0, 0.0}, "the buffer is zeros"


def test_an_async_worker_makes_only_the_steps_after_its_record_again(tmp_path: Path) -> None:
    """Its record is of clock 3: it was killed at the next step's edge, before it could hand in another."""
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = counting(shards, 0)
        first.attach()
        rounds(first, 0, 4)
        first.job.wait()
        assert eventually(lambda: 3 in shards.servers[0].coordinator.machine.state.members[0].records)  # type: ignore[union-attr]
        first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert (again.session.clock, again.job.made) == (4, 3)
        rounds(again, 3, 8)
        assert again.leave() == 0 and final(shards) == {8.0}


def test_an_async_push_that_one_shard_has_is_made_again_for_the_other(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, mode="async") as shards:
        first = counting(shards, 0)
        first.attach()
        with severed(first.session.links[1]):
            pushing = aside(lambda: step(first))
            assert eventually(lambda: shards.servers[0].store.clocks()[0] == 1)
            first.session._end(SessionEnd("lost"))
            pushing.join(SECONDS)
            first.die()
        again = counting(shards, 0, start=2)
        again.attach()
        assert again.session.clock == 0
        step(again, 3)
        assert again.leave() == 0 and final(shards) == {3.0}
        assert shards.servers[0].store.counters.duplicates > 0
        assert all(server.store.counters.lost == 0 for server in shards.servers)


def test_where_workers_step_whoever_goes_on_gives_the_weights(tmp_path: Path) -> None:
    """Rank 0 is through after 2 steps: checkpoints continue, and the job's weights are the last worker's."""
    with serving(tmp_path, workers=2, shards=2, update_at="worker", checkpoint=EVERY_2) as shards:

        def beyond() -> bool:
            return any(int(path.stem[-12:]) > 2 for path in shards.folder.glob("manifest-*.json"))

        def act(worker: Worker) -> None:
            rounds(worker, 0, 2)
            deadline = time.monotonic() + SECONDS / 2
            while worker.rank == 1 and time.monotonic() < deadline and not beyond():
                rounds(worker, worker.session.clock, worker.session.clock + 1)

        workers = [counting(shards, rank) for rank in range(2)]
        all_well(workers, act)
        assert beyond(), "no checkpoint without rank 0"
        assert final(shards) == numbers(workers[1].model) == {float(workers[1].session.clock)}


def test_a_last_group_without_parameters_is_nothing_special(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        model = nn.Linear(40, 40)
        for p in model.parameters():
            nn.init.zeros_(p)
        groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
        worker = Worker(shards, 0, model, torch.optim.SGD(groups, lr=1.0))
        all_well([worker], lambda worker: step(worker, 2))
        assert final(shards) == {2.0}


def test_the_last_record_is_sent_again_on_a_new_stream(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 2)
        member = coordinator(shards).machine.state.members[0]
        assert eventually(lambda: 2 in member.records)
        member.records.clear()
        with severed(worker.session.links[0]):
            worker.edge()
        assert eventually(lambda: 2 in member.records)


def test_wishes_and_reports_that_a_broken_stream_swallowed_are_said_again(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 2)
        with severed(worker.session.links[0]):
            worker.session.report({"loss": 0.25})
            worker.session.checkpoint()
        assert eventually(lambda: coordinator(shards).machine.state.progress.metrics.get("loss") == 0.25)

        def committed() -> bool:
            step(worker, 1)
            return coordinator(shards).machine.state.progress.committed > 0

        assert eventually(committed), "the checkpoint that was asked for is taken"
        assert Kind.CHECKPOINT not in worker.session.machine.told, "once only"


def test_where_workers_step_the_last_weights_are_sent_again_on_a_new_stream(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2, update_at="worker") as shards:
        worker = counting(shards, 0)
        worker.attach()
        step(worker, 3)
        with severed(worker.session.links[1]):
            leaving = aside(worker.leave)
            assert eventually(lambda: worker.session.machine.leaving)
        leaving.join(SECONDS)
        assert not leaving.is_alive() and final(shards) == {3.0}


def test_where_workers_step_a_killed_lone_worker_begins_at_the_weights_that_are_stored(tmp_path: Path) -> None:
    """Its record is of step 3, but the weights of step 3 died with it."""
    with serving(tmp_path, workers=1, shards=2, update_at="worker") as shards:
        killed = counting(shards, 0)
        killed.attach()
        step(killed, 3)
        assert eventually(lambda: 3 in coordinator(shards).machine.state.members[0].records)
        killed.die()
        worker = counting(shards, 0, start=2)
        worker.attach()
        assert (worker.session.clock, worker.job.replay) == (0, 0)
        step(worker, 5)
        assert numbers(worker.model) == {5.0}


def test_a_worker_rewinds_when_its_step_is_closed_while_it_is_placed(tmp_path: Path) -> None:
    """A push of its dead process, which was still on its way, moves one shard's blocks on: it must not mix two steps' weights."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        other, killed = counting(shards, 0), counting(shards, 1)
        at_once(other.attach, killed.attach)
        aside(lambda: step(other))  # waits in step 0 for worker 1
        store = shards.servers[1].store
        assert eventually(lambda: store.clocks()[0] == 1)
        worker = counting(shards, 1, start=2)
        second = worker.session.links[1]
        dial = second.dial

        def late(seconds: float) -> None:
            for p in killed.model.parameters():
                p.grad = torch.full_like(p, -1.0)
            killed.session.links[0].close()
            aside(lambda: step(killed))
            assert eventually(lambda: store.span() == (1, 1))
            second.dial = dial  # type: ignore[method-assign]
            dial(seconds)

        second.dial = late  # type: ignore[method-assign]
        with pytest.raises(Rewound):
            worker.attach()


def test_first_values_that_a_broken_stream_swallowed_are_given_again(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        worker = counting(shards, 0)
        link = worker.session.links[1]
        send, swallowed = link.send, []

        def swallow(header: Header, payload: bytes | memoryview = b"") -> None:
            if header.kind is Kind.INIT and not swallowed:
                swallowed.append(header)
                link.close()
            send(header, payload)

        link.send = swallow  # type: ignore[method-assign]
        attaching = aside(worker.attach)
        attaching.join(SECONDS)
        assert swallowed and not attaching.is_alive()


def test_first_values_that_came_before_the_order_to_expect_them_are_given_again(tmp_path: Path) -> None:
    """Rank 0's own stream to shard 1 can be quicker than the coordinator's."""
    with serving(tmp_path, workers=1, shards=2) as shards:
        second = shards.servers[1]
        handle, initialised = second.control.machine.handle, second.initialised
        orders: list[Event] = []

        def note(event: Event, now: float) -> list[Action]:
            if isinstance(event, Ordered) and isinstance(event.order, SetUp):
                orders.append(event)
            return handle(event, now)

        def forget() -> None:
            second.initialised = initialised  # type: ignore[method-assign]
            second.control.post(orders[0])

        second.control.machine.handle = note  # type: ignore[method-assign]
        second.initialised = forget  # type: ignore[method-assign]
        attaching = aside(counting(shards, 0).attach)
        attaching.join(SECONDS)
        assert orders and not attaching.is_alive()


def test_a_shard_that_is_restored_but_not_open_does_not_say_that_it_serves(tmp_path: Path) -> None:
    listener = tcp.listening_socket("127.0.0.1", 0)
    with serving(tmp_path, workers=1, shards=2) as shards:
        place = shards.servers[1].place
        here = replace(place.config.shards[0], port=listener.getsockname()[1])
        server = Server(replace(place, config=replace(place.config, shards=(here, place.config.shards[1]), connect_seconds=0.0)), tmp_path)
        said = {}
        server.control.machine.phase = Phase.HELD
        thread = aside(server.run_until_gone)
        for phase in (Phase.HELD, Phase.SERVING):
            stream = Stream(listener.accept()[0])
            theirs, mine = shard_answers(stream.sock, ShardIdentity(0, 1, 1))
            stream.seal(mine, theirs)
            said[phase] = stream.recv_json(stream.recv_header(10.0))["serving"]
            server.control.machine.phase = Phase.SERVING
            # An order, or it would not dial again.
            stream.send_json(Header(Kind.PEER, run=server.context.run), {"do": "nothing"})
            stream.close()
        server.exit_with(0)
        thread.join(SECONDS)
        server.close()
    assert said == {Phase.HELD: False, Phase.SERVING: True}
    listener.close()
