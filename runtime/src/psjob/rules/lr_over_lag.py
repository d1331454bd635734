"""Learning rate over lag: a push that is late counts less (staleness-aware SGD: Zhang et al. 2016, arXiv 1511.05950)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from psjob.rules.arrays import Array
from psjob.rules.base import BlockState, Hyperparameters, Range, known_lag
from psjob.rules.sgd import HeavyBall


class LrOverLag(HeavyBall):
    """SGD with lr / max(1, lag); without momentum unless one is given."""

    name = "lr-over-lag"
    needs_lag = True
    hyperparameters: Mapping[str, float | bool] = {**HeavyBall.hyperparameters, "momentum": 0.0}

    def apply(
        self,
        state: BlockState,
        grad: Array,
        hyperparameters: Hyperparameters,
        ranges: Sequence[Range] | None = None,
        lag: int | None = None,
        worker: int | None = None,
    ) -> None:
        """One step."""
        lr = float(hyperparameters["lr"]) * share(known_lag(self, lag))
        super().apply(state, grad, {**hyperparameters, "lr": lr}, ranges, lag, worker)


def share(lag: int) -> float:
    """What a push of this lag counts; also the weight of one gradient in a mean of several."""
    return 1 / max(1, lag)
