"""Which processes went with a node of which nothing is heard: those for which nothing else speaks either.

A pod whose process had ended goes with its node too: nobody else would take its volume off. Beyond that a kubelet out of reach proves
nothing of the pods there. A shard that takes a connection lives, and so does a worker that has joined and has a stream to shard 0.
A process that is taken for lost and lives is fenced by the number of its successor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.cluster.lookups import Lookups
from psjob_operator.cluster.memory import Memory
from psjob_operator.cluster.pods import PodView
from psjob_operator.plan.observed_state import Process

AGAIN_SECONDS = 2.0
BEGIN_SECONDS = 30.0
"""From when a pod was bound until its node is asked for, if no container of it has begun."""


async def lost(lookups: Lookups, views: Sequence[PodView], memory: Memory, run: str) -> frozenset[str]:
    """Uids of the pods that are lost with their nodes."""
    # The marked pods may be gone before one that its node never began: the node is looked at until it is heard of.
    nodes = dict.fromkeys(view.process.node for view in views if view.unheard or view.process.node in memory.silent or slow(view, lookups))
    silent = {node for node in nodes if await lookups.silent(node)}
    memory.silent = {node: memory.silent.get(node, lookups.now) for node in silent}
    # The node controller marks one pod after the other: all of the node's are looked at with the first.
    suspects = [view for view in views if view.process.node in silent and view.process.exit is None]
    shards = [view for view in suspects if view.process.role == "shard"]
    # All at once: what is sent to a machine that is off is answered by nothing but the time limit.
    answering = await asyncio.gather(*(lookups.answers(view.ip) for view in shards))
    found = {view.process.uid for view, answers in zip(shards, answering, strict=True) if not answers}
    found |= {view.process.uid for view in views if view.process.node in silent and view.holds}
    first = any(alive_first(view, run) and view.process.uid not in found for view in views)
    for view in suspects:
        process = view.process
        if process.role != "worker":
            continue
        heard = memory.progress_at is not None and memory.progress_at > memory.silent[process.node]
        if not first or (heard and not joined(memory.progress, process)):
            found.add(process.uid)
    if silent:
        lookups.at(lookups.now + AGAIN_SECONDS)
    return frozenset(found)


def slow(view: PodView, lookups: Lookups) -> bool:
    """The pod has not begun for a while. The node controller marks only pods that were ready."""
    process = view.process
    waits = process.phase == "Pending" and process.scheduled is not None and process.deleting is None and bool(process.node)
    return waits and lookups.at((process.scheduled or 0.0) + BEGIN_SECONDS)


def alive_first(view: PodView, run: str) -> bool:
    """This is the run's shard 0, and it can be asked."""
    process = view.process
    alive = process.phase == "Running" and process.deleting is None
    return process.role == "shard" and process.index == 0 and process.run == run and alive and bool(view.ip)


def joined(progress: Mapping[str, Any] | None, worker: Process) -> bool:
    """Shard 0 says that this very process is with it. One whose stream has ended is, by an older runtime: that tells no `here`."""
    told = (progress or {}).get("coordinator")
    workers = told.get("workers") if isinstance(told, Mapping) else None
    mine = (entry for entry in workers if isinstance(entry, Mapping)) if isinstance(workers, list) else ()
    return any(
        it.get("rank") == worker.index and it.get("start") == worker.number and it.get("state") == "joined" and it.get("here", True) is True
        for it in mine
    )
