"""Models built on the meta device, and their first values: by the name of each module and a seed, stage by stage.

First values come from each module's own `reset_parameters`, run under generators that are seeded for the module's name. So a stage makes
only its part, and the values are the same for any number of stages. What a script sets elsewhere cannot be made again and is refused.

`InitialValues` makes them a few modules at a time, and the model itself stays without them. Tensors that one `reset_parameters` sets are
drawn together, and so are those of modules that share a tensor. Such a group is the least whose values can be made by itself; the values
are those that `materialise` gives the whole model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from psjob.pipeline.random_draws import generators_of, put_generators_back, seed_for


@dataclass(eq=False)
class _Group:
    """What is drawn together: tensors by name, each with the places where modules hold it; and the modules that are reset, in order."""

    places: dict[str, list[tuple[dict[str, Any], str]]] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)


class InitialValues:
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
        first = {name: places[0] for name, places in group.places.items()}
        with _swapped([place for places in group.places.values() for place in places], self.device):
            made = {name: store[key] for name, (store, key) in first.items()}
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
    for store, key, tensor in _places(model):
        if id(tensor) in canonical:
            name = canonical[id(tensor)]
            groups[name].places.setdefault(name, []).append((store, key))
    for path, module, name in resets:
        groups[name].modules.append((path, module))
    return groups


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The parameters and buffers of all modules, with the dict and the key by which a module holds each."""
    for module in model.modules():
        stores: list[dict[str, Any]] = [module._parameters, module._buffers]
        for store in stores:
            yield from ((store, key, tensor) for key, tensor in store.items() if tensor is not None)


@contextmanager
def _swapped(places: Sequence[tuple[dict[str, Any], str]], device: torch.device) -> Iterator[None]:
    """Inside, modules hold new memory at these places; a tensor that was at several of them is one again."""
    kept = [(store, key, store[key]) for store, key in places]
    made: dict[int, torch.Tensor] = {}
    for _, _, like in kept:
        if id(like) not in made:
            empty = torch.empty_like(like, device=device, requires_grad=False)
            made[id(like)] = nn.Parameter(empty, like.requires_grad) if isinstance(like, nn.Parameter) else empty
    try:
        for store, key, tensor in kept:
            store[key] = made[id(tensor)]
        yield
    finally:
        for store, key, tensor in kept:
            store[key] = tensor


@contextmanager
def on_meta() -> Iterator[None]:
    """Inside, tensors are made on the meta device: they have shapes and no memory."""
    _forget()
    with torch.device("meta"), _Watch(_built):
        yield


def materialise(model: nn.Module, seed: int, device: torch.device | None = None, only: Collection[str] | None = None) -> None:
    """Give the model's meta tensors memory and first values; parameters stay the same objects. Other tensors stay as they are.

    Args:
        model: changed in place.
        seed: with the module's name it decides the values.
        device: where the memory is; the default device if None.
        only: names of parameters and buffers, as those of a part; all if None.

    Raises:
        ValueError: a tensor whose value no `reset_parameters` of its module sets, by name.
    """
    device = device or torch.get_default_device()
    named = dict(model.named_modules())
    tensors = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta and (only is None or name in only)}
    makers = makers_of(named, tensors)
    give_memory(model, list(tensors.values()), device)
    tensors = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name in tensors}
    ids = {id(tensor) for tensor in tensors.values()}
    concerned = [
        (name, module) for name, module in in_order(named) if any(id(tensor) in ids for tensor in [*module.parameters(), *module.buffers()])
    ]
    draw(named, concerned, tensors, makers, seed, device)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Inside, meta tensors of the model seem to have memory, for what looks at devices and shapes: pages that nobody touches take none."""
    with _swapped([(store, key) for store, key, tensor in _places(model) if tensor.is_meta], torch.get_default_device()):
        yield


def in_order(named: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Modules as they are reset: each after those in it."""
    return sorted(named.items(), key=lambda one: -one[0].count(".") if one[0] else 1)


def makers_of(named: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor]) -> dict[str, LastWrite | None]:
    """By name, who set each of these meta tensors while the model was built. Raises ValueError for what `materialise` refuses of that."""
    _refuse_loose(named)
    makers = {name: _built.get(_key(tensor)) for name, tensor in tensors.items()}
    for name, write in makers.items():
        if write is not None and write.module() is None:
            raise ValueError(
                f"{name} is set in {write.where}, which cannot be repeated for only one stage; set it in reset_parameters of its module, "
                "or build the model without ps.lazy()"
            )
    return makers


def draw(
    named: Mapping[str, nn.Module], concerned: Sequence[tuple[str, nn.Module]], tensors: Mapping[str, torch.Tensor],
    makers: Mapping[str, LastWrite | None], seed: int, device: torch.device,
) -> None:  # fmt: skip
    """Give tensors their first values, in place.

    Args:
        named: all modules of the model.
        concerned: those that have any of the tensors, `in_order`.
        tensors: by name, as the modules have them now.
        makers: of `makers_of`.
        seed: with the module's name it decides the values.
        device: where the tensors lie.

    Raises:
        ValueError: a tensor whose value no `reset_parameters` of its module sets, by name.
    """
    written: dict[int, LastWrite] = {}
    for name, module in concerned:
        _reset(name, module, seed, device, written)
    for name, tensor in tensors.items():
        write, by = makers[name], written.get(_key(tensor))
        if write is not None and by is not None and write.module() is not by.module():  # tied: the values are those of the one that made it
            owner = write.module()
            _reset(next(name for name, module in named.items() if module is owner), owner, seed, device, written)
    _check_written(named, tensors, written)


def check_drawn(named: Mapping[str, nn.Module], concerned: Sequence[tuple[str, nn.Module]], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError as `draw` would, as far as that shows without memory: `tensors` are on the meta device."""
    written: dict[int, LastWrite] = {}
    for name, module in concerned:
        try:
            _reset(name, module, 0, torch.device("meta"), written)
        except (RuntimeError, ValueError):  # it looks at values, so it must be seen with them
            return
    _check_written(named, tensors, written)


def _check_written(named: Mapping[str, nn.Module], tensors: Mapping[str, torch.Tensor], written: Mapping[int, LastWrite]) -> None:
    for name, tensor in tensors.items():
        if _key(tensor) not in written:
            owner_name, _, attribute = name.rpartition(".")
            raise ValueError(
                f"{name} gets no value from reset_parameters of {type(named[owner_name]).__name__}; set {attribute} there, "
                "or build the model without ps.lazy()"
            )


def give_memory(model: nn.Module, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Give these tensors of the model memory without values; parameters stay the same objects."""
    made = {id(tensor): torch.empty_like(tensor, device=device) for tensor in tensors}
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects
    try:
        for module in model.modules():
            # What `to_empty` does, for some of the tensors; modules such as nn.LSTM know there what else to bring along.
            module._apply(lambda tensor: made.get(id(tensor), tensor), recurse=False)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _reset(name: str, module: Any, seed: int, device: torch.device, written: dict[int, LastWrite]) -> None:
    reset = reset_of(module)
    if reset is None:
        return
    given = generators_of([device])
    kept = [generator.get_state() for generator in given]
    try:
        for generator in given:
            generator.manual_seed(seed_for(seed, "first values", name))
        with _Watch(written) as watch, torch.no_grad():
            reset()
        if watch.meta and device.type != "meta":
            raise ValueError(f"reset_parameters of {name or type(module).__name__} sets tensors of another stage; cut the model around it")
    finally:
        put_generators_back(given, kept)


def reset_of(module: Any) -> Callable[[], Any] | None:
    """What gives the module's own tensors their first values; None: it has nothing for that."""
    return next((getattr(module, one) for one in RESETS if callable(getattr(module, one, None))), None)


RESETS = ("reset_parameters", "_reset_parameters")
"""What torch's modules call it."""


@dataclass(frozen=True)
class LastWrite:
    """Who set a tensor last: the module whose `reset_parameters` ran, or none, and in which function."""

    storage: StorageWeakRef
    module: Any
    where: str


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes by storage who writes into tensors in place."""

    def __init__(self, notes: dict[int, LastWrite]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes
        self.meta = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for argument, given in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, torch.Tensor):
                    self.meta = self.meta or given.is_meta
                    self._notes[_key(given)] = _who(given)
        return func(*args, **(kwargs or {}))


def _who(tensor: torch.Tensor) -> LastWrite:
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    frame, where = sys._getframe(2), ""
    while frame is not None:
        module = frame.f_locals.get("self")
        if frame.f_code.co_name in RESETS and isinstance(module, nn.Module):
            return LastWrite(storage, weakref.ref(module), where)
        if not where and not frame.f_globals.get("__name__", "").startswith("torch."):
            where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return LastWrite(storage, lambda: None, where)


_built: dict[int, LastWrite] = {}
"""Writes into tensors of the meta device, by storage; those of tensors that are gone are dropped."""


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _forget() -> None:
    gone = [key for key, write in _built.items() if write.storage.expired()]  # type: ignore[no-untyped-call]
    for key in gone:
        del _built[key]


def _refuse_loose(named: Mapping[str, nn.Module]) -> None:
    for name, module in named.items():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(
                    f"{attribute} of {name or type(module).__name__} is a tensor that is neither parameter nor buffer and has no value. "
                    "Register it as a buffer and set it in reset_parameters, or build the model without ps.lazy()"
                )
