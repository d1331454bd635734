"""What a worker tells of its weights, so that shard 0 sees where workers come apart (`psjob.protocol.coordinator.consistency`).

At its beginning a worker tells sums over frozen parameters, which each script builds by itself. Where all workers stand at one step, it
tells a few windows of its parameters every EVERY steps. At a checkpoint and at its end it tells sums over all of them and its buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from psjob.api.strangers import Strangers
from psjob.embeddings.statetable import Table
from psjob.layout import members
from psjob.protocol.coordinator.consistency import BEGIN, BUFFER, END, FROZEN, OTHER, TRAINED, WHOLE, WINDOWS
from psjob.worker import digests
from psjob.worker.exchange import Clip

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob

EVERY: Final = 16
"""From one look at windows to the next, steps."""
LANDED: Final = 64
"""The same where a step does not wait for the weights, so that a look has to."""
SHORT: Final = 64
"""Steps of a job that may end before a look at any of them."""
MOST: Final = 512
"""Sums of one kind of tensor in a digest."""
GROUPS, NUMBERS = 32, 32
"""Parameter groups, and numbers of each, that are compared."""
CLIPPED: Final = "max_norm of clip_grad_norm_"
"""The name of that number; 0: nothing is clipped."""
STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of normalisation layers, which are each worker's own."""
Row = tuple[str, str, torch.Tensor]
"""Kind, name and tensor."""


class WeightDigests:
    """Of an attached script. What is compared depends on the mode, see `compares`."""

    def __init__(self, job: AttachedJob) -> None:
        self._job = job
        self.strangers = Strangers(job)
        config, session = job.place.config, job.session
        alone = config.workers == 1 or bool(config.stages) or job.place.local > 0
        plain = session.mode.steady and not session.mode.decided
        self._frozen_at_begin = not alone
        self._trained = not alone and (session.mode.rewinds_together and (session.reduces or config.compression.pull == "none"))
        self._together = not alone and plain and job.rounds is None
        """All workers stand at one step, and what their scripts do between steps is the same."""
        self._windows: tuple[int, list[Row], digests.Windows] | None = None
        self._begun = False
        self._numbers: tuple[int, list[dict[str, float]]] = (0, [])
        """The hyperparameters of the last step that is looked at, and the clock to which it led."""
        self._last: tuple[str, int] | None = None

    def stepping(self, asked: Sequence[Mapping[str, Any]], clip: Clip) -> None:
        """The optimizer steps next with these hyperparameters, here or on the shards. Between steps a scheduler may be further on."""
        session = self._job.session
        clock = session.clock
        if self._together and (clock < SHORT or clock % EVERY == 0 or session.machine.cut_clock == clock):
            groups = [_numbers(group) for group in asked[:GROUPS]]
            self._numbers = clock, [{**groups[0], CLIPPED: clip.norm or 0.0}, *groups[1:]] if groups else []

    def begin(self) -> None:
        """The script is in its job, and has made no step."""
        if self._frozen_at_begin and self._job.session.clock == 0 and self._job.session.record is None:
            self._send([row for row in self._parameters() if row[0] == FROZEN], 0, BEGIN)
        self._begun = True

    def edge(self, cut: bool) -> None:
        """The script stands between two steps; `cut`: at the step of a checkpoint."""
        clock = self._clock()
        if clock is None or not clock or not (self._trained or self._together):
            return
        look = WHOLE if cut else WINDOWS
        if self._last == (look, clock):  # between two passes an edge may come twice
            return
        self._last = look, clock
        if cut:
            self._whole(clock, WHOLE)
        elif clock % (LANDED if self._job.session.exchange.overlaps else EVERY) == 0:
            self._job.session.exchange.finish()
            self._look(clock)

    def leave(self) -> None:
        """The script is through."""
        self._job.session.exchange.finish()
        clock = self._clock()
        if clock and self._begun and (self._trained or self._together):
            self._whole(clock, END)

    def _clock(self) -> int | None:
        """What workers with the same weights have in common; None: the blocks of this one are of several updates."""
        session = self._job.session
        if not session.mode.decided:
            return session.clock
        versions = {n for _, n in session.exchange.versions.values()}
        return versions.pop() if len(versions) == 1 else None

    def _look(self, clock: int) -> None:
        others = len(self.strangers.parameters)
        if self._windows is None or self._windows[0] != others:
            rows = self._parameters()
            self._windows = others, rows, digests.Windows([tensor for _, _, tensor in rows])
        _, rows, windows = self._windows
        seen = windows.at(clock)
        self._tell(clock, [rows[row][:2] for row, _ in seen], [crc for _, crc in seen], True, WINDOWS)

    def _whole(self, clock: int, look: str) -> None:
        rows = self._parameters()
        if self._together:
            rows += self._buffers()
        self._send([rows[row] for row in digests.part_of([tensor for _, _, tensor in rows], clock)], clock, look)

    def _send(self, rows: Sequence[Row], clock: int, look: str) -> None:
        named: list[tuple[str, str]] = []
        told: list[int] = []
        values = digests.sums([tensor for _, _, tensor in rows])
        for kind in dict.fromkeys(row[0] for row in rows):
            own = [at for at, row in enumerate(rows) if row[0] == kind]
            for at, value in digests.grouped([values[row] for row in own], MOST):
                named.append(rows[own[at]][:2])
                told.append(value)
        self._tell(clock, named, told, self._job.place.index == 0, look)

    def _tell(self, clock: int, rows: Sequence[tuple[str, str]], told: Sequence[int], names: bool, look: str) -> None:
        body: dict[str, Any] = {
            "clock": clock, "look": look, "kinds": "".join(kind for kind, _ in rows), "sums": list(told),
            "alone": self._job.session.reduces,
        }  # fmt: skip
        if names:
            body["names"] = [name for _, name in rows]
        body["numbers"] = self._numbers[1] if self._numbers[0] == clock else []
        if self._job.session.reduces:
            body["machine"] = digests.machine(self._job.parameters)
        if self.strangers.kinds:
            body["strangers"] = self.strangers.kinds
        if self._job.left_out:
            body["leftOut"] = self._job.left_out
        self._job.session.digest(body)

    def _parameters(self) -> list[Row]:
        job, anchors = self._job, self._job.tables.anchors
        rows: list[Row] = []
        if self._trained:
            names = (spec.name for spec in job.session.layout.table)
            rows += [(TRAINED, name, p) for name, p in zip(names, job.parameters, strict=True) if id(p) not in anchors]
        known = {id(p) for p in job.parameters} | {id(module.anchor) for module in job.model.modules() if isinstance(module, Table)}
        others = self.strangers.parameters if self._together else {}
        if self._together or not self._begun:
            rows += [
                (FROZEN, name, p) for name, p in members.named_parameters(job.model) if id(p) not in known and id(p) not in others
            ]  # fmt: skip
        return rows + [(OTHER, name, p) for name, p in others.values()]

    def _buffers(self) -> list[Row]:
        found: list[Row] = []
        for prefix, module in self._job.model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._NormBase):
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if name not in STATISTICS:
                    found.append((BUFFER, f"{prefix}.{name}" if prefix else name, buffer))
        return found


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The hyperparameters of a parameter group that are finite numbers, by name."""
    found: dict[str, float] = {}
    for key, value in group.items():
        several = value if isinstance(value, tuple) else (value,)
        for at, one in enumerate(several):
            number = one.item() if isinstance(one, torch.Tensor) and one.numel() == 1 else one
            if type(number) in (bool, int, float) and math.isfinite(number):
                found[f"{key}[{at}]" if len(several) > 1 else key] = float(number)
    return dict(list(found.items())[:NUMBERS])
