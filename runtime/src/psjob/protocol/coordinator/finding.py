"""Which checkpoint to go on from. The view is claimed before one is looked for; one that cannot be read is passed over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psjob import contract
from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.events import CheckpointFacts

if TYPE_CHECKING:
    from psjob.protocol.coordinator.recovery import Recovery

AGAIN_SECONDS = 1.0
"""After a restore that a shard could not read."""
CLAIM_AGAIN_SECONDS = 2.0
"""After a claim for which the volume had no room."""
LOST_AGAIN_SECONDS = 5.0
"""After a look that failed, or that met no checkpoint which could be read though none is known to be damaged."""
TRIES = 3
"""So often a checkpoint is tried that could not be read, though no file is known to be damaged."""


class Finding:
    """Of one recovery. `claimed`: the folder is this process's in the present view."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.claimed = False
        self.waits_for: str | None = None
        """Why the view cannot be claimed, or nothing be read."""
        self.looking = False
        """Is the newest checkpoint wanted, and not found yet?"""
        self._asked: int | None = None
        self._number = 0
        self._records = False
        self._claim_at: float | None = None
        self._gather_at: float | None = None
        self._look_at: float | None = None
        self._damaged: dict[str, str] = {}
        """By manifest's name, why it is not taken any more."""
        self._failed: dict[str, int] = {}
        self._from: tuple[int, int] | None = None
        """View and step of an earlier coordinator's checkpoint that this one has gone on from."""

    def tick(self, now: float) -> None:
        """Try again what failed."""
        if self._claim_at is not None and now >= self._claim_at:
            self.claim()
        if self._gather_at is not None and now >= self._gather_at:
            self.recovery.gather()
        if self._look_at is not None and now >= self._look_at:
            self.look()

    def stop(self) -> None:
        """What was looked for is not wanted any more."""
        self._asked = self._gather_at = self._look_at = None
        self.looking = False

    # -- claiming ------------------------------------------------------------------------------

    def claim(self) -> None:
        """Claim the present view."""
        self._claim_at, self.claimed = None, False
        self.recovery.c.emit(actions.ClaimView(self.recovery.view))

    def view_claimed(self, event: events.ViewClaimed) -> None:
        """The view is this process's."""
        recovery = self.recovery
        if event.view != recovery.view:
            return
        if self.waits_for is not None:
            self.waits_for = recovery.c.progress.checkpoint_problem = None
        self.claimed = True
        if recovery.state == "reading":
            self.look()
        elif recovery.state == "electing" and self._gather_at is None:
            recovery.gather()
        elif self.looking and self._asked is None:
            self.look()

    def unclaimed(self, event: events.ViewUnclaimed) -> None:
        """The claim could not be written: on a full volume that is waited for."""
        recovery, c = self.recovery, self.recovery.c
        if event.view != recovery.view:
            return
        if not event.full:
            c.emit(actions.Leave(1, event.why))
            return
        self.waits_for = f"{event.why}; this run continues once there is room for a small file"
        c.progress.checkpoint_problem = self.waits_for
        self._claim_at = c.now + CLAIM_AGAIN_SECONDS

    # -- reading -------------------------------------------------------------------------------

    def look(self) -> None:
        """Look for the newest checkpoint, as soon as the view is claimed."""
        recovery = self.recovery
        self._asked = self._look_at = None
        self.looking = True
        if not self.claimed:
            return
        self._number += 1
        self._asked = self._number
        self._records = recovery.state != "reading" and recovery.reads_records()
        passed = frozenset(self._damaged) | {name for name, tries in self._failed.items() if tries >= TRIES}
        recovery.c.emit(actions.ReadNewest(self._number, recovery.view, passed, self._records))

    def newest(self, event: events.NewestRead) -> None:
        """What was found."""
        recovery, c = self.recovery, self.recovery.c
        if event.number != self._asked:
            return
        self._asked = None
        if not self.claimed:  # the view rose meanwhile
            return
        self.looking, self.waits_for = False, None
        for problem in event.problems:
            c.log("warning", problem)
        if event.problems:
            c.progress.checkpoint_problem = event.problems[0]
        if event.failed:
            self._later(event.problems[0] if event.problems else "the folder cannot be read")
            return
        found, why = event.found, "; ".join((*self._damaged.values(), *event.problems))
        foreign = c.job.resume_from and (found is None or found.folder != c.job.folder)
        if foreign and (refused := self._refuse(found, why)) is not None:
            if recovery.source is None:
                c.emit(actions.Leave(contract.EXIT_REFUSED, refused))
                return
            found = None
        if recovery.state == "reading":
            self._begin(found, why)
            return
        if found is None:
            self._none(why)
        elif self._comes_late(found):
            self._damaged[found.name] = f"checkpoint {found.name} is passed over: its coordinator had a successor when it was committed"
            self.look()
        elif found.final and found.folder == c.job.folder:  # an earlier coordinator committed it after this one's first look
            self._over(found)
            recovery.begun()
        elif recovery.reads_records() and not self._records:
            self.look()
        else:
            recovery.restore_from(found, event.records or {}, event.initial)

    def _comes_late(self, found: CheckpointFacts) -> bool:
        """Did an earlier coordinator commit it after this one had gone on from another? What it holds is undone on other shards."""
        job = self.recovery.c.job
        if found.folder != job.folder or found.view >= job.view:
            return False
        self._from = self._from or (found.view, found.step)
        return (found.view, found.step) > self._from

    def _begin(self, found: CheckpointFacts | None, why: str) -> None:
        """The first look: it says what the job is."""
        recovery, c = self.recovery, self.recovery.c
        if found is None and c.job.must_find:
            said = f" ({why})" if why else ""
            recovery.leave_lost(f"no valid manifest in {c.job.folder}, though this run had a checkpoint{said}")
            return
        c.emit(actions.SweepOrphans(recovery.view, c.cutting.cuts.number + 1))
        recovery.source = found
        if found is not None:
            c.switching.begin(found)
            c.progress.rewound(found.step)
            if found.folder == c.job.folder:
                if found.final:
                    self._over(found)
                else:
                    c.adopt(found)
        recovery.begun()

    def _over(self, found: CheckpointFacts) -> None:
        """The run has ended."""
        c = self.recovery.c
        c.adopt(found)
        self.recovery.finish()
        c.members.rewound(found.workers, {})
        c.completion.already_over()

    def _later(self, why: str) -> None:
        """A disk that cannot be read now is asked again."""
        self.looking, self.waits_for = True, f"no checkpoint can be looked for: {why}"
        self._look_at = self.recovery.c.now + LOST_AGAIN_SECONDS

    def _none(self, why: str) -> None:
        if self._failed:  # a volume that is away for a while takes all of them away
            self._failed.clear()
            self._later(why)
            return
        said = f" ({why})" if why else ""
        self.recovery.leave_lost(f"no checkpoint of this run in {self.recovery.c.job.folder} can be read{said}")

    def unreadable(self, source: CheckpointFacts, event: events.Unrestored) -> None:
        """A shard could not read `source`: where a file is damaged the one before counts, else it is tried again."""
        c = self.recovery.c
        if event.damaged:
            self._damaged[source.name] = f"checkpoint {source.name} is passed over: {event.why}"
            c.progress.checkpoint_problem = self._damaged[source.name]
        else:
            self._failed[source.name] = self._failed.get(source.name, 0) + 1
            c.progress.checkpoint_problem = event.why
        c.log("warning", f"restore failed: {event.why}")
        self._gather_at = c.now + AGAIN_SECONDS

    def is_good(self, made: CheckpointFacts) -> None:
        """A manifest of that name was written anew."""
        self._damaged.pop(made.name, None)
        self._failed.pop(made.name, None)

    def _refuse(self, made: CheckpointFacts | None, why: str) -> str | None:
        """Why this run cannot begin from what `checkpoint.resumeFrom` names; None where it can."""
        job = self.recovery.c.job
        if made is None:
            return f"checkpoint.resumeFrom: no valid manifest in {job.resume_from}" + (f" ({why})" if why else "")
        if made.final:
            return f"checkpoint.resumeFrom: the run in {made.folder} is complete; load its final.safetensors in the script instead"
        if len(made.workers) != job.workers:
            return (
                f"checkpoint.resumeFrom: that run had {len(made.workers)} workers, this job has {job.workers}; "
                "set workers.replicas to the same number (another number of shards is fine)"
            )
        modes = contract.GOES_ON.get(made.mode, (made.mode,))
        mode = self.recovery.c.mode.name
        if mode not in modes:
            return f"checkpoint.resumeFrom: that run was {made.mode}, this job is {mode}; training.mode may be {' or '.join(modes)}"
        return None
