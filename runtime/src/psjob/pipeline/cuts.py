"""Splits a model into the parts of a pipeline, at names of its modules.

A model that is no nn.Sequential is traced by torch.export and split by torch.distributed.pipelining. The graph is exported with the
micro-batch's shapes, and again for each other shape, dtype or mode that comes. What a later stage needs of an earlier one is handed on by
the stages between. `prepare_graph` makes a graph ready to be split: one level of nodes, names that cannot be mixed up, random operators
by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint

from psjob.pipeline.exported import exported_parts
from psjob.pipeline.random_draws import joined_path
from psjob.pipeline.stage import Pieces, StagePart

Cuts = Sequence[str | int] | Mapping[str, SplitPoint]
"""Where parts begin: names of modules, or numbers of children of an nn.Sequential; or torch's SplitPoint by name."""


def split_model(model: nn.Module, cuts: Cuts = (), example: tuple[tuple[Any, ...], dict[str, Any]] | None = None) -> list[StagePart]:
    """The parts of `model`, one more than there are cuts, in order.

    A model that is an nn.Sequential, or does no more than call one, is cut between its children and those of nn.Sequential in it,
    without tracing. Others are exported by torch.export and cut by torch.distributed.pipelining, once for each shape of a micro-batch.

    Args:
        model: in training mode or not; its modules, parameters and buffers stay as they are.
        cuts: each names the first module of a part, or by `SplitPoint.END` the last one. A number is a child of the nn.Sequential.
        example: `(args, kwargs)` of a micro-batch, for a model that must be exported.

    Raises:
        ValueError: a cut that is no module, is out of order or leaves a part empty. Also a model that must be exported and cannot be,
            or for which no example is given.
    """
    trunk = _trunk(model)
    points = _points(model, cuts, trunk)
    pieces = None if trunk is None else _pieces(model, trunk, [name for name, _ in points])
    if not points:
        # By pieces too, so that random bits have the names that they have with cuts.
        return [Pieces(0, model, [("", model)] if not pieces or any(map(_has_hooks, _around(model, trunk))) else pieces)]
    if pieces is None:
        if example is None:
            raise ValueError(f"{type(model).__name__} is not an nn.Sequential: cutting it needs an example micro-batch; give one")
        return exported_parts(model, points, example)
    return [Pieces(index, model, part) for index, part in enumerate(_between(pieces, points))]


def needs_example(model: nn.Module, cuts: Cuts) -> bool:
    """Must the model be exported to be cut there? Raises ValueError for cuts that are no modules."""
    trunk = _trunk(model)
    points = _points(model, cuts, trunk)
    return bool(points) and (trunk is None or _pieces(model, trunk, [name for name, _ in points]) is None)


def beginnings(model: nn.Module, names: Sequence[str]) -> list[str | None]:
    """Of modules in their order of execution, the cut with which a stage can begin at each; None where none can."""
    trunk = _trunk(model)
    if trunk is None:
        return list(names)
    pieces = [name for name, _ in _opened(trunk, model.get_submodule(trunk))]
    found: list[str | None] = []
    last = None
    for name in names:
        piece = next((one for one in pieces if _within(name, one)), None)
        if piece is None:
            found.append(name if any(_within(one, name) for one in pieces) else None)
        else:
            found.append(None if piece == last else piece)
        last = piece
    return found


def _points(model: nn.Module, cuts: Cuts, trunk: str | None) -> list[tuple[str, SplitPoint]]:
    if isinstance(cuts, str):
        raise ValueError(f"cuts is the text {cuts!r}, must be a list of names, such as [{cuts!r}]")
    named = cuts.items() if isinstance(cuts, Mapping) else [(_name(model, cut, trunk), SplitPoint.BEGINNING) for cut in cuts]
    modules = dict(model.named_modules(remove_duplicate=False))
    points: list[tuple[str, SplitPoint]] = []
    for name, point in named:
        if not name or name not in modules:
            near = difflib.get_close_matches(name, modules, n=3) or list(modules)[1:4]
            raise ValueError(
                f"cut {name!r} is no module of {type(model).__name__}; near are {', '.join(near) or 'none, it has no modules'}"
            )
        if not isinstance(point, SplitPoint):
            raise ValueError(f"cut {name!r} is {point!r}, must be SplitPoint.BEGINNING or SplitPoint.END")
        if name in (one for one, _ in points):
            raise ValueError(f"cut {name!r} was given twice; leave one out")
        points.append((name, point))
    return points


def _name(model: nn.Module, cut: str | int, trunk: str | None) -> str:
    if isinstance(cut, str):
        return cut
    if isinstance(cut, bool) or not isinstance(cut, int):
        raise ValueError(f"cut {cut!r} is a {type(cut).__name__}, must be a module's name or the number of a child of an nn.Sequential")
    if trunk is None:
        raise ValueError(f"cut {cut} is a number, and {type(model).__name__} is not an nn.Sequential; give the name of a module")
    children = list(model.get_submodule(trunk)._modules)
    if not 0 < cut < len(children):
        raise ValueError(f"cut {cut}: must be 1 to {len(children) - 1}, the model's nn.Sequential has {len(children)} children")
    return joined_path(trunk, children[cut])


def _trunk(model: nn.Module) -> str | None:
    """The name of the nn.Sequential that is all the model does; empty where it is the model itself."""
    name, module = "", model
    while not _is_sequential(module):
        children = [(child, found) for child, found in module._modules.items() if found is not None]
        if len(children) != 1 or not _only_calls(module, children[0][0]):
            return None
        name, module = joined_path(name, children[0][0]), children[0][1]
    return name


def _only_calls(module: nn.Module, child: str) -> bool:
    """Is its forward no more than `return self.child(x)`? Its code is run on symbols; nothing is computed."""
    if any(True for _ in module.named_parameters(recurse=False)) or any(True for _ in module.named_buffers(recurse=False)):
        return False
    try:
        nodes = list(_ChildrenAreLeaves().trace(module).nodes)
    except Exception:  # code that cannot be run on symbols does more
        return False
    kinds = [node.op for node in nodes]
    return kinds == ["placeholder", "call_module", "output"] and nodes[1].target == child and nodes[2].args == (nodes[1],)


class _ChildrenAreLeaves(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _is_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def _pieces(model: nn.Module, trunk: str, names: Sequence[str]) -> list[tuple[str, nn.Module]] | None:
    """The model as a row of modules, each nn.Sequential in it opened; None where one of `names` lies inside something else.

    Raises:
        ValueError: one lies inside what has hooks. A module that is opened is not called itself, so they would not run.
    """
    if hooked := next((module for module in _around(model, trunk) if _has_hooks(module)), None) if names else None:
        raise ValueError(_HOOKS.format(type(hooked).__name__))
    pieces = list(_opened(trunk, model.get_submodule(trunk)))
    for wanted in names:
        if not any(_within(name, wanted) for name, _ in pieces):
            inside = next((piece for piece in pieces if _within(wanted, piece[0])), None)
            if inside is None or not _is_sequential(inside[1]):
                return None
            raise ValueError(_HOOKS.format(inside[0]))
    return pieces


def _around(model: nn.Module, trunk: str | None) -> list[nn.Module]:
    """The model, what it calls alone, and so on to its nn.Sequential."""
    return [module for name, module in model.named_modules() if not name or f"{trunk}.".startswith(f"{name}.")]


_HOOKS = "{} has hooks and would be cut, so that they would not run; put them on its children"


def _opened(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # `_modules` and not `named_children`: one module may have several places.
    for child_name, child in module._modules.items():
        assert child is not None  # nn.Sequential calls all of them
        path = joined_path(name, child_name)
        if _is_sequential(child) and child._modules and not _has_hooks(child):
            yield from _opened(path, child)
        else:
            yield path, child


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _between(pieces: Sequence[tuple[str, nn.Module]], points: Sequence[tuple[str, SplitPoint]]) -> list[Sequence[tuple[str, nn.Module]]]:
    edges = [0]
    for name, point in points:
        places = [place for place, (piece, _) in enumerate(pieces) if _within(piece, name)]
        edge = places[0] if point is SplitPoint.BEGINNING else places[-1] + 1
        if edge < edges[-1]:
            raise ValueError(f"cut {name!r} comes before the one given before it; give cuts in the order in which the model runs them")
        if edge == edges[-1] or edge == len(pieces):
            raise ValueError(f"cut {name!r} leaves a part without modules; leave it out")
        edges.append(edge)
    return [pieces[begin:end] for begin, end in zip(edges, [*edges[1:], len(pieces)], strict=True)]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
