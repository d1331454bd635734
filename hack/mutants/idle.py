"""`python -m hack.mutants.idle`: names the tests that assert nothing. Returns 1 where there are any."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KINDS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
ROOT = Path(__file__).parents[2]
RAISING = {"raises", "warns", "deprecated_call", "fail", "assert_never", "check_call", "check_output"}
"""Calls that fail a test by themselves."""
COMMON = {"run", "main", "get", "wait", "close", "start", "stop", "read", "write", "send", "put", "set", "post", "call", "begin", "check"}
"""Methods with such a name may be anybody's: that one of them can fail says nothing of the others."""


@dataclass(frozen=True)
class Function:
    """What counts of a function, or of a class."""

    path: str
    name: str
    fails: bool
    """It asserts or raises by itself."""
    calls: frozenset[str]


def idle(sources: Mapping[str, str]) -> list[str]:
    """Tests, by file and name, in which neither they nor a function of `sources` that they call can fail. Names decide, not imports."""
    functions = [read(path, node) for path, source in sources.items() for node in ast.walk(ast.parse(source)) if isinstance(node, KINDS)]
    failing = {function.name for function in functions if function.fails}
    while more := {function.name for function in functions if function.name not in failing and function.calls & failing}:
        failing |= more
    return [
        f"{function.path}::{function.name}"
        for function in functions
        if function.name.startswith("test_") and Path(function.path).name.startswith("test_")
        if not function.fails and not function.calls & failing
    ]


def read(path: str, function: ast.AST) -> Function:
    """Of a definition in the file `path`."""
    assert isinstance(function, KINDS)
    fails, calls = False, set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assert | ast.Raise):
            fails = True
        if isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute)
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
            checks = any(
                word.arg == "check" and isinstance(word.value, ast.Constant) and word.value.value is True for word in node.keywords
            )
            fails = fails or checks or name in RAISING or name.startswith("assert_")
            if not (method and name in COMMON):
                calls.add(name)
    return Function(path, function.name, fails, frozenset(calls))


def main() -> int:
    """The command."""
    found = idle({str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))})
    print("\n".join(found) or "every test can fail")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
