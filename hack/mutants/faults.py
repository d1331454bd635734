"""Faults drawn from the syntax of a file: each changes one expression or removes one statement. Pure."""

from __future__ import annotations

import ast
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
"""By comparison: how it is written, and what takes its place."""
TOLD_ONLY = {"log", "info", "warning", "debug", "error", "exception"}
"""Calls that write to a log: their removal changes no decision."""


@dataclass(frozen=True)
class Fault:
    """A change of the bytes from `start` to `end` of a file."""

    path: str
    """From the root of the checkout."""
    line: int
    """Of the change, counted from 1."""
    within: str
    """The function or class around it, with dots; empty at the top of a file."""
    kind: str
    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        """The file with the fault."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def faults(path: str, source: bytes) -> list[Fault]:
    """Every fault of a file, in the order of its lines."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = _Finder(path, source, starts)
    found.visit(ast.parse(source))
    return sorted(found.found, key=lambda fault: (fault.start, fault.end, fault.new))


def drawn(sources: Mapping[str, bytes], seed: int, count: int) -> list[Fault]:
    """`count` faults by a seed. Each has a rank of its own: an edit of one function leaves the draw of all others as it was."""
    ranked: list[tuple[bytes, Fault]] = []
    for path, source in sources.items():
        seen: dict[str, int] = {}
        for fault in faults(path, source):
            words = f"{path}\n{fault.within}\n{fault.kind}\n{lines(source, fault)[0]}\n{fault.new}"
            seen[words] = seen.get(words, -1) + 1
            ranked.append((hashlib.sha256(f"{seed}\n{seen[words]}\n{words}".encode()).digest(), fault))
    ranked.sort(key=lambda one: one[0])
    readable = (fault for _, fault in ranked if _reads(fault.applied(sources[fault.path])))
    return list(itertools.islice(readable, count))


def _reads(source: bytes) -> bool:
    """Python reads the file."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def lines(source: bytes, fault: Fault) -> tuple[str, str]:
    """The lines that a fault touches, without and with it."""
    first = source.rfind(b"\n", 0, fault.start) + 1
    last = source.find(b"\n", fault.end)
    last = len(source) if last < 0 else last
    was = source[first:last]
    became = source[first : fault.start] + fault.new.encode() + source[fault.end : last]
    return was.decode(), became.decode()


class _Finder(ast.NodeVisitor):
    """Walks a file; types, messages of errors, docstrings, defaults of a class and what only a type checker reads are left as they are."""

    def __init__(self, path: str, source: bytes, starts: list[int]) -> None:
        self.path, self.source, self.starts = path, source, starts
        self.found: list[Fault] = []
        self.names: list[str] = []
        self.functions = 0

    def _at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        self.found.append(Fault(self.path, line, ".".join(self.names), kind, start, end, new))

    def _between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Change the operator that stands between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        at = self.source[start:end].find(old.encode())
        if at >= 0:
            self._add(kind, start + at, start + at + len(old), new)

    # -- what is left as it is -------------------------------------------------------------------------

    def visit_Raise(self, node: ast.Raise) -> None:
        """A message of an error."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """What tells the type checker what is known."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text for people."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    # -- where it is -----------------------------------------------------------------------------------

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for child in node.body:
            self.visit(child)
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.names.append(node.name)
        self.functions += 1
        for child in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(child)
        self.functions -= 1
        self.names.pop()

    # -- what is changed -------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            old, others = COMPARISONS[type(operator)]
            for new in others:
                self._between("comparison", left, right, old, new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and or", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            self._between("plus minus", node.left, node.right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start, _ = self._span(node)
            self._add("not", start, self._span(node.operand)[0], "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        start, end = self._span(node)
        if isinstance(node.value, bool):
            self._add("constant", start, end, str(not node.value))
        elif isinstance(node.value, int | float):
            for new in (node.value + 1, node.value - 1):
                self._add("constant", start, end, f"({new!r})" if new < 0 else repr(new))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            if not isinstance(node.value, ast.Constant):
                self._add("return", *self._span(node.value), "None")
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between("plus minus", node.target, node.value, old, new)
        self._removed(node)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not all(isinstance(target, ast.Name) for target in _targets(node)):
            self._removed(node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in TOLD_ONLY:
                return
            self._removed(node)
        self.generic_visit(node)

    def _removed(self, node: ast.stmt) -> None:
        if self.functions:
            self._add("statement", *self._span(node), "pass")


def _targets(node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]
