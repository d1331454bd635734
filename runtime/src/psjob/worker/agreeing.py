"""The processes of a worker agree, when they join, on the way in which they sum."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from psjob.collectives.localsum import AUTO, CPU, SHARED, Given, LocalSum, choose
from psjob.layout.blocks import Layout
from psjob.worker import gpus, podsums
from psjob.worker.ending import SessionEnd
from psjob.worker.gpus import Lying
from psjob.worker.podmemory import PodMemory
from psjob.worker.podsums import PodSum

if TYPE_CHECKING:
    from psjob.worker.following import FollowerSession
    from psjob.worker.leading import LeaderSession


def lead(session: LeaderSession, device: torch.device) -> PodSum:
    """As process 0: choose from where all models lie, meet the others where the way needs a group, and tell them what holds.

    Where they cannot meet, or one lacks the memory for it, shared memory is taken, unless the manifest asks for the way. Raises SessionEnd.
    """
    config, places = session.place.config, session.lying
    chosen = _chosen(session, [gpus.lying(device), *(places[local] for local in sorted(places))])
    sums: PodSum | None = None
    failed = ""
    if chosen.way != SHARED:
        fd = podsums.meeting_place()
        session.tell_others({"way": chosen.way}, fd)
        sums, failed = _met(chosen.way, session.layout, session.memory, fd, 0, config.processes, device)
        session.wait(lambda: len(session.met) == config.processes - 1, "the other processes of this worker to make a group")
        failed = failed or next((why for _, why in sorted(session.met.items()) if why), "")
        if failed and config.local_sum != AUTO:
            raise SessionEnd("refused", f"the processes of worker {session.place.index} could not make a group for {chosen.way}: {failed}; "
                             "leave out spec.workers.localSum")  # fmt: skip
        if failed:
            chosen, sums = LocalSum(SHARED, f"they could not make a group for {chosen.way}: {failed}"), None
    session.tell_others({"sums": chosen.way})
    print(
        f"psjob: the processes of worker {session.place.index} sum their gradients by {chosen.way}: {chosen.reason}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return sums or podsums.made(SHARED, session.layout, session.memory, 0, config.processes, device, None)


def follow(session: FollowerSession, device: torch.device) -> PodSum:
    """As another process. Raises SessionEnd."""
    place, memory = session.place, session.memory
    assert memory is not None
    sums: PodSum | None = None

    def told() -> bool:
        return session.heard("way") or session.heard("sums")

    session.wait(told, "process 0 of this worker to choose how to sum")
    if session.heard("way"):
        said = session.next("way", "")
        sums, failed = _met(str(said.body["way"]), session.layout, memory, said.fd, place.local, place.config.processes, device)
        session.tell_first({"met": failed})
    way = str(session.next("sums", "the other processes of this worker to make a group").body["sums"])
    if sums is None or way == SHARED:
        return podsums.made(SHARED, session.layout, memory, place.local, place.config.processes, device, None)
    return sums


def _chosen(session: LeaderSession, places: list[Lying]) -> LocalSum:
    devices = [one.device for one in places]
    apart = CPU not in devices and len(set(devices)) == len(devices)
    matrix, numbers = gpus.topology(devices) if apart else (None, [])
    rates = {"host": min(one.host for one in places), "add": min(one.add for one in places)} if apart else {}
    try:
        return choose(Given(devices, session.layout.nbytes, matrix, numbers, **rates), session.place.config.local_sum)
    except ValueError as error:
        sentence = f"spec.workers.localSum is {session.place.config.local_sum}, and {error}"
        raise SessionEnd("refused", sentence) from None


def _met(
    way: str, layout: Layout, memory: PodMemory, fd: int, local: int, processes: int, device: torch.device
) -> tuple[PodSum | None, str]:
    """The sum in a group of all, with its memory taken, or why it cannot be had."""
    try:
        group = podsums.meet(way, fd, local, processes, device)
        return podsums.made(way, layout, memory, local, processes, device, group), ""
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        return None, podsums.first_line(error)
