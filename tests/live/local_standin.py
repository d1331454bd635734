"""A psjob of a few lines, for tests of only the supervisor: its shard counts steps by the clock and keeps them in a file.

Found before the real one by PYTHONPATH, so that `psjob run` itself is the real thing, with real processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psjob
from tests.support import warm

SHARD = """
import hashlib, http.server, json, os, signal, sys, threading, time
from psjob_operator import keys
env = os.environ
config = json.load(open(env["PSJOB_CONFIG"]))
questions = keys.parse_keys(open(env["PSJOB_KEYS"]).read())["questions"]
index, attempt = int(env["PSJOB_INDEX"]), int(env["PSJOB_ATTEMPT"])
run = os.path.join(env["PSJOB_CHECKPOINTS"], env["PSJOB_RUN"])
kept = os.path.join(run, "step")
base = int(open(kept).read()) if os.path.exists(kept) else 0
began, stopping, absent, patient = time.time(), [], "STANDIN_ABSENT" in env, "STANDIN_PATIENT" in env
signal.signal(signal.SIGTERM, lambda *_: stopping.append(1))
def told():
    step = base + int((time.time() - began) * 100)
    counters = {"pushes": step, "applied": step, "duplicatesRefused": 0, "updatesLost": 0}
    counters |= {"acknowledged": {"0": step}, "firstApplied": began}
    answer = {"run": config["run"], "index": index, "attempt": attempt, "term": 1, "state": "serving", "counters": counters}
    if index == 0:
        answer["coordinator"] = {"step": step, "loss": 0.5, "rate": 100.0, "eta": None, "totalSteps": None,
            "metrics": {"test_accuracy": 0.9781},
            "workers": [{"rank": 0, "idle": 0.25}, {"rank": 1}],
            "checkpoint": {"step": max(0, step - patient), "term": 1, "time": time.time(), "bytes": 1, "path": "x", "final": False},
            "checkpointProblem": None, "waiting": None, "weightsSha256": "abc", "failure": None, "passed": [[step, time.time()]]}
    if absent and index == 0:
        gone = [{"rank": rank, "state": "absent"} for rank in range(config["workers"])]
        answer["coordinator"] |= {"step": 0, "checkpoint": None, "workers": gone}
    return answer
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(told() if self.path == "/status" else {"nonce": "1"}).encode()
        self.send_response(200)
        nonce, _, proof = self.headers.get("X-Psjob-Proof", "").partition(" ")
        if proof and proof == keys.question(questions, nonce, self.path):
            self.send_header("X-Psjob-Answer", keys.answer(questions, nonce, self.path, body))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", config["shards"][index]["statusPort"]), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while not stopping and (absent or not all(os.path.exists(os.path.join(run, f"left-{rank}")) for rank in range(config["workers"]))):
    time.sleep(0.01)
if stopping and patient:
    time.sleep(4)
    open(os.path.join(run, "waited"), "w").close()
last = base + int((time.time() - began) * 100)
with open(kept, "w") as file:
    file.write(str(last))
if index == 0:
    body = {"step": last, "mode": config["mode"], "final": not stopping, "files": [], "tables": {}, "records": None, "buffers": None}
    body["workers"] = {"clock": [last] * config["workers"]}
    raw = json.dumps(body, sort_keys=True, separators=(",", ":"))
    with open(os.path.join(run, f"manifest-v000001-s{last:012d}.json"), "w") as file:
        json.dump({**body, "sha256": hashlib.sha256(raw.encode()).hexdigest()}, file)
with open(env["PSJOB_TERMINATION_LOG"], "w") as file:
    json.dump({"status": told()}, file)
os._exit(0)
"""

WORKER = """
import json, os, signal, socket, sys, time
run = os.path.dirname(os.environ["PSJOB_CONFIG"])
rank, start = os.environ["PSJOB_INDEX"], int(os.environ["PSJOB_START"])
print(f"worker {rank} start {start} of {os.getcwd()}", flush=True)
def leave(code, **message):
    with open(os.environ["PSJOB_TERMINATION_LOG"], "w") as file:
        json.dump(message, file)
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: leave(75, ending=""))
first, then = (sys.argv[1:] + ["0.5"])[:1][0], sys.argv[2] if len(sys.argv) > 2 else "0.5"
what = first if start == 1 else then
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    what = "600"
if what.startswith(("late", "steps")):
    for shard in json.load(open(os.environ["PSJOB_CONFIG"]))["shards"]:
        while socket.socket().connect_ex(("127.0.0.1", shard["statusPort"])):
            time.sleep(0.02)
    time.sleep(1.0 if what.startswith("steps") else 0)
    what = what.replace("late", "exit").replace("steps", "exit")
if what.startswith("exit"):
    print("this went wrong", file=sys.stderr, flush=True)
    leave(int(what[4:]), error="this went wrong") if what in ("exit75", "exit77") else sys.exit(int(what[4:]))
time.sleep(float(what))
open(os.path.join(run, f"left-{rank}"), "w").close()
"""


def manifest(folder: Path, *args: str, shards: int = 2, workers: int = 2, **spec: Any) -> Path:
    """A job in `folder` whose workers sleep or exit as `args` say."""
    (folder / "worker.py").write_text(WORKER)
    container = {"name": "worker", "image": "none", "command": ["python", "worker.py", *args]}
    job = {
        "apiVersion": "psjob.dev/v1alpha1",
        "kind": "PSTrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "shards": {"replicas": shards, **spec.pop("of_shards", {})},
            "workers": {"replicas": workers, "template": {"spec": {"containers": [container]}}},
            **spec,
        },
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def environment(folder: Path) -> Mapping[str, str]:
    """An environment in which the stand-in is psjob. What it has not itself, such as the planners of the command line, is psjob's own."""
    package = folder / "standin" / "psjob"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(f"__path__.append({str(Path(psjob.__file__).parent)!r})\n")
    (package / "shard.py").write_text(SHARD)
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def command(*args: str | Path) -> list[str]:
    """The words of `psjob run`."""
    return ["run", *map(str, args)]


def start(folder: Path, *args: str | Path, **env: str) -> warm.Started:
    """`psjob run` in `folder`, with the stand-in; it and its processes are forks."""
    streams = folder / "printed.txt", folder / "told.txt"
    return warm.start(folder, "psjob_client.cli.main", command(*args), {**environment(folder), **env}, *streams, warm.LIGHT)


def run(folder: Path, *args: str | Path, timeout: float = 100, **env: str) -> subprocess.CompletedProcess[str]:
    """`psjob run` in `folder`, to its end."""
    started = start(folder, *args, **env)
    try:
        printed, told = started.communicate(timeout)
    finally:
        started.kill()
    return subprocess.CompletedProcess(command(*args), started.wait(), printed, told)


class Run:
    """What `Client.submit` starts, in place of its Popen: a fork that reads the manifest from a pipe."""

    def __init__(self, argv: Sequence[str], *, stdout: IO[bytes], cwd: Path, **_: Any) -> None:
        reader, writer = multiprocessing.Pipe(duplex=False)
        output = Path(stdout.name)
        self._started = warm.start_python(cwd, argv[1:], None, output, output, warm.LIGHT, reader)
        reader.close()
        self.stdin = open(os.dup(writer.fileno()), "wb")  # noqa: SIM115
        writer.close()
        self.pid = self._started.pid

    @property
    def returncode(self) -> int | None:
        """As Popen's."""
        return self._started.returncode

    def poll(self) -> int | None:
        """As Popen's."""
        return self._started.returncode

    def kill(self) -> None:
        """As Popen's."""
        self._started.kill()
