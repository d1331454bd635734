"""The supervisor of `psjob run` with real processes and a stand-in for the runtime (local_standin.py): starts, ends, faults, signals.

`psjob run` in a real terminal: the live part below, lines of the chosen workers above, and bars that the script draws itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hack.terminal import terminal
from psjob_client.local.process import ADDRESS, reserve_ports
from tests.live.local_standin import environment, manifest, run, start
from tests.support import warm
from tests.support.soaking import rotating

NO_WAIT = {"backoffLimit": 0}


def summary(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_a_script_needs_no_manifest(tmp_path: Path) -> None:
    manifest(tmp_path)  # writes the script too
    ended = run(tmp_path, "worker.py", "--workers", "3", "--save", "saved.yaml", "--summary", "s.json", "--", "0.3")
    assert ended.returncode == 0, ended.stderr
    assert f"worker 0 start 1 of {tmp_path.resolve()}" in ended.stdout
    assert "sync, 3 workers and 1 shard" in ended.stderr and "not used on this machine" not in ended.stderr
    again = run(tmp_path, "saved.yaml", "--summary", "t.json")
    assert again.returncode == 0 and "sync, 3 workers and 1 shard" in again.stderr, "the manifest that was saved is the same job"


def test_a_job_runs_to_its_end_and_its_metric_is_the_last_line(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "0.3"), "--summary", "s.json", "--history", "h.jsonl")
    told = summary(tmp_path / "s.json")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "test accuracy 0.978"
    assert f"worker 0 start 1 of {tmp_path.resolve()}" in ended.stdout and "worker 1" not in ended.stdout
    assert "not used on this machine: image" in ended.stderr
    assert (told["result"], told["restarts"], told["attempts"], told["term"]) == ("Complete", {}, [1, 1], 1)
    assert told["pushes"] > 0 and told["weights_sha256"] == "abc" and told["recoveries"] == []
    lines = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert last["staleness"]["count"] == last["gap"]["count"] == 0 and last["idle"] == [0.25, None], (
        "what was wasted stands in the last line"
    )
    steps = [line["step"] for line in lines]
    assert (
        steps[:-1] == sorted(set(steps[:-1]))
        and steps[-1] == max(steps)
        and all(line["metrics"] == {"test_accuracy": 0.9781} for line in lines)
    )
    assert lines[0]["passed"] and all(at <= line["time"] for line in lines for _, at in line["passed"])
    folder = tmp_path / ".psjob" / told["run"]
    assert (tmp_path / ".psjob" / ".gitignore").read_text() == "*\n"
    status = json.loads((folder / "status.json").read_text())
    assert status["phase"] == "Complete" and len(status["internal"]["pinned"].pop("templates")) == 16
    assert status["internal"]["pinned"] == {
        "configFormat": 1,
        "wire": 3,
        "container": "worker",
        "encryption": "none",
        "key": 1,
    }
    assert {path.name for path in (folder / "logs").glob("*.log")} == {
        "tiny-shard-0-a1.log", "tiny-shard-1-a1.log", "tiny-worker-0-r1.log", "tiny-worker-1-r1.log",
    }  # fmt: skip


@pytest.mark.parametrize("shard", [0, rotating(1)])
def test_a_killed_shard_is_started_again_with_the_next_attempt(tmp_path: Path, shard: int) -> None:
    ended = run(tmp_path, manifest(tmp_path, "4"), "--fault", f"kill:shard-{shard}@step=40", "--summary", "s.json")
    told = summary(tmp_path / "s.json")
    assert ended.returncode == 0, ended.stderr
    assert told["attempts"] == [2 if index == shard else 1 for index in range(2)] and told["term"] == 2
    assert sum(told["restarts"].values()) == 1
    (recovery,) = told["recoveries"]
    assert recovery["step"] >= 40 and recovery["secondsToFirstPush"] > 0 and recovery["secondsToPassStep"] > 0
    assert f"fault kill:shard-{shard}@step=40: SIGKILL to tiny-shard-{shard}-a1 at step" in ended.stderr
    assert "first push applied again after" in ended.stderr


def test_a_stopped_shard_counts_as_lost_after_its_timeout(tmp_path: Path) -> None:
    job = manifest(tmp_path, "9", of_shards={"progressDeadlineSeconds": 2})
    ended = run(tmp_path, job, "--fault", "stop:shard-1@step=20", "--summary", "s.json")
    told = summary(tmp_path / "s.json")
    assert ended.returncode == 0, ended.stderr
    assert told["attempts"] == [1, 2] and told["restarts"] == {"Unresponsive": 1}
    assert told["recoveries"][0]["secondsToFirstPush"] > 1.5  # 2 s since its last answer, which may be older than its stop


def test_a_failed_worker_is_started_again_and_the_end_of_its_log_is_shown(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "steps3", "0.2", workers=1), "--summary", "s.json")
    assert ended.returncode == 0, ended.stderr
    assert "tiny-worker-0-r1 ended with exit code 3" in ended.stderr and "worker 0 start 2" in ended.stdout
    assert sum(summary(tmp_path / "s.json")["restarts"].values()) == 1


@pytest.mark.rotating
def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "3", "1"), "--fault", "kill:worker-1@step=20", "--summary", "s.json")
    assert ended.returncode == 0, ended.stderr
    assert sum(summary(tmp_path / "s.json")["restarts"].values()) == 1 and "SIGKILL to tiny-worker-1-r1" in ended.stderr


def test_a_job_that_cannot_go_on_fails_with_the_reason(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "exit1", runPolicy=NO_WAIT), "--summary", "s.json")
    told = summary(tmp_path / "s.json")
    assert ended.returncode == 1 and told["result"] == "Failed" and told["failure"]
    assert "this went wrong" in ended.stdout + ended.stderr
    assert "Failed: " in ended.stderr.splitlines()[-1] and "logs" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_a_refusal_of_the_runtime_fails_at_once(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "exit77"), "--summary", "s.json")
    assert ended.returncode == 1 and summary(tmp_path / "s.json")["restarts"] == {}


def test_a_worker_that_never_joins_fails_the_job_with_a_sentence(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "0.1"), "--summary", "s.json", STANDIN_ABSENT="1")
    told = summary(tmp_path / "s.json")
    assert ended.returncode == 1 and told["result"] == "Failed"
    assert told["failure"].startswith("NeverAttached: worker ") and "psjob.attach" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(("first", "absent"), [("late1", False), rotating("0.1", True)])
def test_a_failed_job_waits_for_no_last_checkpoint_and_says_why_at_once(tmp_path: Path, first: str, absent: bool) -> None:
    env = {"STANDIN_PATIENT": "1", **({"STANDIN_ABSENT": "1"} if absent else {})}
    ended = run(tmp_path, manifest(tmp_path, first, runPolicy=NO_WAIT), "--summary", "s.json", **env)
    told = summary(tmp_path / "s.json")
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1 and not list((tmp_path / ".psjob").glob("*/waited"))
    assert lines[-1].startswith(f"Failed: {told['failure']}")
    assert ("NeverAttached: all processes are ended" if absent else told["failure"]) in lines[:-1]


@pytest.mark.parametrize(("action", "code"), [rotating("Count", 0), ("FailJob", 1)])
def test_the_jobs_rules_say_what_becomes_of_a_script_that_fails(tmp_path: Path, action: str, code: int) -> None:
    rules = [{"action": action, "role": "worker", "onExitCodes": {"operator": "In", "values": [3]}}]
    policy = {"backoffLimit": 2, "podFailurePolicy": {"rules": rules}}
    ended = run(tmp_path, manifest(tmp_path, "exit3", "0.2", runPolicy=policy), "--summary", "s.json")
    assert ended.returncode == code, ended.stdout + ended.stderr
    if action == "FailJob":
        assert "spec.runPolicy.podFailurePolicy.rules[0] says FailJob" in ended.stdout + ended.stderr


@pytest.mark.rotating
def test_leaving_to_come_back_is_not_counted(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "exit75", "0.2", runPolicy=NO_WAIT), "--summary", "s.json")
    assert ended.returncode == 0, ended.stderr
    assert set(summary(tmp_path / "s.json")["restarts"]) == {"Retry"}


def interrupted(folder: Path, *signals: signal.Signals, worker: str = "60", **env: str) -> tuple[int, str]:
    process = start(folder, manifest(folder, worker), "--set", "spec.runPolicy.backoffLimit=3", "--summary", "s.json", **env)
    until(lambda: serving(folder), process)
    for number, sentence in zip(signals, ("Ctrl-C again kills", ""), strict=False):
        process.send_signal(number)
        if len(signals) > 1:
            until(lambda: sentence in (folder / "told.txt").read_text(), process)  # noqa: B023
    _, told = process.communicate(timeout=60)
    return process.returncode, told


def serving(folder: Path) -> bool:
    try:
        (status,) = (folder / ".psjob").glob("*/status.json")
        return json.loads(status.read_text()).get("phase") == "Running" and bool(json.loads(status.read_text()).get("checkpoint"))
    except ValueError:
        return False


def until(true: Any, process: warm.Started) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit, "did not come to pass in 60 s"
        time.sleep(0.05)


def processes_of(folder: Path) -> list[int]:
    """Pids of processes that work in `folder`: `psjob run` and those that it has started."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd") == str(folder.resolve()):
                found.append(int(pid))
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, rotating(signal.SIGTERM)])
def test_ctrl_c_stops_in_order_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    code, told = interrupted(tmp_path, number)
    lines = told.splitlines()
    assert code == 130 and "Traceback" not in told
    assert lines[-1].startswith(f"  psjob run {tmp_path}/job.yaml --set spec.runPolicy.backoffLimit=3 --resume .psjob/tiny-")
    assert summary(tmp_path / "s.json")["result"] == "Suspended"
    assert processes_of(tmp_path) == []
    again = run(tmp_path, manifest(tmp_path, "0.2"), "--resume", lines[-1].split()[-1])
    config = max((tmp_path / ".psjob").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    assert again.returncode == 0 and json.loads(config.read_text())["checkpoint"]["resumeFrom"]["path"].endswith(lines[-1].split("/")[-1])


def test_ctrl_c_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    code, _ = interrupted(tmp_path, signal.SIGINT, STANDIN_PATIENT="1")
    assert code == 130 and list((tmp_path / ".psjob").glob("*/waited"))


def test_a_complete_run_is_not_resumed(tmp_path: Path) -> None:
    job = manifest(tmp_path, "0.1")
    assert run(tmp_path, job).returncode == 0
    (folder,) = (tmp_path / ".psjob").glob("tiny-*")
    again = run(tmp_path, job, "--resume", folder)
    assert again.returncode == 2 and "that run is complete" in again.stderr and "final.safetensors" in again.stderr
    assert list((tmp_path / ".psjob").glob("tiny-*")) == [folder]


def test_a_second_ctrl_c_kills_who_does_not_leave(tmp_path: Path) -> None:
    code, told = interrupted(tmp_path, signal.SIGINT, signal.SIGINT, worker="stubborn")
    assert code == 130 and "Ctrl-C again kills" in told and "Traceback" not in told
    assert processes_of(tmp_path) == []


def test_a_killed_psjob_run_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start(tmp_path, manifest(tmp_path, "60"))
    until(lambda: serving(tmp_path), process)
    assert len(processes_of(tmp_path)) == 5
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while processes_of(tmp_path):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_no_progress_shows_no_progress(tmp_path: Path) -> None:
    ended = run(tmp_path, manifest(tmp_path, "0.2"), "--no-progress")
    assert ended.returncode == 0 and "step" not in "".join(ended.stderr.splitlines()[:-1])


def test_ports_are_kept_for_whoever_reuses_the_address() -> None:
    import socket

    ports = reserve_ports(2)
    assert len({*ports.data, *ports.status}) == 4
    with socket.create_server((ADDRESS, ports.data[0])) as server:
        assert server.getsockname()[1] == ports.data[0]
    with socket.create_server((ADDRESS, ports.data[0])):
        pass
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((ADDRESS, ports.data[0]))
    ports.close()


DRAWS = """
import os, sys, time
run, rank = os.path.dirname(os.environ["PSJOB_CONFIG"]), os.environ["PSJOB_INDEX"]
print(f"worker {rank} begins", flush=True)
for part in range(0, 101, 5):
    sys.stderr.write(f"\\r{part:3}%|{'#' * part}{'-' * (100 - part)}| of {rank}")
    sys.stderr.flush()
    time.sleep(0.05)
while not os.path.exists("looked"):
    time.sleep(0.05)
sys.stderr.write("\\n")
print(f"worker {rank} is done", flush=True)
open(os.path.join(run, f"left-{rank}"), "w").close()
"""


def watched(folder: Path, columns: int, *words: str) -> tuple[list[list[str]], list[str]]:
    """Every screen that was seen while the job ran, and all lines at its end."""
    job, seen = manifest(folder), []
    (folder / "worker.py").write_text(DRAWS)
    command = [sys.executable, "-m", "psjob_client.cli.main", "run", str(job), *words]
    with terminal(columns) as shown:
        env = {**environment(folder), **shown.environment}
        with subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=shown.theirs, stderr=shown.theirs) as process:
            until = time.monotonic() + 60
            while process.poll() is None and time.monotonic() < until:
                seen.append(shown.shown())
                if is_whole(seen[-1], script="none" not in words):
                    (folder / "looked").touch()
                time.sleep(0.05)
            process.kill()
        shown.end()
        assert process.returncode == 0, shown.all()
        return seen, shown.all()


def is_whole(screen: list[str], script: bool) -> bool:
    """Does the live part show all that the tests look for? On a busy machine the shards are asked late."""
    drawn = any(line.startswith("script") and "%|#" in line for line in screen)
    return any("shards      0-1 serving" in line for line in screen) and (drawn or not script)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_live_part_stands_below_and_is_gone_at_the_end(tmp_path: Path, columns: int) -> None:
    seen, lines = watched(tmp_path, columns)
    live = [screen for screen in seen if any(line.startswith("tiny  Running  step ") for line in screen)]
    assert live and any("shards      0-1 serving" in screen for screen in live)
    assert any(line.startswith("script") and "%|###" in line for screen in live for line in screen), "its bar moves"
    assert all(len(line) <= columns for screen in seen for line in screen)
    assert not any(line.startswith(("shards  ", "workers  ", "script  ")) for line in lines)
    own = [line for line in lines if line.startswith(("worker ", "100%"))]
    assert own[0] == "worker 0 begins" and own[-1] == "worker 0 is done" and own[1].startswith("100%|#####"), lines
    assert sum("the lines of worker 0 follow" in line for line in lines) == 1


@pytest.mark.parametrize(("logs", "told"), [("all", {"0", "1"}), ("1", {"1"}), ("none", set())])
def test_the_lines_of_chosen_workers_are_shown(tmp_path: Path, logs: str, told: set[str]) -> None:
    _, lines = watched(tmp_path, 100, "--logs", logs)
    begun = {line for line in lines if line.endswith(" begins")}
    assert begun == {f"{rank}: worker {rank} begins" if len(told) > 1 else f"worker {rank} begins" for rank in told}
    assert not any("follow" in line for line in lines)
