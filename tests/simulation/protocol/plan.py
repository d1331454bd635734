"""What a seed stands for: a job, a world, and the faults that come over it. Plain values: a part can be dropped and the rest replayed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.simulation.protocol import faults
from tests.simulation.protocol.faults import MEGABIT, Fault

MODES = ("sync", "async", "bounded", "backup", "softsync", "threshold", "local", "local-quorum", "local-async")
DELAYED = ("sync-delay", "async-delay", "bounded-delay")
"""Modes in which pushes are under way while a worker computes."""
CRASHING = "crashing"
"""Stands for a mode: see `draw`."""
PHASES = ("gathering", "restoring", "initialising", "training", "snapshot", "writing", "committing", "ending", "finished")
"""Where a job can stand when a fault comes."""


@dataclass(frozen=True)
class Plan:
    """A run. Times are virtual seconds, sizes bytes."""

    seed: int
    mode: str
    shards: int
    workers: int
    steps: tuple[int, ...]
    """By rank: how many steps its script makes."""
    blocks: int
    tables: int
    every: int | None
    """Checkpoint every so many steps,"""
    interval: float | None
    """and every so many seconds."""
    shard_timeout: float
    step_seconds: float
    delay: float
    rate: float
    disk_rate: float
    disk_delay: float
    shard_bytes: int
    """What a shard writes at a snapshot."""
    record_bytes: int
    policy: str
    clips: bool
    """In sync without tables: every step is clipped by the norm of all blocks."""
    residual: bool
    """Pushes leave something out that the next ones carry (error feedback)."""
    starts: float
    """Seconds from a process's start until it speaks."""
    faults: tuple[Fault, ...]

    @property
    def patience(self) -> float:
        """Seconds after the last fault in which the job must be complete: some snapshots, restores and restarts."""
        return 240.0 + 12 * self.shard_bytes / self.disk_rate + 40 * self.record_bytes * self.workers / self.rate

    def words(self) -> str:
        """The plan in lines that a person reads."""
        head = (
            f"seed {self.seed}: mode {self.mode}, {self.shards} shards, {self.workers} workers, steps {list(self.steps)}, "
            f"{self.blocks} blocks, "
            f"{self.tables} tables, checkpoint every {self.every} steps and {self.interval} s, policy {self.policy}, "
            f"{'clipped, ' if self.clips else ''}"
            f"a shard's snapshot {self.shard_bytes} B at {self.disk_rate:.0f} B/s, record {self.record_bytes} B"
        )
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def draw(seed: int, mode: str | None = None) -> Plan:
    """The plan of a seed, in a mode (None: its own). CRASHING: in sync, and shards' processes crash while their memory stays."""
    if mode == CRASHING:
        return _crashing(seed)
    if mode is None and seed % 13 == 6:
        mode = DELAYED[seed // 13 % len(DELAYED)]
    random = Random(f"plan {seed}")
    chosen = random.choice(MODES)
    mode = mode or chosen
    shards, workers = random.randint(3, 6), random.randint(2, 8)
    steps = random.randint(8, 20)
    ragged = random.random() < 0.25
    lengths = tuple(random.randint(4, steps) if ragged and random.random() < 0.5 else steps for _ in range(workers))
    slow_disk = random.random() < 0.2
    large = random.random() < 0.15
    minutes = random.random() < 0.02
    """Writing a snapshot takes more than one."""
    step_seconds = random.choice((0.02, 0.1, 0.4))
    count = random.choice((0, 1, 1, 2, 2, 3, 4, 6))
    until = 1.0 + steps * step_seconds * 2 + random.uniform(0.0, 6.0)
    every = random.choice((None, 3, 5, 5))
    blocks, tables = random.randint(max(1, shards - 1), shards + 2), 1 if random.random() < 0.25 else 0
    return Plan(
        seed=seed, mode=mode, shards=shards, workers=workers, steps=lengths,
        blocks=blocks, tables=0 if mode in DELAYED else tables,
        every=every, interval=random.choice((0.5, 2.0, 5.0)) if every is None or random.random() < 0.4 else None,
        shard_timeout=random.choice((2.0, 5.0, 10.0)), step_seconds=step_seconds, delay=random.choice((0.0002, 0.002, 0.02)),
        rate=MEGABIT if random.random() < 0.04 else 1e8,
        disk_rate=1e8 if minutes else 1e6 if slow_disk else 1e8, disk_delay=random.choice((0.001, 0.01, 0.05)),
        shard_bytes=8_000_000_000 if minutes else random.choice((100_000, 10_000_000)) if slow_disk else 1_000_000,
        record_bytes=400_000 if large else random.choice((300, 300, 80_000)),
        policy="FirstWorker" if random.random() < 0.15 else "AllWorkers",
        clips=mode in ("sync", "sync-delay") and not tables and seed % 4 != 0,
        residual=random.random() < 0.3,
        starts=random.choice((0.2, 1.0, 3.0)),
        faults=tuple(faults.draw(random, shards, workers, until, PHASES) for _ in range(count)),
    )  # fmt: skip


def _crashing(seed: int) -> Plan:
    """In half of them nothing else happens; in some, shard 0 crashes when workers have left."""
    plan, random = draw(seed, "sync-delay" if seed % 11 == 5 else "sync"), Random(f"crashes {seed}")
    until = 1.0 + max(plan.steps) * plan.step_seconds * 2
    crashes = [faults.draw_crash(random, plan.shards, until, PHASES) for _ in range(random.choice((1, 2, 4)))]
    steps = plan.steps
    if random.random() < 0.25:
        steps = tuple(random.randint(4, max(plan.steps)) for _ in plan.steps)
        crashes.append(Fault("crash", random.uniform(0.3, 3.0), 1.0, ("shard", 0), ("shard", 0), random.random(), "ending"))
    others = plan.faults if random.random() < 0.5 else ()
    return replace(plan, tables=0, clips=random.random() < 0.4, steps=steps, faults=(*others, *crashes))
