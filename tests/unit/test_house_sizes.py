"""How many files and lines the house has, that it has no circle of imports, and which names mean two things.

A limit falls with each change that allows it. Only a new capability raises one, in its own commit.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"runtime": "runtime/src", "operator": "operator/src", "client": "client/src"}
FILES = 340
"""Source files of runtime, operator and client together, at most."""
LINES = 89_210
"""Lines of Python in them, at most."""
TEST_LINES = 101_510
"""Lines of Python in tests/, at most."""
LONGEST = 700
"""Lines of the longest source file, at most."""
TWO_CLASSES = 0
"""Names that two or more files give to a class, at most."""
TWO_FUNCTIONS = 0
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
RUNTIME, OPERATOR, CLIENT = "runtime/src/psjob", "operator/src/psjob_operator", "client/src/psjob_client"
FAMILIES = {
    "the entry of a program": ("*", {"main"}),
    "what psjob.process.startup calls of an integration": (
        f"{RUNTIME}/integrations/*",
        {"attached", "begin", "hand", "inner", "mark", "moves", "plain"},
    ),
    "what the coordinator calls of its parts at an event": (
        f"{RUNTIME}/protocol/coordinator/*",
        {"tick", "begin", "committed", "worker_left"},
    ),
    "what each machine of the protocol has, none of which may import another": (f"{RUNTIME}/protocol/*/*", {"Log", "Tick"}),
    "a registry of plug-ins: the plug-in of a name": (f"{RUNTIME}/*/__init__.py", {"named"}),
    "a command of psjob, whose function has the command's name": (
        f"{CLIENT}/cli/*",
        {"checkpoint", "compare", "crd", "run"},
    ),
    "a command of the operator": (f"{OPERATOR}/__main__.py", {"run"}),
}
"""Names that several files give by one rule: the files, and the names. In any other file such a name is one like all others."""


def is_counted(file: str, name: str) -> bool:
    return not name.startswith("_") and not any(name in names and fnmatch(file, files) for files, names in FAMILIES.values())


def test_names_mean_one_thing() -> None:
    """Private names are their file's own."""
    classes, functions = defaultdict(set), defaultdict(set)
    for file in (file for folder in ROOMS.values() for file in (ROOT / folder).rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.parse(file.read_text()).body if name not in COPIES else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and is_counted(name, node.name):
                (classes if isinstance(node, ast.ClassDef) else functions)[node.name].add(name)
    twice = [{name: where for name, where in kind.items() if len(where) > 1} for kind in (classes, functions)]
    print(f"\n{twice}")
    assert (len(twice[0]) <= TWO_CLASSES, len(twice[1]) <= TWO_FUNCTIONS) == (True, True)
