"""The coordinator and its run's folder: full volumes, damaged files, what void snapshots leave, and a disk that takes its time."""

from __future__ import annotations

import errno
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psjob.checkpoint import claim, disk, files, manifest
from psjob.checkpoint.disk import CheckpointProblem
from psjob.checkpoint.manifest import sweep_orphans
from psjob.process.errors import Fenced
from psjob.protocol.coordinator import events
from psjob.protocol.coordinator.events import StreamFacts
from psjob.wire.frame import Header, Kind
from tests.live.live_shards import eventually, serving
from tests.tensors.checkpoint_parts import RUN, names, save
from tests.tensors.desk import NEVER, Clerk, Desk


class Volume:
    """A volume that has no room for files whose names hold one of `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: tuple[str, ...] = ()
        create, real = disk._create, claim._write

        def refuse(temp: str, *more: Any) -> int:
            if any(part in temp for part in self.full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return create(temp, *more)

        def write(fd: int, body: bytes) -> int:
            if "CLAIM" in self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, body)

        monkeypatch.setattr(disk, "_create", refuse)
        monkeypatch.setattr(claim, "_write", write)


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    return Volume(monkeypatch)


def checkpoint(desk: Desk, clerks: list[Clerk], steps: int = 4) -> None:
    """A snapshot is ordered and everybody continues past its step."""
    desk.begin_snapshot()
    first = next(iter(desk.versions()))
    for clock in range(first, first + steps):
        for clerk in clerks:
            desk.push(clerk, clock)
            desk.edge(clerk, clock + 1)
    desk.settle()


# -- a full volume ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["shard001", "records", "manifest"])
def test_a_full_volume_ends_no_job_and_leaves_nothing(tmp_path: Path, volume: Volume, what: str) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    before = names(desk.folder)
    volume.full = (what,)
    checkpoint(desk, clerks)
    said = str(desk.c.progress.checkpoint_problem)
    assert "checkpoints pause, the volume of " in said and str(desk.folder) in said and "are free" in said and "ENOSPC" in said
    assert names(desk.folder) == before, "what was written of it is gone, on every shard"
    volume.full = ()
    desk.tick(later=desk.c.snapshots.FAILED_SECONDS + 1)
    checkpoint_again = desk.c.snapshots.current
    assert checkpoint_again is not None and checkpoint_again.step is not None
    for clock in range(4, checkpoint_again.step + 1):
        for clerk in clerks:
            desk.push(clerk, clock)
            desk.edge(clerk, clock + 1)
    desk.settle()
    assert desk.manifests()[-1].step == checkpoint_again.step and desk.c.progress.checkpoint_problem is None
    assert [server._exit for server in desk.servers] == [[], []]


def test_a_full_volume_at_the_claim_is_waited_for(tmp_path: Path, volume: Volume) -> None:
    volume.full = ("CLAIM", claim.RESERVE)
    desk = Desk(tmp_path)
    told = desk.coordination.status()
    assert told is not None and "ENOSPC" in str(told["waiting"]) and "once there is room" in str(told["checkpointProblem"])
    assert not desk.servers[0]._exit and claim.highest(desk.folder) is None, "half a claim would be nobody's"
    volume.full = ()
    desk.tick(later=3.0)
    desk.settle()
    assert claim.highest(desk.folder) == (1, "shard-0-1")
    desk.begun()


def test_room_for_a_claim_is_reserved(tmp_path: Path, volume: Volume) -> None:
    claim.claim_term(tmp_path, 1, "pod-a")
    assert (tmp_path / claim.RESERVE).stat().st_size == claim.RESERVE_BYTES
    tries = []
    real = claim._write

    def write(fd: int, body: bytes) -> int:
        tries.append((tmp_path / claim.RESERVE).exists())
        if tries[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, body)

    claim._write = write
    try:
        assert claim.claim_term(tmp_path, 2, "pod-b") is True
    finally:
        claim._write = real
    assert tries == [True, False] and claim.highest(tmp_path) == (2, "pod-b")
    assert (tmp_path / claim.RESERVE).exists(), "and for the next one"


def test_a_claim_for_which_there_is_no_room_at_all_is_a_sentence(tmp_path: Path, volume: Volume) -> None:
    volume.full = ("CLAIM", claim.RESERVE)
    with pytest.raises(CheckpointProblem, match="ENOSPC") as raised:
        claim.claim_term(tmp_path, 1, "pod-a")
    assert raised.value.full and names(tmp_path) == []


# -- damage ----------------------------------------------------------------------------------------


def two_checkpoints(folder: Path) -> tuple[manifest.Manifest, manifest.Manifest]:
    desk = Desk(folder)
    clerks = desk.begun()
    checkpoint(desk, clerks)
    before, after = desk.manifests()
    return before, after


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("which", ["shard001", "admission", "records"])
def test_damage_that_only_a_reader_finds_means_the_checkpoint_before(tmp_path: Path, which: str) -> None:
    before, after = two_checkpoints(tmp_path)
    folder = tmp_path / "run-1"
    fact = next(fact for fact in after.listed() if which in fact.name)
    flip(folder / fact.name)
    desk = Desk(tmp_path, number=2)
    desk.tick(later=1.1)
    desk.settle()
    assert desk.c.open and desk.versions() == {before.step}
    assert f"{after.name} is passed over" in str(desk.c.progress.checkpoint_problem)
    assert fact.name in str(desk.c.progress.checkpoint_problem)


def test_the_coordinator_reads_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard checks what it loads; a whole checkpoint of gigabytes is not read to look for the newest."""
    two_checkpoints(tmp_path)
    desk = Desk(tmp_path, number=2)
    desk.settle()
    opened: list[str] = []
    real = files.opened_checkpoint_file

    def seen(path: Path, *more: Any) -> Any:
        opened.append(path.name)
        return real(path, *more)

    monkeypatch.setattr(files, "opened_checkpoint_file", seen)
    found = desk.coordination.disk.carry_out(events.ReadNewest(99, 2, frozenset(), True))
    assert isinstance(found, events.NewestRead) and found.found is not None and set(found.records or {}) == {0, 1}
    assert opened and all("-records" in name for name in opened)


# -- orphans ---------------------------------------------------------------------------------------


def test_what_earlier_lives_left_is_found_when_a_coordinator_begins(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    folder = tmp_path / "run-1"
    kept = names(folder)
    for name in ("v000001-c065599-shard001-a1.safetensors", "v000001-c065599-records.safetensors", "v000001-c065600-x.safetensors.tmp"):
        (folder / name).write_bytes(b"x")
    (folder / "mine.txt").write_bytes(b"x")
    desk = Desk(tmp_path, number=2)
    desk.settle()
    assert names(folder) == sorted([*kept, "CLAIM-000002", "mine.txt"]) and desk.c.open


def test_a_void_snapshot_leaves_nothing_on_any_shard(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    kept = names(desk.folder)
    desk.begin_snapshot()
    snapshot = desk.c.snapshots.current
    assert snapshot is not None
    for clock in range(4):
        for clerk in clerks:
            desk.push(clerk, clock)
            if clerk.rank == 0:
                desk.edge(clerk, clock + 1)
    desk.settle()
    assert len(names(desk.folder)) > len(kept) and len(snapshot.written) == 2
    (desk.folder / f"v000001-c{snapshot.number:06d}-shard009-a1.safetensors").write_bytes(b"of a shard that is gone")
    desk.drop_snapshot("a test")
    desk.settle()
    assert names(desk.folder) == kept


def test_a_sweep_takes_only_what_nobody_can_need(tmp_path: Path) -> None:
    made = save(tmp_path, 10)
    manifest.commit(tmp_path, made)
    save(tmp_path, 20)
    save(tmp_path, 40)
    gone = sweep_orphans(tmp_path, 1, 40)
    assert gone and all("-c000020-" in name for name in gone), "a snapshot that may be in flight stays, and what a manifest lists"
    assert manifest.newest_manifest(tmp_path, RUN) == (made, [])
    (tmp_path / "manifest-v000001-s000000000041.json").write_bytes(
        manifest.encode(replace(made, step=41)).replace(b'"format": 2', b'"format": 1')
    )
    assert sweep_orphans(tmp_path, 1, 99) == [], "what that one lists is not known here"
    claim.claim_term(tmp_path, 2, "newer")
    with pytest.raises(Fenced):
        sweep_orphans(tmp_path, 1, 99)


# -- a slow disk -----------------------------------------------------------------------------------


def test_the_coordinator_answers_while_the_disk_does_not(tmp_path: Path, last_words: Path) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        coordination = shards.servers[0].coordinator
        assert coordination is not None and eventually(lambda: coordination.machine.state.phase == "fresh")
        stuck, real = threading.Event(), coordination.disk.carry_out

        def slow(job: Any) -> Any:
            stuck.wait(30.0)
            return real(job)

        coordination.disk.carry_out = slow  # type: ignore[method-assign]
        coordination.jobs.put(events.MeasureRoom())
        heard: list[float] = []
        for _ in range(20):
            asked, step = time.monotonic(), len(heard) + 1
            coordination.step_passed(step)
            assert eventually(lambda: coordination.machine.state.progress.step == step)  # noqa: B023
            heard.append(time.monotonic() - asked)
        assert max(heard) < 1.0 and time.monotonic() - coordination.beat < 1.0
        stuck.set()


def test_a_bug_in_the_coordinator_ends_its_process_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from psjob.process import supervise

    told: list[str] = []
    monkeypatch.setattr(supervise, "_end", told.append)
    with serving(tmp_path, workers=1, shards=1, checkpoint=NEVER) as shards:
        coordination = shards.servers[0].coordinator
        assert coordination is not None and eventually(lambda: coordination.machine.state.phase == "fresh")
        coordination.machine.state.members.all.clear()
        coordination.post(events.WorkerHello(StreamFacts(7, 0, (1, 0), True, "sync")))
        assert eventually(lambda: bool(told))
    assert "thread coordinator failed: KeyError" in told[0]


def test_workers_that_come_while_the_newest_is_looked_for_are_let_in_afterwards(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    desk = Desk(tmp_path, number=2)
    desk.settle()
    held, work = [], desk.work
    desk.work = lambda: None  # type: ignore[method-assign]
    desk.relink(1, serving=False)
    held = [desk.hello(rank, rewinds=1) for rank in range(2)]
    assert desk.c.restoring and not any(Kind.WELCOME in clerk.heard for clerk in held)
    desk.work = work  # type: ignore[method-assign]
    desk.settle()
    assert all(clerk.heard[-2:] == [Kind.WELCOME, Kind.RECORD] for clerk in held)


def test_an_empty_record_of_a_worker_keeps_nobodys_checkpoint_off(tmp_path: Path) -> None:
    """No script makes one, but a worker may say anything: only its own restart is harmed."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    desk.begin_snapshot()
    first = next(iter(desk.versions()))
    for clock in range(first, first + 4):
        for clerk in clerks:
            desk.push(clerk, clock)
            if clerk.rank:
                desk.say(clerk, Header(Kind.RECORD, clock=clock + 1), {}, b"")
            else:
                desk.edge(clerk, clock + 1)
    desk.settle()
    made = desk.manifests()[-1]
    assert made.step > 0 and desk.c.progress.checkpoint_problem is None
    records = manifest.read_records(desk.folder, made)
    assert records[1] == b"" and records[0]
