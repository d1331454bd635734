"""The race: the same script under psjob, torchft and torchrun, while processes are killed at moments that a seed draws.

A side runs once without kills and once with them. Its rows are the wall time over that without kills and, by the ledger in the last
weights, how many samples were lost and how many counted twice. The moments are the same for all sides. A victim is a worker, with psjob a
shard too. `race_script.py` is what they train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import clock
import psjob_run

COPIES = 4
"""Ledgers of the script."""
LEDGER = "ledger"
"""File of the folder where a script has left its ledgers, one behind the other."""
MARK = "BENCH_RACE"
"""Variable by which all processes of one run know themselves."""
SCRIPT = str(Path(__file__).resolve().with_name("race_script.py"))
SHARDS = 2
STARTING, SLOWEST = 180.0, 6.0
"""A run may take so long to start and so many times its sleep."""
LOOK = 0.02
"""Seconds between two looks at a run."""
GRACE = 10.0
"""Seconds that other replicas of torchft have when one is through."""
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it ranks that torchrun 2.15 has started again read the addresses of those before them, and gloo never connects."""


def words(doc: str | None) -> argparse.Namespace:
    """What race and script are told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=("sync", "async", "torchft", "torchrun"), required=True)
    parser.add_argument("--steps", type=int, default=3000, help="of each worker (default 3000)")
    parser.add_argument("--step", type=float, default=0.2, help="seconds that a worker sleeps in place of the compute (default 0.2)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds for each kill (default 60)")
    parser.add_argument("--save-every", type=int, default=10, help="seconds between two checkpoints of psjob and DDP (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="of moments and victims (default 1)")
    parser.add_argument("--workers", type=int, default=4, help="default 4")
    parser.add_argument("--most", type=float, help="wall time over that without kills that is wanted (default: told only)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step of a worker (default 8)")
    return parser.parse_args()


@dataclass(frozen=True)
class Kill:
    """`at` seconds after every worker has made a step, the process at this part of the list of victims."""

    at: float
    part: float


@dataclass
class Ran:
    """A run: its wall time, the part before all had made a step, who was killed when, how many samples never counted (in some part of the
    weights), how many times too often."""

    seconds: float
    starting: float
    killed: list[str]
    lost: int
    doubled: int
    told: str = ""


def main() -> None:
    asked = words(__doc__)
    title = {"sync": "psjob, sync", "async": "psjob, async", "torchft": "torchft", "torchrun": "torchrun, DDP"}[asked.side]
    calm, storm = run(asked, []), run(asked, drawn(asked))
    kills = f"{len(storm.killed)} kills: {', '.join(storm.killed)}"
    wall = (
        f"{storm.seconds:.1f} s, {calm.seconds:.1f} without kills, of which {storm.starting:.1f} and {calm.starting:.1f} to start; {kills}"
    )
    most = 0.0 if asked.side == "sync" else None
    ratio = storm.seconds / calm.seconds
    samples = f"of {asked.steps * asked.workers * asked.batch}; {calm.lost} without kills{storm.told}"
    clock.answer_rows(
        [
            clock.row(f"{title}: wall time over that without kills", ratio, "times", asked.most, note=wall),
            clock.row(f"{title}: samples lost", storm.lost, "", most, note=samples),
            clock.row(f"{title}: samples counted twice", storm.doubled, "", most, note=f"{calm.doubled} without kills"),
        ]
    )


def drawn(asked: argparse.Namespace) -> list[Kill]:
    """A kill for each whole interval of the time that the steps sleep, within the middle half of it."""
    seeded = random.Random(asked.seed)
    count = int(asked.steps * asked.step / asked.every)
    return [Kill((turn + 0.25 + seeded.random() / 2) * asked.every, seeded.random()) for turn in range(count)]


# -- one run -----------------------------------------------------------------------------------


def run(asked: argparse.Namespace, kills: Sequence[Kill]) -> Ran:
    """A whole run with these kills. Raises RuntimeError with its last words where it does not come to an end."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[MARK] = folder
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        began = time.monotonic()
        processes = start(asked, folder)
        try:
            first, killed = storm(asked, folder, processes, kills, began + STARTING + SLOWEST * asked.steps * asked.step)
            seconds = time.monotonic() - began
            finish(asked, processes)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {said(folder)!r}") from None
        finally:
            end_all(folder, processes)
        lost, doubled = counted(ledgers(asked, folder), asked.steps * asked.workers)
        return Ran(seconds, first - began, killed, lost * asked.batch, doubled * asked.batch, told(asked, folder))


def start(asked: argparse.Namespace, folder: str) -> list[subprocess.Popen[bytes]]:
    """The processes that a user starts."""
    given = [word for name, value in vars(asked).items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))]
    if asked.side in ("sync", "async"):
        spec = {
            "training": {"mode": asked.side}, "checkpoint": {"periodSeconds": asked.save_every}, "runPolicy": {"backoffLimit": 1000},
        }  # fmt: skip
        return [psjob_run.start(folder, [SCRIPT, *given], asked.workers, SHARDS, **spec)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1000"]
    if asked.side == "torchrun":
        own = [*torchrun, "--standalone", f"--nproc-per-node={asked.workers}", SCRIPT, *given]
        return [spawn(folder, "torchrun", own, NEW_STORE)]
    lighthouse, *ports = clock.free_ports(1 + asked.workers)
    # as torchft's README starts it, but for two replicas at least
    command = [
        str(Path(sys.executable).parent / "torchft_lighthouse"),
        "--min_replicas=2",
        "--quorum_tick_ms=100",
        "--join_timeout_ms=10000",
    ]
    processes = [spawn(folder, "lighthouse", [*command, f"--bind=[::]:{lighthouse}"])]
    for replica, port in enumerate(ports):
        place = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}", "REPLICA_GROUP_ID": str(replica),
            "NUM_REPLICA_GROUPS": str(asked.workers),
        }  # fmt: skip
        own = [*torchrun, "--nnodes=1", f"--master-port={port}", "--nproc-per-node=1", SCRIPT, *given]
        processes.append(spawn(folder, f"replica-{replica}", own, place))
    return processes


def spawn(folder: str, name: str, command: list[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    with open(Path(folder) / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, **(environment or {})}, stdout=log, stderr=log, start_new_session=True
        )


def storm(
    asked: argparse.Namespace, folder: str, processes: Sequence[subprocess.Popen[bytes]], kills: Sequence[Kill], end: float
) -> tuple[float, list[str]]:
    """Kill until the run is over; when all had made a step, and who was killed when. Raises RuntimeError when it is not over in time."""
    seats, waiting, killed, first = victims(asked), list(kills), list[str](), 0.0
    while not over(asked, processes):
        time.sleep(LOOK)
        now = time.monotonic()
        if now > end:
            raise RuntimeError(f"it was not through after {len(killed)} kills in {SLOWEST:.0f} times its sleep")
        if not first and all((Path(folder) / f"begun-{rank}").exists() for rank in range(asked.workers)):
            first = now
        if first and waiting and now >= first + waiting[0].at:
            name = list(seats)[int(waiting[0].part * len(seats))]
            for pid in found(folder, seats[name]):  # none: it is being replaced, and its next start is hit
                os.kill(pid, signal.SIGKILL)
                killed.append(f"{name} at {now - first:.1f} s")
                waiting.pop(0)
                break
    return first, killed


def victims(asked: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What the environment of each seat's process holds."""
    ranks = range(asked.workers)
    if asked.side == "torchrun":
        return {f"worker-{rank}": {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks}
    if asked.side == "torchft":
        return {f"worker-{rank}": {"REPLICA_GROUP_ID": str(rank), "LOCAL_RANK": "0"} for rank in ranks}
    workers = {f"worker-{rank}": {"PSJOB_ROLE": "worker", "PSJOB_INDEX": str(rank)} for rank in ranks}
    return workers | {f"ps-{index}": {"PSJOB_ROLE": "shard", "PSJOB_INDEX": str(index)} for index in range(SHARDS)}


def found(folder: str, wanted: Mapping[str, str]) -> list[int]:
    """Processes of the run in `folder` with these variables."""
    lines = {f"{name}={value}".encode() for name, value in {MARK: folder, **wanted}.items()}
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if lines <= set(path.read_bytes().split(b"\0")):
                pids.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return [pid for pid in pids if pid != os.getpid()]


def over(asked: argparse.Namespace, processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    """All workers are through; with torchft one is, since all make their steps together. Raises RuntimeError if one has failed."""
    agents = processes[1:] if asked.side == "torchft" else processes
    codes = [process.poll() for process in agents]
    if any(codes):
        raise RuntimeError(f"{asked.side} ended with {next(filter(None, codes))}")
    return 0 in codes


def finish(asked: argparse.Namespace, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + GRACE
    while asked.side == "torchft" and time.monotonic() < end and any(process.poll() is None for process in processes[1:]):
        time.sleep(LOOK)


def end_all(folder: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what is left of a run."""
    for process in processes:
        process.kill()
        process.wait()
    for pid in found(folder, {}):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def said(folder: str) -> str:
    """The last words of every log."""
    return " ".join(path.read_text(errors="replace")[-300:] for path in sorted(Path(folder).glob("*log")))


# -- what counted ------------------------------------------------------------------------------


def ledgers(asked: argparse.Namespace, folder: str) -> list[array[float]]:
    """The ledgers in the last weights."""
    if asked.side not in ("sync", "async"):
        every = array("f", (Path(folder) / LEDGER).read_bytes())
        size = len(every) // COPIES
        return [every[copy * size : (copy + 1) * size] for copy in range(COPIES)]
    (path,) = Path(folder).glob(f".psjob/*/{psjob_run.FINAL}")
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    spans = [header[f"ledgers.{copy}"]["data_offsets"] for copy in range(COPIES)]
    return [array("f", body[begin:end]) for begin, end in spans]


def place(number: int, copy: int, batches: int) -> int:
    """Where a batch is marked in a copy of the ledger."""
    return (number + copy * batches // COPIES) % batches


def counted(copies: Sequence[array[float]], batches: int) -> tuple[int, int]:
    """Batches that are missing in one of the copies, and how many times batches counted beyond the first."""
    lost = doubled = 0
    for number in range(batches):
        marks = [round(ledger[place(number, copy, batches)]) for copy, ledger in enumerate(copies)]
        lost += min(marks) < 1
        doubled += max(0, max(marks) - 1)
    return lost, doubled


def told(asked: argparse.Namespace, folder: str) -> str:
    """What psjob itself says that was lost."""
    if asked.side not in ("sync", "async"):
        return ""
    summary = json.loads((Path(folder) / "summary.json").read_text())
    return f"; psjob tells of {summary['updates_lost']} updates lost, restarts {summary['restarts']}"


if __name__ == "__main__":
    main()
