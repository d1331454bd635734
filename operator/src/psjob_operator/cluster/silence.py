"""Which processes went with a node of which nothing is heard: those for which nothing else speaks either.

A kubelet out of reach proves nothing of the pods there. A shard that takes a connection lives, and so does a worker that shard 0 has
joined. Whoever is taken for lost and lives is fenced by the number of its successor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob_operator.cluster.lookups import Lookups
from psjob_operator.cluster.memory import Memory
from psjob_operator.cluster.pods import PodView
from psjob_operator.plan.snapshot import Process

AGAIN_SECONDS = 2.0


async def lost(lookups: Lookups, views: Sequence[PodView], memory: Memory, run: str) -> frozenset[str]:
    """Uids of the pods that are lost with their nodes."""
    suspects = [view for view in views if view.unheard]
    silent = {node for node in dict.fromkeys(view.process.node for view in suspects) if await lookups.silent(node)}
    memory.silent = {node: memory.silent.get(node, lookups.now) for node in silent}
    found: set[str] = set()
    for view in suspects:
        if view.process.role == "shard" and view.process.node in silent and not await lookups.answers(view.ip):
            found.add(view.process.uid)
    first = any(alive_first(view, run) and view.process.uid not in found for view in views)
    for view in suspects:
        process = view.process
        if process.role != "worker" or process.node not in silent:
            continue
        heard = memory.progress_at is not None and memory.progress_at > memory.silent[process.node]
        if not first or (heard and not joined(memory.progress, process)):
            found.add(process.uid)
    if silent:
        lookups.at(lookups.now + AGAIN_SECONDS)
    return frozenset(found)


def alive_first(view: PodView, run: str) -> bool:
    """This is the run's shard 0, and it can be asked."""
    process = view.process
    alive = process.phase == "Running" and process.deleting is None
    return process.role == "shard" and process.index == 0 and process.run == run and alive and bool(view.ip)


def joined(progress: Mapping[str, Any] | None, worker: Process) -> bool:
    """Shard 0 says that this very process is with it."""
    told = (progress or {}).get("coordinator")
    workers = told.get("workers") if isinstance(told, Mapping) else None
    mine = (entry for entry in workers if isinstance(entry, Mapping)) if isinstance(workers, list) else ()
    return any(it.get("rank") == worker.index and it.get("start") == worker.number and it.get("state") == "joined" for it in mine)
