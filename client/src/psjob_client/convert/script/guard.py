"""What a conversion has promised, checked on its result: a script that breaks one of these is not written."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator

from psjob_client.convert.script.text import BY_HAND
from psjob_client.convert.script.tidy import names_psjob, outside_functions
from psjob_client.convert.script.work import ENDS_IN, Work
from psjob_client.problems import BadInput

Shape = tuple[object, ...]
ASSIGNED = (ast.Assign, ast.AnnAssign)
IMPORTS = (ast.Import, ast.ImportFrom)


def check(work: Work, after: str) -> None:
    """The new text is Python, has all that was put in, lost only what was taken out, and imports psjob before it is used.

    Raises:
        BadInput: it is not so, and the script has to be changed by hand.
    """
    try:
        tree = ast.parse(after.removeprefix("\ufeff"))
    except (SyntaxError, ValueError):
        raise BadInput(f"psjob could not convert it, as the result would be no Python; {BY_HAND}") from None
    added = Counter(ast.unparse(ast.parse(line)) for line in work.inserted)
    before, now = _told(work.text.tree, added), _told(tree, added)
    if any(now[line] < before[line] + count for line, count in added.items()):
        raise BadInput(f"psjob could not convert it, as a statement would be lost that has to come in; {BY_HAND}")
    if _shape(work.text.tree, added, work.removed) != _shape(tree, added, set()):
        raise BadInput(f"psjob could not convert it, as a statement of the script would be lost or moved; {BY_HAND}")
    if names_psjob(work) and not _is_imported(work, tree):
        raise BadInput(f"psjob could not convert it, as {work.ps} would be used before it is imported; {BY_HAND}")


def _told(tree: ast.Module, lines: Collection[str]) -> Counter[str]:
    return Counter(said for node in ast.walk(tree) if isinstance(node, ast.stmt) and (said := ast.unparse(node)) in lines)


def _shape(node: ast.AST, added: Collection[str], removed: set[ast.stmt]) -> Shape:
    """The kinds of statements that a node's blocks hold, in order, without those that came, went, or do nothing."""
    blocks = []
    for name, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case):
            held = tuple(
                (_kind(one), _shape(one, added, removed))
                for one in value
                if one not in removed and not isinstance(one, ast.Pass) and not (isinstance(one, ast.stmt) and ast.unparse(one) in added)
            )
            if held:
                blocks.append((name, held))
    return tuple(blocks)


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"{type(node).__name__} {node.name}"
    return "Assign" if isinstance(node, ASSIGNED) else type(node).__name__


def _is_imported(work: Work, tree: ast.Module) -> bool:
    """psjob is imported at the head of the module, before all that names it."""
    for statement in outside_functions(tree.body):
        if isinstance(statement, IMPORTS):
            names = {alias.asname or alias.name: alias.name for alias in statement.names}
            if isinstance(statement, ast.Import) and names.get(work.ps) == ENDS_IN:
                return True
        elif any(isinstance(node, ast.Name) and node.id == work.ps for node in _own(statement)):
            return False
    return not any(isinstance(node, ast.Name) and node.id == work.ps for node in ast.walk(tree))


def _own(statement: ast.stmt) -> Iterator[ast.AST]:
    """A statement's nodes, without the blocks that are seen by themselves."""
    if isinstance(statement, ast.If):
        return ast.walk(statement.test)
    return iter(()) if isinstance(statement, ast.Try) else ast.walk(statement)
