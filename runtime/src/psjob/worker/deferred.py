"""A push whose answers land while the script computes: for stages that do not need the weights that follow at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psjob.worker.exchange import Exchange, count_change


class Deferred(Exchange):
    """As `Exchange`, but `push` comes back when all is under way. `finish` waits for its answers; nothing reads the targets before.

    The gradients that were pushed must not change until then: a shard that comes back is sent them again.
    """

    beside = True
    lends = False  # bytes are sent while others are made

    def push(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
        scale: float,
        targets: Sequence[torch.Tensor],
    ) -> None:
        """As `Exchange.push`, without waiting. Raises SessionEnd."""
        self.finish()
        self._send(self.pushes(grads, hyperparameters, skip, scale), targets)
        self.session.stepped()

    def finish(self) -> None:
        super().finish()
        self.sources = ()  # all is answered: nothing is sent again
        count_change(self.targets)
