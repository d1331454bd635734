"""What a worker of one stage has given its neighbours, what they gave it, and what has to be given again.

Any process may be lost at any moment, and another one takes its place at the step that its stage's blocks are at. So a worker keeps what
it gave of a step until the neighbour says that it is at a later one. A new process of the neighbour is given it again. What comes
twice is dropped. With flush the same step from the same weights gives the same values; without, what came first counts.

A worker *stands* at the first step whose update its stage has not made. If a job flushes after each step, it works on that step
only, is one step ahead of a neighbour at most, and frames of two steps are held. If it does not, a worker works on up to `ahead`
steps beyond, and so many more are held.

If two neighbours are lost together, one may come back at the next step while the other still needs what it gave in this one. Its
weights are others by now, and its update of that step is made. Then all go back to the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from psjob.modes.stages import Stages
from psjob.wire.frame import Kind, WireError

P = TypeVar("P")
MOST_MICROBATCHES: Final = 1024
"""Of a step."""


@dataclass(frozen=True, order=True)
class Key:
    """What one frame carries: activations or gradients of one micro-batch of one step."""

    step: int
    micro: int
    kind: Kind


@dataclass(frozen=True)
class Give(Generic[P]):
    """Send this to that worker."""

    rank: int
    key: Key
    payload: P


@dataclass(frozen=True)
class SayStands:
    """Tell that worker at which step this one stands, at which step its process has joined, and whether its script has ended."""

    rank: int
    step: int
    since: int
    left: bool = False


@dataclass(frozen=True)
class AllBack:
    """Ask the coordinator to let all go back: nobody has what this worker needs of `rank` in this step."""

    rank: int
    step: int


Action = Give[P] | SayStands | AllBack


class StageExchange(Generic[P]):
    """Of worker `rank`, whose stage's blocks are at `step` when it joins. `P` is what a payload is to the caller.

    `ahead`: how many steps a worker of any stage may begin beyond the one at which it stands.
    """

    def __init__(self, stages: Stages, rank: int, step: int, ahead: int = 0) -> None:
        stage = stages.of(rank)
        if stage is None:
            raise ValueError("a job without stages exchanges nothing between them")
        self.stages, self.rank, self.stage, self.step, self.since, self._ahead = stages, rank, stage, step, step, ahead
        self.left = False
        """Has the script ended?"""
        self.ended: dict[int, int] = {}
        """Neighbours whose scripts have ended, and after how many steps."""
        self.linked: set[int] = set()
        """Neighbours to whom there is a link now."""
        self._stand: dict[int, int] = dict.fromkeys(stages.neighbours(rank), 0)
        """By neighbour, the step that it said it stands at."""
        self._since = dict.fromkeys(self._stand, 0)
        """By neighbour, the step at which its process has joined."""
        self._microbatches: dict[int, int] = {}
        """Of the steps that have begun and are not over."""
        self._given: dict[int, dict[Key, P]] = {other: {} for other in self._stand}
        self._came: dict[Key, P] = {}
        self._taken: set[Key] = set()
        """Of steps that are not over."""

    # -- the script's side -------------------------------------------------------------------------

    def begin(self, step: int, microbatches: int) -> list[Action[P]]:
        """This worker begins a step of so many micro-batches, at most MOST_MICROBATCHES."""
        self._microbatches[step] = microbatches
        return [back for other in sorted(self.linked) for back in self._check(other)]

    def stand(self, step: int) -> list[Action[P]]:
        """This worker stands at a step: nothing of steps before is needed any more."""
        self.step = step
        self._taken = {key for key in self._taken if key.step >= step}
        self._came = {key: payload for key, payload in self._came.items() if key.step >= step}
        self._microbatches = {begun: count for begun, count in self._microbatches.items() if begun >= step}
        return self._say()

    def leave(self, step: int) -> list[Action[P]]:
        """The script has ended after so many steps. What neighbours may still need is held."""
        self.left = True
        return self.stand(step)

    def give(self, key: Key, payload: P) -> list[Action[P]]:
        """Give a neighbour what this worker made of a micro-batch."""
        other = self.partner(key.micro, key.kind, gives=True)
        if self._stand[other] > key.step:
            return []
        self._given[other][key] = payload
        return [Give(other, key, payload)] if other in self.linked else []

    def take(self, key: Key) -> P:
        """What a neighbour gave of a micro-batch. Raises KeyError if it has not come."""
        payload = self._came.pop(key)
        self._taken.add(key)
        return payload

    def has(self, key: Key) -> bool:
        """Can it be taken?"""
        return key in self._came

    def partner(self, micro: int, kind: Kind, gives: bool) -> int:
        """With whom this worker exchanges activations or gradients of a micro-batch: to whom it gives them, or who gives them to it.

        Raises IndexError for what goes beyond the first or the last stage.
        """
        other = self.stage + (1 if (kind is Kind.ACTIVATION) == gives else -1)
        if not 0 <= other < len(self.stages.replicas):
            raise IndexError(f"stage {self.stage} has no stage {other} beside it")
        return self.stages.serving(other, micro)

    # -- the neighbours' side ----------------------------------------------------------------------

    def linked_to(self, rank: int) -> SayStands:
        """There is a new link to a neighbour: the first that is said on it."""
        self.linked.add(rank)
        return self._standing(rank)

    def met(self, rank: int, step: int, since: int, left: bool = False) -> list[Action[P]]:
        """A neighbour has said on a new link where it stands: what it may lack is given again."""
        self._since[rank] = since
        self.stands(rank, step, left)
        return [
            self._standing(rank),
            *(Give(rank, key, payload) for key, payload in sorted(self._given[rank].items())),
            *self._check(rank),
        ]

    def stands(self, rank: int, step: int, left: bool = False) -> None:
        """A neighbour has come to a step; `left`: its script has ended."""
        self._stand[rank] = step
        if left:
            self.ended[rank] = step
        else:
            self.ended.pop(rank, None)
        given = self._given[rank]
        for key in [key for key in given if key.step < step]:
            del given[key]

    def lost(self, rank: int) -> None:
        """The link to a neighbour has ended."""
        self.linked.discard(rank)

    def came(self, rank: int, key: Key, payload: P) -> bool:
        """A neighbour gives something; whether it was not here before.

        Raises WireError for what no such neighbour gives, or gives at another step.
        """
        self.check(rank, key)
        if not self.wants(key):
            return False
        self._came[key] = payload
        return True

    def wants(self, key: Key) -> bool:
        """Is this of a step that is not over, and not here yet?"""
        return key.step >= self.step and key not in self._came and key not in self._taken

    def check(self, rank: int, key: Key) -> None:
        """Raise WireError for what a neighbour cannot give: also before its payload has been read."""
        try:
            right = key.micro < MOST_MICROBATCHES and self.partner(key.micro, key.kind, gives=False) == rank
            right = right and self.stages.serving(self.stage, key.micro) == self.rank
        except IndexError:
            right = False
        if not right:
            raise WireError(f"worker {rank} gave worker {self.rank} {key.kind.name} of micro-batch {key.micro}, which it does not have")
        if key.step > self.step + 1 + self._ahead:
            raise WireError(f"worker {rank} gave {key.kind.name} of step {key.step}; worker {self.rank} is at step {self.step}")

    def _say(self) -> list[Action[P]]:
        return [self._standing(other) for other in sorted(self.linked)]

    def _standing(self, rank: int) -> SayStands:
        return SayStands(rank, self.step, self.since, self.left)

    def _check(self, rank: int) -> list[Action[P]]:
        """Does this worker need anything that the process of a neighbour never made?"""
        lacking = next((key for key in self._lacks(rank) if key.step < self._since[rank]), None)
        return [] if lacking is None else [AllBack(rank, lacking.step)]

    def _lacks(self, rank: int) -> Iterator[Key]:
        for step, count in sorted(self._microbatches.items()):
            for micro in range(count):
                for kind in (Kind.ACTIVATION, Kind.GRADIENT) if self.stages.serving(self.stage, micro) == self.rank else ():
                    key = Key(step, micro, kind)
                    try:
                        if self.partner(micro, kind, gives=False) == rank and self.wants(key):
                            yield key
                    except IndexError:
                        pass

    @property
    def held(self) -> int:
        """How many payloads are held, those that were given and those that came."""
        return len(self._came) + sum(map(len, self._given.values()))
