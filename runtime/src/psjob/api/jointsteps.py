"""Steps of several optimizers whose gradients are clipped by one norm, as the whole model's with Muon and AdamW.

The norm is that of all their mean gradients, so the first of their steps pushes them all. Where the shards step, they update all of these
parameters then. Where the workers step, each keeps the clipped means of the others. The steps of the others follow, and push nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from psjob.process.errors import Refused
from psjob.worker.clip import Clip

if TYPE_CHECKING:
    from psjob.api.pairs import Pair


@dataclass(frozen=True)
class Asked:
    """How a script clips the next steps of these."""

    clip: Clip
    pairs: tuple[Pair, ...]


@dataclass
class Pushed:
    """The gradients of a step that is still to come, which went with the step of another optimizer."""

    pair: Pair
    skipped: bool = False
    """The shards made no update of them."""
    _seen: list[tuple[torch.Tensor, weakref.ref[torch.Tensor] | None, int]] = field(default_factory=list)

    def note(self, skipped: bool) -> None:
        """They were pushed just now."""
        self.skipped = skipped
        self._seen = [(p, None if p.grad is None else weakref.ref(p.grad), _version(p.grad)) for p in self.pair.parameters]

    def check(self) -> None:
        """Raises Refused if they are not what they were then."""
        for p, grad, version in self._seen:
            if p.grad is not (None if grad is None else grad()) or _version(p.grad) != version:
                raise Refused(
                    f"a gradient of {named(self.pair)} of shape {tuple(p.shape)} was changed or cleared between the step of another "
                    "optimizer and its own, and one norm clips both. Make the steps one after the other, and call zero_grad after the last"
                )


class Asking:
    """What a script asks for between two steps, and the steps that are still to follow."""

    def __init__(self) -> None:
        self._asked: dict[Pair, Asked] = {}
        self._due: dict[Pair, Pushed] = {}

    @property
    def waits(self) -> bool:
        """Are there steps whose gradients were pushed, and that were not made?"""
        return bool(self._due)

    def check_over(self) -> None:
        """Raises Refused if such a step is missing."""
        if self._due:
            late = next(iter(self._due))
            raise Refused(
                f"{named(late)} was clipped by one norm with another optimizer, which made its step, and {named(late)} made none. Make "
                "the steps of all that are clipped together, one after the other, or clip each by its own parameters"
            )

    def ask(self, pairs: Sequence[Pair], clip: Clip, again: bool = False) -> None:
        """One norm over the parameters of all of `pairs`; `again`: the gradients were clipped before, and are the same.

        Raises Refused if one of them is clipped in another way already.
        """
        self.check_over()
        tightest = clip
        for pair in pairs:
            before = self._asked.get(pair)
            if before is not None and (before.clip.norm is None) != (clip.norm is None):
                raise Refused("a step is clipped by norm and by value, and the shards are not told which comes first. Clip in one way")
            if before is not None and clip.norm is not None and set(before.pairs) != set(pairs):
                raise Refused(
                    f"{named(pair)} is clipped by its own norm and by one with other optimizers before its step, and the shards clip once. "
                    "Clip in one way"
                )
            if before is not None and again:
                tightest = tightest.within(before.clip)
        self._asked.update(dict.fromkeys(pairs, Asked(tightest, tuple(pairs))))

    def of(self, pair: Pair) -> Asked | None:
        """What is asked for the step of `pair`."""
        return self._asked.get(pair)

    def begin(self, pair: Pair) -> Pushed | None:
        """A step of `pair` is made: what was pushed of it already, or None. Raises Refused if another one is due."""
        pushed = self._due.pop(pair, None)
        if pushed is None:
            self.check_over()
            asked = self._asked.get(pair)
            if asked is None:
                self._check_apart(pair)
            for other in () if asked is None else asked.pairs:
                if other is not pair:
                    self._asked.pop(other, None)
                    self._due[other] = Pushed(other)
        return pushed

    def note(self, skipped: bool) -> None:
        """The gradients of the step under way, and of those that follow, were pushed."""
        for pushed in self._due.values():
            pushed.note(skipped)

    def end(self, pair: Pair) -> None:
        """A step of `pair` is over, also one that was not made: the next one may be clipped in another way."""
        self._asked.pop(pair, None)

    def _check_apart(self, pair: Pair) -> None:
        """Raises Refused for a step of parameters that were clipped for an optimizer that has them too."""
        for other, asked in self._asked.items():
            if not set(other.rows).isdisjoint(pair.rows) and asked.clip.norm is not None:
                raise Refused(
                    f"{named(pair)} makes a step, and its gradients were clipped by one norm with all those of {named(other)}, which has "
                    "them too. Clip the parameters of the optimizer that steps next"
                )


def joint(pairs: Sequence[Pair], given: Collection[torch.Tensor]) -> list[Pair]:
    """Those whose parameters with a gradient are together all of `given`, none in two of them; empty: no such ones."""
    wanted = {id(p) for p in given}
    found: list[Pair] = []
    seen: set[int] = set()
    for pair in pairs:
        own = {id(p) for p in pair.parameters if p.grad is not None}
        if own and own <= wanted:
            if own & seen:
                return []
            found.append(pair)
            seen |= own
    return found if seen == wanted else []


def named(pair: Pair) -> str:
    """The optimizer, for a reader: its class, and the model's name if it has one."""
    return f"{pair.plain.__name__} of {pair.name}" if pair.name else pair.plain.__name__


def _version(grad: torch.Tensor | None) -> int:
    return -1 if grad is None else grad._version
