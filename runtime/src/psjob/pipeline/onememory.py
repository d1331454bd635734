"""The weights of a stage that keeps no older ones: one memory, which changes under open graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class OneMemory:
    """Autograd does not see that it changes: a backward goes through what is in it.

    What a forward has made of a weight and kept, such as its product with another one, stays as it was.

    Attributes:
        leaves: the tensors that forwards take, by name.
    """

    def __init__(self, leaves: Mapping[str, torch.Tensor]) -> None:
        self.leaves = dict(leaves)

    def take(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put these in place of what is there. Raises KeyError for a name that is not there."""
        for name, tensor in weights.items():
            # `data` has a version counter of its own: through the leaf, autograd would refuse the backward.
            self.leaves[name].data.copy_(tensor)
        torch.clear_autocast_cache()  # it keeps a leaf's cast until autocast ends, and nothing tells it that the leaf has changed
