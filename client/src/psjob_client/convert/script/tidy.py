"""What serves nothing any more once the rest is out: emptied functions and branches, ranks that nobody asks for, imports."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from psjob_client.convert.script.groups import HARMLESS, rank_of
from psjob_client.convert.script.text import Edit
from psjob_client.convert.script.work import ENDS_IN, Work

QUIET = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Subscript,
    ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip
"""Parts of expressions that do nothing but give a value."""


def convert(work: Work) -> None:
    """Take out what was left without a purpose, until nothing is."""
    before = -1
    while before != len(work.removed):
        before = len(work.removed)
        for owner, block in _blocks(work):
            if block[0] not in work.removed and not _is_docstring(owner, block[0]):
                continue
            if _emptied(work, owner, block) and isinstance(owner, ast.stmt) and owner not in work.removed:
                _without(work, owner)
        for name in [name for name in work.names.bound if work.names.loads.get(name)]:
            _unasked(work, name)
    _imports(work)


def finished(work: Work) -> list[Edit]:
    """All edits, those of statements that were taken out among them: `pass` stays where a block would be empty."""
    edits = list(work.edits)
    kept = set()
    for owner, block in _blocks(work):
        if not isinstance(owner, ast.Module) and all(one in work.removed for one in block) and not work.text.is_elif(block[0]):
            kept.add(block[0])
    for statement in work.removed:
        if any(owner in work.removed for owner in work.text.owners(statement)):
            continue
        edits.append(Edit(*work.text.span(statement), "pass") if statement in kept else work.text.without(statement))
    return edits


def _blocks(work: Work) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    for owner in ast.walk(work.text.tree):
        for _, value in ast.iter_fields(owner):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield owner, value


def _is_docstring(owner: ast.AST, statement: ast.stmt) -> bool:
    function = isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef)
    return function and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _emptied(work: Work, owner: ast.AST, block: list[ast.stmt]) -> bool:
    rest = [one for one in block if one not in work.removed and not _is_docstring(owner, one)]
    return not rest and any(one in work.removed for one in block)


def _without(work: Work, owner: ast.stmt) -> None:
    """The statement whose block is empty goes too, where that changes nothing."""
    if isinstance(owner, ast.If) and not owner.orelse and _is_quiet(work, owner.test):
        work.remove(owner)
    elif isinstance(owner, ast.FunctionDef) and not owner.decorator_list and isinstance(work.text.parents[owner], ast.Module):
        loads = work.names.loads.get(owner.name, [])
        uses = [work.text.parents[load] for load in loads]
        calls = [work.stands_alone(use) for use, load in zip(uses, loads, strict=True) if isinstance(use, ast.Call) and use.func is load]
        quiet = all(isinstance(use, ast.Call) and all(_is_quiet(work, given) for given in use.args) and not use.keywords for use in uses)
        if len(work.names.bound[owner.name]) == 1 and quiet and len(calls) == len(uses) and all(calls):
            work.removed |= {owner, *(call for call in calls if call is not None)}


def _is_quiet(work: Work, test: ast.AST) -> bool:
    """Computing it changes nothing."""
    if isinstance(test, ast.Call):
        return bool(rank_of(work, test)) or work.full(test.func) in HARMLESS
    return isinstance(test, QUIET) and all(_is_quiet(work, part) for part in ast.iter_child_nodes(test))


def _unasked(work: Work, name: str) -> None:
    """A rank, or another plain value, that was asked for before and is no more."""
    value = work.only_value(name)
    if value is None or name in _words(work) or not all(work.is_gone(load) for load in work.names.loads[name]):
        return
    (bound,) = work.names.bound[name]
    statement = work.text.parents[bound]
    if isinstance(statement, ast.Assign) and statement not in work.removed and _is_quiet(work, value):
        work.remove(statement)


def _words(work: Work) -> set[str]:
    """Words of what was written anew."""
    return {word for edit in work.edits for word in re.findall(r"(?<![\w.])[^\W\d]\w*", edit.text)}


def _imports(work: Work) -> None:
    """Imports of which nothing is used any more go; others stay as they are."""
    words = _words(work)
    for statement in ast.walk(work.text.tree):
        if not isinstance(statement, ast.Import | ast.ImportFrom) or work.is_gone(statement):
            continue
        kept = [alias for alias in statement.names if not _is_unused(work, statement, alias, words)]
        if not kept:
            work.remove(statement)
        elif len(kept) < len(statement.names) and "#" not in work.text.of(statement):
            fewer = ast.ImportFrom(statement.module, kept, statement.level) if isinstance(statement, ast.ImportFrom) else ast.Import(kept)
            work.edits.append(Edit(*work.text.span(statement), ast.unparse(fewer)))


def _is_unused(work: Work, statement: ast.stmt, alias: ast.alias, words: set[str]) -> bool:
    name = alias.asname or alias.name.partition(".")[0]
    loads = work.names.loads.get(name, [])
    if name in work.names.bound or name in words or not loads:
        return False
    if isinstance(statement, ast.Import) and not alias.asname and "." in alias.name:
        return _is_unused_module(work, statement, alias.name, name)
    return all(work.is_gone(load) for load in loads)


def _is_unused_module(work: Work, statement: ast.stmt, module: str, name: str) -> bool:
    """`import torch.distributed` names torch too."""
    used = [node for node in ast.walk(work.text.tree) if isinstance(node, ast.Attribute) and work.full(node).startswith(module)]
    others = [
        one for one in ast.walk(work.text.tree)
        if isinstance(one, ast.Import) and one is not statement and any(alias.name == name and not alias.asname for alias in one.names)
    ]  # fmt: skip
    free = bool(others) or all(work.is_gone(load) for load in work.names.loads[name])
    return bool(used) and free and all(work.is_gone(node) for node in used)


def psjob_imported(work: Work) -> None:
    """`import psjob as ps`, behind the last import at the head of the script."""
    lines = sorted(work.imports)
    if not any(_imports_psjob(statement) for statement in outside_functions(work.text.tree.body)) and (
        names_psjob(work) or ENDS_IN not in {name for meant in work.names.imports.values() for name in meant}
    ):
        lines.append(f"import {ENDS_IN}" if work.ps == ENDS_IN else f"import {ENDS_IN} as {work.ps}")
    if not lines:
        return
    work.inserted += lines
    named = re.compile(rf"(?<![\w.])({'|'.join([work.ps, *(line.rpartition(' ')[2] for line in lines)])})\b")
    first = min((edit.start for edit in work.edits if named.search(edit.text)), default=len(work.text.raw))
    place: Edit | None = None
    for at, statement in enumerate(work.text.tree.body):
        if isinstance(statement, ast.Import | ast.ImportFrom) or (at == 0 and _is_text(statement)):
            found = work.text.below(statement, lines)
            future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            place = found if found.start <= first or future or (place is None and at == 0 and _is_text(statement)) else place
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.For | ast.With):
            break
    if place is None:
        start = work.text.line_of(work.text.tree.body[0])[0]
        place = Edit(start, start, "".join(f"{line}{work.text.newline}" for line in [*lines, ""]))
    work.edits.append(place)


def names_psjob(work: Work) -> bool:
    """Does one of the edits name psjob?"""
    return work.ps in _words(work)


def outside_functions(block: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module in their order, those of its if and try among them."""
    for statement in block:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from outside_functions(statement.body)


def _imports_psjob(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Import) and any(alias.name == ENDS_IN for alias in statement.names)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
