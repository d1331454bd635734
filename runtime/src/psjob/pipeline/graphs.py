"""Makes a graph of torch.export ready to be split: one level of nodes, names that cannot be mixed up, random operators by name."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from psjob.pipeline.draws import drawn

Mode = tuple[Any, ...]
"""("grad", enabled), or ("autocast", device type, dtype, enabled, cache)."""

Place = tuple[str, int, int]
"""Of a random operator: its module's name, the number of the module's call, its own number in that call."""


def prepare(traced: fx.GraphModule) -> None:
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
