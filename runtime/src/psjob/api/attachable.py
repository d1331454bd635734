"""What `attach` takes: a model, an optimizer of all its parameters, objects that can be put back; and the table of those parameters.

What a worker of several processes does not go with yet.

Outside a job: what `attach` refuses in one it refuses here, so that a script that trains alone is one that a job takes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from psjob.api import advice, pairs
from psjob.api.pairs import Later, Pair, check_name, check_overlap, joined, later_groups, pairs_of, refuse_more
from psjob.api.rulechoice import check_kind
from psjob.checkpoint import files
from psjob.embeddings.statetable import Table
from psjob.layout import members
from psjob.layout.blocks import TensorSpec
from psjob.process.config import Config
from psjob.process.errors import Refused
from psjob.resume import record
from psjob.wire.frame import MAX_BODY, MAX_JSON

LIBRARIES = {"accelerate": "Accelerate", "lightning": "Lightning"}
"""They read torchrun's names too, and would make a group of all processes of the job."""


def check_processes(config: Config, overlap: bool, half: bool, tables: int) -> None:
    """Raise Refused where workers have several processes and the script wants what only one goes with."""
    if config.processes == 1:
        return
    library = next((name for module, name in LIBRARIES.items() if module in sys.modules), None)
    for there, what, remedy in (
        (overlap, "attach(…, overlap=True)", "leave it out"),
        (half, f"training.updateRule {config.update_rule}", "leave it out"),
        (bool(tables), "ps.Embedding and ps.Table", "take torch's nn.Embedding"),
        (config.mode == "local", "training.mode local", "take another mode"),
        (library is not None, library, "train with a plain loop"),
    ):
        if there:
            raise Refused(
                f"{what} does not go with several processes per worker yet, and spec.workers.processes is {config.processes}; {remedy}, or "
                "leave processes out and raise spec.workers.replicas"
            )


NOWHERE: Final[Mapping[str, tuple[int, ...]]] = MappingProxyType({})
MOST_TOLD: Final = MAX_BODY - MAX_JSON
"""Bytes of a table of parameters: the rest of a hello, and of the coordinator's order that repeats it, fits beside it."""


def check(
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
    for name, p in members.named_parameters(model):
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
    """What makes the steps of a model of `Table`s alone. Raises Refused where there is something to train, or no table."""
    if not isinstance(model, torch.nn.Module):
        raise Refused(f"attach takes a torch Module, got {type(model).__name__}")
    trained = next((name for name, p in members.named_parameters(model) if p.requires_grad), None)
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
    names = {p: name for name, p in members.named_parameters(model)}
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

    Raises Refused where these and the table are more than a hello can carry.
    """
    every = list(members.named_parameters(model, remove_duplicate=False))
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
    known = {id(p) for name, p in members.named_parameters(model) if name in names}
    known |= {id(module.anchor) for module in model.modules() if isinstance(module, Table)}
    apart = [name for name, p in members.named_parameters(model) if id(p) not in known]
    if apart:
        told = ", ".join(apart[:3]) + (f" and {len(apart) - 3} more" if apart[3:] else "")
        advice.tell(
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
        check_name(name, _attached)
    if pairs.is_next_phase(_attached, model, optimizers, name):
        check(model, optimizers, stateful)
        check_kind(optimizers[0])
        pairs.check_parameters(_attached[0].parameters, model, optimizers[0])
        return
    if _attached and (name is None or not _attached[0].name or any(_used(pair) for pair in _attached)):
        refuse_more(_attached)
    added = later_groups(later, optimizers)
    check(model, optimizers, stateful, added)
    made = pairs_of(name, model, optimizers, added)
    check_overlap(overlap, [*_attached, *made])
    for optimizer in optimizers:
        check_kind(optimizer)
    table_of(*joined([*_attached, *made]))
    _attached.extend(made)


def interactive() -> bool:
    """Somebody types here, as in a notebook, and runs a line again: `attach` begins anew each time."""
    return hasattr(sys, "ps1")


def forget() -> None:
    """Nothing is attached here any more."""
    _attached.clear()


def _used(pair: Pair) -> bool:
    """Was it trained since it was attached?"""
    return bool(pair.optimizer.state) or any(p.grad is not None for group in pair.optimizer.param_groups for p in group["params"])
