"""The engine: order of events, who waits, outages and delays; golden values of whole schedules."""

from __future__ import annotations

import math
import random
from heapq import heappop, heappush
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.modes import Async, Backup, Bounded, LocalAsync, LocalSGD, Mode, Softsync, Sync, Threshold
from psjob.simulate.engine import Outage, SimulationOutcome, Stall, Trace, TraceRecord, WorkerSpeeds, read_trace, simulate

CONSTANT = WorkerSpeeds(mean=100.0, shape=math.inf)
ROUGH = WorkerSpeeds(spread=0.6, stall=Stall(0.05, 5), slow={2: 1.5}, outages=(Outage(0, 300, 400), Outage(3, 900)), up=3, down=5)
MODES: list[Mode] = [
    Sync(), Backup(1), Bounded(0), Bounded(2), Softsync(2), Softsync(2, by_staleness=False), Async(), Threshold(3), LocalSGD(3),
    LocalSGD(3, 2, 20.0), LocalAsync(3), Sync(1), Bounded(4, 2), Async(3),
]  # fmt: skip


def records(
    mode: Mode, workers: int, speeds: WorkerSpeeds, pushes: int, path: Path, **more: bool
) -> tuple[list[TraceRecord], SimulationOutcome]:
    outcome = simulate(mode, workers, speeds, pushes, trace=Trace(path), **more)
    return list(read_trace(path)), outcome


GOLDEN = {
    "Sync(delay=0)": "8a14b628fb498b6a73b7c3e51b43ec472352a812b5603cfa1e432928ce589962",
    "Backup(backup_workers=1)": "37fbdd34f3fd3c0cc21ac9ca88a603ccf3c4fcd6f1a3343a400cd22d92164b5d",
    "Bounded(staleness=0, delay=0)": "8a14b628fb498b6a73b7c3e51b43ec472352a812b5603cfa1e432928ce589962",
    "Bounded(staleness=2, delay=0)": "240b77768be7de67a934826f5df1bc8b2d47fdcc90b028c9f871cfb3b0d9fbfb",
    "Softsync(splits=2, by_staleness=True)": "278d171df1fc5dedfe06938f18246c855ee1a2f18006473a9bd71c14a2fbb68c",
    "Softsync(splits=2, by_staleness=False)": "bb7095fe7249a31d54ef3ee92d0a081b0c392da0d2682202c38ea3c443b1e209",
    "Async(delay=0)": "01c724f4b9c07c8fc87756285160cf9cedb8bd575888f30820ecc4d8cc59f606",
    "Threshold(staleness=3)": "a402fdb86d6d25868d934d246c0269be77b7fa10e31c7ad0da8da7af57bf0c0d",
    "LocalSGD(inner_steps=3, quorum=0, grace=0.0)": "a331fae9234a07d9ba744b82a6e619744c7ea6c0da2a2ce46299eea933e5e9b2",
    "LocalAsync(inner_steps=3)": "3656ce09a299c0b2ff74bbe2808da26fc25b50d4ecf9b0c37964e796e07aeb65",
    "LocalSGD(inner_steps=3, quorum=2, grace=20.0)": "85ccca5e7248d43aba4fb0ef57e7835cfcf1a94df3269d7238d3d6afa0ce8363",
    "Sync(delay=1)": "c88b5dd99bc797308495f810affea01b5554b8548c83cc01717932b7c5bdb3a6",
    "Bounded(staleness=4, delay=2)": "fe751d7ef2a59b285a947ee826ab39992436af0e1f1fd39f2ec187997203a577",
    "Async(delay=3)": "6361e43095f253da51def8c7ec7858aea1795ff281b97dd9431f718d01f50867",
}


@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_a_schedule_is_its_golden_value(mode: Mode) -> None:
    assert simulate(mode, 5, ROUGH, 400, seed=7).sha256 == GOLDEN[repr(mode)]


def test_seeds_of_the_times_decide() -> None:
    first, again, other = (simulate(Async(), 4, WorkerSpeeds(), 200, seed).sha256 for seed in (1, 1, 2))
    assert first == again != other


def test_one_time_goes_by_worker(tmp_path: Path) -> None:
    rows, _ = records(Async(), 3, CONSTANT, 7, tmp_path / "t.jsonl")
    assert [(row.t, row.worker, row.clock, row.staleness) for row in rows] == [
        (100, 0, 0, 0), (100, 1, 0, 1), (100, 2, 0, 2), (200, 0, 1, 2), (200, 1, 1, 2), (200, 2, 1, 2), (300, 0, 2, 2),
    ]  # fmt: skip


def test_delays_are_paid_once_a_step() -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, up=7, down=5)
    assert simulate(Sync(), 4, speeds, 40).elapsed == 10 * 112


def test_sync_waits_for_who_comes_back_and_not_for_who_left(tmp_path: Path) -> None:
    back = WorkerSpeeds(mean=100.0, shape=math.inf, outages=(Outage(1, 250, 400),))
    rows, outcome = records(Sync(), 3, back, 12, tmp_path / "back.jsonl")
    assert [row.t for row in rows] == [100] * 3 + [200] * 3 + [750] * 3 + [850] * 3, "its step in hand is made again"
    assert outcome.updates == 4
    gone = WorkerSpeeds(mean=100.0, shape=math.inf, outages=(Outage(1, 250),))
    rows, _ = records(Sync(), 3, gone, 10, tmp_path / "gone.jsonl")
    assert [(row.t, row.worker) for row in rows[6:]] == [(300, 0), (300, 2), (400, 0), (400, 2)]


def test_the_last_one_of_a_clock_may_leave_while_all_wait(tmp_path: Path) -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, slow={1: 3.0}, outages=(Outage(1, 250),))
    rows, _ = records(Sync(), 2, speeds, 3, tmp_path / "t.jsonl")
    assert [(row.t, row.worker) for row in rows] == [(250, 0), (350, 0), (450, 0)]


def test_when_all_have_left_it_ends() -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, outages=(Outage(0, 250), Outage(1, 320)))
    outcome = simulate(Async(), 2, speeds, 1000)
    assert (outcome.pushes, outcome.elapsed) == (5, 320)


def test_bounded_goes_on_when_the_slowest_does(tmp_path: Path) -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0})
    rows, _ = records(Bounded(1), 2, speeds, 8, tmp_path / "t.jsonl")
    assert [(row.t, row.worker, row.clock) for row in rows if row.worker == 1] == [
        (100, 1, 0), (200, 1, 1), (500, 1, 2), (900, 1, 3), (1300, 1, 4),
    ]  # fmt: skip


def test_backup_drops_the_late_and_interrupts_when_asked(tmp_path: Path) -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, slow={2: 1.5})
    rows, outcome = records(Backup(1), 3, speeds, 7, tmp_path / "a.jsonl")
    assert [(row.t, row.worker, row.weight) for row in rows] == [
        (100, 0, 0.5), (100, 1, 0.5), (150, 2, 0), (200, 0, 0.5), (200, 1, 0.5), (300, 0, 0.5), (300, 1, 0.5),
    ]  # fmt: skip
    assert (outcome.kept, outcome.dropped) == (6, 1)
    rows, outcome = records(Backup(1), 3, speeds, 6, tmp_path / "b.jsonl", interrupt=True)
    assert outcome.dropped == 0 and {row.worker for row in rows} == {0, 1}


def test_local_waits_for_its_grace(tmp_path: Path) -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, slow={2: 1.1, 3: 2.0})
    rows, outcome = records(LocalSGD(2, quorum=2, grace=30.0), 4, speeds, 8, tmp_path / "t.jsonl")
    assert [(row.t, row.worker, round(row.weight, 3)) for row in rows[:4]] == [
        (230, 0, 0.333),
        (230, 1, 0.333),
        (230, 2, 0.333),
        (400, 3, 0),
    ]
    assert outcome.updates == 2


@pytest.mark.parametrize(
    ("mode", "speeds", "pushes", "waited"),
    [
        (Sync(), WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0}), 12, (0, 900, 900, 900)),
        (Async(), WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0}), 12, (0, 0, 0, 0)),
        (Bounded(1), WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0}), 8, (0, 800)),
        (Sync(), WorkerSpeeds(mean=100.0, shape=math.inf, outages=(Outage(1, 250, 400),)), 12, (450, 0, 450)),
        # Away while it would have waited: the others' time counts, its own does not, nor what comes after it has left.
        (Sync(), WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0}, outages=(Outage(1, 150, 100),)), 6, (0, 500, 600)),
        (Sync(), WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0}, outages=(Outage(1, 150),)), 5, (0, 50, 600)),
    ],
)
def test_who_waits_and_how_long(mode: Mode, speeds: WorkerSpeeds, pushes: int, waited: tuple[float, ...]) -> None:
    assert simulate(mode, len(waited), speeds, pushes).waited == waited


@settings(max_examples=25)
@given(
    st.sampled_from(MODES), st.integers(1, 6), st.integers(0, 1000), st.sampled_from([0.0, 0.6]), st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 2000), st.sampled_from([50.0, 500.0, math.inf])), max_size=3),
)  # fmt: skip
def test_every_push_is_decided_on_once_and_in_order(
    mode: Mode, workers: int, seed: int, spread: float, interrupt: bool, lost: list[tuple[int, float, float]]
) -> None:
    outages = tuple(Outage(worker, at, away) for worker, at, away in lost if worker < workers)
    trace = _Kept()
    outcome = simulate(mode, workers, WorkerSpeeds(spread=spread, outages=outages), 120, seed, trace=trace, interrupt=interrupt)
    clocks = [0] * workers
    for row in trace.all:
        assert row.clock == clocks[row.worker], "a worker's pushes are decided on in its order, none is left out"
        clocks[row.worker] += 1
        assert row.staleness >= 0
    assert outcome.kept + outcome.dropped == len(trace.all) <= outcome.pushes
    times = [row.t for row in trace.all]
    assert times == sorted(times)
    if isinstance(mode, Sync | Backup | LocalSGD):
        assert all(row.staleness == min(mode.delay, row.clock) for row in trace.all if row.weight)
    if len({outage.worker for outage in outages if outage.away == math.inf}) < workers:
        assert outcome.pushes == 120, "nobody hangs"


class _Kept(Trace):
    """A trace that keeps its records."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[TraceRecord] = []

    def flush(self) -> None:
        self.all += [TraceRecord(*row) for row in self.rows]
        super().flush()


@settings(max_examples=15)
@given(st.integers(0, 4), st.integers(0, 3), st.integers(2, 8), st.integers(0, 1000))
def test_bounded_keeps_its_bound_on_the_clock(staleness: int, delay: int, workers: int, seed: int) -> None:
    trace = _Kept()
    mode = Bounded(staleness, min(delay, max(0, staleness - 1)))
    simulate(mode, workers, WorkerSpeeds(spread=0.6, stall=Stall(0.1, 5), up=9.0), 200, seed, trace=trace)
    clocks = [0] * workers
    for row in trace.all:
        if staleness:
            assert row.clock - min(clocks) <= staleness
        clocks[row.worker] = row.clock + 1
        assert max(clocks) - min(clocks) <= staleness + 1


def test_bounded_keeps_its_bound_on_random_schedules(tmp_path: Path) -> None:
    """On the engine: no worker has made more than `staleness` + 1 pushes more than another, and some have come to that."""
    rng, reached = random.Random(5), 0
    for schedule in range(60):
        mode, workers = Bounded(schedule % 4), 2 + schedule % 3
        speeds = WorkerSpeeds(mean=100.0, spread=rng.choice([0.0, 0.5]), slow={rng.randrange(workers): rng.uniform(1.0, 6.0)})
        rows, _ = records(mode, workers, speeds, 60, tmp_path / "t.jsonl")
        made = [0] * workers
        for row in rows:
            made[row.worker] = row.clock + 1
            assert max(made) - min(made) <= mode.staleness + 1
            reached += max(made) - min(made) == mode.staleness + 1
    assert reached > 60


@pytest.mark.parametrize(("up", "down"), [(30, 20), (50, 50), (0, 170), (90, 160)])
def test_in_sync_with_a_delay_a_step_takes_the_longer_of_computing_and_exchange(up: float, down: float) -> None:
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, up=up, down=down)
    assert simulate(Sync(), 4, speeds, 4 * 50).elapsed == 50 * (100 + up + down)
    assert simulate(Sync(1), 4, speeds, 4 * 50).elapsed == down + 100 + 49 * max(100, up + down) + up


def test_who_waits_with_a_delay() -> None:
    """The slow one takes 400: the others have computed two steps when its first push comes, and then wait 300 a step."""
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, slow={0: 4.0})
    assert simulate(Sync(1), 2, speeds, 2 * 5).waited == (0, 200 + 4 * 300)
    assert simulate(Async(2), 2, speeds, 10).waited == (0, 0)
    assert simulate(Bounded(3, 1), 2, speeds, 4 + 8).waited == (0, 4 * 300), "steps 5 to 8 begin at 800, 1200, 1600 and 2000"


def reference(mode: Mode, workers: int, speeds: WorkerSpeeds, pushes: int, seed: int) -> list[tuple[float, int, int, int]]:
    """(time, worker, clock, staleness) of pushes that count as they come, by workers that do one thing after the other.

    It asks the mode when a step begins, with the numbers that the mode's own words name.
    """
    draws, events = speeds.draws(workers, seed), list[tuple[float, int, str, int]]()
    computed, sent, version, rows = [0] * workers, [0] * workers, 0, list[tuple[float, int, int, int]]()
    answers: list[list[int]] = [[] for _ in range(workers)]  # versions of those that have come; the first stands before any push
    held: list[list[int]] = [[] for _ in range(workers)]  # at the server: pushes that are not answered
    bases: list[list[int]] = [[] for _ in range(workers)]
    arrived, busy = [0] * workers, [False] * workers
    for who in range(workers):
        heappush(events, (speeds.down, who, "answered", 0))
    while len(rows) < pushes:
        now, who, what, number = heappop(events)
        if what == "answered":
            answers[who].append(number)
        elif what == "computed":
            computed[who], busy[who] = computed[who] + 1, False
        else:
            rows.append((now, who, number, version - bases[who][number]))
            version, arrived[who] = version + 1, number + 1
            held[who].append(number)
        for one in range(workers):
            if held[one] and mode.may_go(held[one][0] + 1 + mode.delay, min(arrived), mode.delay):
                held[one].pop()
                heappush(events, (now + speeds.down, one, "answered", version))
            if not busy[one] and answers[one] and computed[one] - (len(answers[one]) - 1) <= mode.delay:
                busy[one] = True
                bases[one].append(answers[one][-1])
                heappush(events, (now + next(draws[one]), one, "computed", 0))
            if sent[one] < computed[one] and sent[one] < len(answers[one]):
                heappush(events, (now + speeds.up, one, "pushed", sent[one]))
                sent[one] += 1
    return rows


@settings(max_examples=25)
@given(
    st.sampled_from([Async(), Async(1), Async(2), Async(8), Bounded(1), Bounded(2, 1), Bounded(4, 3), Bounded(9, 2)]),
    st.integers(1, 5), st.integers(0, 1000), st.sampled_from([0.0, 31.0, 170.0]), st.sampled_from([0.0, 17.0, 260.0]),
)  # fmt: skip
def test_a_delay_is_what_workers_do_one_thing_after_the_other(mode: Mode, workers: int, seed: int, up: float, down: float) -> None:
    trace = _Kept()
    speeds = WorkerSpeeds(mean=100.0, spread=0.4, stall=Stall(0.1, 4), up=up, down=down)
    simulate(mode, workers, speeds, 150, seed, trace=trace)
    wanted = reference(mode, workers, speeds, 150, seed)
    assert [(row.worker, row.clock, row.staleness) for row in trace.all] == [row[1:] for row in wanted]
    assert [row.t for row in trace.all] == pytest.approx([row[0] for row in wanted])


def test_who_comes_back_makes_its_steps_again_on_the_weights_of_the_mode(tmp_path: Path) -> None:
    """Lost while its push 1 is under way and step 2 is computed. In sync step 1 is of version 0 as before, else of that of its return."""
    speeds = WorkerSpeeds(mean=100.0, shape=math.inf, up=50.0, outages=(Outage(1, 225, 400),))
    rows, _ = records(Sync(1), 2, speeds, 8, tmp_path / "s.jsonl")
    assert [(row.t, row.staleness) for row in rows] == [(150, 0)] * 2 + [(775, 1)] * 2 + [(875, 1)] * 2 + [(975, 1)] * 2
    rows, _ = records(Async(1), 2, speeds, 12, tmp_path / "a.jsonl")
    assert [(row.t, row.clock, row.staleness) for row in rows if row.worker == 1] == [(150, 0, 1), (775, 1, 2), (875, 2, 4)]


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        (lambda: WorkerSpeeds(mean=0), "mean is 0, must be a number above 0"),
        (lambda: WorkerSpeeds(spread=math.nan), "spread is nan"),
        (lambda: WorkerSpeeds(up=-1), "up is -1, must be 0 or more"),
        (lambda: WorkerSpeeds(slow={1: 0}), "slow factor of worker 1 is 0, must be above 0"),
        (lambda: WorkerSpeeds(stall=Stall(2)), "chance of 0 to 1"),
        (lambda: WorkerSpeeds(outages=(Outage(0, -1),)), "must begin at 0 or later"),
        (lambda: WorkerSpeeds(measured=((),)), "measured times must be above 0"),
        (lambda: WorkerSpeeds(slow={9: 2}), "worker 9 is not one of the 4 workers"),
    ],
)
def test_speeds_that_cannot_be_are_named(speeds, sentence: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=sentence):
        simulate(Sync(), 4, speeds(), 10)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    rows, outcome = records(Softsync(2), 4, WorkerSpeeds(), 300, path)
    again = Trace()
    again.rows += rows
    assert again.close() == outcome.sha256
    path.with_stem("old").write_text(path.read_text().replace("staleness", "lag"))
    with pytest.raises(ValueError, match=r"old\.\w+: record 1 is not one of a trace: it has no column staleness; give a file"):
        list(read_trace(path.with_stem("old")))
    path.write_text(path.read_text().replace("\n", "\nrubbish\n", 1) + "")
    with pytest.raises(ValueError, match=r"trace\.\w+: record 1 is not one of a trace|record 2 is not one of a trace"):
        list(read_trace(path))
