"""Points of scripts at which workers meet, on real shards: each hears what all have said, also one that begins again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.integrations import barriers
from psjob.process.errors import Refused
from psjob.protocol.records import ASKS, BEFORE
from psjob.shard import rendezvous as kept_meetings
from psjob.shard.rendezvous import MOST_POINTS, Rendezvous
from psjob.wire.frame import Header, Kind, WireError, run_digest
from psjob.wire.reading import StreamClosed
from psjob.worker import rendezvous
from psjob.worker.rendezvous import newest_process
from tests.live.live_shards import Shards, Worker, all_well, eventually, serving


def nothing() -> None:
    """Nothing ends the wait."""


def at(shards: Shards, point: str, ranks: list[int], heard: dict[int, Any], starts: int = 1) -> Callable[[], None]:
    """Workers come to a point, each from a thread; what is returned waits for all of them."""

    def come(rank: int) -> None:
        heard[rank] = rendezvous.meet_workers(shards.place(rank, starts), point, f"from {rank}", nothing)

    threads = [threading.Thread(target=come, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()

    def join() -> None:
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    return join


def test_each_hears_what_all_have_said_once_all_are_there(tmp_path: Path) -> None:
    heard: dict[int, Any] = {}
    with serving(tmp_path, workers=3, shards=2) as shards:
        join = at(shards, "a point", [0, 2], heard)
        time.sleep(0.3)
        assert not heard, "one is missing"
        at(shards, "a point", [1], heard)()
        join()
        assert heard == {rank: ["from 0", "from 1", "from 2"] for rank in range(3)}
        # One that begins again hears the same, and does not wait for others.
        assert rendezvous.meet_workers(shards.place(1, 2), "a point", "another", nothing) == heard[0]
        # Rank 0 alone may be waited for, and waits for nobody.
        assert rendezvous.meet_workers(shards.place(0), "its file", "written", nothing, first=True) == ["written"]
        assert rendezvous.meet_workers(shards.place(2), "its file", "", nothing, first=True) == ["written"]
        assert rendezvous.meet_workers(shards.place(2), "another file", "", nothing, waits=False, first=True) is None
        # Lines that run again do not wait for a point that nobody else comes to.
        assert rendezvous.meet_workers(shards.place(1, 2), "another point", "", nothing, waits=False) is None


def test_who_begins_again_passes_the_points_before_attach_and_who_has_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_meetings, "HOLD_SECONDS", 0.1)

    def act(worker: Worker) -> None:
        if worker.rank == 0:
            assert rendezvous.meet_workers(shards.place(1, 2), f"{BEFORE} 0", "", nothing) is None
            with pytest.raises(rendezvous.NotMet, match="worker 1 has ended its script without coming there"):
                rendezvous.meet_workers(shards.place(0), "the end", "", nothing)

    with serving(tmp_path, workers=2, shards=1) as shards:
        models = [torch.nn.Linear(2, 1) for _ in range(2)]
        all_well([Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1)) for rank, model in enumerate(models)], act)


def test_without_shard_0_the_wait_ends_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        place = shards.place(0)
    place = replace(place, config=replace(place.config, connect_seconds=1.0))
    with pytest.raises(rendezvous.NotMet, match="shard 0, by which they meet, was not reached for"):
        rendezvous.meet_workers(place, "a point", "", nothing)


class EndedError(Exception):
    pass


def test_what_ends_the_session_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_meetings, "HOLD_SECONDS", 0.1)
    begun = time.monotonic()

    def check() -> None:
        if time.monotonic() - begun > 0.5:
            raise EndedError

    with serving(tmp_path, workers=2, shards=1) as shards, pytest.raises(EndedError):
        rendezvous.meet_workers(shards.place(0), "a point", "", check)


STRANGE = {
    "no name": {"role": "worker", "asks": ASKS, "said": ""},
    "a long name": {"role": "worker", "asks": ASKS, "point": "x" * 201, "said": ""},
    "nothing said": {"role": "worker", "asks": ASKS, "point": "x"},
    "a shard": {"role": "shard", "asks": ASKS, "point": "x", "said": ""},
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_question_out_of_shape_is_refused(tmp_path: Path, case: str) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        kept = Rendezvous(shards.place(0), list, lambda: False)
    stream: Any = None
    with pytest.raises(WireError):
        kept.meet(stream, Header(Kind.HELLO, worker=0), STRANGE[case])


class _Stream:
    """Takes answers."""

    closed = False

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []

    def send_json(self, header: Header, body: dict[str, Any]) -> None:
        self.answers.append(body)


def test_points_that_were_left_long_ago_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_meetings, "HOLD_SECONDS", 0.0)
    with serving(tmp_path, workers=2, shards=1) as shards:
        kept = Rendezvous(shards.place(0), list, lambda: False)
    for number in range(MOST_POINTS + 10):
        for rank in range(2):
            stream: Any = _Stream()
            kept.meet(stream, Header(Kind.HELLO, worker=rank), {"role": "worker", "point": f"{number}", "said": "x"})()
    assert stream.answers == [{"said": ["x", "x"]}]
    assert len(kept._points) <= MOST_POINTS + 1


@pytest.mark.parametrize(("said", "most"), [("x", kept_meetings.MOST_OPEN), ("x" * (16 << 20), 4)])
def test_one_worker_holds_a_bounded_part_of_shard_0_at_points_that_nobody_else_knows(tmp_path: Path, said: str, most: int) -> None:
    with serving(tmp_path, workers=2, shards=1) as shards:
        kept = Rendezvous(shards.place(0), list, lambda: False)

    def come(rank: int, number: int) -> None:
        kept.meet(_Stream(), Header(Kind.HELLO, worker=rank), {"role": "worker", "point": f"{number}", "said": said})()  # type: ignore

    for number in range(most):
        come(1, number)
    with pytest.raises(WireError, match=f"worker 1 waits at {most} points"):
        come(1, most)
    come(1, 0)  # again, as after a restart
    come(0, most)  # another worker has a part of its own
    come(0, 0)
    come(1, most)


VALUES: list[Any] = [
    3, 0.5, float("inf"), "text", None, (1, [2, {"a": torch.arange(3)}]), torch.tensor(True), torch.ones(2, 0),
    torch.randn(3, dtype=torch.bfloat16), torch.complex(torch.ones(2), torch.ones(2)).conj(),
]  # fmt: skip


def test_a_worker_that_asks_again_and_again_holds_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest questions wait on. Another worker is answered."""
    monkeypatch.setattr(kept_meetings, "HOLD_SECONDS", 2.0)
    with serving(tmp_path, workers=2, shards=1) as shards:
        place = shards.place(1)
        head = Header(Kind.HELLO, run=run_digest(place.run), worker=1, start=1)
        streams = []
        for number in range(3 * kept_meetings.MOST_ASKING):
            streams.append(newest_process(place, 0))
            streams[-1].send_json(head, {"role": "worker", "asks": ASKS, "point": f"{number}", "said": "", "waits": True})
        assert eventually(lambda: len(asking(shards)) == kept_meetings.MOST_ASKING + 1, 5)
        assert sum(thread.name == "stream-apart" for thread in threading.enumerate()) <= kept_meetings.MOST_ASKING + 4
        assert rendezvous.meet_workers(shards.place(0), "its file", "written", nothing, first=True) == ["written"]
        assert streams[-1] is not None and not streams[-1].gone()
        with pytest.raises(StreamClosed):
            streams[0].recv_header(5)
        for stream in streams:
            stream.close()


def asking(shards: Shards) -> dict[Any, None]:
    meetings_of_0 = shards.servers[0].meetings
    assert meetings_of_0 is not None
    return meetings_of_0._asking.get(1, {})


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_values_come_as_they_were_given(number: int) -> None:
    given = VALUES[number]
    found = barriers.read_value(barriers.write_value(given, "gather"))
    assert type(found) is type(given)
    assert torch.equal(found, given) if isinstance(given, torch.Tensor) else str(found) == str(given)


@pytest.mark.parametrize("given", [object(), torch.zeros(13 << 20, dtype=torch.uint8)])
def test_what_has_no_form_and_what_is_too_large_is_refused(given: Any) -> None:
    with pytest.raises(Refused, match="gather between the workers of a job takes"):
        barriers.write_value(given, "gather")


def test_outside_a_job_everyone_is_here() -> None:
    barriers.everyone("wait_for_everyone")
    assert barriers.of_all(3, "gather") == [3]
