"""How processes find each other: process groups, `hvd.init`, ranks and their variables are taken out of a script.

So is what serves nothing any more once the rest is out: emptied functions and branches, ranks that nobody asks for, imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from psjob_client.convert.script.text import ENDS_IN, GROUP, HOROVOD, Edit, Remark, ScriptEdits, constant, keyword

DROPPED = frozenset(
    {f"{GROUP}.{name}" for name in ("init_process_group", "destroy_process_group")}
    | {f"{HOROVOD}.{name}" for name in ("init", "shutdown", "broadcast_parameters", "broadcast_optimizer_state")}
)
"""Statements that nothing takes the place of."""
BARRIERS = frozenset({f"{GROUP}.barrier", f"{HOROVOD}.barrier", f"{HOROVOD}.join"})
RANKS = {f"{GROUP}.get_rank": "rank", f"{HOROVOD}.rank": "rank", f"{GROUP}.get_world_size": "world", f"{HOROVOD}.size": "world"}
HARMLESS = frozenset({f"{GROUP}.is_available", f"{GROUP}.is_initialized"})
"""What stays: true or false as it is."""
VARIABLES = {"RANK": ("rank", (None, 0, "0")), "WORLD_SIZE": ("world", (None, 1, "1"))}
"""With the defaults that a script outside a job has from psjob too."""
MEETING = frozenset({"MASTER_ADDR", "MASTER_PORT"})
DEVICES = frozenset({"to", "cuda", "set_device", "device"})
SPAWN = "torch.multiprocessing.spawn"
NO_GROUP = "psjob starts no process group"
ADVICE = {
    "all_reduce": "each worker has its own number: leave it out, or compute the number where ps.is_first() is true",
    "allreduce": "each worker has its own number: leave it out, or compute the number where ps.is_first() is true",
    "new_group": "psjob.all_reduce of docs/collectives.md works under torchrun only: leave groups out",
    "broadcast": "all workers begin with the same weights: leave it out, or read the value from a file",
    "broadcast_object": "all workers begin with the same weights: leave it out, or read the value from a file",
}
QUIET = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Subscript,
    ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip
"""Parts of expressions that do nothing except give a value."""


def convert_groups(work: ScriptEdits) -> None:
    """Take out what starts and ends groups; ranks become psjob's."""
    for call in work.calls():
        full = work.full(call.func)
        if full in DROPPED:
            _drop(work, call)
        elif full in BARRIERS:
            _barrier(work, call)
        elif full == SPAWN:
            _spawn(work, call)
    _devices(work)
    _variables(work)
    _ranks(work)


def _devices(work: ScriptEdits) -> None:
    """A rank that is a GPU's number too: each worker counts its own GPUs from 0."""
    spawned = {
        function.args.args[0].arg
        for call in work.calls() if work.full(call.func) == SPAWN
        for function in ast.walk(work.text.tree) if isinstance(function, ast.FunctionDef) and function.args.args
        and isinstance(given := keyword(call, "fn", 0), ast.Name) and given.id == function.name
    }  # fmt: skip
    for call in work.calls():
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name not in DEVICES:
            continue
        for given in (*call.args, *(one.value for one in call.keywords)):
            value = work.only_value(given.id) if isinstance(given, ast.Name) else given
            if (isinstance(given, ast.Name) and given.id in spawned) or rank_kind(work, value) == "rank":
                work.remarks.add(
                    Remark(
                        call.lineno,
                        f"{work.text.of(call)[:60]}: takes a rank for the number of a GPU, which each worker counts from 0:"
                        ' write int(os.environ.get("LOCAL_RANK", "0"))',
                    )
                )


def _drop(work: ScriptEdits, call: ast.Call) -> None:
    alone = work.stands_alone(call)
    if alone is None:
        work.tell(call, f"{work.text.of(call.func)}(…) is a part of a larger expression: take it out")
        return
    work.remove(alone)
    work.seen.update(ast.walk(call))


def _barrier(work: ScriptEdits, call: ast.Call) -> None:
    alone = work.stands_alone(call)
    name = work.text.of(call.func)
    if alone is None:
        work.tell(call, f"{name}() has no like in psjob: take it out")
        return
    work.remove(alone)
    work.tell(
        call,
        f"{name}() was taken out, as psjob has none; if workers waited there for a file, put that file into the image",
        by_hand=False,
    )


def _spawn(work: ScriptEdits, call: ast.Call) -> None:
    """`mp.spawn(main, args=(a, b), nprocs=n)` becomes `main(rank, a, b)`: psjob starts the processes."""
    alone, function, given = work.stands_alone(call), keyword(call, "fn", 0), keyword(call, "args", 1)
    if alone is None or not isinstance(function, ast.Name) or not isinstance(given, ast.Tuple | None):
        work.tell(call, "psjob starts a process for each worker: call the function itself, with ps.rank() as its first argument")
        return
    head, elements = f"{function.id}({work.ps}.rank()", given.elts if given is not None else []
    if elements:
        start, end = work.text.span(call)
        work.edits += [
            Edit(start, work.text.whole(elements[0])[0], f"{head}, "),
            Edit(work.text.whole(elements[-1])[1], end, ")"),
        ]
    else:
        work.replace(call, f"{head})")
    work.tell(
        call,
        f"psjob starts a process for each worker, and {function.id} is called once in it",
        by_hand=False,
    )


def rank_kind(work: ScriptEdits, node: ast.AST | None) -> str:
    """`rank` or `world` where an expression is one of them, else empty."""
    if not isinstance(node, ast.Call):
        return ""
    if not node.args and not node.keywords and (found := RANKS.get(work.full(node.func))):
        return found
    if isinstance(node.func, ast.Name) and node.func.id == "int" and len(node.args) == 1:
        name, default = variable(work, node.args[0])
        found, defaults = VARIABLES.get(name, ("", ()))
        return found if default in defaults else ""
    return ""


def variable(work: ScriptEdits, node: ast.AST) -> tuple[str, object]:
    """Name and default of an environment variable that an expression reads; the name is empty where it reads none."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and work.full(node.value) == "os.environ":
        return str(constant(node.slice)), None
    if isinstance(node, ast.Call) and work.full(node.func) in ("os.environ.get", "os.getenv") and node.args:
        default = keyword(node, "default", 1)
        return str(constant(node.args[0])), None if default is None else constant(default)
    return "", None


def _variables(work: ScriptEdits) -> None:
    """LOCAL_RANK is set in workers of several processes only; addresses are nobody's business any more."""
    for node in ast.walk(work.text.tree):
        if isinstance(node, ast.Assign) and _is_address(work, node.targets):
            work.remove(node)
        elif isinstance(node, ast.Call) and work.full(node.func) == "os.environ.setdefault" and node.args:
            alone = work.stands_alone(node)
            if alone is not None and constant(node.args[0]) in MEETING:
                work.remove(alone)
        elif isinstance(node, ast.Subscript) and variable(work, node)[0] == "LOCAL_RANK":
            _local_rank(work, node, "", work.text.of(node.value), "")
        elif isinstance(node, ast.Call) and work.full(node.func) == f"{HOROVOD}.local_rank" and not node.args:
            system = next((name for name, meant in work.names.imports.items() if meant == {"os"} and name not in work.names.bound), "os")
            if system not in work.names.imports:
                work.imports.add("import os")
            _local_rank(work, node, "int(", f"{system}.environ", ")")


def _local_rank(work: ScriptEdits, node: ast.expr, head: str, environment: str, tail: str) -> None:
    """In quotes that no f-string around it is in."""
    outer = [work.text.of(one).lstrip("fFrR")[:1] for one in work.text.owners(node) if isinstance(one, ast.JoinedStr)]
    quote = next((one for one in ('"', "'") if one not in outer), None)
    if quote is None:
        work.tell(node, 'give the number of the GPU a name before: local = int(os.environ.get("LOCAL_RANK", "0"))')
        return
    work.replace(node, f"{head}{environment}.get({quote}LOCAL_RANK{quote}, {quote}0{quote}){tail}")


def _is_address(work: ScriptEdits, targets: list[ast.expr]) -> bool:
    """`os.environ["MASTER_ADDR"] = …`."""
    (target, *others) = targets
    of_environment = not others and isinstance(target, ast.Subscript) and work.full(target.value) == "os.environ"
    return of_environment and isinstance(target, ast.Subscript) and constant(target.slice) in MEETING


def _ranks(work: ScriptEdits) -> None:
    for node in ast.walk(work.text.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and constant(node.comparators[0]) == 0:
            _compared(work, node)
        elif found := rank_kind(work, node):
            work.replace(node, f"{work.ps}.{found}()")
            if found == "world":
                _scaled(work, node)
        elif isinstance(node, ast.Subscript | ast.Call):
            _read(work, node)
        elif isinstance(node, ast.Compare) and (name := constant(node.left)) in {*VARIABLES, *MEETING} and _in_environment(work, node):
            work.tell(node, f"{name} is not set in workers of one process: ask {work.ps}.world() > 1", by_hand=False)


def _in_environment(work: ScriptEdits, node: ast.Compare) -> bool:
    return work.full(node.comparators[0]) == "os.environ"


def _compared(work: ScriptEdits, node: ast.Compare) -> None:
    """`rank == 0` becomes `ps.is_first()`."""
    first = f"{work.ps}.is_first()"
    said = {ast.Eq: first, ast.NotEq: f"not {first}", ast.Gt: f"not {first}"}.get(type(node.ops[0]))
    value = work.only_value(node.left.id) if isinstance(node.left, ast.Name) else node.left
    if said is not None and rank_kind(work, value) == "rank" and type(constant(node.comparators[0])) is int:
        work.replace(node, said)


def _scaled(work: ScriptEdits, node: ast.AST) -> None:
    above = work.text.parents[node]
    if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Mult):
        work.tell(
            above,
            f"{work.text.of(above)} multiplies by the number of workers; if it is a learning rate, write the plain one, and"
            " spec.training.lrScaling: linear in the manifest",
            by_hand=False,
        )


def _read(work: ScriptEdits, node: ast.Subscript | ast.Call) -> None:
    """A variable that is read in another way than as `int(os.environ["RANK"])`."""
    name, default = variable(work, node)
    above = work.text.parents[node]
    if name not in {*VARIABLES, *MEETING} or rank_kind(work, above):
        return
    if isinstance(node, ast.Subscript) and name in VARIABLES:
        work.replace(node, f"str({work.ps}.{VARIABLES[name][0]}())")
    elif isinstance(node, ast.Subscript):
        work.tell(node, f"{name} is not set, as workers find the shards by themselves: take it out")
    else:
        shown = "nothing" if default is None else repr(default)
        work.tell(
            node,
            f"{name} is not set in workers of one process, so this is {shown}; {work.ps}.rank() and {work.ps}.world() say who is who",
            by_hand=False,
        )


def tell_the_rest(work: ScriptEdits) -> None:
    """Every use of torch.distributed and Horovod that is still there."""
    for node in ast.walk(work.text.tree):
        if not isinstance(node, ast.Name | ast.Attribute) or node in work.seen or isinstance(work.text.parents[node], ast.Attribute):
            continue
        full = work.full(node)
        if not full.startswith((f"{GROUP}.", f"{HOROVOD}.")) or full in HARMLESS or work.is_gone(node):
            continue
        call = work.text.parents[node]
        whole = call if isinstance(call, ast.Call) and call.func is node else node
        advice = ADVICE.get(full.rpartition(".")[2].rstrip("_"), "take it out")
        work.tell(whole, f"{work.text.of(node)}: {NO_GROUP}; {advice}")


def convert_tidy(work: ScriptEdits) -> None:
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


def finished_edits(work: ScriptEdits) -> list[Edit]:
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


def _blocks(work: ScriptEdits) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    for owner in ast.walk(work.text.tree):
        for _, value in ast.iter_fields(owner):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield owner, value


def _is_docstring(owner: ast.AST, statement: ast.stmt) -> bool:
    function = isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef)
    return function and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _emptied(work: ScriptEdits, owner: ast.AST, block: list[ast.stmt]) -> bool:
    rest = [one for one in block if one not in work.removed and not _is_docstring(owner, one)]
    return not rest and any(one in work.removed for one in block)


def _without(work: ScriptEdits, owner: ast.stmt) -> None:
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


def _is_quiet(work: ScriptEdits, test: ast.AST) -> bool:
    """Computing it changes nothing."""
    if isinstance(test, ast.Call):
        return bool(rank_kind(work, test)) or work.full(test.func) in HARMLESS
    return isinstance(test, QUIET) and all(_is_quiet(work, part) for part in ast.iter_child_nodes(test))


def _unasked(work: ScriptEdits, name: str) -> None:
    """A rank, or another plain value, that was asked for before and is no more."""
    value = work.only_value(name)
    if value is None or name in _words(work) or not all(work.is_gone(load) for load in work.names.loads[name]):
        return
    (bound,) = work.names.bound[name]
    statement = work.text.parents[bound]
    if isinstance(statement, ast.Assign) and statement not in work.removed and _is_quiet(work, value):
        work.remove(statement)


def _words(work: ScriptEdits) -> set[str]:
    """Words of what was written anew."""
    return {word for edit in work.edits for word in re.findall(r"(?<![\w.])[^\W\d]\w*", edit.text)}


def _imports(work: ScriptEdits) -> None:
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


def _is_unused(work: ScriptEdits, statement: ast.stmt, alias: ast.alias, words: set[str]) -> bool:
    name = alias.asname or alias.name.partition(".")[0]
    loads = work.names.loads.get(name, [])
    if name in work.names.bound or name in words or not loads:
        return False
    if isinstance(statement, ast.Import) and not alias.asname and "." in alias.name:
        return _is_unused_module(work, statement, alias.name, name)
    return all(work.is_gone(load) for load in loads)


def _is_unused_module(work: ScriptEdits, statement: ast.stmt, module: str, name: str) -> bool:
    """`import torch.distributed` names torch too."""
    used = [node for node in ast.walk(work.text.tree) if isinstance(node, ast.Attribute) and work.full(node).startswith(module)]
    others = [
        one for one in ast.walk(work.text.tree)
        if isinstance(one, ast.Import) and one is not statement and any(alias.name == name and not alias.asname for alias in one.names)
    ]  # fmt: skip
    free = bool(others) or all(work.is_gone(load) for load in work.names.loads[name])
    return bool(used) and free and all(work.is_gone(node) for node in used)


def psjob_imported(work: ScriptEdits) -> None:
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


def names_psjob(work: ScriptEdits) -> bool:
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
