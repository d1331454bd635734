"""Tables of a model's row modules: the rule of their rows and its hyperparameters, from the attached optimizer or of their own.

`Alone` has the same tables in this process, outside a job. They are updated when the attached optimizer has stepped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from psjob.embeddings.lookup import Lookup, Road
from psjob.process.errors import Refused
from psjob.rules import optimizers
from psjob.rules.base import check_hyperparameters
from psjob.shard.table import first_rows
from psjob.tables import RowTable, TableSpec
from psjob.tables import rules as row_rules
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
                taken = optimizers.hyperparameters(self.optimizer)[group]
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
        rule, groups = optimizers.describe(self.optimizer)
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
    """The table of a module. Raises Refused where it cannot be."""
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
