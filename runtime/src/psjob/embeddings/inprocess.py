"""Outside a job: the same tables in this process, updated when the attached optimizer has stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psjob.embeddings.lookup import Lookup
from psjob.embeddings.rowtables import RowTables, spec_of
from psjob.rules import optimizers
from psjob.shard.table import first_rows
from psjob.tables import RowTable, TableSpec
from psjob.tables import rules as row_rules
from psjob.worker.rows import RowRequest

SEED = 0
"""training.seed where there is no job."""


class Alone:
    """A road to tables of this process. `steps` is False before an optimizer is attached: rows can be looked at, not trained."""

    def __init__(self, specs: list[TableSpec], steps: bool) -> None:
        self.tables = [RowTable(spec) for spec in specs]
        self.steps = steps
        self._clock = 0

    def ask(self, table: int, ids: torch.Tensor, ahead: int = 0) -> RowRequest:
        """The rows at once; those of a later step are not known yet."""
        held = self.tables[table]
        rows = held.pull(ids) if ahead == 0 else torch.empty(0, held.spec.dim, dtype=held.spec.torch_dtype, device="cpu")
        return RowRequest(table, ids, None, [len(ids)], rows, self._clock + ahead if ahead == 0 else -1)

    def collect(self, asked: RowRequest) -> torch.Tensor:
        return asked.rows

    def fits(self, asked: RowRequest) -> bool:
        return False

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        return ids, None, [len(ids)]

    def ids(self, table: int) -> torch.Tensor:
        return torch.sort(self.tables[table].ids()).values

    def unwinding(self, call: Callable[[], None]) -> None:
        call()

    def begin(self, table: int, values: torch.Tensor, hyperparameters: Any) -> None:
        """Rows 0, 1, … begin with `values`."""
        held = self.tables[table]
        held.load(first_rows(held, torch.arange(len(values), device="cpu"), values, hyperparameters))

    def step(self, tables: RowTables, scale: float) -> None:
        """Update every table by what has landed since the last `zero_grad`."""
        for held, given, hyperparameters in zip(self.tables, tables.gradients(scale), tables.hyperparameters(), strict=True):
            if given is not None:
                held.push(given.ids, given.grads, hyperparameters, self._clock)
            held.evict(self._clock)
        self._clock += 1


def attach_alone(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let steps of `optimizer` reach the rows of `model`'s row modules, if it has any. Raises Refused."""
    tables = RowTables(model, optimizer, SEED)
    if not tables.modules:
        return
    road = Alone(tables.specs, True)
    hyperparameters = tables.hyperparameters()
    for table, values in tables.first.items():
        road.begin(table, values, hyperparameters[table])
    tables.bind(road)

    def after(stepped: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        scale, skip = optimizers.amp(stepped)
        if not skip:
            road.step(tables, scale)
        for module in tables.modules:
            module.anchor.data.zero_()

    optimizer.register_step_post_hook(after)


def look_alone(module: Lookup) -> None:
    """Before attach: rows of this process, as they would begin."""
    rule = module.options.optimizer or "sgd"
    road = Alone([spec_of("_", module, rule, SEED)], False)
    if module.first is not None:
        road.begin(0, module.first, row_rules.named(rule).hyperparameters)
    module.bind(road, 0)
