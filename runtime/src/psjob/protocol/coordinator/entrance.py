"""Whom a hello lets in: the mode, the restores and the model of a worker must be the job's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psjob.layout.blocks import TensorSpec
from psjob.modes import written
from psjob.protocol.coordinator import actions
from psjob.protocol.coordinator.checks import difference, rule_difference, rule_for, table_difference
from psjob.protocol.coordinator.events import Stream
from psjob.wire.frame import Kind

if TYPE_CHECKING:
    from psjob.protocol.coordinator.recovery import Recovery


class Entrance:
    """Of one recovery, which knows what the job is."""

    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery

    def behind(self, stream: Stream) -> bool:
        """Is a worker of another mode, or of what a restore has undone? One that was out of reach then must begin again too."""
        if stream.incarnation < self.recovery.fences.get(stream.rank, (0, 0)):
            return True
        missed = not stream.fresh and stream.recovery != self.recovery.recovery
        return (missed and self.recovery.c.mode.rewinds_together) or stream.mode != written(self.recovery.c.mode)

    def refused(self, stream: Stream) -> bool:
        """Has a worker another model or rule than the job? Then it is told so."""
        problem = stream.problem or self._difference(stream)
        if problem:
            self.recovery.c.emit(actions.Tell(stream.id, Kind.ERROR, {"code": "refused", "error": problem}))
            self.recovery.c.emit(actions.HangUp(stream.id))
        return problem is not None

    def _difference(self, stream: Stream) -> str | None:
        table: tuple[TensorSpec, ...] = () if self.recovery.layout is None else self.recovery.layout.table
        tables, rule = self.recovery.tables, self.recovery.rule
        if not (table or tables) and self.recovery.source is not None:
            table, tables, rule = self.recovery.source.layout.table, self.recovery.source.tables, self.recovery.source.rule
        if not (table or tables):
            return None
        return (
            difference(stream.rank, table, stream.table)
            or table_difference(stream.rank, tables, stream.tables)
            or rule_difference(stream.rank, rule, rule_for(stream.rule, self.recovery.c.job.update_at))
        )
