"""What runs beside the loop: rounds with the status ports, and the faults that the user ordered."""

from __future__ import annotations

import asyncio
import time

from psjob_operator.local.faults import Fault, Recovery
from psjob_operator.local.ground import Ground
from psjob_operator.local.probe import numbers, part
from psjob_operator.local.story import Story

EVERY = 0.5
"""Seconds between two rounds with a shard."""
CLOSE = 0.1
"""The same while a recovery is measured."""
ARMED = 0.03
"""The same with the coordinator while a fault waits for its step."""


async def poll_shards(ground: Ground, wake: asyncio.Event) -> None:
    """Ask every shard again and again, each in its own rhythm: one that hangs holds up no other."""
    async with asyncio.TaskGroup() as group:
        for index, port in enumerate(ground.ports.status):
            group.create_task(_poll(ground, index, port, wake))


async def strike_at(ground: Ground, faults: tuple[Fault, ...], story: Story, wake: asyncio.Event) -> None:
    """Do each fault when the lowest complete clock reaches its step."""
    waiting = list(faults)
    while waiting:
        await asyncio.sleep(ARMED)
        coordinator = ground.current("shard", 0)
        told = coordinator and await ground.watch.look(coordinator, ground.ports.status[0])
        if not told:
            continue
        for fault in [fault for fault in waiting if numbers(told, "coordinator", "step") >= fault.step]:
            if await _strike(ground, fault, story):
                waiting.remove(fault)
                wake.set()


async def _poll(ground: Ground, index: int, port: int, wake: asyncio.Event) -> None:
    while True:
        child = ground.current("shard", index)
        if child is not None:
            before = ground.watch.ready(child), ground.watch.unresponsive(child)
            await ground.watch.ask(child, port)
            if before != (ground.watch.ready(child), ground.watch.unresponsive(child)):
                wake.set()
        await asyncio.sleep(CLOSE if ground.watch.recovering or child is None else EVERY)


async def _strike(ground: Ground, fault: Fault, story: Story) -> bool:
    child = ground.current(fault.role, fault.index)
    if child is None:
        return False  # It is being replaced; its next start is hit.
    told = await ground.watch.look(child, ground.ports.status[fault.index]) if fault.role == "shard" else None
    if not child.running or (fault.role == "shard" and not ground.watch.ready(child)):
        return False  # One that has ended or does not serve yet would show how a start fails, not how training does.
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
        manifests=sum(step > 0 for _, step in ground.watch.manifests),
        acknowledged=part(told, "counters", "acknowledged"),
    )
    ground.watch.recoveries.append(recovery)
    kept = "no checkpoint yet" if recovery.checkpoint_step is None else f"last checkpoint at step {recovery.checkpoint_step}"
    story.display.say(f"fault {fault.text}: {fault.signal.name} to {child.name} at step {recovery.step}, {kept}", "yellow")
    return True
