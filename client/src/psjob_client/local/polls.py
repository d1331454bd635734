"""What runs beside the loop: rounds with the status ports, and the faults that the user ordered."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path

from psjob_client.local.children import ChildProcess
from psjob_client.local.faults import Fault, Recovery, unfinished
from psjob_client.local.ground import Ground
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
GLANCE, GLANCES = 0.002, 100
"""Seconds between two looks at a run's folder while a fault waits for a cut, and how many of them come between two rounds."""
SETTLE = 0.01
"""Seconds in which every thread of a process that was stopped stands still."""


async def poll_shards(ground: Ground, wake: asyncio.Event) -> None:
    """Ask every shard again and again, each in its own rhythm: one that hangs holds up no other."""
    async with asyncio.TaskGroup() as group:
        for index, shard in enumerate(ground.sites.shards):
            group.create_task(_poll(ground, index, shard, wake))


async def strike_at(ground: Ground, faults: tuple[Fault, ...], story: Story, wake: asyncio.Event) -> None:
    """Do each fault when its time has come."""
    waiting = list(faults)
    while waiting:
        await asyncio.sleep(ARMED)
        coordinator = ground.current("shard", 0)
        told = coordinator and await ground.watch.look(coordinator, ground.sites.shards[0])
        if not told:
            continue
        step, checkpoints = int(numbers(told, "coordinator", "step")), ground.watch.checkpoints
        for fault in [fault for fault in waiting if fault.due(step, checkpoints)]:
            if await _strike(ground, fault, story):
                waiting.remove(fault)
                wake.set()


async def _poll(ground: Ground, index: int, shard: Listening, wake: asyncio.Event) -> None:
    while True:
        child = ground.current("shard", index)
        if child is not None:
            before = ground.watch.ready(child), ground.watch.unresponsive(child)
            await ground.watch.ask(child, shard)
            if before != (ground.watch.ready(child), ground.watch.unresponsive(child)) or ground.watch.hung:
                wake.set()
        await asyncio.sleep(CLOSE if ground.watch.recovering or child is None else EVERY)


async def _strike(ground: Ground, fault: Fault, story: Story) -> bool:
    child = ground.current(fault.role, fault.index)
    if child is None:
        return False  # It is being replaced; its next start is hit.
    told = await ground.watch.look(child, ground.sites.shards[fault.index]) if fault.role == "shard" else None
    if not child.running or (fault.role == "shard" and not ground.watch.ready(child)):
        return False  # One that has ended or does not serve yet would show how a start fails, not how training does.
    torn = await _stopped_in_cut(ground, child) if fault.when == "cut" else None
    if fault.when == "cut" and torn is None:
        return False
    child.send(fault.signal)
    at = time.time()
    checkpoint = part(ground.watch.coordinator, "checkpoint")
    recovery = Recovery(
        fault,
        child.name,
        child.number,
        at,
        ground.watch.step,
        checkpoint_step=int(numbers(checkpoint, "step")) if checkpoint else None,
        manifests=ground.watch.checkpoints,
        torn=torn,
        acknowledged=part(told, "counters", "acknowledged"),
    )
    ground.watch.recoveries.append(recovery)
    kept = "no checkpoint yet" if recovery.checkpoint_step is None else f"last checkpoint at step {recovery.checkpoint_step}"
    where = "" if torn is None else f", while it wrote {torn}"
    story.display.say(f"fault {fault.text}: {fault.signal.name} to {child.name} at step {recovery.step}, {kept}{where}", "yellow")
    return True


async def _stopped_in_cut(ground: Ground, child: ChildProcess) -> str | None:
    """Stop a shard with a file of a checkpoint begun and not finished, and name that file; None: it began none, or was quicker."""
    for _ in range(GLANCES):
        torn = unfinished(_written_since(ground.folder.path, child.created), child.index, child.number)
        if torn is not None:
            caught = False
            child.send(signal.SIGSTOP)
            try:
                await asyncio.sleep(SETTLE)
                caught = (ground.folder.path / torn).exists()
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
