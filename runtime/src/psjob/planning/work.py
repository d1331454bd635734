"""What any run of neighbouring modules takes: seconds and bytes of one micro-batch, from sums that are made once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from psjob.planning.profile import Profile


class Work:
    """Sums over the modules [first, end) of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.count = len(profile.nodes)
        self._forward = _sums(node.forward for node in profile.nodes)
        self._backward = _sums(node.backward for node in profile.nodes)
        self._own = _sums(float(node.parameters) for node in profile.nodes)
        self._fixed = _sums(float(node.fixed) for node in profile.nodes)
        self._saved = _sums(float(node.saved) for node in profile.nodes)
        self._tied = [(tied.bytes, sorted(tied.nodes)) for tied in profile.tied]
        self.crossing = _crossing(profile)
        """Bytes that a cut before module p sends forward, for p in 0..count; 0: the model's inputs; count: nothing."""

    def forward(self, first: int, end: int) -> float:
        """Seconds of the forward pass."""
        return self._forward[end] - self._forward[first]

    def backward(self, first: int, end: int) -> float:
        """Seconds of the backward pass."""
        return self._backward[end] - self._backward[first]

    def weights(self, first: int, end: int) -> float:
        """Bytes of trained parameters; tied ones once."""
        tied = sum(size for size, nodes in self._tied if any(first <= node < end for node in nodes)) if self._tied else 0
        return self._own[end] - self._own[first] + tied

    def fixed(self, first: int, end: int) -> float:
        """Bytes of frozen parameters and buffers."""
        return self._fixed[end] - self._fixed[first]

    def kept(self, first: int, end: int) -> float:
        """Bytes that a micro-batch keeps until its backward pass, what came in included."""
        return self._saved[end] - self._saved[first] + self.crossing[first]


def _sums(values: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(values, initial=0.0))


def _crossing(profile: Profile) -> list[float]:
    sent = [0.0] * (len(profile.nodes) + 2)
    for i, node in enumerate(profile.nodes):
        for output in node.outputs:
            sent[i + 1] += output.bytes
            sent[max(output.to) + 1] -= output.bytes
    found = list(itertools.accumulate(sent))[: len(profile.nodes) + 1]
    return [float(profile.input), *found[1:]]
