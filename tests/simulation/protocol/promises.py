"""What must hold whatever happens, in terms of pushes: nothing acknowledged as durable is lost, nothing counts twice, a snapshot is one.

A block's content is a chain: each update's digest stands on the one before and names every push in it. A push's value is made of what
its worker knew: its cursor and the digests of all blocks that it computed on. So equal digests are equal histories, to the last detail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.protocol.world import World


MOST_ORPHANS = 6
"""Snapshots that may have files in no manifest at one time: one under way, void ones that wait for a busy disk, those of dead processes."""
SUPERSEDED_SECONDS = 12.0
"""A coordinator looks for a higher claim each five seconds; its disk may have other work."""


class Broken(BaseException):
    """A promise does not hold. Nothing that is simulated may catch it."""

    def __init__(self, promise: str, detail: str) -> None:
        super().__init__(f"{promise}: {detail}")
        self.promise = promise


def make_record(clock: int, cursor: int, residual: int, size: int) -> bytes:
    """A resume record of about `size` bytes: `residual` is the clock whose leftovers it holds."""
    return (b"%d %d %d " % (clock, cursor, residual)).ljust(size, b".")


def read_record(blob: bytes) -> tuple[int, int, int]:
    """(clock, cursor, residual) of a record."""
    clock, cursor, residual, *_ = blob[:60].split(b" ")
    return int(clock), int(cursor), int(residual)


class Content(NamedTuple):
    """What a block (or table on a shard) holds. `next` is, by rank, the clock after the newest push that was decided on.

    `before` is the digest of one update ago, which shards keep in sync with a delay.
    """

    digest: int
    updates: int
    next: tuple[int, ...]
    before: int


def first(part: int, workers: int) -> Content:
    """The content of a part of the model at step 0."""
    digest = hash(("first", part)) if isinstance(part, str) else hash((-7, part))
    return Content(digest, 0, (0,) * workers, digest)


def gradient(rank: int, clock: int, cursor: int, part: int, model: int) -> int:
    """The value of a push: `model` stands for all that its worker computed on."""
    return hash((rank, clock, cursor, part, model))


def update(content: Content, pushes: Sequence[tuple[int, int, int]]) -> Content:
    """The content after an update of `pushes` (rank, clock, value), in order."""
    following = list(content.next)
    for rank, clock, _ in pushes:
        following[rank] = max(following[rank], clock + 1)
    return Content(hash((content.digest, *pushes)), content.updates + 1, tuple(following), content.digest)


@dataclass(frozen=True)
class Saved:
    """A manifest as the simulator keeps it."""

    name: str
    term: int
    step: int
    snapshot: int
    final: bool
    mode: str
    writer: str
    parts: Mapping[int, Content]
    versions: Mapping[int, int]
    where: Mapping[int, str]
    """The file in which each part lies."""
    tables: Mapping[int, Any]
    """By shard: its admission table."""
    workers: tuple[Any, ...]
    """By rank, as `WorkerFacts`."""
    records: Mapping[int, bytes]
    initial: bytes
    facts: Any
    files: tuple[str, ...]
    """Every file that it lists."""


class Promises:
    """Hears of everything that matters, and raises Broken."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.told: tuple[int, int] = (-1, -1)
        """(term, step) of the newest checkpoint that anybody was told of,"""
        self.durable: Saved | None = None
        """and what it holds."""
        self.final: Saved | None = None
        self.final_restore_id = self.highest_restore_id = 0
        self.sources: dict[int, float] = {}
        """By term: when its coordinator first continued from a checkpoint."""
        self.zombies: set[str] = set()
        """Manifests that were committed by a process whose successor had continued from another one already."""
        self._superseded: dict[str, float] = {}
        """By coordinator's pod: since when it could have read of its successor's claim."""
        self._met: dict[tuple[str, int], tuple[int, int]] = {}
        """By shard's process and rank: the newest incarnation that was let in there."""
        self.counts: Counter[str] = Counter()
        self._reference: list[dict[int, Content]] = []
        self._batches: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}

    # -- pushes ------------------------------------------------------------------------------------

    def applied(self, shard: str, part: int, before: Content, pushes: Sequence[tuple[int, int, int]], mode: Any) -> None:
        """An update is made on a part of the model."""
        self.counts["updates"] += 1
        following = list(before.next)
        for rank, clock, _ in pushes:
            had = following[rank]
            following[rank] = clock + 1
            if clock < had:
                raise Broken("applied twice", f"{shard}: push {clock} of worker {rank} on part {part}, which holds its clocks below {had}")
            if clock > had:
                raise Broken("lost silently", f"{shard}: push {clock} of worker {rank} on part {part} follows on {had}")
        if len({rank for rank, _, _ in pushes}) < len(pushes) and not mode.decided:
            raise Broken("applied twice", f"{shard}: {pushes} is one update")
        if mode.name in ("sync", "local"):
            self._together(shard, part, before, pushes)

    def met(self, shard: str, rank: int, incarnation: tuple[int, int]) -> None:
        """A shard lets a worker's process in."""
        self._met[shard, rank] = max(incarnation, self._met.get((shard, rank), (0, 0)))

    def admitted(self, shard: str, rank: int, incarnation: tuple[int, int]) -> None:
        """A shard takes a push of a worker's process."""
        newest = self._met.get((shard, rank), (0, 0))
        if incarnation < newest:
            raise Broken("an older process counts", f"{shard} takes a push of worker {rank} {incarnation}, and let {newest} in before")

    def _together(self, shard: str, part: int, before: Content, pushes: Sequence[tuple[int, int, int]]) -> None:
        step = before.updates if not self.world.switched else max(before.next)
        expected = [rank for rank, length in enumerate(self.world.plan.steps) if length > step]
        if [(rank, clock) for rank, clock, _ in pushes] != [(rank, step) for rank in expected]:
            raise Broken(
                "a step with other pushes",
                f"{shard}: step {step} of part {part} is made of {[p[:2] for p in pushes]}, not of ranks {expected}",
            )

    # -- checkpoints -------------------------------------------------------------------------------

    def committed(self, saved: Saved, writer: Any) -> None:
        """A manifest was renamed into place: is it one consistent snapshot?"""
        self.counts["commits"] += 1
        newer = [term for term in self.sources if term > saved.term]
        if newer:
            self.zombies.add(saved.name)
        if (saved.facts.request or 0) > self.world.planner.request:
            raise Broken("an answer without a request", f"snapshot {saved.snapshot} answers {saved.facts.request}, nobody has asked for it")
        self._one_snapshot(saved)

    def _one_snapshot(self, saved: Saved) -> None:
        world = self.world
        parts = set(world.parts())
        if set(saved.parts) != parts:
            raise Broken("not one snapshot", f"snapshot {saved.snapshot} holds parts {sorted(saved.parts)}, the job has {sorted(parts)}")
        opened = self._opened(saved)
        for part, content in saved.parts.items():
            for rank, clock in enumerate(worker.clock for worker in saved.workers):
                if content.next[rank] > clock + ((rank, part) in opened):
                    raise Broken(
                        "not one snapshot",
                        f"snapshot {saved.snapshot}: part {part} has worker {rank}'s clocks below {content.next[rank]}, it is at {clock}",
                    )
        if saved.mode in ("sync", "local") and not world.switched:
            wanted = self.reference(saved.step)
            for part, content in saved.parts.items():
                if content != wanted[part]:
                    raise Broken(
                        "not the undisturbed history",
                        f"snapshot {saved.snapshot} at step {saved.step}: part {part} is {content}, expected {wanted[part]}",
                    )
        else:
            for rank in range(len(saved.workers)):
                held = {part: content.next[rank] - ((rank, part) in opened) for part, content in saved.parts.items()}
                if len(set(held.values())) > 1:
                    raise Broken("not one snapshot", f"snapshot {saved.snapshot}: of worker {rank} the parts hold {held}")
        for rank, blob in saved.records.items():
            clock, at = read_record(blob)[0], saved.workers[rank].clock
            if clock > at or (clock != at and saved.mode in ("sync", "local", "async", "bounded") and blob != saved.initial):
                raise Broken("not one snapshot", f"snapshot {saved.snapshot} is of clock {at}, worker {rank}'s record of {clock}")

    def _opened(self, saved: Saved) -> set[tuple[int, int]]:
        """(rank, part) of pushes of an open clock: a worker died in the middle of it, and the table tells which parts have it."""
        rows = [(shard, int(rank), row["open"]) for shard, table in saved.tables.items() for rank, row in table.items() if row["open"]]
        return {(rank, self.world.owned(shard)[position]) for shard, rank, positions in rows for position in positions}

    def tell(self, term: int, step: int, saved: Saved | None) -> None:
        """Somebody outside was told that this checkpoint is durable."""
        if (term, step) < self.told:
            raise Broken("status went back", f"the checkpoint is said to be {(term, step)}, it was {self.told}")
        if saved is not None:
            answered = saved.facts.request or 0
            if answered < self.counts["answered"]:
                raise Broken("an answer is taken back", f"{saved.name} answers {answered}, it was {self.counts['answered']}")
            self.counts["answered"] = answered
            self.counts["answered before the end"] += answered > 0 and not saved.final
        if (term, step) > self.told and saved is not None:
            self.durable = saved
        self.told = (term, step)

    def found(self, saved: Saved, term: int) -> None:
        """A coordinator finds a checkpoint."""
        if saved.final and self.final is None:
            self.finished(saved, max(term << 20, self.highest_restore_id))  # who wrote it may have crashed before it could say so

    def chosen(self, saved: Saved, term: int, by: str) -> None:
        """A coordinator continues from a checkpoint."""
        self.sources.setdefault(term, self.world.kernel.now)
        if saved.name in self.zombies:
            raise Broken("a zombie's commit was adopted", f"{by} continues from {saved.name} of {saved.writer}")
        durable = self.durable
        if durable is not None:
            for part, content in durable.parts.items():
                for rank, clock in enumerate(content.next):
                    if saved.parts[part].next[rank] < clock:
                        raise Broken("a durable push is lost",
                            f"{by} continues from {saved.name}: part {part} has {saved.parts[part].next[rank]} of worker {rank}, "
                                     f"{durable.name} had {clock}")  # fmt: skip

    def finished(self, saved: Saved, restore_id: int) -> None:
        """The final manifest is there."""
        self.final, self.final_restore_id = saved, restore_id
        world = self.world
        for rank, length in enumerate(world.plan.steps):
            clock = saved.workers[rank].clock if saved.workers[rank].left is None else saved.workers[rank].left
            if world.plan.policy == "AllWorkers" and clock != length:
                raise Broken("a step is missing", f"the final checkpoint has {clock} steps of worker {rank}, which made {length}")

    def opened(self, shard: Any, restore_id: int) -> None:
        """A shard begins to serve."""
        self.highest_restore_id = max(self.highest_restore_id, restore_id)
        if self.final is not None and restore_id > self.final_restore_id:
            raise Broken("a finished job trains again", f"{shard.pod} serves restore_id {restore_id} after the final checkpoint")

    def stepped(self, worker: Any) -> None:
        """A worker has computed a step."""
        self.counts["steps"] += 1

    def resumed(self, worker: Any, record: bytes, residual: bool) -> None:
        """A worker has put a record back; with `residual` also what its pushes had left out."""
        clock, cursor, _ = read_record(record)
        other = cursor != clock and not self.world.switched  # before a switch a crash may have taken an older record to a later clock
        if worker.mode.steady and (clock != worker.machine.clock or other):
            raise Broken(
                "a worker continues elsewhere",
                f"{worker.pod} is at clock {worker.machine.clock} with the record of {clock}, batch {cursor}",
            )
        if residual and clock != worker.machine.clock and worker.machine.clock > 0:
            raise Broken(
                "a residual counts twice", f"{worker.pod} takes what pushes before {clock} left out at clock {worker.machine.clock}"
            )

    def complete(self) -> None:
        """The job is over."""
        saved = self.final
        if saved is None:
            raise Broken("complete without an end", "shard 0 ended well and no final checkpoint was committed")

    def superseded(self, shard: Any, claimed: int) -> None:
        """A coordinator whose successor has claimed a higher term ends, wherever it can read that."""
        volume, now = self.world.volume, self.world.kernel.now
        hindered = shard.frozen or not shard.up or volume.slow or volume.ill or shard.coordinator.machine.state.term >= claimed
        if not shard.alive or hindered:
            self._superseded.pop(shard.pod, None)
        elif now - self._superseded.setdefault(shard.pod, now) > SUPERSEDED_SECONDS:
            raise Broken("a superseded coordinator stays", f"{shard.pod} lives on, and term {claimed} is claimed")

    def tidy(self) -> None:
        """Files of snapshots that came to nothing do not pile up."""
        volume = self.world.volume
        if volume.stays or len(volume.files) < MOST_ORPHANS * self.world.plan.shards:
            return
        kept = {name for file in volume.files.values() if isinstance(file.content, Saved) for name in file.content.files}
        snapshots = {name.split("-")[1] for name in volume.files if name[0] == "v" and name not in kept and not name.endswith(".tmp")}
        if len(snapshots) > MOST_ORPHANS:
            raise Broken("files pile up", f"files of the snapshots {sorted(snapshots)} are in no manifest")

    # -- the undisturbed history -------------------------------------------------------------------

    def reference(self, step: int) -> dict[int, Content]:
        """In sync: what every part holds after `step` steps that nothing disturbed."""
        plan, parts = self.world.plan, self.world.parts()
        if not self._reference:
            self._reference.append({part: first(part, plan.workers) for part in parts})
        while len(self._reference) <= step:
            at, held = len(self._reference) - 1, self._reference[-1]
            knew = self._reference[max(0, at - self.world.mode_of(plan.mode).delay)]
            model = hash(tuple(knew[part].digest for part in parts))
            ranks = [rank for rank, length in enumerate(plan.steps) if length > at]
            self._reference.append(
                {
                    part: update(held[part], [(rank, at, gradient(rank, at, at, part, model)) for rank in ranks]) if ranks else held[part]
                    for part in parts
                }
            )
        return self._reference[step]
