"""Which blocks' gradients are whole while a backward pass goes on. Pure: it takes rows that have a gradient and gives the ready blocks.

A block is ready when every parameter of it that had a gradient in the step before has one again. Where a step is made of
several backward passes (accumulation), it is ready in the pass in which the step before was through with it.
"""

from __future__ import annotations

from psjob.layout.blocks import Layout


class Readiness:
    """`told` at every gradient of a row of the table, `step_made` at every step."""

    def __init__(self, layout: Layout) -> None:
        self._blocks_of = [tuple(dict.fromkeys(block.index for block, _ in layout.pieces_of(row))) for row in range(len(layout.table))]
        self._rows_of = [tuple(dict.fromkeys(piece.tensor for piece in block.pieces)) for block in layout.blocks]
        self._expected = [1] * len(layout.table)
        """Backward passes of the step before that gave each row a gradient."""
        self._begin()

    def _begin(self) -> None:
        self.seen = [0] * len(self._blocks_of)
        """Gradients of each row since the last step."""
        self.whole: set[int] = set()
        """Blocks that were ready and of which no row has had a gradient since."""
        self._round = [0] * len(self._rows_of)
        self._lacking = [sum(self._expected[row] > 0 for row in rows) for rows in self._rows_of]

    def told(self, row: int) -> list[int]:
        """A row's gradient was accumulated (again). Returns the blocks that are ready with it."""
        self.seen[row] += 1
        ready = []
        for block in self._blocks_of[row]:
            self.whole.discard(block)
            if self._expected[row] and self.seen[row] == self._expected[row] + self._round[block]:
                self._lacking[block] -= 1
                if not self._lacking[block]:
                    self._next_round(block)
                    ready.append(block)
        self.whole.update(ready)
        return ready

    def step_made(self) -> None:
        """What was told since the last step is a step's whole; a step without any gradient says nothing about the next."""
        if any(self.seen):
            self._expected = self.seen
        self._begin()

    def _next_round(self, block: int) -> None:
        self._round[block] += 1
        self._lacking[block] = sum(
            self._expected[row] > 0 and self.seen[row] < self._expected[row] + self._round[block] for row in self._rows_of[block]
        )
