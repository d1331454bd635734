"""How many files and lines the house has, that it has no circle of imports, and which names mean two things. The limits only fall."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"runtime": "runtime/src", "operator": "operator/src", "client": "client/src"}
FILES = 351
"""Source files of runtime, operator and client together, at most."""
LINES = 87_650
"""Lines of Python in them, at most."""
TEST_LINES = 101_850
"""Lines of Python in tests/, at most."""
LONGEST = 700
"""Lines of the longest source file, at most."""
TWO_CLASSES = 30
"""Names that two or more files give to a class, at most."""
TWO_FUNCTIONS = 52
"""Names that two or more files give to a public function, at most."""


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_sizes_stay_within_their_limits() -> None:
    total, lines, longest = 0, 0, 0
    print(f"\n{'':10}{'files':>8}{'lines':>8}{'mean':>8}{'longest':>9}")
    for room, folder in ROOMS.items():
        sizes = [lines_of(file) for file in (ROOT / folder).rglob("*.py")]
        print(f"{room:10}{len(sizes):8}{sum(sizes):8}{sum(sizes) / len(sizes):8.0f}{max(sizes):9}")
        total, lines, longest = total + len(sizes), lines + sum(sizes), max(longest, *sizes)
    tests = sum(lines_of(file) for file in (ROOT / "tests").rglob("*.py"))
    print(f"{'all':10}{total:8}{lines:8}{lines / total:8.0f}{longest:9}\n{'tests':10}{'':8}{tests:8}")
    assert (total <= FILES, lines <= LINES, longest <= LONGEST, tests <= TEST_LINES) == (True,) * 4


def test_no_files_import_each_other_in_a_circle() -> None:
    """An import for types or inside a function counts."""
    graph = grimp.build_graph("psjob", "psjob_operator", "psjob_client", cache_dir=None)
    assert len(graph.modules) > FILES / 2
    arrows = networkx.DiGraph((module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module))
    circles = [sorted(circle) for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1]
    assert circles == []


COPIES = ("operator/src/psjob_operator/contract.py", "operator/src/psjob_operator/keys.py")
"""Generated from the runtime's files of these names."""
FAMILIES = {
    "the entry of a program": {"main"},
    "an integration, as psjob.process.startup calls it": {"attached", "begin", "hand", "inner", "mark", "moves", "plain", "given"},
    "a part of the coordinator, at an event": {"tick", "begin", "opened", "committed", "worker_left", "failed"},
    "a registry of plug-ins": {"named"},
    "a command, named as the function that it calls": {
        "compare",
        "replay",
        "train",
        "run",
        "events",
        "checkpoint",
        "version",
        "crd",
        "schedule",
    },
}
"""Names that several files give by one rule."""


def test_names_mean_one_thing() -> None:
    """Private names are their file's own."""
    classes, functions = defaultdict(set), defaultdict(set)
    for file in (file for folder in ROOMS.values() for file in (ROOT / folder).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.parse(file.read_text()).body if name not in COPIES else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                (classes if isinstance(node, ast.ClassDef) else functions)[node.name].add(name)
    family = set().union(*FAMILIES.values())
    twice = [{name: where for name, where in kind.items() if len(where) > 1 and name not in family} for kind in (classes, functions)]
    print(f"\n{twice}")
    assert (len(twice[0]) <= TWO_CLASSES, len(twice[1]) <= TWO_FUNCTIONS) == (True, True)
