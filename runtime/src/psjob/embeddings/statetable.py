"""`Table`: push and pull of rows that are no parameters: counts, sets, distances."""

from __future__ import annotations

from typing import Any, Final

import torch

from psjob.embeddings.lookup import Lookup, RowOptions
from psjob.embeddings.rowtables import look_alone
from psjob.rules import arrays
from psjob.tables.rules import COMBINES
from psjob.tables.spec import IDENTITY
from psjob.worker.rows import RowGrads

_DTYPES: Final = {torch.float32: "float32", torch.int32: "int32"}


class Table(Lookup):
    """Rows of numbers on the shards, combined with what is pushed; outside a job they are in this process.

    A table is a module, so that a model has it and checkpoints name it. A push counts at the next `step()` of the attached optimizer. In
    async it counts at once. In sync it counts when all workers have made that step, and pushes are joined in rank order. No push counts
    twice, whatever fails. A shard that is lost loses the pushes since its checkpoint, except in sync. A checkpoint holds all rows.

    Args:
        num_rows: rows; None takes any int64 as an id.
        width: numbers of a row.
        combine: how a row takes a push: "sum", "max", "min", "or", "and", "count" (of pushes in which an element is not 0) or "logsumexp"
            (float32 alone). A row that nobody has pushed is the combination of nothing: 0 for a sum, inf for a min.
        dtype: torch.float32, or torch.int32, whose sums are exact; a sum that leaves int32 ends the job with a sentence.
        device: of what `pull` gives.

    Raises:
        ValueError: a value that no table can have, by the name of its field.

    Example:
        >>> import torch, psjob as ps
        >>> counts = ps.Table(None, 1, combine="sum", dtype=torch.int32)
        >>> counts, stepper = ps.attach(counts)
        >>> counts.push(torch.tensor([3, 3, 9]), torch.ones(3, 1, dtype=torch.int32)); stepper.step()
        >>> counts.pull(torch.tensor([3, 9, 10])).flatten().tolist()
        [2, 1, 0]
    """

    counts = True

    def __init__(
        self, num_rows: int | None, width: int, combine: str = "sum", dtype: torch.dtype = torch.float32, device: Any = None
    ) -> None:
        if combine not in COMBINES:
            raise ValueError(f"combine is one of {', '.join(COMBINES)}, got {combine!r}")
        if dtype not in _DTYPES or (dtype == torch.int32 and combine == "logsumexp"):
            raise ValueError(f"dtype of a Table is torch.float32 or torch.int32 (not with logsumexp), got {dtype} with {combine}")
        super().__init__(num_rows, width, RowOptions(init=IDENTITY, optimizer=combine), {}, _DTYPES[dtype], device)
        self.anchor.requires_grad_(False)
        self._rule = COMBINES[combine]
        self._rows_dtype = dtype
        self._pushed: tuple[torch.Tensor, torch.Tensor] | None = None
        """Distinct ids and their rows, since the last step."""

    def push(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Join values to rows at the next `step()`. What is pushed after the last step never counts.

        Args:
            ids: int64 or int32, of any shape; they may repeat.
            values: of the table's dtype, shape [*ids.shape, width].

        Raises:
            ValueError: another dtype or shape, or a sum beyond int32.
            IndexError: an id that is no row.
            RuntimeError: before `attach`.
        """
        if not self.steps:
            raise RuntimeError("rows of a ps.Table take what is pushed at steps of an attached optimizer: call ps.attach(model) before")
        if values.dtype != self._rows_dtype or values.shape != (*ids.shape, self.dim):
            wanted = f"{self._rows_dtype} of shape {[*ids.shape, self.dim]}"
            raise ValueError(f"values for a table are {wanted}, got {values.dtype} of {list(values.shape)}")
        flat, rows = self.flat(ids), values.detach().to("cpu").reshape(-1, self.dim)
        rows = arrays.as_flags(rows) if self._rule.monoid.flags else rows
        if self._pushed is not None:
            flat, rows = torch.cat([self._pushed[0], flat]), torch.cat([self._pushed[1], rows])
        pushed = self._rule.distinct(flat, rows)
        self.check(pushed[0])
        self._pushed = pushed

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows as the shards have them; in sync those of this step. What was pushed since the last step is not in them.

        Args:
            ids: int64 or int32, of any shape; they may repeat.

        Returns:
            Their rows, of the table's dtype and shape [*ids.shape, width], on the module's device.

        Raises:
            IndexError: an id that is no row.
        """
        asked, position = self.rows_of(ids)
        return asked.rows[position].view(*ids.shape, self.dim).to(self.anchor.device)

    forward = pull

    def gradients(self, scale: float) -> RowGrads | None:
        """What was pushed since the last step; it is taken."""
        pushed, self._pushed = self._pushed, None
        if pushed is None or self._road is None or not len(pushed[0]):
            return None
        mine, order, counts = self._road.split(pushed[0])
        return RowGrads(mine, (pushed[1] if order is None else pushed[1][order]).contiguous(), counts)

    def forget(self) -> None:
        """Drop what was pushed: a process before this one has pushed it."""
        self._pushed = None

    def _look_alone(self) -> None:
        look_alone(self)

    def extra_repr(self) -> str:
        """Rows, width, combination and dtype."""
        return f"{'open ids' if self.num_rows is None else self.num_rows}, {self.dim}, {self._rule.name}, {self.dtype}"
