"""Parts of a model that torch.export can trace, split by torch.distributed.pipelining.

The graph is exported with the micro-batch's shapes, and again for each other shape, dtype or mode that comes. What a later stage needs
of an earlier one is handed on by the stages between. `prepare_graph` makes a graph ready to be split: one level of nodes, names that cannot
be mixed up, random operators by name.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils import _pytree as pytree

from psjob.pipeline.lazy import untouched
from psjob.pipeline.random_draws import Calls, Draw, drawing, drawn, joined_path, seed_for
from psjob.pipeline.stage import StagePart, tensor_devices

Mode = tuple[Any, ...]
"""("grad", enabled), or ("autocast", device type, dtype, enabled, cache)."""
Place = tuple[str, int, int]
"""Of a random operator: its module's name, the number of the module's call, its own number in that call."""


def prepare_graph(traced: fx.GraphModule) -> None:
    """Change the graph in place. What it computes stays the same.

    - What the model does under `torch.no_grad` or `torch.autocast` is a graph of its own, with which torch's split cannot deal. It comes
      into the graph itself, each operator with its mode.
    - torch's split goes by names, and a buffer `mean` and an operator `mean` would be one to it. Operators get names of their own.
    - A random operator is run by its place.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    _copy(traced, traced.graph, graph, copies, ())
    draws = _draws(graph)
    for node in graph.nodes:
        if node.meta.get(MODES) or node in draws:
            node.args = (node.meta[MODES], draws.get(node), node.target, *node.args)
            node.target = run_as
    graph.set_codegen(traced.graph._codegen)
    traced.graph = graph


MODES = "psjob_modes"


def run_as(modes: Sequence[Mode], place: Place | None, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator under the modes, the outermost first; a random one by its place."""
    with ExitStack() as stack:
        for kind, *given in modes:
            if kind == "grad":
                stack.enter_context(torch.set_grad_enabled(given[0]))
            else:
                device, dtype, enabled, cache = given
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        return op(*args, **kwargs) if place is None else drawn(op, *place, *args, **kwargs)


def _copy(module: torch.nn.Module, old: fx.Graph, new: fx.Graph, copies: dict[fx.Node, Any], modes: tuple[Mode, ...]) -> Any:
    """Copy the nodes of a graph that belongs to `module`; `copies` has what its inputs are. Returns what an inner graph gives."""
    for node in old.nodes:
        if node in copies:
            continue
        if node.op == "output" and modes:
            return fx.map_arg(node.args[0], copies.__getitem__)
        if node.op == "get_attr" and isinstance(_attribute(module, node.target), torch.nn.Module):
            copies[node] = _attribute(module, node.target)
        elif (inner := _mode(node)) is not None:
            graph_module, inputs = copies[inner[1]], [copies.get(one, one) if isinstance(one, fx.Node) else one for one in inner[2]]
            inner_copies = dict(zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True))
            copies[node] = _copy(graph_module, graph_module.graph, new, inner_copies, (*modes, inner[0]))
        elif node.target is operator.getitem and isinstance(copies[node.args[0]], tuple | list):
            copies[node] = copies[node.args[0]][node.args[1]]
        else:
            args, kwargs = (fx.map_arg(given, copies.__getitem__) for given in (node.args, node.kwargs))
            # Without a name it gets one after its target, which is how the split names it.
            name = None if node.op in ("get_attr", "placeholder") else f"psjob_node_{len(new.nodes)}"
            copies[node] = new.create_node(node.op, node.target, args, kwargs, name, node.type)
            copies[node].meta = node.meta | {MODES: modes}
    return None


def _mode(node: fx.Node) -> tuple[Mode, fx.Node, Sequence[Any]] | None:
    """The mode, the graph and the inputs of a node that runs a graph in a mode."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name == "wrap_with_set_grad_enabled":
        enabled, graph, *inputs = node.args
        return ("grad", enabled), graph, inputs  # type: ignore[return-value]
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, graph, *inputs = node.args
        return ("autocast", device, dtype, enabled, cache), graph, inputs  # type: ignore[return-value]
    return None


def _attribute(module: torch.nn.Module, target: Any) -> Any:
    found: Any = module
    for name in str(target).split("."):
        found = getattr(found, name, None)
    return found


def _draws(graph: fx.Graph) -> dict[fx.Node, Place]:
    """The places of random operators."""
    places: dict[fx.Node, Place] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            key, (path, _) = list(node.meta["nn_module_stack"].items())[-1]
            repeated = re.search(r"@(\d+)$", key)
            call = int(repeated[1]) if repeated else 0
            places[node] = (path, call, counts[path, call])
            counts[path, call] += 1
    return places


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Points = Sequence[tuple[str, SplitPoint]]


def exported_parts(model: nn.Module, points: Points, example: Arguments) -> list[StagePart]:
    """The parts of `model` between `points`. Raises ValueError if it cannot be exported, or a part would be empty."""
    graphs = _Graphs(model, points)
    graphs.of(example)
    return [ExportedPart(index, graphs) for index in range(len(points) + 1)]


class ExportedPart(StagePart):
    """One stage of an exported model. Between parts go the number of the graph and tensors by name."""

    def __init__(self, index: int, graphs: _Graphs) -> None:
        self.index = index
        self._graphs = graphs
        self.parameters, self.buffers = graphs.tensors(index)

    def run(self, parameters: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor], value: Any, draw: Draw, calls: Calls) -> Any:
        if self.index == 0:
            number, graph = self._graphs.of(value)
            held = dict(zip(graph.inputs, pytree.tree_leaves(value), strict=True))
        else:
            number, held = value[0], dict(value[1])
            graph = self._graphs.known[number]
        stage = graph.stages[self.index]
        given = {local: (parameters if name in self.parameters else buffers)[name] for name, local in stage.names.items()}
        with drawing(draw, {}, tensor_devices([given, held]), calls):
            result = torch.func.functional_call(stage.module, given, tuple(held[name] for name in stage.takes))
        held |= dict(zip(stage.gives, result if stage.several else (result,), strict=True))
        if self.index + 1 == len(graph.stages):
            leaves = [held[one] if isinstance(one, _Named) else one for one in graph.outputs]
            return pytree.tree_unflatten(leaves, graph.structure)
        return number, {name: held[name] for name in stage.passes}

    def expect(self, given: Arguments) -> None:
        self._graphs.of(given)

    def repeating(self, draw: Draw, devices: Sequence[torch.device], calls: Calls) -> AbstractContextManager[None]:
        return drawing(draw, {}, devices, calls)


class _Named(str):
    """A value by its name in a graph, in a place where constants may stand too."""


@dataclass(frozen=True, eq=False)
class _GraphStage:
    module: nn.Module
    names: dict[str, str]
    """By name in the model: the name in `module`."""
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    several: bool
    passes: tuple[str, ...]
    """What later stages need."""


@dataclass(frozen=True, eq=False)
class _Graph:
    inputs: tuple[str, ...]
    stages: list[_GraphStage]
    outputs: list[Any]
    structure: pytree.TreeSpec


@dataclass(eq=False)
class _Graphs:
    """All graphs of one model, by the shape of what it is given."""

    model: nn.Module
    points: Points
    known: dict[int, _Graph] = field(default_factory=dict)
    """By number, in the order in which they were made. A number depends only on shapes, so that workers call one graph by one number."""

    def __post_init__(self) -> None:
        self.parameters = frozenset(name for name, _ in self.model.named_parameters())

    def of(self, given: Arguments) -> tuple[int, _Graph]:
        """The number of the graph for these arguments, and the graph; made where there is none."""
        leaves, structure = pytree.tree_flatten(given)
        shapes = tuple((leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
        casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
        key = (str(structure), shapes, tuple(module.training for module in self.model.modules()), casts)
        number = seed_for("graph", repr(key))
        if number not in self.known:
            with untouched(self.model):
                graph = _export(self.model, self.points, given)
            if self.known and (names := sorted(self._names(graph) - self._names(self._first))):
                raise ValueError(
                    f"stage {names[0][0]} of {type(self.model).__name__} uses {names[0][1]} for this micro-batch, not for the first; "
                    "begin with one that uses all, or cut elsewhere"
                )
            self.known[number] = graph
        return number, self.known[number]

    def tensors(self, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the parameters and buffers of a stage."""
        used = [name for stage, name in sorted(self._names(self._first)) if stage == index]
        parameters = tuple(name for name, _ in self.model.named_parameters() if name in used)
        return parameters, tuple(name for name, _ in self.model.named_buffers() if name in used)

    @property
    def _first(self) -> _Graph:
        return next(iter(self.known.values()))

    def _names(self, graph: _Graph) -> set[tuple[int, str]]:
        """By stage, what it uses; and further buffers of the same modules, which another mode may use (BatchNorm's)."""
        used = {(stage, name) for stage, one in enumerate(graph.stages) for name in one.names}
        owners = {(stage, name.rpartition(".")[0]) for stage, name in used}
        kept = {(stage, name) for name, _ in self.model.named_buffers() for stage, owner in owners if owner == name.rpartition(".")[0]}
        return used | kept


def _export(model: nn.Module, points: Points, given: Arguments) -> _Graph:
    seen: dict[str, Any] = {}
    fired: list[str] = []

    def mark(name: str) -> None:
        fired.append(name)
        pipe_split()  # type: ignore[no-untyped-call]

    def look(traced: torch.fx.GraphModule) -> torch.fx.GraphModule:
        seen["in"], seen["out"] = traced._in_spec, traced._out_spec
        prepare_graph(traced)
        return traced

    owned = {id(module): name for name, module in model.named_modules()}
    replaced: list[str] = []

    def note(module: nn.Module, name: str, _value: Any) -> None:
        if id(module) in owned:
            replaced.append(joined_path(owned[id(module)], name))

    handles: list[Any] = [register_module_buffer_registration_hook(note)]
    for name, point in points:
        module = model.get_submodule(name)
        if point is SplitPoint.BEGINNING:
            handles.append(module.register_forward_pre_hook(lambda _module, _args, name=name: mark(name)))
        else:
            handles.append(module.register_forward_hook(lambda _module, _args, _output, name=name: mark(name)))
    try:
        with torch.enable_grad():
            pipe = pipeline(model, given[0], given[1], split_policy=look)
    except Exception as error:
        why = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{type(model).__name__} cannot be cut: torch.export did not trace it ({why[:200]}); "
            "make it an nn.Sequential, or change what torch.export names"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if replaced:  # torch.export leaves such an assignment out of the graph
        raise ValueError(
            f"the forward of {type(model).__name__} puts another tensor in place of its buffer {replaced[0]}, which a cut would lose; "
            "write into the buffer, as by copy_"
        )
    _check_fired(fired, [name for name, _ in points], pipe.num_stages)
    if seen["in"] != pytree.tree_structure(given):
        raise ValueError(f"{type(model).__name__} takes other arguments than the example has; give them in the order of its forward")
    return _graph(model, pipe, seen["out"])


def _check_fired(fired: Sequence[str], names: Sequence[str], stages: int) -> None:
    for name in names:
        if fired.count(name) != 1:
            raise ValueError(f"cut {name!r} is at a module that runs {fired.count(name)} times in a forward; cut at one that runs once")
    if list(fired) != list(names):
        raise ValueError(f"cuts are in the order {', '.join(names)}, and the model runs {', '.join(fired)}; give them in the model's order")
    if stages != len(names) + 1:
        raise ValueError(f"cuts {', '.join(names)} leave a part without operations: {stages} parts where {len(names) + 1} were asked for")


def _graph(model: nn.Module, pipe: Any, structure: pytree.TreeSpec) -> _Graph:
    nodes = list(pipe.split_gm.graph.nodes)
    by_target = {node.target: node for node in nodes if node.op == "call_module"}
    # By number: parts that need nothing of each other may stand in any order in the graph.
    runs = [by_target[f"submod_pp_{index}"] for index in range(len(by_target))]
    flat = nodes[-1].args[0]
    outputs = [_Named(one.name) if isinstance(one, torch.fx.Node) else one for one in (flat if isinstance(flat, list | tuple) else [flat])]
    wanted = [tuple(one.name for one in node.args) for node in runs]
    stages: list[_GraphStage] = []
    for index, node in enumerate(runs):
        items = {user.args[1]: user.name for user in node.users if user.op == "call_function"}
        module = pipe.get_stage_module(index)
        module.graph.set_codegen(torch.fx.graph.CodeGen())  # the first stage has the model's own, which takes nested arguments
        module.recompile()
        if len(module.graph.find_nodes(op="placeholder")) != len(wanted[index]):
            raise ValueError(f"torch.distributed.pipelining lost a tensor of stage {index} of {type(model).__name__}; cut elsewhere")
        count = len(module.graph.find_nodes(op="output")[0].args[0]) if items else 1
        gives = tuple(items.get(place, f"{node.name}:{place}") for place in range(count)) if items else (node.name,)
        later = {*(name for names in wanted[index + 1 :] for name in names), *(one for one in outputs if isinstance(one, _Named))}
        made = [one.name for one in nodes if one.op == "placeholder"] + [name for stage in stages for name in stage.gives] + list(gives)
        stages.append(
            _GraphStage(module, _own_names(model, module), wanted[index], gives, bool(items), tuple(n for n in made if n in later))
        )
    return _Graph(tuple(node.name for node in nodes if node.op == "placeholder"), stages, outputs, structure)


def _own_names(model: nn.Module, module: nn.Module) -> dict[str, str]:
    """Names in the model, each with a name in the stage's module, whose own tensors are given up: others are put in their place."""
    canonical = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {name: canonical[id(tensor)] for name, tensor in every}
    names: dict[str, str] = {}
    empty: dict[str, torch.Tensor] = {}
    for local, tensor in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        name = first.get(re.sub(r"@\d+", "", local))
        if name is None:
            continue  # a constant of the graph
        names.setdefault(name, local)
        place, _, attribute = local.rpartition(".")
        owner = module.get_submodule(place)
        if attribute in owner._parameters:
            owner._parameters[attribute] = empty.setdefault(name, nn.Parameter(tensor.detach().to("meta")))  # type: ignore[assignment]
        else:
            owner._buffers[attribute] = empty.setdefault(name, tensor.to("meta"))
    return names
