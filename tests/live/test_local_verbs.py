"""The verbs over runs of this machine: real processes of `psjob run`, with the stand-in for the runtime where training does not matter.

- A folder of runs that came from elsewhere: it hangs nobody, and nothing in it has another process signalled.
"""

from __future__ import annotations

import asyncio
import csv
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from psjob import AsyncClient, Client
from psjob_client.jobs import runs
from psjob_client.jobs.runs import LocalJobs
from psjob_client.local import run_folder
from psjob_client.local.run_folder import manifests, read_file
from psjob_client.problems import Conflict, DeadlinePassed, JobFailed, JobProblem, NoSuchJob
from tests.live import cli_inside
from tests.live.local_standin import Run, environment, manifest, run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which `psjob run` finds the stand-in and is a fork; whatever still runs there at the end is ended."""
    monkeypatch.setattr(runs.subprocess, "Popen", Run)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    yield tmp_path
    with Client.local(tmp_path) as client:
        for job in client.list():
            client.delete(job.id)


def psjob(home: Path, *words: str, stdin: str = "", fails: bool = False) -> subprocess.CompletedProcess[str]:
    """A verb in `home`."""
    done = cli_inside.psjob(home, *words, stdin=stdin)
    assert (done.returncode != 0) == fails and "Traceback" not in done.stderr, done.stdout + done.stderr
    return done


def read(path: Path) -> dict[str, object]:
    made: dict[str, object] = yaml.safe_load(path.read_text())
    return made


def test_a_job_is_started_followed_suspended_resumed_and_removed(home: Path) -> None:
    with Client.local(home) as client:
        job = client.submit(read(manifest(home, "60")))
        view = job.wait(phases=["Running"], timeout=60)
        assert view.fresh and view.name == "tiny" and view.shards_ready == "2/2" and client.get("tiny").id == job.id
        assert yaml.safe_load(job.manifest)["spec"]["shards"]["replicas"] == 2
        lines = client.logs(job.id, "worker-0", follow=True)
        assert str(next(lines)) == f"worker 0 start 1 of {home.resolve()}"
        with pytest.raises(Conflict, match="runs"):
            job.resume()
        job.suspend(timeout=60)
        assert list(lines) == [], "following ends with the run"
        ended = job.get()
        assert ended.phase == "Suspended" and not ended.active and ended.checkpoint is not None
        for verb in (job.suspend, job.checkpoint):
            with pytest.raises(Conflict, match="does not run"):
                verb()
        with pytest.raises(JobFailed, match="is suspended"):
            job.wait(timeout=60)
        again = job.resume()
        assert again.id != job.id and len(client.list()) == 2 and client.get("tiny").id == again.id, "the newest run of the name"
        again.wait(phases=["Running"], timeout=60)
        again.delete()
        assert [one.id for one in client.list()] == [job.id]
        assert {span.lane for span in client.timeline(job.id)} == {"job", "shard 0", "shard 1", "worker 0", "worker 1"}
        assert client.events(job.id)[0].reason


def test_a_checkpoint_is_asked_for_in_the_config(home: Path) -> None:
    with Client.local(home) as client:
        job = client.submit(read(manifest(home, "60")))
        job.wait(phases=["Running"], timeout=60)
        with pytest.raises(DeadlinePassed, match="no new checkpoint"):
            job.checkpoint(timeout=0.5)
        config = home / ".psjob" / job.id / "config.json"
        first = json.loads(config.read_text())["checkpoint"]["request"]
        late = json.dumps({"files": [{"bytes": 5}], "request": first})
        (config.parent / "manifest-v000001-s000000000070.json").write_text(late)  # it was begun before the next one is asked for
        threading.Timer(
            0.5, lambda: (config.parent / "manifest-v000001-s000000000080.json").write_text(late.replace(str(first), str(2**53 - 1)))
        ).start()
        made = job.checkpoint(timeout=30)
        assert (made.step, made.bytes) == (80, 5) and json.loads(config.read_text())["checkpoint"]["request"] > first


def test_the_same_verbs_without_blocking(home: Path) -> None:
    async def both() -> tuple[list[str], int]:
        async with AsyncClient.local(home) as client:
            job = await client.submit(read(manifest(home, "1")))
            phases = [view.phase async for view in job.watch(timeout=60)]
            history = await job.metrics()
            return phases, len(history.series)

    phases, series = asyncio.run(both())
    assert phases[-1] == "Complete" and "Running" in phases and series == 2


def test_an_interrupt_leaves_the_job_or_suspends_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process begins with SIGINT ignored
    with Client.local(home) as client:
        job = client.submit(read(manifest(home, "60")))
        job.wait(phases=["Running"], timeout=60)
        for on_interrupt, phase in (("detach", "Running"), ("suspend", "Suspended")):
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT]).start()
                job.wait(on_interrupt=on_interrupt)  # type: ignore[arg-type]
            assert job.get().phase == phase
        assert f"{job.id} continues" in capsys.readouterr().out


def test_what_cannot_start_is_said_and_leaves_nothing(home: Path) -> None:
    with Client.local(home) as client:
        with pytest.raises(JobProblem, match="there is no gone"):
            client.train(["python", "gone.py"])
        with pytest.raises(JobProblem, match=r"spec\.workers\.replicas"):
            client.train(["python", "x.py"], workers=0)
        with pytest.raises(NoSuchJob, match="there is no job"):
            client.get("tiny")
        assert client.list() == [] and list((home / ".psjob").iterdir()) == [home / ".psjob" / ".gitignore"]
    with pytest.raises(JobProblem, match="is no folder"):
        Client.local(home / "none").list()


def test_a_run_that_was_killed_is_known_as_such_and_goes_on(home: Path) -> None:
    with Client.local(home) as client:
        job = client.submit(read(manifest(home, "60")))
        job.wait(phases=["Running"], timeout=60)
        folder = home / ".psjob" / job.id
        os.kill(json.loads((folder / "run.json").read_text())["pid"], signal.SIGKILL)
        until = time.monotonic() + 30
        while run_folder.alive(folder) and time.monotonic() < until:
            time.sleep(0.05)
        view = job.get()
        assert (view.phase, view.reason) == ("Failed", "Killed") and f"psjob resume {job.id}" in view.message
        with pytest.raises(JobFailed, match="Killed: psjob run was ended from outside"):
            job.wait(timeout=60)


def test_each_verb_prints_for_people_and_for_programs(home: Path) -> None:
    assert run(home, manifest(home, "1")).returncode == 0
    (name,) = psjob(home, "list", "-o", "name").stdout.split()
    assert name.startswith("tiny-") and psjob(home, "get", "-o", "name").stdout.split() == [name]
    head, row = psjob(home, "list").stdout.splitlines()
    assert head.split()[:3] == ["NAME", "PHASE", "MODE"] and row.split()[:3] == [name, "Complete", "sync"]
    (listed,) = json.loads(psjob(home, "list", "--local", "-o", "json").stdout)
    assert listed["id"] == name and listed["phase"] == "Complete"
    shown = psjob(home, "get", "tiny").stdout
    assert "phase:       Complete" in shown and "worker 1" in shown and "test_accuracy: 0.9781" in shown
    assert yaml.safe_load(psjob(home, "get", name, "-o", "yaml").stdout)["manifest"]["metadata"]["name"] == "tiny"
    assert "Completed" in psjob(home, "events", "tiny").stdout
    points = list(csv.DictReader(io.StringIO(psjob(home, "metrics", "tiny", "--name", "test_accuracy", "-o", "csv").stdout)))
    assert points and float(points[0]["value"]) == 0.9781
    assert "there are: rate, test_accuracy" in psjob(home, "metrics", "tiny", "--name", "x", fails=True).stderr
    assert psjob(home, "logs", "tiny", "-p", "worker-1").stdout == f"worker 1 start 1 of {home.resolve()}\n"
    assert psjob(home, "logs", "tiny", "--tail", "1").stdout.splitlines()[0].startswith("worker-")
    assert "names them" in psjob(home, "logs", "tiny", "-p", "shard-7").stderr
    assert psjob(home, "checkpoints", "tiny").stdout.splitlines()[1].split()[0].isdigit()
    assert psjob(home, "top", "--once").stdout.splitlines()[0].split()[0] == "NAME"
    assert "phase:       Complete" in psjob(home, "top", "tiny").stdout
    assert "is Complete" in psjob(home, "wait", "tiny").stdout
    assert "there is no such phase" in psjob(home, "wait", "tiny", "--for", "Done", fails=True).stderr
    assert "did you mean tiny" in psjob(home, "get", "tinny", fails=True).stderr
    assert "is complete; submit it anew" in psjob(home, "resume", "tiny", fails=True).stderr
    assert "add --yes" in psjob(home, "delete", "tiny", fails=True).stderr
    assert psjob(home, "clean", "--older-than", "0s", "--dry-run").stdout.startswith(name)
    assert "is no span of time" in psjob(home, "clean", "--older-than", "soon", fails=True).stderr
    assert "removed 1" in psjob(home, "clean", "--older-than", "0s", "--yes").stderr
    assert "there is no run in" in psjob(home, "list").stderr


def test_a_script_that_cannot_be_submitted_is_refused(home: Path) -> None:
    def refused(*words: str) -> str:
        done = psjob(home, "submit", *words, fails=True)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr

    (home / "train.py").write_text("import os, nets.small\nfrom . import loss\n\nimport tools\n")
    for name in ("nets/small.py", "loss.py", "other.py", "os/no-python"):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).touch()
    said = refused("train.py")
    assert (
        "train.py: imports loss.py, nets, and only the script itself is sent" in said
        and "--image registry.example.com/train:1 --in-image" in said
    )
    assert "--image is missing: name the image that /app/train.py lies in" in refused("/app/train.py", "--in-image")
    assert "--image is missing" in refused("-m", "package.train")
    assert "there is no such file" in refused("none.py", "--image", "me/x:1")
    assert "No such option: --worker; did you mean --workers?" in psjob(home, "submit", "job.yaml", "--worker", "3", fails=True).stderr
    assert "is for a script" in refused(str(manifest(home, "1")), "--in-image")


def test_an_option_that_is_almost_one_of_psjob_is_refused_but_behind_dashes(home: Path) -> None:
    (home / "train.py").write_text("print()\n")
    told = psjob(home, "submit", "train.py", "--local", "--worker=3", "--lr", "1", fails=True).stderr
    assert "--worker: did you mean psjob's own --workers? If it is an option of train.py, write -- before the script's options" in told
    words = ("--workers", "3", "--lr", "1", "--", "--worker", "2", "--workers", "4")
    assert "did you mean" not in psjob(home, "submit", "train.py", "--local", *words).stderr


def test_a_script_is_submitted_to_this_machine(home: Path) -> None:
    (home / "train.py").write_text("import sys\nprint(sys.argv)\n")
    name = psjob(home, "submit", "train.py", "--local", "-o", "name", "--workers", "3", "--", "--lr", "$(HOME)").stdout.strip()
    spec = Client.local(home).get(name).manifest["spec"]
    assert spec["workers"]["replicas"] == 3
    assert spec["workers"]["template"]["spec"]["containers"][0]["command"] == ["python", "train.py", "--lr", "$$(HOME)"]


def test_a_job_is_submitted_to_the_background(home: Path) -> None:
    path = manifest(home, "0.5")
    done = psjob(home, "submit", str(path), "--local", "--wait", "--set", "metadata.name=other")
    assert "`psjob logs other-" in done.stdout and "is Complete" in done.stdout
    name = psjob(home, "submit", "-", "--local", "-o", "name", stdin=path.read_text().replace('"0.5"', '"60"')).stdout.strip()
    assert name.startswith("tiny-")
    psjob(home, "wait", name, "--for", "running", "--timeout", "60s")
    assert psjob(home, "top").stdout.splitlines()[1].startswith(name)
    assert "is suspended" in psjob(home, "suspend", name).stdout
    assert "continues from the last checkpoint" in psjob(home, "resume", name).stdout
    assert "is removed" in psjob(home, "delete", "tiny", "--yes").stdout, "the newest run of the name, while it runs"
    assert "no cluster can be reached" in psjob(home, "submit", str(path), fails=True).stderr


HOLDS = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, 2); print('held', flush=True); time.sleep(60)"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program of the user's that holds a lock of its own."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "own.lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    folder = tmp_path / ".psjob" / "job-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"job": "job", "run": "job-1"}))
    return folder


def told(foreign: Path, pid: object) -> None:
    (foreign / run_folder.RUN).write_text(json.dumps({"job": "job", "pid": pid, "created": time.time()}))


def ended(tmp_path: Path, name: str = "job-1") -> str:
    try:
        asyncio.run(LocalJobs(tmp_path).delete(name, 1.0))
    except JobProblem as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("way", ["a link", "a hard link"])
def test_a_lock_of_another_program(tmp_path: Path, foreign: Path, victim: subprocess.Popen[str], way: str) -> None:
    own = tmp_path / "own.lock"
    (foreign / run_folder.LOCK).symlink_to(own) if way == "a link" else os.link(own, foreign / run_folder.LOCK)
    told(foreign, victim.pid)
    assert run_folder.holder(foreign) is None
    ended(tmp_path)
    assert victim.poll() is None


@pytest.mark.parametrize("pid", [-1, 0, 1, True, "7", 10**9, None])
def test_a_number_that_is_no_process_of_the_run(tmp_path: Path, foreign: Path, pid: object) -> None:
    with (foreign / run_folder.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told(foreign, pid)
        assert run_folder.alive(foreign) and run_folder.holder(foreign) is None
        assert "is not known" in ended(tmp_path)
    assert foreign.exists()


def test_another_process_than_the_one_that_holds_the_lock(tmp_path: Path, foreign: Path, victim: subprocess.Popen[str]) -> None:
    with (foreign / run_folder.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told(foreign, victim.pid)
        assert "is not known" in ended(tmp_path)
        told(foreign, os.getpid())
        assert run_folder.holder(foreign) == os.getpid()
    assert victim.poll() is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name",
    [run_folder.RUN, run_folder.JOB, run_folder.LIVE, run_folder.STORY, run_folder.HISTORY, run_folder.LOCK, "status.json", "config.json"],
)
@pytest.mark.parametrize("what", ["a pipe", "a folder", "a link to a device"])
def test_files_that_are_none_hang_nobody(tmp_path: Path, foreign: Path, name: str, what: str) -> None:
    other = foreign / name
    other.unlink(missing_ok=True)
    if name != run_folder.RUN:
        told(foreign, os.getpid())
    if what == "a pipe":
        os.mkfifo(other)
    elif what == "a folder":
        other.mkdir()
    else:
        other.symlink_to("/dev/zero")
    source = LocalJobs(tmp_path)
    found = asyncio.run(source.list())
    assert [job.id for job in found] == ["job-1"]
    for job in found:
        asyncio.run(source.get(job.id))
        asyncio.run(source.history(job.id))
        asyncio.run(source.events(job.id))


def test_a_manifest_that_is_a_pipe(foreign: Path) -> None:
    os.mkfifo(foreign / "manifest-v000001-c000001.json")
    for path in manifests(foreign):
        with pytest.raises(OSError, match="no regular file"):
            read_file(path)


def test_a_file_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 100)
    assert read_file(tmp_path / "long", 100) == b"x" * 100
    with pytest.raises(OSError, match="more than 99 bytes"):
        read_file(tmp_path / "long", 99)
