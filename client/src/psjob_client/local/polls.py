"""What runs beside the loop: rounds with the status ports, and the faults that the user ordered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from pathlib import Path

from psjob_client.local.backend import Backend
from psjob_client.local.children import ChildProcess
from psjob_client.local.command import base_environment
from psjob_client.local.faults import Fault, Recovery, unfinished
from psjob_client.local.probe import numbers, part
from psjob_client.local.sites import Listening
from psjob_client.local.story import Story
from psjob_operator import contract

EVERY = 0.5
"""Seconds between two rounds with a shard."""
CLOSE = 0.1
"""The same while a recovery is measured."""
ARMED = 0.03
"""The same with the coordinator while a fault waits for its step."""
REPLACED_SECONDS = 3.0
GLANCE, GLANCES = 0.002, 100
"""Seconds between two looks at a run's folder while a fault waits for a cut, and how many of them come between two rounds."""
SETTLE = 0.01
"""Seconds in which every thread of a process that was stopped stands still."""


async def poll_shards(backend: Backend, wake: asyncio.Event) -> None:
    """Ask every shard again and again, each in its own rhythm: one that hangs holds up no other."""
    async with asyncio.TaskGroup() as group:
        for index, shard in enumerate(backend.sites.shards):
            group.create_task(_poll(backend, index, shard, wake))


async def strike_at(backend: Backend, faults: tuple[Fault, ...], story: Story, wake: asyncio.Event) -> None:
    """Do each fault when its time has come."""
    waiting, since = list(faults), dict[Fault, float]()
    while waiting:
        await asyncio.sleep(ARMED)
        coordinator = backend.current("shard", 0)
        told = coordinator and await backend.watch.look(coordinator, backend.sites.shards[0])
        if not told:
            continue
        step, checkpoints = int(numbers(told, "coordinator", "step")), backend.watch.checkpoints
        for fault in [fault for fault in waiting if fault.due(step, checkpoints)]:
            if time.monotonic() - since.setdefault(fault, time.monotonic()) >= fault.later and await _strike(backend, fault, story):
                waiting.remove(fault)
                wake.set()


async def _poll(backend: Backend, index: int, shard: Listening, wake: asyncio.Event) -> None:
    while True:
        child = backend.current("shard", index)
        if child is not None:
            before = backend.watch.ready(child), backend.watch.unresponsive(child)
            await backend.watch.ask(child, shard)
            if before != (backend.watch.ready(child), backend.watch.unresponsive(child)) or backend.watch.hung:
                wake.set()
        await asyncio.sleep(CLOSE if backend.watch.recovering or child is None else EVERY)


async def _strike(backend: Backend, fault: Fault, story: Story) -> bool:
    child = backend.current(fault.role, fault.index)
    if child is None:
        return False  # It is being replaced; its next start is hit.
    told = await backend.watch.look(child, backend.sites.shards[fault.index]) if fault.role == "shard" else None
    if not child.running or (fault.role == "shard" and not backend.watch.ready(child)):
        return False  # One that has ended or does not serve yet would show how a start fails, not how training does.
    crashes = int(numbers(told, "counters", "crashes"))
    if fault.inside and backend.watch.crashing(child, crashes):
        return False  # The process that the last fault hit has no successor yet that has gone on.
    torn = await _stopped_in_cut(backend, child) if fault.when == "cut" else None
    if fault.when == "cut" and torn is None:
        return False
    if fault.inside:
        await _hit_inside(child, fault.signal)
    else:
        child.send(fault.signal)
    at = time.time()
    checkpoint = part(backend.watch.coordinator, "checkpoint")
    recovery = Recovery(
        fault,
        child.name,
        child.number,
        at,
        backend.watch.step,
        checkpoint_step=int(numbers(checkpoint, "step")) if checkpoint else None,
        manifests=backend.watch.checkpoints,
        torn=torn,
        acknowledged=part(told, "counters", "acknowledged"),
        crashes=crashes,
    )
    backend.watch.recoveries.append(recovery)
    kept = "no checkpoint yet" if recovery.checkpoint_step is None else f"last checkpoint at step {recovery.checkpoint_step}"
    where = "" if torn is None else f", while it wrote {torn}"
    story.display.say(f"fault {fault.text}: {fault.signal.name} to {_hit(fault, child)} at step {recovery.step}, {kept}{where}", "yellow")
    return True


async def _hit_inside(child: ChildProcess, number: signal.Signals) -> None:
    """A shard without a keeper is hit itself. One whose process is being replaced is waited for."""
    has_keeper = contract.fork_server_after(base_environment()) < math.inf
    until = time.monotonic() + (REPLACED_SECONDS if has_keeper else 0)
    while not child.send_inside(number):
        if time.monotonic() >= until:
            child.send(number)
            return
        await asyncio.sleep(GLANCE)


def _hit(fault: Fault, child: ChildProcess) -> str:
    return f"the process that serves in {child.name}" if fault.inside else child.name


async def _stopped_in_cut(backend: Backend, child: ChildProcess) -> str | None:
    """Stop a shard with a file of a checkpoint begun and not finished, and name that file; None: it began none, or was quicker."""
    for _ in range(GLANCES):
        torn = unfinished(_written_since(backend.folder.path, child.created), child.index, child.number)
        if torn is not None:
            caught = False
            child.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(SETTLE)
                caught = (backend.folder.path / torn).exists()
            finally:
                if not caught:  # also where the run ends at this moment
                    child.send(signal.SIGCONT)
            if caught:
                return torn
        await asyncio.sleep(GLANCE)
    return None


def _written_since(folder: Path, created: float) -> list[str]:
    """Temp files of checkpoints, but for what a killed process has left there."""
    found = []
    for path in folder.glob(f"*{contract.TEMP}"):
        with contextlib.suppress(FileNotFoundError):  # it was given its name meanwhile
            if path.stat().st_mtime >= created:
                found.append(path.name)
    return found
