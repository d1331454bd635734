"""The loops that train: epochs become `ps.epochs`, and the loader's loop goes over `ps.shard`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from psjob_client.convert.script import data
from psjob_client.convert.script.text import Edit
from psjob_client.convert.script.work import Work, constant, keyword

AROUND = ("enumerate", "tqdm", "track")
"""Calls that give the items of their first argument."""
EPOCHS, SHARD = "psjob.epochs", "psjob.shard"
BY_HAND = "for epoch in ps.epochs(n)"


class Loops:
    """What of a script trains."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.functions: dict[str, list[ast.AST]] = {}
        for node in ast.walk(work.text.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
        self.loaders = data.loaders(work)

    def reaches(self, node: ast.AST) -> set[ast.AST]:
        """All nodes of a body, and of the script's functions that it calls."""
        found: set[ast.AST] = set()
        waiting = [node]
        while waiting:
            for one in ast.walk(waiting.pop()):
                if one not in found:
                    found.add(one)
                    waiting += self.functions.get(_called(one), [])
        return found

    def trains(self, loop: ast.AST) -> bool:
        """Does a loop's body, or what a call calls, compute gradients?"""
        return any(
            isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "backward" for one in self.reaches(loop)
        )


def _called(node: ast.AST) -> str:
    """The name of a function of the script that a call may be of."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Name):
        return node.func.id
    of_self = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "trainer")
    return node.func.attr if of_self and isinstance(node.func, ast.Attribute) else ""


def convert(work: Work) -> None:
    """Shard the loops over loaders that train, and let the loops around them be epochs."""
    loops = Loops(work)
    every = [node for node in ast.walk(work.text.tree) if isinstance(node, ast.For) and loops.trains(node)]
    ours = {loop: work.full(items.func) for loop in every if isinstance(items := inside(work, loop.iter), ast.Call)}
    sharded = [loop for loop in every if ours.get(loop) == SHARD or _over_sharded(work, loop)]
    found = sharded or _loader_loops(loops, every)
    for loop in found if not sharded else ():
        items = inside(work, loop.iter)
        if len(given := _given(loops, loop, items)) > 1:
            work.tell(
                items,
                f"the loop over {work.text.of(items)} is called for {' and '.join(sorted(given))}: write {work.ps}.shard(…) around the one"
                " that trains, where it is given",
            )
            continue
        start, end = work.text.span(items)
        work.edits += [Edit(start, start, f"{work.ps}.shard("), Edit(end, end, ")")]
        if work.text.of(items) not in loops.loaders and not isinstance(items, ast.Call):
            work.tell(items, f"{work.text.of(items)} is taken for a DataLoader, as the loop over it trains", by_hand=False)
    if not found:
        line = next((node for node in every), work.text.tree)
        work.tell(
            line,
            f"no loop over a DataLoader is seen that trains; without {work.ps}.shard(loader) each worker makes all batches",
            by_hand=False,
        )
    if EPOCHS not in ours.values():
        _epochs(loops, every, found)


def _given(loops: Loops, loop: ast.For, items: ast.expr) -> set[str]:
    """What the script's calls give a function for the parameter that its loop goes over, as it is written."""
    function = loops.work.text.scope(loop)
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or not isinstance(items, ast.Name):
        return set()
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if items.id not in {*names, *(one.arg for one in function.args.kwonlyargs)}:
        return set()
    found = set()
    for call in loops.work.calls():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
        if name == function.name:
            bound = isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"])
            place = names.index(items.id) - bound if items.id in names else None
            given = keyword(call, items.id, place)
            found |= {loops.work.text.of(given)} if given is not None else set()
    return found


def inside(work: Work, items: ast.expr) -> ast.expr:
    """Without enumerate and progress bars."""
    while isinstance(items, ast.Call) and items.args and work.text.of(items.func).rpartition(".")[2] in AROUND:
        items = items.args[0]
    return items


def _over_sharded(work: Work, loop: ast.For) -> bool:
    """The loop's loader was given by `ps.shard` before."""
    items = inside(work, loop.iter)
    value = work.only_value(items.id) if isinstance(items, ast.Name) else None
    return isinstance(value, ast.Call) and work.full(value.func) == SHARD


def _is_range(work: Work, loop: ast.For) -> ast.Call | None:
    items = inside(work, loop.iter)
    named = (
        isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id == "range" and "range" not in work.names.bound
    )
    return items if named and isinstance(items, ast.Call) else None


def _loader_loops(loops: Loops, every: Iterable[ast.For]) -> list[ast.For]:
    """The loop over a loader in each nest: a known loader, else the outermost that has no epochs inside."""
    work = loops.work

    def may_be(loop: ast.For) -> bool:
        items = inside(work, loop.iter)
        return isinstance(items, ast.Name | ast.Attribute) or (isinstance(items, ast.Call) and data.is_loader(work, items))

    def is_known(loop: ast.For) -> bool:
        items = inside(work, loop.iter)
        return isinstance(items, ast.Call) or work.text.of(items) in loops.loaders

    found = [loop for loop in every if may_be(loop)]
    if any(is_known(loop) for loop in found):
        known = {loop for loop in found if is_known(loop)}
        found = [loop for loop in found if loop in known or not (loops.reaches(loop) & known or _inside(work, loop, known))]
    ranges = {loop for loop in every if _is_range(work, loop)}
    with_epochs = {
        loop for loop in found if any(one is not loop and one in ranges and loops.reaches(one) & set(found) for one in loops.reaches(loop))
    }
    found = [loop for loop in found if loop not in with_epochs]
    return [loop for loop in found if not any(other is not loop and loop in loops.reaches(other) for other in found)]


def _inside(work: Work, loop: ast.For, others: set[ast.For]) -> bool:
    return any(owner in others for owner in work.text.owners(loop))


def _epochs(loops: Loops, every: Iterable[ast.For], found: list[ast.For]) -> None:
    """The innermost loop over a range around each loop over a loader."""
    work = loops.work
    around = [loop for loop in every if _is_range(work, loop) and loops.reaches(loop) & set(found)]
    inner = [loop for loop in around if not any(one is not loop and one in loops.reaches(loop) for one in around)]
    for loop in inner:
        call = _is_range(work, loop)
        assert call is not None
        _as_epochs(work, loop, call)
    if inner or not found:
        return
    others = [loop for loop in every if loop not in found and loops.reaches(loop) & set(found)]
    whiles = [node for node in ast.walk(work.text.tree) if isinstance(node, ast.While) and loops.reaches(node) & set(found)]
    for one in [*others, *whiles][:1]:
        work.tell(one, f"the loop around training begins at its first turn after a restart, unless it is {BY_HAND}", by_hand=False)


def _as_epochs(work: Work, loop: ast.For, call: ast.Call) -> None:
    first = constant(call.args[0]) if len(call.args) == 2 else 0
    whole = isinstance(first, int) and not isinstance(first, bool)
    alone = work.text.starts_its_line(loop.body[0]) and isinstance(loop.target, ast.Name)
    if (
        call.keywords
        or len(call.args) > 2
        or not whole
        or (first != 0 and not alone)
        or any(isinstance(one, ast.Starred) for one in call.args)
    ):
        work.tell(loop, f"{work.text.of(loop.iter)} is not seen through: psjob continues at the right epoch by itself, write {BY_HAND}")
        return
    assert isinstance(first, int)
    work.edits.append(Edit(*work.text.span(call.func), f"{work.ps}.epochs"))
    if len(call.args) == 1:
        return
    last = call.args[1]
    work.edits.append(Edit(work.text.whole(call.args[0])[0], work.text.whole(last)[0]))
    if first == 0:
        return
    assert isinstance(loop.target, ast.Name)
    if isinstance(last, ast.BinOp) and isinstance(last.op, ast.Add) and constant(last.right) == first:
        work.edits.append(Edit(work.text.whole(last.left)[1], work.text.span(last)[1]))
    elif isinstance(number := constant(last), int):
        work.edits.append(Edit(*work.text.span(last), str(max(0, number - first))))
    else:
        start, end = work.text.span(last)
        plain = isinstance(last, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        work.edits += [Edit(start, start, "" if plain else "("), Edit(end, end, f"{'' if plain else ')'} - {first}")]
    body = loop.body[0]
    start = work.text.line_of(body)[0]
    line = f"{loop.target.id} += {first}"
    work.inserted.append(line)
    work.edits.append(Edit(start, start, f"{work.text.indent(body)}{line}{work.text.newline}"))
