"""A new run begins: rank 0 gives its values, and one whole checkpoint of step 0 is committed before any push is admitted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psjob.layout.blocks import Layout
from psjob.modes import written
from psjob.protocol.coordinator import actions, events
from psjob.protocol.coordinator.checks import rule_for
from psjob.protocol.coordinator.events import CheckpointFacts, Stream

if TYPE_CHECKING:
    from psjob.protocol.coordinator.recovery import Recovery


class Beginning:
    """Of one recovery."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        # Above every number that an earlier coordinator gave: a shard may still answer a set-up of that one.
        self._setup = recovery.view << 20
        self._asked_of = -1
        """The stream that was asked for the run's first values."""

    def ask(self) -> None:
        """Ask rank 0 for the run's first values, if it waits for that. While one of those before is being committed, it waits."""
        cut, stream = self.recovery.c.cutting.cuts.current, self.recovery.waiting.get(0)
        if stream is None or (cut is not None and cut.committing):
            return
        if self.recovery.state == "fresh" or (self.recovery.initialising and stream.id != self._asked_of):
            self._initialise(stream)

    def _initialise(self, stream: Stream) -> None:
        recovery, c = self.recovery, self.recovery.c
        c.cutting.drop("rank 0 starts again")
        self._asked_of = stream.id
        recovery.tables, recovery.aliases = stream.tables, stream.aliases
        recovery.rule = rule_for(stream.rule, c.job.update_at)
        recovery.lay_out(Layout.of(stream.table))
        recovery.enter("initialising")
        recovery.done, recovery.only, recovery.initial = set(), set(range(c.job.shards)), b""
        self._setup += 1
        table = [row.to_json() for row in stream.table]
        order = {
            "do": "setup", "setup": self._setup, "table": table, "rule": recovery.rule, "view": recovery.view, "mode": written(c.mode),
            "tables": list(recovery.tables),
        }  # fmt: skip
        recovery.order_all(order)
        assignment = list(recovery.assignment)
        body = {"init": True, "view": recovery.view, "clock": 0, "recovery": recovery.recovery, "assignment": assignment}
        c.emit(actions.Welcome(stream.id, body, init=True))

    def gives(self, rank: int, buffers: bytes) -> None:
        """A worker gives the run's first buffers. Only rank 0 does, when it was asked."""
        if rank == 0 and self.recovery.initialising:
            self.recovery.initial = buffers
            self.check()

    def initialised(self, event: events.Initialised) -> None:
        """A shard has all first values of a set-up."""
        if self.recovery.initialising and event.setup == self._setup:
            self.recovery.done.add(event.shard)
            self.check()

    def check(self) -> None:
        """All blocks and rank 0's buffers are here: commit the manifest of step 0 before any push is admitted."""
        recovery, c = self.recovery, self.recovery.c
        whole = recovery.initialising and recovery.done >= recovery.only and recovery.initial
        if whole and c.cutting.cuts.may_begin(c.now):
            c.cutting.begin(still=True)

    def first_committed(self, made: CheckpointFacts) -> None:
        """The manifest of step 0 is there."""
        self.recovery.source = made
        if self.recovery.initialising:
            self.recovery.told = {}
            self.recovery.open_all()
        else:  # a shard came anew meanwhile
            self.recovery.gather()
