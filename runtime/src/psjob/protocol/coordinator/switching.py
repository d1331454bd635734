"""What the mounted config asks of a running job: another mode, to which all go over at a checkpoint, or a checkpoint now.

The checkpoint is an ordinary one, of the mode that runs. Every shard reads it back in the other mode and every worker begins again
from it, as after a lost shard. So whatever dies on the way, all run one mode or the other afterwards. A restarted coordinator
takes the config's mode where the newest checkpoint allows it, else that of the checkpoint.

A checkpoint answers the request that was seen before it was begun, and its manifest says which. So a coordinator that starts again
knows what is answered; for any other number it asks anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from psjob import contract, modes
from psjob.modes import Bounded, ServedMode, written
from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.events import CheckpointFacts
from psjob.protocol.coordinator.schedule import Cut

if TYPE_CHECKING:
    from psjob.protocol.coordinator.machine import Coordinator

LOOK_SECONDS = 2.0


class Switching:
    """`wish` and `request` are the mode and the checkpoint.request that the config has named last."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.c = coordinator
        self.wish = coordinator.mode
        self.request = coordinator.job.request
        self._looked = 0.0
        self._asked = False

    def begin(self, made: CheckpointFacts) -> None:
        """This coordinator goes on from a checkpoint of its own run, or of one that this run resumes.

        The config is read again before a request is compared: what this process began with may be older than the checkpoint.
        """
        self.request = made.request if made.folder == self.c.job.folder else None
        allowed = contract.GOES_ON.get(made.mode)
        if allowed is not None and (self.wish.name not in allowed or self._fixed(made.rule)):
            self._take(modes.read(made.mode))

    def tick(self, now: float) -> None:
        """Read the config from time to time; where another mode is asked for, ask for a checkpoint."""
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        if not self._asked:
            self._asked = True
            self.c.emit(actions.ReadWish())
        self._request()

    def wished(self, event: events.ModeWished) -> None:
        """What the config names now."""
        self._asked = False
        if event.problem is not None:
            self.c.log("warning", event.problem)
        if event.request is not None and event.request != self.request:
            self.request = event.request
            if self.c.job.checkpoints:
                self.c.cutting.cuts.ask(self.c.now)
        if event.mode is None or event.mode == self.wish:
            return
        self.wish = event.mode
        if event.mode != self.c.mode and self.next() is None:
            why = self._fixed(self.c.recovery.rule) or "it is fixed while a job runs"
            self.c.log("warning", f"training.mode {written(event.mode)} is asked for; the job stays {written(self.c.mode)}: {why}")
        self._request()

    def _request(self) -> None:
        if self.c.recovery.open and self.c.cutting.cuts.current is None and self.next() is not None:
            self.c.cutting.cuts.requested = True

    def committed(self, cut: Cut, made: CheckpointFacts) -> None:
        """A checkpoint is on disk: go over to the next mode, if there is one."""
        mode = self.next()
        if mode is None or cut.final or cut.stop or not self.c.recovery.open:
            return
        before = written(self.c.mode)
        self._take(mode)
        self.c.recovery.rewind_all(f"from step {made.step} on the mode is {written(mode)}, it was {before}")

    def next(self) -> ServedMode | None:
        """The mode to go over to; None where the one that runs is asked for, or nothing can be done.

        From async to sync by way of bounded: its checkpoints bring all workers to one step, and nobody skips a batch.
        """
        return None if self._fixed(self.c.recovery.rule) else following(self.c.mode, self.wish)

    def _fixed(self, rule: str) -> str | None:
        """What goes with the mode that runs and with no other; None: nothing."""
        job = self.c.job
        if rule == "reduce":
            return "the workers' optimizer has no rule on the shards"
        if job.update_rule is not None:
            return f"training.updateRule {job.update_rule} goes with mode {self.c.mode.name}"
        if job.reduction != "mean":
            return f"training.reduction {job.reduction} goes with mode {self.c.mode.name}"
        return None

    def _take(self, mode: ServedMode) -> None:
        self.c.mode = mode
        self.c.cutting.cuts.follow(mode.marks(), mode.ahead)


def following(runs: ServedMode, wish: ServedMode) -> ServedMode | None:
    """The mode that comes after `runs` on the way to `wish`; None: there is none, or no way."""
    if wish == runs or not {runs.name, wish.name} <= set(contract.GOES_ON):
        return None
    return wish if wish.name in contract.GOES_ON[runs.name] else Bounded()
