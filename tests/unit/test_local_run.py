"""When a script on one machine is not started again.

- A local job that makes no step is never silent, and ends where there is no room; a restart does not spoil the time that is left.
- The folder of all runs on this machine: nobody else may write to it.
- Logs on their way to the user: whole lines, lines that are drawn again, and whose are shown.
- The keys of a run on a laptop: files of only their owner, and a start that a full disk does not keep from happening.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from psjob.process.config import read_keys
from psjob.protocol.coordinator.report import JobProgress
from psjob_client.local import run_folder
from psjob_client.local.monitor import FULL_PATIENCE, Failures, Standstill
from psjob_client.local.process import ChildProcess
from psjob_client.local.run_folder import RUNS_FOLDER, Follow, new_folder, parse_logs
from psjob_client.problems import BadInput
from psjob_operator import keys


@dataclass
class Raw:
    pid: int
    returncode: int


def ended(name: str, code: int, role: str = "worker", deleting: float | None = None) -> ChildProcess:
    index = int(name.split("-")[1])
    return ChildProcess(name, role, index, 1, Raw(7, code), 0.0, ended=1.0, deleting=deleting)  # type: ignore[arg-type]


def verdict(*seen: tuple[str, int, int, str], heard: tuple[int, float | None] = (0, 2.0)) -> str | None:
    """Of (name, code, steps made, end of the log), in their order; all end at 1.0. `heard`: steps, and when. Log "ours": the runtime's."""
    failures = Failures()
    for name, code, made, tail in seen:
        failures.note(ended(name, code), made, tail, ours=tail == "ours")
    return failures.verdict(*heard, now=2.5)


def test_an_error_before_the_first_step_ends_the_job_at_once() -> None:
    assert verdict(("worker-1", 1, 0, "Traceback …\nZeroDivisionError: division by zero")) == (
        "ScriptFailed: worker-1 ended with exit code 1: ZeroDivisionError: division by zero (before the job's first step); "
        "fix the script and run it again"
    )


@pytest.mark.parametrize(("heard", "over"), [((0, None), True), ((0, 2.0), True), ((0, 0.5), False), ((20, 2.0), False)])
def test_steps_that_were_not_heard_of_yet_are_asked_for(heard: tuple[int, float | None], over: bool) -> None:
    """A short job may train between two looks, and fail after it."""
    assert (verdict(("worker-1", 5, 0, "gone"), heard=heard) is not None) == over


@pytest.mark.parametrize(
    ("heard", "now", "holds"),
    [
        ((0, None), 1.5, True), ((0, 0.5), 1.5, True), ((0, 0.5), 3.1, False), ((0, 2.0), 2.5, True), ((20, 0.5), 1.5, False),
        ((20, 2.0), 2.5, False),
    ],
)  # fmt: skip
def test_nothing_is_started_again_while_it_is_not_heard_whether_there_was_a_step(
    heard: tuple[int, float | None], now: float, holds: bool
) -> None:
    failures = Failures()
    assert not failures.holds(*heard, now)
    failures.note(ended("worker-0", 1), 0, "gone")
    assert failures.holds(*heard, now) == holds
    failures.note(ended("worker-0", 1), 0, "gone")
    assert failures.holds(0, 0.5, 3.1), "a verdict"


def test_a_later_error_is_tried_once_more_and_the_first_one_is_shown() -> None:
    first = ("worker-0", 1, 12, "ValueError: labels")
    assert verdict(first) is None
    told = verdict(first, ("worker-0", 1, 12, "NameError: name 'loss' is not defined"))
    assert told is not None and told.startswith("ScriptFailed: worker-0 ended with exit code 1: ValueError: labels (at step 12)")
    assert "NameError" in told and told.endswith("the first error is the one to look at")
    same = verdict(first, first)
    assert same is not None and "started again" not in same


def test_an_end_with_0_in_the_middle_of_training_is_tried_once_more() -> None:
    failures = Failures()
    for name in ("worker-0", "worker-0", "worker-1"):
        failures.note_unfinished(ended(name, 0), 12)
        assert not failures.holds(12, 2.0, 2.5), "each process once"
    again = replace(ended("worker-1", 0), name="worker-1-again")
    failures.note_unfinished(again, 12)
    told = failures.verdict(12, 2.0, 2.5)
    assert told is not None and "worker-0 ended with exit code 0: it left in the middle of training" in told and "os._exit" in told


@pytest.mark.parametrize(
    "seen",
    [
        [("worker-0", 1, 12, "a"), ("worker-0", 1, 13, "a")],  # progress between them
        [("worker-0", 1, 12, "a"), ("worker-1", 1, 12, "a")],  # each once
        [("worker-0", 137, 0, "")],  # killed
        [("worker-0", 75, 0, "ours")],  # start me again
        [("worker-0", 79, 3, "ours"), ("worker-0", 79, 3, "ours")],  # it hung
        [("worker-0", 0, 0, "")],
    ],
)
def test_what_may_be_another_time_better_is_tried_again(seen: list[tuple[str, int, int, str]]) -> None:
    assert verdict(*seen) is None


def test_a_scripts_own_exit_code_is_its_error_whatever_the_number() -> None:
    assert (verdict(("worker-0", 77, 0, "usage: train.py")) or "").startswith("ScriptFailed: worker-0 ended with exit code 77: usage")


def test_what_was_asked_to_end_is_no_failure() -> None:
    failures = Failures()
    failures.note(ended("worker-0", 1, deleting=1.0), 0, "KeyboardInterrupt")
    failures.note(ended("shard-0", 1, role="shard"), 0, "MemoryError")
    assert failures.verdict(0, None, 2.5) is None


FULL = {"checkpointProblem": "checkpoints pause, the volume of /x is full: 10 are free; the next try is in 8 s"}


def test_a_full_volume_is_told_once_and_its_end_too() -> None:
    standing = Standstill()
    assert standing.see(1, {}, 0) == []
    (line,) = standing.see(2, FULL, 1)
    assert line.startswith("warning: checkpoints pause")
    assert standing.see(3, {"checkpointProblem": FULL["checkpointProblem"].replace("8 s", "16 s")}, 2) == []
    assert standing.see(4, {}, 3) == ["checkpoints are written again"]
    assert standing.see(5, {}, 4) == []


def test_a_standstill_is_told_again_and_again_with_its_reason() -> None:
    standing = Standstill()
    hung = {"hung": [{"rank": 1, "start": 1, "seconds": 28.0}]}
    said = [(now, line) for now in range(0, 1000, 5) for line in standing.see(7, hung, float(now))]
    assert [now for now, _ in said] == [30, 60, 120, 240, 480, 780]
    assert said[0][1] == (
        "no step for 30 s, at step 7: they wait for worker 1 for 28.0 s; "
        "spec.workers.progressDeadlineSeconds has such a worker started again; Ctrl-C stops the job"
    )
    assert standing.see(8, hung, 1000) == [] and standing.see(8, {"waiting": "shards [1] are restoring, for 31 s"}, 1031)[0].startswith(
        "no step for 31 s, at step 8: shards [1] are restoring"
    )


def test_a_long_step_is_no_standstill_for_a_while() -> None:
    standing = Standstill("round")
    said = [(now, line) for now in range(0, 700, 5) for line in standing.see(3, {}, float(now))]
    assert [now for now, _ in said] == [300, 480] and said[0][1].startswith("no round for 300 s, at round 3: nobody waits")


def test_a_volume_without_room_ends_a_job_that_stands_and_no_other() -> None:
    standing = Standstill()
    standing.see(0, FULL, 0)
    assert standing.verdict(FULL, FULL_PATIENCE - 1) is None
    assert standing.verdict({}, FULL_PATIENCE + 1) is None
    told = standing.verdict(FULL, FULL_PATIENCE + 1)
    assert told is not None and told.startswith("DiskFull: no step for 301 s at step 0: checkpoints pause")
    standing.see(1, FULL, FULL_PATIENCE + 2)
    assert standing.verdict(FULL, FULL_PATIENCE + 3) is None


def test_the_time_left_after_a_restart_is_that_of_the_steps_alone() -> None:
    progress = JobProgress()
    progress.report(0, {"total": 1000})
    now = 0.0
    for step in range(1, 121):
        now += 0.02
        progress.passed(step, now)
    before = progress.status(now)["eta"]
    now += 16
    progress.rewound(100)
    for step in range(101, 111):
        now += 0.02
        progress.passed(step, now)
    after = progress.status(now)
    assert before is not None and abs(before - 17.6) < 0.1
    assert abs(after["eta"] - 17.8) < 0.1, after["eta"]
    for step in range(111, 116):
        now += 16 if step == 113 else 0.02  # a lost worker returns: nobody goes back, all wait
        progress.passed(step, now)
    assert abs(progress.status(now)["eta"] - 17.7) < 0.1


def test_a_rate_is_that_of_the_last_minute_and_not_of_a_moment() -> None:
    progress, now = JobProgress(), 0.0
    for step in range(1, 2001):
        now += 0.01 if step % 200 < 150 else 0.03  # as where an evaluation beside it takes the processor
        progress.passed(step, now)
        if step > 400:
            assert abs((progress.rate(now) or 0) - 1 / 0.015) < 12, step


def test_slow_steps_are_steps() -> None:
    progress = JobProgress()
    for step, now in ((1, 0.0), (2, 9.0), (3, 20.0), (4, 28.0)):
        progress.passed(step, now)
    assert progress.rate(28.0) is not None and abs((progress.rate(28.0) or 0) - 3 / 28) < 1e-9
    assert JobProgress().rate(0) is None


def test_a_new_folder_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_folder("digits", tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / RUNS_FOLDER).stat().st_mode) == 0o755
    new_folder("digits", tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir()
    runs.chmod(mode)
    with pytest.raises(BadInput) as caught:
        new_folder("digits", tmp_path)
    assert f"{runs}: others may write to it (mode {mode:o})" in str(caught.value) and f"chmod go-w {runs}" in str(caught.value)
    assert list(runs.iterdir()) == [], "nothing was written there"
    runs.chmod(0o755)
    new_folder("digits", tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir(mode=0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(BadInput, match=f"belongs to user {me}, and this is user {me + 1}: .*; remove it, or start psjob run in a folder"):
        new_folder("digits", tmp_path)
    assert list(runs.iterdir()) == []


def test_a_group_of_several_users_may_not_write(tmp_path: Path) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir()
    others = next((group for group in os.getgroups() if group != os.geteuid()), os.geteuid() + 1)
    try:
        os.chown(runs, -1, others)
    except PermissionError:
        pytest.skip("this user is in no other group")
    runs.chmod(0o775)
    with pytest.raises(BadInput, match="mode 775"):
        new_folder("digits", tmp_path)


def test_a_line_that_is_drawn_again_is_told_once_as_it_was_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follow = Follow(log)
    assert list(follow.lines()) == [] and follow.drawn == ""
    with log.open("ab", buffering=0) as file:
        file.write(b"begin\n\r  0%|   \r 10%|#  ")
        assert list(follow.lines()) == ["begin"] and follow.drawn == " 10%|#  "
        file.write(b"\r100%|###\r\n")
        assert list(follow.lines()) == ["100%|###"] and follow.drawn == ""
        file.write(b"half")
        assert list(follow.lines()) == [] and follow.drawn == "", "a line that is not whole yet is not one that is drawn"
    assert list(follow.lines(whole=True)) == ["half"]


@pytest.mark.parametrize(("text", "found"), [("0", {0}), ("0,2", {0, 2}), ("all", {0, 1, 2}), ("none", set()), ("2, 2", {2})])
def test_workers_are_chosen_by_number(text: str, found: set[int]) -> None:
    assert parse_logs(text, 3) == found


@pytest.mark.parametrize("text", ["", "3", "0,9", "-1", "every", "0,", "٣"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--logs"):
        parse_logs(text, 3)


def test_each_seat_has_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    made = run_folder.make_keys(tmp_path / "keys", shards=2, workers=1)
    assert {path.name for path in made.folder.iterdir()} == {"run", "shard-0", "shard-1", "worker-0"}
    assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o600} and made.folder.stat().st_mode & 0o777 == 0o700
    assert keys.parse_keys((made.folder / "run").read_text()) == dict(made.named)


def test_workers_that_listen_have_a_certificate_where_streams_are_encrypted(tmp_path: Path) -> None:
    plain = run_folder.make_keys(tmp_path / "plain", shards=1, workers=2, listening=2)
    assert not list(plain.folder.glob("*.pem"))
    made = run_folder.make_keys(tmp_path / "keys", shards=1, workers=2, encrypted=True, listening=2)
    assert {path.name for path in made.folder.glob("*.pem")} == {"ca.pem", "shard-0.pem", "worker-0.pem", "worker-1.pem"}
    assert made.hand("worker", 1, 2).with_name("worker-1.pem").exists()


@pytest.mark.parametrize(("role", "index"), [("shard", 0), ("shard", 1), ("worker", 0)])
def test_a_start_gets_its_own_keys_in_the_room_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, index: int
) -> None:
    made = run_folder.make_keys(tmp_path / "keys", shards=2, workers=1)
    first = read_keys(str(made.hand(role, index, 9)), role, index)

    def full(handle: int, offset: int, length: int) -> None:
        if os.fstat(handle).st_size < offset + length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    second = read_keys(str(made.hand(role, index, 10)), role, index)
    assert first.own != second.own and len(second.own) == keys.SIZE
    (made.folder / f"{role}-{index}").unlink()
    with pytest.raises(OSError, match="No space left"):
        made.hand(role, index, 11)
