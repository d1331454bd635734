"""Tables of a model's row modules: the rule of their rows and its hyperparameters, from the attached optimizer or of their own.

`Alone` has the same tables in this process, outside a job. They are updated when the attached optimizer has stepped.

`Table` is push and pull of rows that are no parameters: counts, sets, distances.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from psjob.embeddings.lookup import Lookup, Road, RowOptions
from psjob.process.errors import Refused
from psjob.rules import arrays, optimizers
from psjob.rules.base import check_hyperparameters
from psjob.shard.table import first_rows
from psjob.tables import RowTable, TableSpec
from psjob.tables import rules as row_rules
from psjob.tables.rules import COMBINES
from psjob.tables.spec import IDENTITY
from psjob.worker.rows import RowGrads, RowRequest

_FOLLOWED: Final = {"sgd": "sgd", "adagrad": "adagrad", "adam": "adam", "adamw": "adam"}
"""The rows' rule for a rule of the shards, where the hyperparameters that rows do not have are at rest."""
_AT_REST: Final = ("momentum", "dampening", "nesterov", "maximize", "amsgrad", "lr_decay")
_CHOICE: Final = (
    "rows follow SGD without momentum, Adagrad, and Adam without decoupled weight decay; for another rule give it to the module "
    f"(optimizer= one of {', '.join(row_rules.RULES)}, with its lr=)"
)
SEED = 0
"""training.seed where there is no job."""


class RowTables:
    """The modules of a model whose rows are on the shards, in its order. Raises Refused, naming the module, where one's cannot be."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        self.optimizer = optimizer
        self.names, self.modules = _found(model)
        self._groups = [_group(name, module, optimizer) for name, module in zip(self.names, self.modules, strict=True)]
        self._attached = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        """Learning rates by group: a process that begins again has the same, since its script makes the optimizer again."""
        self.specs: list[TableSpec] = []
        self.rules = [self._rule(index) for index in range(len(self.modules))]
        for name, module, rule in zip(self.names, self.modules, self.rules, strict=True):
            self.specs.append(spec_of(name, module, rule, seed))
        self.counts = any(module.counts for module in self.modules)
        """Are there tables of what is no gradient?"""
        self.anchors = {id(module.anchor) for module in self.modules}
        self.hyperparameters()

    @property
    def first(self) -> dict[int, torch.Tensor]:
        """Values with which rows 0, 1, … begin, by table; only of those that have them."""
        return {index: module.first for index, module in enumerate(self.modules) if module.first is not None}

    def bind(self, road: Road) -> None:
        """From now on rows are fetched by `road`, which has taken the first values."""
        for index, module in enumerate(self.modules):
            module.bind(road, index)
            module.first = None

    def hyperparameters(self) -> list[Mapping[str, Any]]:
        """Hyperparameters by table as they are now, whole. Raises ValueError naming one that is not finite, Refused for a rate of a rule of
        the rows' own that the schedule has led to where that rule has none."""
        found: list[Mapping[str, Any]] = []
        for index, (module, group) in enumerate(zip(self.modules, self._groups, strict=True)):
            rule = row_rules.named(self.rules[index])
            if module.options.optimizer is None:
                taken = optimizers.current_hyperparameters(self.optimizer)[group]
                chosen = {name: taken[name] for name in rule.hyperparameters if name in taken}
                found.append(check_hyperparameters(rule, chosen))
                continue
            factor = schedule_factor(self.optimizer.param_groups[group], self._attached[group])
            own = check_hyperparameters(rule, module.hyperparameters)
            try:
                found.append(own if "lr" not in own else check_hyperparameters(rule, {**own, "lr": own["lr"] * factor}))
            except ValueError as error:
                name = self.names[index]
                raise Refused(
                    f"rows of {name}: {error}. It is the rows' {own['lr']:g} times {factor:g}, by which the schedule has changed their "
                    f"group's lr; put {name}.anchor into a parameter group whose lr stays"
                ) from None
        return found

    def gradients(self, scale: float) -> list[RowGrads | None]:
        """By table: the rows' gradients since the last `zero_grad`, times `scale`; None where there are none."""
        return [module.gradients(scale) for module in self.modules]

    def forget(self) -> None:
        """The step in hand was made before: what it would push counts already."""
        for module in self.modules:
            module.forget()

    def _rule(self, index: int) -> str:
        module, name = self.modules[index], self.names[index]
        chosen = module.options.optimizer
        if chosen is not None:
            try:
                check_hyperparameters(row_rules.named(chosen), module.hyperparameters)
            except ValueError as error:
                raise Refused(f"rows of {name}: {error}") from None
            return chosen
        if module.hyperparameters:
            raise Refused(
                f"rows of {name} follow the attached optimizer, but have hyperparameters of their own "
                f"({', '.join(module.hyperparameters)}); "
                "name a rule too"
            )
        rule, groups = optimizers.describe_optimizer(self.optimizer)
        kind = type(self.optimizer).__name__
        if rule not in _FOLLOWED:
            raise Refused(f"rows of {name} cannot follow {kind}; {_CHOICE}")
        taken = groups[self._groups[index]]
        odd = [word for word in _AT_REST if taken.get(word)] + (["weight_decay"] if rule == "adamw" and taken["weight_decay"] else [])
        if odd:
            raise Refused(f"rows of {name} cannot follow {kind} with {odd[0]} {taken[odd[0]]}; {_CHOICE}")
        return _FOLLOWED[rule]


def schedule_factor(group: Mapping[str, Any], attached: float) -> float:
    """By what a schedule has changed the lr of `group` since its first one: torch's schedulers note that as `initial_lr`; without one it
    is that of when the optimizer was `attached`. 1 if there is no lr, or the first is 0."""
    first = float(group.get("initial_lr", attached))
    return float(group["lr"]) / first if "lr" in group and first else 1.0


def spec_of(name: str, module: Lookup, rule: str, seed: int) -> TableSpec:
    """The table of a module. Raises Refused if it cannot be."""
    options = module.options
    try:
        return TableSpec(
            name, module.dim, rule, module.num_rows, module.dtype, options.init, float(options.scale),
            seed if options.seed is None else options.seed, options.admit_after, options.evict_after,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise Refused(f"rows of {name} cannot be: {error}") from None


def _found(model: torch.nn.Module) -> tuple[list[str], list[Lookup]]:
    names, modules = [], []
    for path, module in model.named_modules():
        if isinstance(module, Lookup):
            plain = re.sub(r"[^A-Za-z0-9_.\-]", "_", path)
            names.append(plain if re.match(r"[A-Za-z_]", plain) else "_" + plain)
            modules.append(module)
    return names, modules


def _group(name: str, module: Lookup, optimizer: torch.optim.Optimizer) -> int:
    for number, group in enumerate(optimizer.param_groups):
        if any(p is module.anchor for p in group["params"]):
            return number
    if not module.anchor.requires_grad:
        return 0
    raise Refused(
        f"the optimizer has no parameter of {name}: give it model.parameters(), or {name}.anchor in the group that its rows follow"
    )


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
            (only float32). A row that nobody has pushed is the combination of nothing: 0 for a sum, inf for a min.
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
