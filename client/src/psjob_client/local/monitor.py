"""Polls the status ports of a run: who serves, who gives no answer, how far training is, and the counters of every attempt.

`poll_shards` asks each shard in its own rhythm; `Watch` is everything that was heard. A shard is unresponsive after
`shards.progressDeadlineSeconds` without a good answer and three misses in a row.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from psjob_client.local.process import ChildProcess, Listening
from psjob_client.local.status import ask_status, is_healthy, numbers, part

LONGEST_TRY = 2.0
"""Seconds for one question to a status port; less where that is short."""
STARTUP = 300.0
"""Seconds from the start of a shard to its first good answer, while it imports; it gives good answers while it restores."""
POLL_SECONDS, CLOSE_POLL_SECONDS = 0.5, 0.1
"""Between two rounds with a shard; the second while a recovery is measured."""
MOVING = 2.0
"""Seconds without news of bytes after which none are moved."""
LEAST_MISSES = 3
"""Unanswered questions in a row before silence counts: a laptop that slept has a long silence, but only one miss."""


Current = Callable[[int], "ChildProcess | None"]
"""Of a shard, by index: its running process."""


async def poll_shards(watch: Watch, shards: Sequence[Listening], current: Current, close: Callable[[], bool], wake: asyncio.Event) -> None:
    """Ask every shard again and again, each in its own rhythm: one that hangs holds up no other.

    `close`: ask more often now. `wake` is set when a shard becomes ready or silent, or names a worker that hangs.
    """
    async with asyncio.TaskGroup() as group:
        for index, shard in enumerate(shards):
            group.create_task(_poll(watch, index, shard, current, close, wake))


@dataclass
class Pulse:
    """What was heard of one process."""

    good: float | None = None
    misses: int = 0
    serving: bool = False


@dataclass
class Watch:
    """Everything that was heard in this run."""

    progress_deadline: float
    questions: bytes
    """The run's key of that name (contract.KEYS)."""
    told: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    """(shard, attempt) -> the last that it said."""
    progress: Mapping[str, Any] | None = None
    """The last of shard 0 that holds the coordinator."""
    progress_at: float | None = None
    manifests: set[tuple[int, int]] = field(default_factory=set)
    """(view, step) of the committed checkpoints that were seen."""
    hearers: list[Callable[[int, Mapping[str, Any], float], None]] = field(default_factory=list)
    """Each is called with a shard, what it said, and when."""
    began_at: int | None = None
    """The step at which this run began; of one that goes on from another run, as first heard."""
    _pulses: dict[str, Pulse] = field(default_factory=dict)
    _moved_at: float = 0.0

    @property
    def hung(self) -> bool:
        """Does shard 0 name workers that hang?"""
        return bool(self.coordinator.get("hung"))

    async def ask(self, child: ChildProcess, shard: Listening) -> None:
        """One round with one shard: is it well, and what does it say."""
        pulse = self._pulses.setdefault(child.uid, Pulse())
        if not await is_healthy(shard, self._patience):
            pulse.misses += 1
            return
        pulse.good, pulse.misses = time.time(), 0
        await self.look(child, shard)

    async def look(self, child: ChildProcess, shard: Listening) -> Mapping[str, Any] | None:
        """What a shard says right now, taken note of; None without a good answer."""
        told = await ask_status(shard, self.questions, self._patience)
        if told is not None and child.running:
            self.hear(child, told)
        return told

    def hear(self, child: ChildProcess, told: Mapping[str, Any]) -> None:
        """Take note of what a shard said, on its status port or at its end."""
        if numbers(told, "attempt") not in (0, child.number):
            return  # The port's last holder: its answer was on the way while it was replaced.
        pulse = self._pulses.setdefault(child.uid, Pulse())
        pulse.serving = told.get("state") in ("serving", "finishing", "finished")
        # It has started: from now on silence counts, though nobody has asked for its heartbeat yet.
        pulse.good = pulse.good or time.time()
        before = self.told.get((child.index, child.number))
        if before is not None and before.get("transfer") != told.get("transfer"):
            self._moved_at = time.time()
        self.told[child.index, child.number] = told
        coordinator = part(told, "coordinator")
        if child.index == 0 and coordinator:
            self.progress, self.progress_at = told, time.time()
            self.began_at = self.step if self.began_at is None else self.began_at
            checkpoint = part(coordinator, "checkpoint")
            if checkpoint:
                self.manifests.add((int(numbers(checkpoint, "view")), int(numbers(checkpoint, "step"))))
        for hear in self.hearers:
            hear(child.index, told, time.time())

    def ended(self, child: ChildProcess, message: str) -> None:
        """A process has ended; a shard's last words are its status at the end."""
        if child.role != "shard":
            return
        try:
            last = json.loads(message)
        except (ValueError, RecursionError):
            return
        last = last.get("status") if isinstance(last, dict) else None
        if isinstance(last, dict):
            before = self.told.get((child.index, child.number), {})
            # Cut to 2 KB, the last words leave out what did not fit.
            merged = {**before, **last, "counters": {**part(before, "counters"), **part(last, "counters")}}
            if child.index == 0:
                merged["coordinator"] = {**part(before, "coordinator"), **part(last, "coordinator")}
            self.hear(child, merged)

    def ready(self, child: ChildProcess) -> bool:
        """It serves."""
        return self._pulses.setdefault(child.uid, Pulse()).serving

    def unresponsive(self, child: ChildProcess) -> bool:
        """No good answer for so long; before the first one, for as long as a start may take."""
        if child.role != "shard":
            return False
        pulse = self._pulses.setdefault(child.uid, Pulse())
        silent = time.time() - (child.created if pulse.good is None else pulse.good)
        return pulse.misses >= LEAST_MISSES and silent > (STARTUP if pulse.good is None else self.progress_deadline)

    @property
    def _patience(self) -> float:
        return min(LONGEST_TRY, self.progress_deadline / (LEAST_MISSES + 1))

    @property
    def coordinator(self) -> Mapping[str, Any]:
        """What the coordinator last said; empty before."""
        return part(self.progress, "coordinator")

    @property
    def checkpoints(self) -> int:
        """Committed checkpoints above step 0 that were seen."""
        return sum(step > 0 for _, step in self.manifests)

    @property
    def step(self) -> int:
        """Lowest complete clock, as last heard."""
        return int(numbers(self.coordinator, "step"))

    @property
    def made(self) -> int:
        """Steps that the job has made in this run, as last heard."""
        return self.step - (self.began_at or 0)

    @property
    def unsaved(self) -> bool:
        """Has the job made steps that no committed checkpoint holds, as last heard?"""
        saved = numbers(self.coordinator, "checkpoint", "step") if self.coordinator.get("checkpoint") else self.began_at or 0
        return self.step > saved

    @property
    def moving(self) -> bool:
        """Are bytes of a checkpoint being written or read? As heard in the last seconds."""
        return time.time() - self._moved_at < MOVING

    def total(self, counter: str) -> int:
        """A counter over all shards and attempts, as last heard of each."""
        return sum(int(numbers(told, "counters", counter)) for told in self.told.values())


async def _poll(
    watch: Watch,
    index: int,
    shard: Listening,
    current: Callable[[int], ChildProcess | None],
    close: Callable[[], bool],
    wake: asyncio.Event,
) -> None:
    while True:
        child = current(index)
        if child is not None:
            before = watch.ready(child), watch.unresponsive(child)
            await watch.ask(child, shard)
            if before != (watch.ready(child), watch.unresponsive(child)) or watch.hung:
                wake.set()
        await asyncio.sleep(CLOSE_POLL_SECONDS if close() or child is None else POLL_SECONDS)
