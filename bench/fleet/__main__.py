"""A fleet of jobs on one machine: the operator beside a bare client that makes as many pods, on one control plane with pretending nodes.

python -m bench.fleet                        100 jobs x (2 + 8) pods
python -m bench.fleet --jobs 1000 --new-job  and a job more while all of them run
python -m bench.fleet --jobs 1 --shards 64 --workers 4000
python -m bench.fleet --foreign 10000        with so many pods of others in the namespace
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.__main__ import machine
from bench.fleet import phases
from bench.fleet.kube import together, until
from bench.fleet.meter import Meter, resident_mib
from bench.fleet.place import USER, Place, place
from bench.fleet.table import table
from bench.fleet.tracker import LABEL_JOB, Job, Tracker, container, job

FLEET, BARE = "fleet", "bare"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=100, help="nodes that pretend (default 100)")
    parser.add_argument("--idle", type=float, default=60.0, metavar="SECONDS", help="how long nothing happens (default 60; 0: not at all)")
    parser.add_argument("--foreign", type=int, default=0, metavar="PODS", help="pods of others in the namespace")
    parser.add_argument("--new-job", action="store_true", help="a job more while all run")
    parser.add_argument("--no-bare", action="store_true", help="leave the bare client out")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="most seconds for each phase (default 600)")
    parser.add_argument("--python", default="", help="words in place of the operator's interpreter, such as a profiler's")
    parser.add_argument("--option", action="append", default=[], help="an option of psjob-operator run; may be given again")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--folder", type=Path, help="keep logs and the audit log there")
    asked = parser.parse_args()
    run = measure(**{key: value for key, value in vars(asked).items() if key != "json"})
    print(table(run))
    if asked.json:
        asked.json.write_text(json.dumps(run, indent=1) + "\n")
    return 0


def measure(
    jobs: int = 100,
    shards: int = 2,
    workers: int = 8,
    nodes: int = 100,
    idle: float = 60.0,
    foreign: int = 0,
    new_job: bool = False,
    no_bare: bool = False,
    timeout: float = 600.0,
    python: str = "",
    option: list[str] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """One run; see the module. Raises TimeoutError if a phase takes longer than `timeout`."""
    with tempfile.TemporaryDirectory(prefix="psjob-fleet-") as scratch:
        kept = folder or Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_measure(kept, jobs, shards, workers, nodes, idle, foreign, new_job, no_bare, timeout, python, option or []))


async def _measure(
    folder: Path,
    jobs: int,
    shards: int,
    workers: int,
    nodes: int,
    idle: float,
    foreign: int,
    new_job: bool,
    no_bare: bool,
    timeout: float,
    python: str,
    option: list[str],
) -> dict[str, Any]:
    about = f"{machine()}, {time.strftime('%Y-%m-%d')}"
    run: dict[str, Any] = {"jobs": jobs, "shards": shards, "workers": workers, "foreign": foreign, "about": about, "rss": {}}
    names = [f"job-{number:04d}" for number in range(jobs)]
    async with place(folder, nodes) as here:
        await here.namespace(FLEET)
        meter, seen = Meter(here.processes), Tracker(FLEET)
        if not no_bare:
            await here.namespace(BARE)
            with meter.phase("bare"):
                run["bare"] = await phases.bare(here.kube, BARE, jobs, phases.smallest(shards + workers), timeout)
            _say(f"bare client: {run['bare']}")
            await asyncio.sleep(2)
        await _strangers(here, foreign)
        async with here.operator(*option, python=tuple(python.split())) as pid:
            watches = [asyncio.create_task(seen.follow_pods(here.kube)), asyncio.create_task(seen.follow_jobs(here.kube))]
            await _warm(here, seen, shards, workers)
            run["rss"]["start"] = resident_mib(pid)
            with meter.phase("burst"):
                run["burst"] = await phases.burst(here.kube, seen, names, shards, workers, timeout)
                await asyncio.sleep(3)
            run["rss"]["burst"] = resident_mib(pid)
            if not no_bare:
                pattern = await here.kube.call("GET", f"{seen.pods_path}?labelSelector={LABEL_JOB}%3D{names[0]}")
            _say(f"burst: {run['burst']}")
            if new_job:
                run["newJob"] = await phases.burst(here.kube, seen, ["newcomer"], shards, workers, timeout)
                _say(f"a job more: {run['newJob']}")
                names.append("newcomer")
            if idle:
                with meter.phase("idle"):
                    await asyncio.sleep(idle)
            with meter.phase("lose"):
                run["lose"] = await phases.lose(here.kube, seen, names, timeout)
                await asyncio.sleep(3)
            _say(f"lost workers: {run['lose']}; memory so far: {run['rss']}")
            with meter.phase("finish"):
                run["finish"] = await phases.finish(here.kube, seen, names, timeout)
                await asyncio.sleep(3)
            run["rss"]["end"] = resident_mib(pid)
            for watch in watches:
                if watch.done():
                    watch.result()
                watch.cancel()
        if not no_bare:
            with meter.phase("alike"):
                run["alike"] = await phases.bare(here.kube, BARE, jobs, phases.alike(pattern["items"]), timeout)
        assert here.ready.audit is not None
        audit = shutil.copy(here.ready.audit, folder / "audit.log")
        meter.count(audit, USER)
        run["podsMade"] = sum(len(seen.jobs[name].pods) for name in names)
        run["phases"] = {name: {**vars(phase), "requests": dict(phase.requests)} for name, phase in meter.phases.items()}
    return run


async def _strangers(here: Place, count: int) -> None:
    """Pods that no psjob made, on no node."""
    path, spec = f"/api/v1/namespaces/{FLEET}/pods", {"containers": [container()], "schedulerName": "nobody"}
    await together(here.kube.call("POST", path, {"metadata": {"name": f"stranger-{it}"}, "spec": spec}) for it in range(count))


async def _warm(here: Place, seen: Tracker, shards: int, workers: int) -> None:
    """One small job first: it proves that all works, and fills every cache."""
    warm = seen.jobs["warm"] = Job()
    await here.kube.call("POST", seen.jobs_path, job("warm", 1, 1))
    await until("the first job to run", lambda: warm.running, 60)
    await here.kube.call("DELETE", f"{seen.jobs_path}/warm", {"propagationPolicy": "Background"})
    await until("the first job to go", lambda: not seen.live("warm"), 60)
    await asyncio.sleep(2)


def _say(what: str) -> None:
    print(f"  {time.strftime('%T')} {what}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
