"""Which cheap tests reach a module: those that import it, the nearest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp

PACKAGES = ("psjob_operator", "psjob", "psjob_client")
CHEAP = ("tests.unit", "tests.tensors", "tests.simulation")
"""Folders whose tests start no process and open no socket."""


class Nearby:
    """The import graph of the checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        graph = grimp.build_graph(*PACKAGES, "tests", cache_dir=None)
        self._importers = {module: sorted(graph.find_modules_that_directly_import(module)) for module in graph.modules}

    def tests(self, module: str, words: Iterable[str] = ()) -> list[Path]:
        """Test files that import `module`, at once or by way of others: nearest first.

        Among equals those come first that are named after the module or its package, then those that hold most of `words`.
        """
        away = distances(self._importers, module)
        named, parts = list(filter(None, words)), module.split(".")[1:]
        ranked: list[tuple[int, int, int, str, Path]] = []
        for name, distance in away.items():
            if name.startswith(CHEAP) and name.rpartition(".")[2].startswith("test_"):
                path = self.root / (name.replace(".", "/") + ".py")
                text = path.read_text()
                like = sum(part in path.stem for part in parts)
                ranked.append((distance, -like, -sum(word in text for word in named), name, path))
        return [path for *_, path in sorted(ranked)]


def distances(importers: Mapping[str, Iterable[str]], module: str) -> dict[str, int]:
    """By module that imports `module`, how many imports lead to it; a step between two modules of tests counts nothing."""
    found = {module: 0}
    edge = [module]
    while edge:
        name = edge.pop(0)
        for importer in importers.get(name, ()):
            step = 0 if name.startswith("tests.") else 1
            if found.get(importer, found[name] + step + 1) > found[name] + step:
                found[importer] = found[name] + step
                edge.append(importer)
    return found


def module_of(path: str) -> str:
    """The module of a file under a `src` folder."""
    inner = path.partition("/src/")[2].removesuffix(".py").replace("/", ".")
    return inner.removesuffix(".__init__")
