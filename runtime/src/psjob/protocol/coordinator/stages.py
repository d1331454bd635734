"""How each stage of a model stands: its workers, their step, how much they wait and for whom, and their memory."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from psjob.protocol.coordinator.job import JobFacts
from psjob.protocol.coordinator.members import Member, Members, State
from psjob.protocol.coordinator.signs import Measured


class StageReport:
    """Of a job; without stages it tells nothing. It is read while another thread writes."""

    def __init__(self, job: JobFacts, members: Members) -> None:
        self._job, self._members = job, members
        self._told: dict[int, tuple[tuple[int, int], float, Measured]] = {}
        """By rank: which process told it, and when."""

    def measured(self, member: Member, told: Measured, now: float) -> None:
        """A worker tells of itself."""
        self._told[member.rank] = member.incarnation, now, told

    def told(self, now: float) -> list[dict[str, Any]] | None:
        """For the status port (contract.STATUS_KEYS); None without stages."""
        if not self._job.stages:
            return None
        names = self._job.stage_names
        return [
            {"index": stage, "name": names[stage] if names else str(stage)} | self._stage([self._members[rank] for rank in ranks], now)
            for stage, ranks in enumerate(self._job.stages.all())
        ]

    def waiting(self, now: float) -> str | None:
        """A sentence on the worker that the others wait for: of several waits the longest whose worker does not wait itself."""
        if not self._job.stages:
            return None
        waits = {rank: wait for rank in self._members.all if (wait := self._wait(self._members[rank], now)) is not None}
        if not waits:
            return None
        rank = max(waits, key=lambda one: (waits[one][0].awaited not in waits, waits[one][1]))
        return f"worker {rank} (stage {self._job.stages.of(rank)}) waits for {_sentence(*waits[rank])}"

    def _stage(self, members: list[Member], now: float) -> dict[str, Any]:
        known = [(member, told) for member in members if (told := self._of(member)) is not None]
        waits = [wait for member in members if (wait := self._wait(member, now)) is not None]
        longest = max(waits, key=lambda wait: wait[1], default=None)
        idle = [told.idle for _, (_, told) in known if told.idle is not None]
        return {
            "desired": len(members),
            "ready": sum(member.state is State.LEFT or (member.state is State.JOINED and member.here) for member in members),
            "step": min(member.clock for member in members),
            "delay": self._delay([told.delay for _, (_, told) in known if told.delay is not None]),
            "idle": fmean(idle) if idle else None,
            "rssBytes": _most(told.resident for _, (_, told) in known),
            "peakBytes": _most(told.peak for _, (_, told) in known),
            "devicePeakBytes": _most(told.device_peak for _, (_, told) in known),
            "waiting": None if longest is None else _sentence(*longest),
        }

    def _delay(self, told: list[float]) -> float | None:
        """Of what a stage's workers have measured. In a flush an update counts gradients of one version alone, the one that it changes."""
        if self._job.flushes and self._job.mode.ahead == 0:
            return 0.0
        return fmean(told) if told else None

    def _of(self, member: Member) -> tuple[float, Measured] | None:
        """What the process that a worker has now told last, and when."""
        found = self._told.get(member.rank)
        return None if found is None or found[0] != member.incarnation else found[1:]

    def _wait(self, member: Member, now: float) -> tuple[Measured, float] | None:
        """What a worker waits for, and how long already."""
        found = self._of(member)
        if found is None or found[1].waits is None or not member.here or member.state is not State.JOINED:
            return None
        return found[1], found[1].seconds + max(0.0, now - found[0])


def _sentence(told: Measured, seconds: float) -> str:
    return f"{told.waits}, for {seconds:.0f} s"


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)
