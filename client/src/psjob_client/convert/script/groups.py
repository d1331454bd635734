"""How processes find each other: process groups, `hvd.init`, ranks and their variables."""

from __future__ import annotations

import ast

from psjob_client.convert.script.text import GROUP, HOROVOD, Edit
from psjob_client.convert.script.work import Remark, Work, constant, keyword

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


def convert(work: Work) -> None:
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


def _devices(work: Work) -> None:
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
            if (isinstance(given, ast.Name) and given.id in spawned) or rank_of(work, value) == "rank":
                work.remarks.add(
                    Remark(
                        call.lineno,
                        f"{work.text.of(call)[:60]}: takes a rank for the number of a GPU, which each worker counts from 0:"
                        ' write int(os.environ.get("LOCAL_RANK", "0"))',
                    )
                )


def _drop(work: Work, call: ast.Call) -> None:
    alone = work.stands_alone(call)
    if alone is None:
        work.tell(call, f"{work.text.of(call.func)}(…) is a part of a larger expression: take it out")
        return
    work.remove(alone)
    work.seen.update(ast.walk(call))


def _barrier(work: Work, call: ast.Call) -> None:
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


def _spawn(work: Work, call: ast.Call) -> None:
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


def rank_of(work: Work, node: ast.AST | None) -> str:
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


def variable(work: Work, node: ast.AST) -> tuple[str, object]:
    """Name and default of an environment variable that an expression reads; the name is empty where it reads none."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and work.full(node.value) == "os.environ":
        return str(constant(node.slice)), None
    if isinstance(node, ast.Call) and work.full(node.func) in ("os.environ.get", "os.getenv") and node.args:
        default = keyword(node, "default", 1)
        return str(constant(node.args[0])), None if default is None else constant(default)
    return "", None


def _variables(work: Work) -> None:
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


def _local_rank(work: Work, node: ast.expr, head: str, environment: str, tail: str) -> None:
    """In quotes that no f-string around it is in."""
    outer = [work.text.of(one).lstrip("fFrR")[:1] for one in work.text.owners(node) if isinstance(one, ast.JoinedStr)]
    quote = next((one for one in ('"', "'") if one not in outer), None)
    if quote is None:
        work.tell(node, 'give the number of the GPU a name before: local = int(os.environ.get("LOCAL_RANK", "0"))')
        return
    work.replace(node, f"{head}{environment}.get({quote}LOCAL_RANK{quote}, {quote}0{quote}){tail}")


def _is_address(work: Work, targets: list[ast.expr]) -> bool:
    """`os.environ["MASTER_ADDR"] = …`."""
    (target, *others) = targets
    of_environment = not others and isinstance(target, ast.Subscript) and work.full(target.value) == "os.environ"
    return of_environment and isinstance(target, ast.Subscript) and constant(target.slice) in MEETING


def _ranks(work: Work) -> None:
    for node in ast.walk(work.text.tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and constant(node.comparators[0]) == 0:
            _compared(work, node)
        elif found := rank_of(work, node):
            work.replace(node, f"{work.ps}.{found}()")
            if found == "world":
                _scaled(work, node)
        elif isinstance(node, ast.Subscript | ast.Call):
            _read(work, node)
        elif isinstance(node, ast.Compare) and (name := constant(node.left)) in {*VARIABLES, *MEETING} and _in_environment(work, node):
            work.tell(node, f"{name} is not set in workers of one process: ask {work.ps}.world() > 1", by_hand=False)


def _in_environment(work: Work, node: ast.Compare) -> bool:
    return work.full(node.comparators[0]) == "os.environ"


def _compared(work: Work, node: ast.Compare) -> None:
    """`rank == 0` becomes `ps.is_first()`."""
    first = f"{work.ps}.is_first()"
    said = {ast.Eq: first, ast.NotEq: f"not {first}", ast.Gt: f"not {first}"}.get(type(node.ops[0]))
    value = work.only_value(node.left.id) if isinstance(node.left, ast.Name) else node.left
    if said is not None and rank_of(work, value) == "rank" and type(constant(node.comparators[0])) is int:
        work.replace(node, said)


def _scaled(work: Work, node: ast.AST) -> None:
    above = work.text.parents[node]
    if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Mult):
        work.tell(
            above,
            f"{work.text.of(above)} multiplies by the number of workers; if it is a learning rate, write the plain one, and"
            " spec.training.lrScaling: linear in the manifest",
            by_hand=False,
        )


def _read(work: Work, node: ast.Subscript | ast.Call) -> None:
    """A variable that is read in another way than as `int(os.environ["RANK"])`."""
    name, default = variable(work, node)
    above = work.text.parents[node]
    if name not in {*VARIABLES, *MEETING} or rank_of(work, above):
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


def tell_the_rest(work: Work) -> None:
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
