"""First values of a lazy model, a few modules at a time: the model itself stays without them.

Tensors that one `reset_parameters` sets are drawn together, and so are those of modules that share a tensor. Such a group is the least
whose values can be made alone; the values are those that `materialise` gives the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from psjob.pipeline.lazy import check_drawn, draw, in_order, makers_of, reset_of


@dataclass(eq=False)
class _Group:
    """What is drawn together: tensors by name, each with the places where modules hold it; and the modules that are reset, in order."""

    places: dict[str, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)


class FirstValues:
    """Of one model, whose tensors without memory it remembers: they may be given some meanwhile.

    Args:
        model: built under `psjob.lazy()`, or on the meta device.
        seed: with the modules' names it decides the values.

    Attributes:
        names: of the parameters and buffers that have no memory.
        device: where values are made.

    Raises:
        ValueError: a tensor whose value no `reset_parameters` of its module sets, by name.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.device = torch.get_default_device()
        self._seed = seed
        self._named = dict(model.named_modules())
        meta = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta}
        self.names = frozenset(meta)
        self._makers = makers_of(self._named, meta)
        self._groups = _groups(model, self._named, meta)
        for group in {id(group): group for group in self._groups.values()}.values():
            check_drawn(self._named, group.modules, {name: meta[name] for name in group.places})

    def beside(self, name: str) -> frozenset[str]:
        """What `of` gives with this tensor."""
        return frozenset(self._groups[name].places)

    def of(self, name: str) -> dict[str, torch.Tensor]:
        """The values of a tensor of `names`, and of those that are drawn with it, by name. Each call draws them anew, the same.

        Raises:
            ValueError: as of the class, where it shows only when values are drawn.
        """
        group = self._groups[name]
        with _swapped(group, self.device) as made:
            makers = {name: self._makers[name] for name in made}
            draw(self._named, group.modules, made, makers, self._seed, self.device)
        return {name: tensor.detach() for name, tensor in made.items()}


def _groups(model: nn.Module, named: Mapping[str, nn.Module], meta: Mapping[str, torch.Tensor]) -> dict[str, _Group]:
    """By name of a tensor."""
    canonical = {id(tensor): name for name, tensor in meta.items()}
    parents: dict[str, str] = {name: name for name in meta}

    def root(name: str) -> str:
        while parents[name] != name:
            parents[name] = name = parents[parents[name]]
        return name

    resets: list[tuple[str, nn.Module, str]] = []
    for path, module in in_order(named):
        own = [canonical[id(tensor)] for tensor in (*module.parameters(), *module.buffers()) if id(tensor) in canonical]
        if own and reset_of(module) is not None:
            for name in own[1:]:
                parents[root(name)] = root(own[0])
            resets.append((path, module, own[0]))
    found: dict[str, _Group] = {}
    groups = {name: found.setdefault(root(name), _Group()) for name in meta}
    for module in model.modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for store in stores:
            for key, tensor in store.items():
                if id(tensor) in canonical:
                    name = canonical[id(tensor)]
                    groups[name].places.setdefault(name, []).append((store, key))
    for path, module, name in resets:
        groups[name].modules.append((path, module))
    return groups


@contextmanager
def _swapped(group: _Group, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """New memory by name, which the modules hold inside in place of what they have."""
    kept = [(store, key, store[key]) for places in group.places.values() for store, key in places]
    made: dict[str, torch.Tensor] = {}
    for name, places in group.places.items():
        store, key = places[0]
        like = store[key]
        empty = torch.empty_like(like, device=device, requires_grad=False)
        made[name] = nn.Parameter(empty, like.requires_grad) if isinstance(like, nn.Parameter) else empty
    try:
        for name, places in group.places.items():
            for store, key in places:
                store[key] = made[name]
        yield made
    finally:
        for store, key, tensor in kept:
            store[key] = tensor
