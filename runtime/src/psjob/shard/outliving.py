"""Where a store has its memory from, if that is to outlive its process: from the keeper, or from a process before this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psjob.layout.blocks import Block
from psjob.layout.memory import LentSpan
from psjob.rules.base import Rule
from psjob.shard.keeper import STATE, WEIGHTS, Held, Keeping
from psjob.shard.statememory import StateMemory


class Outliving:
    """`keeping` is the way to the keeper; None: this process has none."""

    def __init__(self, keeping: Keeping | None) -> None:
        self._keeping = keeping
        self.found: Held | None = None
        """What a process before this one has left, until it is taken up."""

    @property
    def possible(self) -> bool:
        """Is there a keeper?"""
        return self._keeping is not None

    def memory(
        self, said: Mapping[str, Any], places: LentSpan, blocks: Sequence[Block], workers: int, rule: Rule
    ) -> StateMemory | None:  # fmt: skip
        """That of a store whose blocks lie at `places`; None: nobody holds it."""
        held, self.found = self.found, None
        slots = tuple(rule.slots)
        if held is not None:
            return StateMemory(*held.take(), places, blocks, slots)
        if self._keeping is None:
            return None
        try:
            weights = self._keeping.lend(WEIGHTS, places.size)
            state = self._keeping.lend(STATE, StateMemory.room(said, places, len(blocks), workers, len(slots)))
        except OSError:
            self.drop()  # one of two would stay there for nothing
            self._keeping = None
            return None
        return StateMemory.begin(weights, state, said, places, blocks, workers, slots)

    def drop(self) -> None:
        """What the keeper holds is not what this process serves."""
        if self._keeping is not None:
            self._keeping.drop()
