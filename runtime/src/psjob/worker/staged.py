"""The data path of a model on a GPU: gradients leave by pinned memory all together, answers come back by it as they land."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from psjob.layout.blocks import Block
from psjob.layout.packing import Pack
from psjob.wire.frame import Header
from psjob.worker.exchange import Exchange
from psjob.worker.staging import Staging

if TYPE_CHECKING:
    from psjob.worker.session import WorkerSession


class Staged(Exchange):
    """`staging` is between the model and the wire; the copies of a block go on while others are sent or received."""

    lends = False  # they leave from pinned memory

    def __init__(self, session: WorkerSession, staging: Staging) -> None:
        super().__init__(session)
        self.staging = staging

    def push(
        self,
        grads: Sequence[torch.Tensor | None] | None,
        hyperparameters: list[dict[str, Any]],
        skip: bool,
        scale: float,
        targets: Sequence[torch.Tensor],
    ) -> None:
        for block in self.session.blocks if grads is not None and not skip else ():
            self.staging.gather(block.index, grads or ())
        super().push(grads, hyperparameters, skip, scale, targets)

    def gradient(self, block: int, pack: Pack) -> torch.Tensor:
        return self.staging.gradient(block)

    def pieces(self, pack: Pack) -> None:
        """None: what lands is copied and told on, block by block."""
        return

    def landing(self, block: int, pack: Pack) -> tuple[torch.Tensor, Callable[[], None]]:
        if not self.staging.lands:
            return super().landing(block, pack)
        targets = self.targets
        return self.staging.weights(block), lambda: self.staging.take(block, targets)

    def finish(self) -> None:
        super().finish()
        self.staging.settle(block.index for block in self.session.blocks)

    def _ask(self, make: Callable[[Block], Header], targets: Sequence[torch.Tensor]) -> None:
        self.staging.fence()
        super()._ask(make, targets)
        self.staging.settle(block.index for block in self.session.blocks)
