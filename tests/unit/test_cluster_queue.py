"""The queue: no doubles, one turn a key at a time, fair, exact later times, delays that double.

Which job is looked at first: one that lost something, then what is begun, then what is new; and the counts that this rests on.

Watched namespaces, one by one: a table of what is known, and what follows.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psjob_operator.cluster import queue
from psjob_operator.cluster.cache import JobStore, PodTally
from psjob_operator.cluster.client import JOBS, PODS, POLICIES, JobKey, TokenBucket
from psjob_operator.cluster.queue import FAIR, Queue
from psjob_operator.cluster.watch import Places

A, B, C = JobKey("n", "a"), JobKey("n", "b"), JobKey("n", "c")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_key_added_twice_is_taken_once() -> None:
    queue = Queue(Clock())
    queue.add(A)
    queue.add(A)
    assert queue.take() == A
    assert queue.take() is None


def test_a_key_added_during_its_turn_comes_again_after_it_and_behind_the_others() -> None:
    queue = Queue(Clock())
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.add(B)
    assert queue.take() == B
    assert queue.take() is None, "A's turn still runs"
    queue.done(A)
    assert queue.take() == A
    queue.done(A)
    queue.done(B)
    assert queue.take() is None


def test_a_later_time_is_kept_exactly_and_the_earliest_wins() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add_at(A, 1010.0)
    queue.add_at(A, 1005.0)
    queue.add_at(A, 1020.0)
    clock.now = 1004.9
    assert queue.take() is None
    clock.now = 1005.0
    assert queue.take() == A
    queue.done(A)
    clock.now = 2000.0
    assert queue.take() is None, "the later wishes were answered by the earliest"


def test_failures_in_a_row_double_the_delay_up_to_its_limit_and_success_ends_the_row() -> None:
    clock = Clock()
    queue = Queue(clock, first_backoff=0.5, max_backoff=4.0)
    assert [queue.fail(A) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    queue.succeed(A)
    assert queue.fail(A) == 0.5
    assert queue.fail(A, at_least=30.0) == 30.0
    assert [queue.fail(A, at_most=3.0) for _ in range(2)] == [2.0, 3.0]


def test_a_key_rests_after_a_long_turn_and_gathers_what_comes() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add(A)
    assert queue.take() == A
    queue.add(A)
    queue.done(A, rest=2.0)
    queue.add(A)
    queue.add(B)
    assert queue.take() == B
    clock.now = 1001.9
    assert queue.take() is None
    clock.now = 1002.0
    assert queue.take() == A
    queue.done(A)
    assert queue.take() is None


def test_what_is_forgotten_does_not_come_back() -> None:
    clock = Clock()
    queue = Queue(clock)
    queue.add_at(A, 1001.0)
    queue.forget(A)
    clock.now = 1002.0
    assert queue.take() is None


def test_next_wakes_for_an_added_key_and_for_a_time_that_comes() -> None:
    async def scenario() -> list[JobKey]:
        queue = Queue()
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        queue.add(B)
        first = await asyncio.wait_for(waiting, 5)
        queue.done(first)
        waiting = asyncio.create_task(queue.next())
        await asyncio.sleep(0)
        queue.add_at(C, 0.0)
        return [first, await asyncio.wait_for(waiting, 5)]

    assert asyncio.run(scenario()) == [B, C]


@given(st.lists(st.sampled_from(["add a", "add b", "add c", "take", "done"]), max_size=60))
def test_no_key_runs_twice_at_once_and_none_is_lost(steps: list[str]) -> None:
    queue = Queue(Clock())
    keys = {"a": A, "b": B, "c": C}
    running: list[JobKey] = []
    wanted: set[JobKey] = set()
    for step in steps:
        if step.startswith("add"):
            queue.add(keys[step[-1]])
            wanted.add(keys[step[-1]])
        elif step == "take":
            key = queue.take()
            if key is not None:
                assert key not in running
                running.append(key)
                wanted.discard(key)
        elif running:
            queue.done(running.pop(0))
    for key in running:
        queue.done(key)
    rest = set()
    while (key := queue.take()) is not None:
        rest.add(key)
        queue.done(key)
    assert rest == wanted


def test_the_bucket_lets_a_burst_through_and_then_spaces_calls_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(rate=10.0, burst=3, clock=clock)
    assert [bucket.reserve() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert [round(bucket.reserve(), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    clock.now += 10.0
    assert [bucket.reserve() for _ in range(3)] == [0.0, 0.0, 0.0], "it never holds more than its burst"
    assert bucket.reserve() > 0


def test_nothing_is_kept_of_a_job_that_is_gone() -> None:
    """Its last turn finds no job: that turn's rest is nobody's."""
    queue = Queue(clock=lambda: 5.0)
    key = JobKey("n", "job")
    for _ in range(2):
        queue.add(key)
        assert queue.take() == key
        queue.forget(key)
        queue.done(key, rest=0.2)
    kept = {name: value for name, value in vars(queue).items() if isinstance(value, dict | set | list) or name == "_ready"}
    assert all(not value for value in kept.values()), kept


def test_a_closed_queue_forgets_and_takes_nothing_in() -> None:
    clock = Clock()
    queue = Queue(clock)
    for key in (A, B):
        queue.add(key)
    queue.fail(A)
    queue.add_at(C, clock.now + 1)
    assert queue.take() == A
    queue.done(A, rest=5)
    queue.close()
    queue.add(A)
    queue.add_at(B, clock.now)
    clock.now += 10
    assert queue.take() is None and len(queue) == 0
    queue.open()
    assert queue.take() is None
    queue.add(A)
    assert queue.take() == A
    assert queue.fail(A) == 0.5, "failures of an earlier term are forgotten"


def test_the_lowest_rank_comes_first_and_of_one_rank_the_first() -> None:
    ranks = {A: 2, B: 1, C: 1}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    for key in (A, B, C):
        queue.add(key)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [B, C, A, None]


def test_a_key_that_waits_gets_more_urgent_by_being_added_again_and_never_less() -> None:
    ranks = {A: 2, B: 2, C: 1}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    for key in (A, B, C):
        queue.add(key)
    ranks[B] = 0
    queue.add(B)
    ranks[C] = 3
    queue.add(C)
    assert [queue.take(), queue.take(), queue.take(), queue.take()] == [B, C, A, None]
    assert queue.waiting() == 0


def test_who_takes_only_what_is_urgent_leaves_the_rest() -> None:
    ranks = {A: 4, B: 0}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    queue.add(A)
    assert queue.take(1) is None
    queue.add(B)
    assert queue.take(1) == B
    assert queue.take() == A


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=120), st.integers(0, 5))
def test_nobody_starves_and_nobody_is_taken_twice(steps: list[tuple[int, int]], watched: int) -> None:
    """However urgent the others are, a key that waits behind n older ones begins within FAIR * (n + 1) turns."""
    ranks: dict[JobKey, int] = {}
    queue = Queue(Clock(), rank=lambda key: ranks[key])
    slow = JobKey("n", "slow")
    ranks[slow] = 9
    before = [JobKey("n", f"k{number}") for number in range(watched)]
    for key in before:
        ranks[key] = 0
        queue.add(key)
    queue.add(slow)
    turns = 0
    for number, rank in [*steps, *((0, 0) for _ in range(FAIR * (watched + 1)))]:
        key = JobKey("n", f"k{number}")
        ranks[key] = rank
        queue.add(key)
        taken = queue.take()
        assert taken is not None
        queue.done(taken)
        turns += 1
        if taken == slow:
            break
    assert turns <= FAIR * (watched + 1)


KEY = JobKey("n", "job")
_versions = iter(range(1, 1_000_000))


AT = "2026-01-01T00:00:00Z"
STANDS: dict[str | None, dict[str, Any]] = {
    None: {},
    "Pending": {"startTime": AT},
    "Running": {"startTime": AT, "internal": {"readyTime": AT}},
    "Recovering": {"startTime": AT, "internal": {"readyTime": AT, "lostTime": AT}},
    "Suspended": {"internal": {}},
    "Complete": {"startTime": AT, "internal": {"readyTime": AT}, "completionTime": AT},
}
"""What of a status says that a job is in this phase."""


def job(phase: str | None, run: str | None = "u", workers: int = 2, **metadata: Any) -> dict[str, Any]:
    status = {**STANDS[phase], **({"run": run} if run and phase else {})}
    spec = {"shards": {"replicas": 1}, "workers": {"replicas": workers}}
    return {
        "metadata": {"namespace": "n", "name": "job", "uid": "u", "resourceVersion": str(next(_versions)), **metadata},
        "spec": spec,
        "status": status,
    }


def pod(
    name: str, phase: str = "Running", role: str = "worker", ready: bool = True, deleting: bool = False, owner: str = "job"
) -> dict[str, Any]:
    labels = {"psjob.dev/job-name": owner, "psjob.dev/role": role, "psjob.dev/index": "0", "psjob.dev/number": "1"}
    metadata = {"namespace": "n", "name": name, "uid": f"u-{name}", "resourceVersion": str(next(_versions)), "labels": labels}
    if deleting:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "spec": {"containers": [{"name": role}]}, "status": {"phase": phase, "conditions": conditions}}


UP = [pod("s", role="shard"), pod("w0"), pod("w1")]


@pytest.mark.parametrize(
    ("phase", "run", "pods", "wanted"),
    [
        (None, None, [], queue.NEW),
        ("Pending", "another", [], queue.NEW),
        ("Pending", "u", [], queue.BEGUN),
        ("Pending", "u", [pod("s", role="shard"), pod("w0"), pod("w1", "Pending")], queue.LATER),
        ("Pending", "u", [pod("s", role="shard", ready=False), pod("w0"), pod("w1")], queue.LATER),
        ("Pending", "u", UP, queue.NEAR),
        ("Running", "u", UP, queue.LATER),
        ("Running", "u", UP[:2], queue.RECOVERING),
        ("Running", "u", [*UP[:2], pod("w1", "Failed")], queue.RECOVERING),
        ("Running", "u", [*UP[:2], pod("w1", deleting=True)], queue.RECOVERING),
        ("Running", "u", [*UP, pod("w-old", "Failed")], queue.LATER),
        ("Recovering", "u", UP[:2], queue.RECOVERING),
        ("Recovering", "u", [*UP[:2], pod("w1", "Pending")], queue.LATER),
        ("Recovering", "u", UP, queue.NEAR),
        ("Suspended", "u", [], queue.LATER),
        ("Complete", "u", [], queue.LATER),
    ],
)
def test_the_rank_of_a_job(phase: str | None, run: str | None, pods: list[dict[str, Any]], wanted: int) -> None:
    store = JobStore()
    store.put(JOBS, job(phase, run))
    for raw in pods:
        store.put(PODS, {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(next(_versions))}})
    assert queue.urgency(store, KEY) == wanted


def test_a_job_that_is_gone_or_goes_is_not_urgent() -> None:
    store = JobStore()
    assert queue.urgency(store, KEY) == queue.LATER
    store.put(JOBS, job(None, None, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert queue.urgency(store, KEY) == queue.LATER


@pytest.mark.parametrize("spec", [{}, {"shards": None, "workers": 3}, {"shards": {"replicas": "x"}, "workers": {"replicas": None}}])
def test_a_spec_that_cannot_be_read_has_a_rank(spec: dict[str, Any]) -> None:
    store = JobStore()
    store.put(JOBS, {**job("Running"), "spec": spec})
    assert queue.urgency(store, KEY) == queue.LATER


STEPS = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.sampled_from(["put", "remove"]),
    st.sampled_from(["Pending", "Running", "Succeeded", "Failed"]),
    st.sampled_from(["worker", "shard", "other"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["job", "neighbour", ""]),
)


def test_the_workers_of_a_job_in_stages_are_counted() -> None:
    raw = job("Pending")
    raw["spec"] |= {"workers": {"template": {}}, "stages": [{"name": "a"}, {"name": "b", "replicas": 2}]}
    store = JobStore()
    store.put(JOBS, raw)
    entry = store.job(KEY)
    assert entry is not None and entry.brief["workers"] == {"replicas": 3} and "replicas" not in entry.spec["workers"]


@given(st.lists(STEPS, max_size=40))
def test_the_counts_are_those_of_the_pods_that_are_there(steps: list[Any]) -> None:
    store = JobStore()
    for name, what, phase, role, ready, deleting, owner in steps:
        raw = pod(name, phase, role, ready, deleting, owner)
        if what == "put":
            store.put(PODS, raw)
        else:
            store.remove(PODS, raw)
            raw["metadata"]["uid"] += "'"
    for key in (KEY, JobKey("n", "neighbour")):
        counted = PodTally()
        for view in store.pods(key):
            counted.count(view, 1)
        assert store.tally(key) == counted


def test_what_changes_nothing_that_is_kept_is_no_news() -> None:
    store = JobStore()
    raw = pod("w0")
    assert store.put(PODS, raw) == KEY
    raw["metadata"]["resourceVersion"] = str(next(_versions))
    raw["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    assert store.put(PODS, raw) is None
    raw["metadata"]["resourceVersion"] = str(next(_versions))
    raw["status"]["phase"] = "Failed"
    assert store.put(PODS, raw) == KEY


KINDS = (JOBS, PODS, POLICIES)


def known(namespaces: tuple[str, ...], steps: list[tuple[str, str]]) -> Places:
    """`steps`: (place, what), such as listed, `no list pods`, `may list pods`."""
    places = Places(namespaces, KINDS)
    by_name = {kind.plural: kind for kind in KINDS}
    for place, what in steps:
        if what == "listed":
            for kind in KINDS:
                places.listed(kind, place)
        else:
            word, verb, plural = what.split()
            if word == "no":
                places.refused(by_name[plural], place, verb, "forbidden")
            else:
                places.may(by_name[plural], place, verb)
    return places


ROWS: list[tuple[str, tuple[str, ...], list[tuple[str, str]], bool, str, dict[str, bool]]] = [
    ("nothing yet", ("a", "b"), [], False, "", {"a": False, "b": False}),
    ("one of two listed", ("a", "b"), [("a", "listed")], False, "", {}),
    ("both listed", ("a", "b"), [("a", "listed"), ("b", "listed")], True, "", {}),
    ("one listed, one refused", ("a", "b"), [("a", "listed"), ("b", "no list pods")], True, "", {"a": False, "b": True}),
    ("refused after it was listed", ("a", "b"), [("a", "listed"), ("b", "listed"), ("b", "no watch pods")], True, "", {"b": True}),
    ("one refused, one not listed yet", ("a", "b"), [("b", "no list pods")], False, "", {"a": False}),
    ("both refused", ("a", "b"), [("a", "no list pods"), ("b", "no list pstrainingjobs")], False,
        "the right to list pods in namespace a: forbidden", {"a": True, "b": True}),
    ("granted again", ("a",), [("a", "listed"), ("a", "no watch pods"), ("a", "may watch pods")], True, "", {"a": False}),
    ("another verb is granted", ("a",), [("a", "no watch pods"), ("a", "listed")], False,
        "the right to watch pods in namespace a: forbidden", {}),
    ("everywhere, refused", (), [("", "no list pods")], False, "the right to list pods: forbidden", {"anything": True}),
    ("everywhere, listed", (), [("", "listed")], True, "", {"anything": False}),
    ("what is optional is done without", ("a",), [("a", "no list networkpolicies"), ("a", "listed")], True, "", {"a": False}),
]  # fmt: skip


@pytest.mark.parametrize(("namespaces", "steps", "whole", "blind", "shut"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_each_namespace_counts_by_itself(
    namespaces: tuple[str, ...], steps: list[tuple[str, str]], whole: bool, blind: str, shut: dict[str, bool]
) -> None:
    places = known(namespaces, steps)
    assert (places.whole, places.blind) == (whole, blind)
    assert {place: bool(places.shut(place)) for place in shut} == shut
