"""Resume records of an attached script: what a restart puts back of a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from psjob.resume import record
from psjob.resume.generators import Generators

if TYPE_CHECKING:
    from psjob.api.attach import AttachedJob


class Recording:
    """Of one script, asked at every edge: what has not changed since is not encoded again."""

    def __init__(self, job: AttachedJob) -> None:
        self._job = job
        self._packer, self._generators = record.RecordPacker(), Generators()
        self._ready: tuple[int, bytes] | None = None
        """The record of an edge without a place in the data, by its clock."""

    def stateful(self) -> dict[str, Any]:
        """All objects whose state is in a record, by name."""
        job = self._job
        own: dict[str, Any] = {"optimizer (worker side)": _Own(job.plain, job.optimizer)} if job.steps_alone else {}
        half: dict[str, Any] = {} if job.half is None else {f"{job.rule} (worker side)": job.half}
        return job.stateful | own | half

    def make(self, cursor: dict[str, int] | None, last: bool = False) -> bytes:
        """The record of this moment. `last`: no push will follow, so the residuals of earlier ones are not needed again.

        Raises Refused where it is too large, or a value cannot be kept.
        """
        ready, self._ready = self._ready, None
        clock = self._job.session.clock
        if ready is not None and cursor is None and not last and ready[0] == clock:
            return ready[1]
        return self._pack(cursor, clock, last)

    def prepare(self) -> None:
        """Make the record of the edge that follows the step under way, while its answers are waited for. Raises Refused.

        Nothing of it changes until then where the script's own edge comes right after the step, and the shards make the update.
        """
        job, exchange = self._job, self._job.session.exchange
        if job.cursor is None and not (job.steps_alone or exchange.overlaps or exchange.compression.feeds or job.half is not None):
            clock = job.session.clock + 1
            self._ready = clock, self._pack(None, clock, False)

    def _pack(self, cursor: dict[str, int] | None, clock: int, last: bool) -> bytes:
        job = self._job
        wire = {} if last else job.session.exchange.compression.state()
        return self._packer.pack(record.capture(cursor, clock, job.model, self.stateful(), job.optimizer, wire, self._generators.states()))


class _Own:
    """The optimizer's own state, while `state_dict` of the attached one speaks of the shards."""

    def __init__(self, plain: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
        self._plain, self._optimizer = plain, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dict(self._plain.state_dict(self._optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plain.load_state_dict(self._optimizer, state)
