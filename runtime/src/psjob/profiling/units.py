"""Which modules of a model are the parts that a cut may lie between: its blocks, and the insides of what is too large for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from psjob.profiling.find import Unfound

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that compute nothing themselves: a cut inside is as good as one outside."""
OPEN_CONTAINER, OPEN_MODULE = 1 / 64, 1 / 4
"""A container, or another module, is opened where it has more than this share of the FLOPs or of the weights."""
MOST_PARTS = 512
DEPTH = 12
Parts = dict[str, nn.Module]
Shares = Callable[[Parts], Mapping[str, float]]
"""Of each part that a forward pass calls the larger one of its shares of FLOPs and weights."""


def parts_of(model: nn.Module, shares: Shares) -> Parts:
    """Modules of which none is inside another, by their names in `named_modules()`. Raises Unfound."""
    shut: set[str] = set()
    opened = {""}
    for name, part in model.named_modules():  # the pass may call nothing but what lies in lists
        if name and name.rpartition(".")[0] in opened and isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            opened.add(name)
    if not any(True for _ in model.children()):
        raise Unfound(f"{type(model).__name__} has no modules inside, so there is nowhere to cut it; build it of modules")
    parts = _edge(model, opened)
    for _ in range(DEPTH):
        found = shares(parts)
        closed = {name for name in opened - {""} if not _called(name, found)} - shut
        shut |= {name for name in closed if not isinstance(model.get_submodule(name), CONTAINERS)}
        if opened & shut:
            opened -= shut
            parts = _edge(model, opened)
            continue
        more = {name for name, part in parts.items() if name not in shut and _opens(part, found.get(name))}
        if not more or len(parts) >= MOST_PARTS:
            break
        opened |= more
        parts = _edge(model, opened)
    return parts


def _edge(model: nn.Module, opened: set[str]) -> Parts:
    """What lies directly inside opened modules and is not opened itself."""
    parts = {}
    for name, part in model.named_modules():
        if name not in opened and name.rpartition(".")[0] in opened:
            parts[name] = part
    return parts


def _opens(part: nn.Module, share: float | None) -> bool:
    if next(part.children(), None) is None:
        return False
    if share is None:
        return True  # it is not called itself, as a ModuleList: what is inside may be
    return share > (OPEN_CONTAINER if isinstance(part, CONTAINERS) else OPEN_MODULE)


def _called(name: str, found: Mapping[str, float]) -> bool:
    return any(part.startswith(f"{name}.") for part in found)


def order(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Parts with their first and last event; those that a part which is called again lies around are one with it."""
    last = {name: i for i, name in enumerate(names)}
    found: list[tuple[str, int, int]] = []
    i = 0
    while i < len(names):
        end = j = i
        while j <= end:
            end = max(end, last[names[j]])
            j += 1
        found.append((names[i], i, end))
        i = end + 1
    return found
