"""What `attach` takes: a model, an optimizer of all its parameters, objects that can be put back; and the table of those parameters.

Outside a job: what `attach` refuses in one it refuses here, so that a script that trains without a job is one that a job takes.

Models and their optimizers: one pair, or several by name that are trained as one table of parameters.

Each step of an optimizer is a step of the job, in which the parameters of all others have no gradient. So a step counts for its own
parameters only, as in one process. Several optimizers may train one model.

A model that is attached again with another optimizer is in the next phase of its training, such as fine-tuning (see `begin_phase`).
Parameter groups that a script adds after attach are known from the beginning, without a gradient until they are added.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from psjob.api import advice, compatibility
from psjob.api.compatibility import Features
from psjob.api.recording import PlainState
from psjob.api.rule_choice import check_kind
from psjob.api.stage_cuts import WHOLE, StageCuts
from psjob.checkpoint import files
from psjob.embeddings.row_tables import Table
from psjob.layout import packing
from psjob.layout.blocks import TensorSpec
from psjob.process.errors import Refused, exit_refused
from psjob.resume import record
from psjob.tables import TableSpec
from psjob.tables import rules as row_rules
from psjob.wire.frame import MAX_BODY, MAX_JSON
from psjob.worker.overlap import Hook, before_forward, before_state

LIBRARIES = {"accelerate": "Accelerate", "lightning": "Lightning"}
"""They read torchrun's names too, and would make a group of all processes of the job."""


NOWHERE: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType({})
MOST_TOLD: Final = MAX_BODY - MAX_JSON
"""Bytes of a table of parameters: the rest of a hello, and of the coordinator's order that repeats it, fits beside it."""


def check_attachable(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], stateful: dict[str, Any],
    later: Sequence[Mapping[str, Any]] = (), in_parts: bool = False,
) -> None:  # fmt: skip
    """Raises Refused, with a sentence on the first thing that does not go together. `in_parts`: a worker has values of its stage only."""
    odd = next((each for each in optimizers if not isinstance(each, torch.optim.Optimizer)), None)
    if not isinstance(model, torch.nn.Module) or odd is not None or not optimizers:
        given = odd if odd is not None else next(iter(optimizers), None)
        raise Refused(f"attach takes a torch Module and a torch Optimizer, got {type(model).__name__} and {type(given).__name__}")
    wrapper = next((each for each in optimizers if not hasattr(each, "_optimizer_step_pre_hooks")), None)
    if wrapper is not None:
        raise Refused(
            f"{type(wrapper).__name__} did not begin as an optimizer of torch does; it wraps another one, whose gradients it changes. "
            "Attach that one, before it is given to the library that makes the other"
        )
    if len(set(map(id, optimizers))) < len(optimizers) or (len(optimizers) > 1 and later):
        raise Refused("attach takes each optimizer once, and later=… with one optimizer only; leave the other out")
    trained = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    trained |= {p for group in later for p in group["params"]}
    _check_tensors(model, trained, in_parts)
    for name, p in packing.named_parameters(model):
        if p.requires_grad and p not in trained:
            raise Refused(
                f"parameter {name} needs a gradient but is in no group of the optimizer. Add it, or freeze it. Give attach "
                "several optimizers of one model as a tuple: attach(model, (one, other))"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None and module.weight.requires_grad:
            raise Refused(
                f"{type(module).__name__} {name or '(the model)'} has max_norm {module.max_norm:g}: each worker would change the rows that "
                "it looks up. Leave max_norm out and bring the rows to their norm in forward"
            )
    if any(_steps(state) for optimizer in optimizers for state in optimizer.state.values()):
        raise Refused(
            "the optimizer holds state from steps before attach, which the shards could not take over. Attach it new, "
            "and begin from a checkpoint with checkpoint.resumeFrom"
        )
    for name, thing in stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise Refused(f"attach(…, {name}=…): {type(thing).__name__} has no state_dict and load_state_dict")
    problems = record.verify_round_trip(stateful)
    if problems:
        raise Refused("what attach was given could not be put back after a restart: " + "; ".join(problems))


def _check_tensors(model: torch.nn.Module, trained: Collection[torch.Tensor], in_parts: bool) -> None:
    """Raise Refused for the first parameter or buffer whose values psjob could not send or put back, by its class."""
    for path, module in model.named_modules():
        own = {"parameter": module._parameters, "buffer": module._buffers}
        for what, name, tensor in ((what, name, tensor) for what, held in own.items() for name, tensor in held.items()):
            told = f"{what} {path}.{name}" if path else f"{what} {name}"
            if is_lazy(tensor):
                raise Refused(
                    f"{told} has no shape yet: {type(module).__name__} takes it from its first batch. Run a batch through the model "
                    "before attach, such as model(batch)"
                )
            if tensor is None or (in_parts and tensor.is_meta):
                continue
            if odd := _odd_buffer(tensor) if what == "buffer" else _odd(tensor) if tensor in trained else "":
                raise Refused(f"{told} {odd}")


def _odd(p: torch.Tensor) -> str:
    """Why a parameter cannot be trained in a job, and what to do; empty: it can."""
    if p.is_meta:
        return "is on the meta device, and has no values. Give the model memory before attach, such as model.to_empty(device='cpu')"
    if p.layout is not torch.strided or p.is_quantized or is_traceable_wrapper_subclass(p):
        return (
            f"is a {type(p).__name__} of layout {str(p.layout).removeprefix('torch.')} and dtype {str(p.dtype).removeprefix('torch.')}, "
            "and shards know dense tensors only. Train a dense parameter and make it of that in forward, or freeze it"
        )
    if torch._debug_has_internal_overlap(p) == 1:
        return (
            "is an expanded view: several of its elements are one number in memory, which no optimizer can step. Make it of values.clone()"
        )
    if p.is_neg():
        return "has torch's lazy negative bit, with which it is a view of other numbers. Make it of values.resolve_neg()"
    return ""


def _odd_buffer(buffer: torch.Tensor) -> str:
    """Why records and checkpoints cannot hold a buffer, and what to do; empty: they can."""
    if buffer.is_meta:
        return "is on the meta device, and has no values. Give it some before attach, or keep it as an attribute that is no buffer"
    dtype = str(buffer.dtype).removeprefix("torch.")
    if buffer.layout is torch.strided and not is_traceable_wrapper_subclass(buffer):
        if dtype in files.CODES:
            return ""
        if buffer.is_complex():
            return f"is {dtype}, which checkpoints do not hold. Keep torch.view_as_real of it, and take torch.view_as_complex in forward"
    return (
        f"is a {type(buffer).__name__} of layout {str(buffer.layout).removeprefix('torch.')} and dtype {dtype}, which checkpoints do not "
        "hold. Keep what never changes as a plain attribute, such as self.adjacency = adjacency, and what changes as a dense tensor"
    )


def _steps(state: Any) -> bool:
    """Is this the state of steps that were made? Some optimizers (Adagrad) hold a state of none from the beginning."""
    return not isinstance(state, dict) or "step" not in state or float(state["step"]) > 0


def stepper(model: torch.nn.Module) -> torch.optim.Optimizer:
    """What makes the steps of a model of only `Table`s. Raises Refused if there is something to train, or no table."""
    if not isinstance(model, torch.nn.Module):
        raise Refused(f"attach takes a torch Module, got {type(model).__name__}")
    trained = next((name for name, p in packing.named_parameters(model) if p.requires_grad), None)
    anchors = [module.anchor for module in model.modules() if isinstance(module, Table)]
    if trained is not None or not anchors:
        raise Refused(
            "attach without an optimizer takes a model with only ps.Table; this one has "
            + (f"parameter {trained}, which needs one" if trained is not None else "none")
        )
    return torch.optim.SGD(anchors, lr=0.0)


def table_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, stages: Mapping[str, tuple[int, ...]] = NOWHERE
) -> tuple[list[torch.Tensor], list[TensorSpec]]:
    """The optimizer's parameters in its order, and what each is. Raises Refused for one that is not the model's."""
    names = {p: name for name, p in packing.named_parameters(model)}
    seen: set[torch.Tensor] = set()
    parameters: list[torch.Tensor] = []
    table: list[TensorSpec] = []
    for number, group in enumerate(optimizer.param_groups):
        for p in (p for p in group["params"] if p not in seen):
            seen.add(p)
            name = names.get(p)
            if name is None:
                raise Refused(
                    f"the optimizer has a parameter of shape {tuple(p.shape)} that is not in the model given to attach. Give attach all "
                    "models that it trains as one, such as torch.nn.ModuleList([actor, critic]). Make a single parameter the model's, as "
                    "by model.scale = scale, or leave it out"
                )
            if p.is_complex():
                raise Refused(
                    f"parameter {name} is {str(p.dtype).removeprefix('torch.')}; shards know real numbers, so make it real by "
                    "torch.view_as_real and take torch.view_as_complex of it in forward"
                )
            parameters.append(p)
            table.append(TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), number, stages.get(name, ())))
    return parameters, table


def aliases(model: torch.nn.Module, table: list[TensorSpec]) -> dict[str, str]:
    """Further names under which the model has a parameter of the table (tied weights).

    Raises Refused if these and the table are more than a hello can carry.
    """
    every = list(packing.named_parameters(model, remove_duplicate=False))
    named = dict(every)
    names = {id(named[spec.name]): spec.name for spec in table}
    found = {alias: names[id(p)] for alias, p in every if id(p) in names and names[id(p)] != alias}
    size = len(json.dumps([[spec.to_json() for spec in table], found]))
    if size > MOST_TOLD:
        raise Refused(
            f"the names and shapes of {len(table)} parameters are {size} bytes, at most {MOST_TOLD} can be sent to the shards; "
            "give modules shorter names, or join small parameters in one tensor"
        )
    return found


def tell_frozen(model: torch.nn.Module, table: Sequence[TensorSpec]) -> None:
    """Say once which parameters of the model the job does not know: those that are frozen, and in no group of the optimizer."""
    names = {spec.name for spec in table}
    known = {id(p) for name, p in packing.named_parameters(model) if name in names}
    known |= {id(module.anchor) for module in model.modules() if isinstance(module, Table)}
    apart = [name for name, p in packing.named_parameters(model) if id(p) not in known]
    if apart:
        told = ", ".join(apart[:3]) + (f" and {len(apart) - 3} more" if apart[3:] else "")
        advice.tell_once(
            "frozen",
            f"frozen parameters are in no group of the optimizer: {told}. Each worker keeps those that its script "
            "builds, and final.safetensors does not have them. Seed before the model is built, or load the same file in all workers; or "
            "give them to the optimizer too",
        )


_attached: list[Pair] = []
"""Those of this process, in their order."""


def check_alone(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str | None, overlap: bool, later: Later,
    stateful: dict[str, Any],
) -> None:  # fmt: skip
    """Raise Refused for what a job would refuse, whatever its manifest says. Nothing of the model changes."""
    if interactive():
        forget()
    if name is not None:
        check_model_name(name, _attached)
    if is_next_phase(_attached, model, optimizers, name):
        check_attachable(model, optimizers, stateful)
        check_kind(optimizers[0])
        check_parameters(_attached[0].parameters, model, optimizers[0])
        return
    if _attached and (name is None or not _attached[0].name or any(_used(pair) for pair in _attached)):
        refuse_more(_attached)
    added = later_groups(later, optimizers)
    check_attachable(model, optimizers, stateful, added)
    made = pairs_of(name, model, optimizers, added)
    compatibility.refuse_clashes(features_of([*_attached, *made], overlap))
    for optimizer in optimizers:
        check_kind(optimizer)
    table_of(*joined_pairs([*_attached, *made]))
    _attached.extend(made)


def features_of(pairs: Sequence[Pair], overlap: bool, tables: Sequence[TableSpec] = (), half_rule: bool = False) -> Features:
    """What the script asks for by what it attached. `tables`: those of the model, in their order."""
    first = {spec.rule in row_rules.COMBINES: spec.name for spec in reversed(tables)}
    return Features(
        rows=first.get(False, ""),
        sums=first.get(True, ""),
        half_rule=half_rule,
        pairs=len(pairs),
        overlap=overlap,
        later=any(pair.later for pair in pairs),
        scripted=overlap and any(isinstance(module, torch.jit.ScriptModule) for pair in pairs for module in pair.model.modules()),
        library=next((name for module, name in LIBRARIES.items() if module in sys.modules), ""),
    )


def interactive() -> bool:
    """Somebody types here, as in a notebook, and runs a line again: `attach` begins anew each time."""
    return hasattr(sys, "ps1")


def forget() -> None:
    """Nothing is attached here any more."""
    _attached.clear()


def _used(pair: Pair) -> bool:
    """Was it trained since it was attached?"""
    return bool(pair.optimizer.state) or any(p.grad is not None for group in pair.optimizer.param_groups for p in group["params"])


AT_ONCE = "Make both optimizers first and give attach both, such as attach(model, (first, second)); then step the one whose phase it is"
"""What helps a script that trains a model in two phases."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


@dataclass(eq=False)
class Pair:
    """`name` is empty for the one pair of a script that names none."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    later: Sequence[dict[str, Any]] = ()
    """Groups that the script adds after attach, in their order."""
    cuts: StageCuts = WHOLE
    """Which stages have what, where the model is cut in stages."""
    plain: type[torch.optim.Optimizer] = field(init=False)
    """The optimizer's class before attach: its own step and state."""
    begun: Mapping[torch.Tensor, Any] = field(default_factory=dict)
    """The optimizer's state as it was attached."""
    told: Any = None
    """What `state_dict` of the optimizer gave since its last step."""
    rows: Sequence[int] = ()
    """Rows in the table of the parameters of all groups, in their order."""
    added: int = 0
    """So many of `later` are groups of the optimizer by now."""

    _held: Sequence[Sequence[torch.Tensor]] = ()
    """The parameters of each group of the optimizer, as psjob knows them."""
    _own: frozenset[int] = frozenset()
    _known: int = -1

    def __post_init__(self) -> None:
        self.plain = type(self.optimizer)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """All, those that are not added yet last."""
        return [*self.optimizer.param_groups, *self.later[self.added :]]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Of all groups, in their order."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def own(self) -> Sequence[int]:
        """Rows of the parameters that its optimizer has by now."""
        return self.rows[: sum(len(group["params"]) for group in self.optimizer.param_groups)]

    def hold(self) -> None:
        """The groups of the optimizer are what they should be."""
        self._held = [list(group["params"]) for group in self.optimizer.param_groups]

    def problem(self) -> str:
        """What a script has done to the groups of the optimizer by itself, and what to do instead; empty: nothing."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        if len(groups) == len(self._held) and all(
            len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(groups, self._held, strict=True)
        ):
            return ""
        known, now = ((len(found), sum(map(len, found))) for found in (self._held, groups))
        told = f"{{}} group{'s' if known[0] > 1 else ''} with {{}} parameters"
        return (
            f"optimizer.param_groups was changed after attach: {told.format(*known)} were attached, and now there are "
            f"{now[1]} in {now[0]}{', some of which are others' if known == now else ''}. Give attach the layers that are trained; name "
            "groups that come later by attach(…, later=[…]), and let a group rest by requires_grad_(False) of its parameters"
        )

    def has(self, row: int) -> bool:
        """Is this row of the table a parameter of its optimizer by now?"""
        if self._known != self.added:
            self._own, self._known = frozenset(self.own), self.added
        return row in self._own


class Models(torch.nn.Module):
    """Several models as one, whose names begin with theirs. A name may be a word of torch's modules too, such as `training`."""

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        self._modules.update(models)

    @property
    def trains(self) -> bool:
        """Is one of them in training?"""
        return any(model.training for model in self.children())


def pairs_of(
    name: str | None, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], later: Sequence[dict[str, Any]],
    cuts: StageCuts = WHOLE,
) -> list[Pair]:  # fmt: skip
    """What one call of `attach` gives: a model, and one optimizer or several."""
    return [Pair(name or "", model, optimizer, later, cuts) for optimizer in optimizers]


def joined_pairs(pairs: Sequence[Pair]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """One model and one optimizer that stand for all.

    The optimizer makes no step; its groups are the others' own, so that a learning rate is what it is there.
    """
    rows: dict[int, int] = {}
    for pair in pairs:
        pair.rows = [rows.setdefault(id(p), len(rows)) for p in pair.parameters]
    if len(pairs) == 1 and not pairs[0].name and not pairs[0].later:
        return pairs[0].model, pairs[0].optimizer
    kinds = {pair.plain for pair in pairs}
    shared = len(rows) < sum(len(pair.rows) for pair in pairs)
    one = object.__new__(_together(pairs, shared) if shared or len(kinds) > 1 else pairs[0].plain)
    one.__dict__.update(pairs[0].optimizer.__dict__)
    one.param_groups = [group for pair in pairs for group in pair.groups]
    model = Models({pair.name: pair.model for pair in pairs}) if pairs[0].name else pairs[0].model
    return model, one


def _together(pairs: Sequence[Pair], shared: bool) -> type[torch.optim.Optimizer]:
    """The class of optimizers that no one rule of the shards stands for, so that each steps on the workers. Its name says why."""
    name = " with ".join(pair.plain.__name__ for pair in pairs) + (" over the same parameters" if shared else "")
    return type(name, (torch.optim.Optimizer,), {})


def check_model_name(name: str, before: Sequence[Pair]) -> None:
    """Raise Refused for a name that is none, or is taken."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise Refused(f"attach(…, name={str(name)[:40]!r}): must be a word of letters, digits and _, such as 'generator'")
    if any(pair.name == name for pair in before):
        raise Refused(
            f"attach(…, name={name!r}) was called twice; each model has a name of its own, and several optimizers of one are given as a "
            "tuple: attach(model, (one, other))"
        )


def refuse_more(before: Sequence[Pair]) -> NoReturn:
    """Raise Refused: these are attached, and no more can be."""
    known = ", ".join(pair.name for pair in before if pair.name)
    raise Refused(
        f"attach after {known} were in use; attach all models, each with its name, before the first of them is run"
        if known
        else "attach was called twice; give each model a name, such as attach(model, optimizer, name='generator')"
    )


class FirstUse:
    """Calls `act` once, when one of the models is first used: run, copied, or asked for its state."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._handles: list[Any] = []

    def watch(self, pair: Pair) -> None:
        """One more. A method of the model's other than `forward` runs modules inside it."""
        used = Hook(lambda *_given: self._used())
        self._handles += [
            *(before_forward(module, used, prepend=True) for module in pair.model.modules()),
            before_state(pair.model, used),
            pair.optimizer.register_step_pre_hook(lambda *_given: self._unused(pair)),
        ]

    def stop(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _used(self) -> None:
        if self._handles:
            self.stop()
            self._act()

    def _unused(self, pair: Pair) -> None:
        exit_refused(
            f"the optimizer of {pair.name or 'a model'} made a step before any attached model was run, so that its gradients are of other "
            "weights than the job's. Attach before the first loss is computed, and compute it by the modules of the model"
        )


def is_next_phase(pairs: Sequence[Pair], model: torch.nn.Module, optimizers: Sequence[object], name: str | None) -> bool:
    """Is the model attached already, with one optimizer and no name, and is this another one for it?"""
    return (
        len(pairs) == 1 == len(optimizers)
        and name is None
        and not pairs[0].name
        and pairs[0].model is model
        and pairs[0].optimizer is not optimizers[0]
    )


def check_parameters(known: Sequence[torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise Refused for a parameter that the first optimizer did not have."""
    had, names = {id(p) for p in known}, {id(p): name for name, p in packing.named_parameters(model)}
    new = next((p for group in optimizer.param_groups for p in group["params"] if id(p) not in had), None)
    if new is not None:
        told = names.get(id(new), f"of shape {tuple(new.shape)}")
        raise Refused(f"attach was called again with a parameter that the first optimizer does not have: {told}. {AT_ONCE}")


class PhaseState(PlainState):
    """The state of the optimizer that steps now, in a resume record."""

    def state_dict(self) -> dict[str, Any]:
        """With its class, by which another one is known."""
        return {**super().state_dict(), "class": self.kind}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises Refused for the state of an optimizer of another phase."""
        state = dict(state)
        kind = state.pop("class", self.kind)
        sizes = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], self.groups)]
        if kind != self.kind or sizes[0] != sizes[1]:
            raise Refused(
                f"{kind} of {sum(sizes[0])} parameters was attached when the record was taken, and {self.kind} of {sum(sizes[1])} is now. "
                "After a restart the lines of a phase that is over do not run again. Write a loop over ps.epochs(n) for each phase, and "
                "attach between them"
            )
        super().load_state_dict(state)


Later = Sequence["torch.nn.Module | Iterable[torch.Tensor]"]
"""What `attach(…, later=…)` takes: for each group a module or its parameters, in the order in which they are added."""


def later_groups(later: Later, optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """A parameter group for each, with the first optimizer's defaults. Raises Refused for what is none."""
    optimizer = next(iter(optimizers), None)
    if not later or not isinstance(optimizer, torch.optim.Optimizer):
        return []
    if isinstance(later, torch.nn.Module | torch.Tensor) or not isinstance(later, Sequence):
        raise Refused(f"attach(…, later=…) takes a list with a module or parameters for each group, got {type(later).__name__}")
    made = []
    seen = {p for group in optimizer.param_groups for p in group["params"]}
    for number, part in enumerate(later):
        given = [*(part.parameters() if isinstance(part, torch.nn.Module) else part if isinstance(part, Iterable) else ())]
        if not given or not all(isinstance(p, torch.Tensor) for p in given):
            raise Refused(
                f"attach(…, later=…): entry {number} is {type(part).__name__} without parameters; give a module or its parameters"
            )
        twice = next((p for p in given if p in seen), None)
        if twice is not None:
            raise Refused(f"attach(…, later=…): entry {number} has a parameter of shape {tuple(twice.shape)} that is in a group already")
        seen.update(given)
        made.append({**optimizer.defaults, "params": given})
    return made


def next_added(expected: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as a group whose parameters can be read several times. Raises Refused if it is not the first of `expected`."""
    params = given["params"]
    added = [params] if isinstance(params, torch.Tensor) else list(params)
    if not expected:
        raise Refused(
            "add_param_group after attach: attach was given no such group. Name its parameters there: attach(…, later=[model.backbone])"
        )
    wanted = expected[0]["params"]
    if [id(p) for p in added] != [id(p) for p in wanted]:
        raise Refused(
            f"add_param_group after attach has {len(added)} parameters of shapes {_shapes(added)}; the group that comes next of attach(…, "
            f"later=…) has {len(wanted)} of shapes {_shapes(wanted)}. Add the groups in that order, each with the same parameters"
        )
    return {**given, "params": added}


def _shapes(params: Sequence[torch.Tensor]) -> str:
    told = [str(tuple(p.shape)) for p in params[:3]]
    return ", ".join(told) + (", …" if len(params) > len(told) else "")


class AddedGroups:
    """How many such groups a script has added, for its resume record."""

    counts_again = True
    """A loop without `ps.epochs` adds them again on the way to its place."""

    def __init__(self, pairs: Sequence[Any]) -> None:
        self._pairs = pairs

    def state_dict(self) -> dict[str, Any]:
        """The number for each pair."""
        return {"added": [pair.added for pair in self._pairs]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what is missing. Raises Refused if the script has added more than when its record was taken."""
        for pair, wanted in zip(self._pairs, state["added"], strict=True):
            if pair.added > wanted:
                raise Refused(
                    f"the script had added {wanted} parameter groups after attach when its record was taken, and now {pair.added}. "
                    "Add a group by the number of the epoch, before the loop over its batches"
                )
            for group in pair.later[pair.added : wanted]:
                pair.optimizer.add_param_group(dict(group))


class TrainedFlags:
    """Which parameters are trained: those whose `requires_grad` a script has changed since attach, for its resume record."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._first = [(name, p, p.requires_grad) for name, p in packing.named_parameters(model)]

    def state_dict(self) -> dict[str, bool]:
        """By name of the parameter."""
        return {name: p.requires_grad for name, p, first in self._first if p.requires_grad != first}

    def load_state_dict(self, state: Mapping[str, bool]) -> None:
        """Put them back; all others are as they were at attach."""
        for name, p, first in self._first:
            wanted = state.get(name, first)
            if p.requires_grad != wanted:
                p.requires_grad_(wanted)
