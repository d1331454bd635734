"""What was put around model and optimizer: DistributedDataParallel and hvd.DistributedOptimizer go, `ps.attach` comes."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from psjob_client.convert.script.loops import Loops
from psjob_client.convert.script.text import HOROVOD, Edit
from psjob_client.convert.script.work import Work, assigned, keyword

WRAPPERS = frozenset({"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"})
OPTIMIZER = f"{HOROVOD}.DistributedOptimizer"
SYNC_NORM = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
PARAMETERS = ("parameters", "named_parameters")
LOOPS = (ast.For, ast.While, ast.AsyncFor)
LINE = "after model and optimizer are made, write: model, opt = ps.attach(model, opt)"


@dataclass(frozen=True)
class Made:
    """A place where an optimizer is made and named."""

    statement: ast.stmt
    call: ast.Call
    target: str
    wrapped: bool = False
    """It is Horovod's around another one, and the whole statement is replaced."""


def convert(work: Work) -> None:
    """Take the wrappers off, and attach."""
    wrapped = _unwrap(work)
    _wrapped_uses(work, wrapped)
    if not any(work.full(call.func) == "psjob.attach" for call in work.calls()):
        _attach(work, wrapped)


def _unwrap(work: Work) -> dict[str, ast.Call]:
    """By the text of what each wrapped model is called."""
    found: dict[str, ast.Call] = {}
    for call in work.calls():
        full = work.full(call.func)
        if full == SYNC_NORM:
            work.tell(call, "SyncBatchNorm needs a process group, which psjob does not start: take it out")
        if full not in WRAPPERS:
            continue
        inner = keyword(call, "module", 0)
        if inner is None or isinstance(inner, ast.Starred):
            work.tell(call, f"{work.text.of(call.func)}: no model is seen in its arguments: take it out")
            continue
        work.seen.update(ast.walk(call.func))
        above = work.text.parents[call]
        place = assigned(above)[0]
        target = work.text.of(place) if place is not None else ""
        found[target] = call
        if isinstance(above, ast.Assign) and target == work.text.of(inner):
            work.remove(above)
        else:
            work.edits += work.text.unwrapped(call, inner)
    return found


def _wrapped_uses(work: Work, wrapped: dict[str, ast.Call]) -> None:
    """`model.module` and `model.no_sync()` of what was wrapped."""
    if not wrapped:
        return
    for node in ast.walk(work.text.tree):
        if not isinstance(node, ast.Attribute) or node.attr not in ("module", "no_sync") or work.full(node):
            continue
        name = work.text.of(node.value)
        call = wrapped.get(name)
        if node.attr == "no_sync":
            work.tell(node, f"{name}.no_sync(): psjob sends gradients at step() only: take the with statement off its body")
        elif call is not None and work.text.is_placed(node) and (isinstance(node.value, ast.Attribute) or _comes_after(work, node, call)):
            work.edits.append(Edit(work.text.whole(node.value)[1], work.text.span(node)[1]))
        elif isinstance(node.value, ast.Name | ast.Attribute):
            work.tell(node, f"{name}.module: if {name} is the model that was wrapped, write {name}")


def _comes_after(work: Work, node: ast.Attribute, call: ast.Call) -> bool:
    return work.text.scope(node) is work.text.scope(call) and node.lineno > call.lineno


def _attach(work: Work, wrapped: dict[str, ast.Call]) -> None:
    plain = _optimizers(work)
    made = _horovods(work)
    there = {one.statement for one in made}
    beside = [
        one for one in plain
        if one.statement not in there
        and any(one.target == other.target and work.text.scope(one.statement) is work.text.scope(other.statement) for other in made)
    ]  # fmt: skip
    made = [*made, *beside] if made else plain
    kinds = {(one.target, work.text.scope(one.statement)) for one in made}
    if not made:
        line = next((call for call in work.calls() if isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad"), None)
        work.tell(line or work.text.tree, f"no optimizer is seen that is made and named in one statement; {LINE}")
    elif len(kinds) > 1:
        for one in made:
            work.tell(one.statement, f"{one.target} is one of several optimizers: attach each by a name, as ps.attach(…, name='…')")
    elif turned := [one for one in made if any(isinstance(owner, LOOPS) for owner in work.text.owners(one.statement))]:
        for one in turned:
            work.tell(one.statement, f"{one.target} is made in each turn of a loop, but a script is one training; {LINE}")
    else:
        _attach_one(work, made, wrapped)


def _horovods(work: Work) -> list[Made]:
    """Horovod's optimizers: each around another that has a name, or around one that is made in its place."""
    found = []
    for call in work.calls():
        if work.full(call.func) != OPTIMIZER:
            continue
        work.seen.update(ast.walk(call.func))
        inner, above = keyword(call, "optimizer", 0), work.text.parents[call]
        _options(work, call)
        target = assigned(above)[0]
        if target is None or not isinstance(above, ast.stmt) or not isinstance(inner, ast.Name | ast.Attribute | ast.Call):
            work.tell(call, f"{work.text.of(call.func)} is no statement of its own: take it off the optimizer; {LINE}")
            continue
        if isinstance(inner, ast.Call):
            work.edits += work.text.unwrapped(call, inner)
            found.append(Made(above, inner, work.text.of(target)))
        else:
            found.append(Made(above, call, work.text.of(target), wrapped=True))
    return found


def _options(work: Work, call: ast.Call) -> None:
    for given in call.keywords:
        if given.arg == "compression":
            work.tell(given.value, "compression: is set in the manifest, such as spec.training.compression.push: fp16", by_hand=False)
        elif given.arg not in ("optimizer", "named_parameters"):
            work.tell(given.value, f"{given.arg or '**'} of Horovod's optimizer is left out: psjob has no such option", by_hand=False)


def _optimizers(work: Work) -> list[Made]:
    """Assignments of a call that is an optimizer of torch, or takes parameters and gives what has zero_grad."""
    stepped = {
        work.text.of(node.value) for node in ast.walk(work.text.tree) if isinstance(node, ast.Attribute) and node.attr == "zero_grad"
    }
    found = []
    for node in ast.walk(work.text.tree):
        place, call = assigned(node)
        if not isinstance(node, ast.stmt) or not isinstance(place, ast.Name | ast.Attribute) or not isinstance(call, ast.Call):
            continue
        target = work.text.of(place)
        full = work.full(call.func)
        of_torch = full.startswith("torch.optim.") and "lr_scheduler" not in full and full.rpartition(".")[2][:1].isupper()
        if of_torch or (target in stepped and _roots(work, call)):
            found.append(Made(node, call, target))
    return found


def _attach_one(work: Work, made: list[Made], wrapped: dict[str, ast.Call]) -> None:
    last = made[-1]
    models = {model for one in made if (model := _model(work, one, wrapped))}
    if len(models) != 1:
        work.tell(last.statement, f"it is not seen which model {last.target} trains; {LINE}")
        return
    (model,) = models
    place = _common(work, [one.statement for one in made])
    if _trains_between(work, made, place):
        work.tell(last.statement, f"{last.target} is made again behind what trains with the first one; {LINE}")
        return
    kept = _kept(work, model, last)
    if not kept:
        work.tell(last.statement, f"{model} is a name of the module that this function only reads; {LINE}")
        return
    _moved(work, model, last)
    around = [one for one in made if one.wrapped]
    given = {work.text.of(inner) for one in around if (inner := keyword(one.call, "optimizer", 0)) is not None}
    if not around or (given == {last.target} and len(around) < len(made)):
        for one in around:
            work.remove(one.statement)
        _insert(work, place, f"{kept}, {last.target} = {work.ps}.attach({model}, {last.target})")
    elif len(made) == 1 and not any(isinstance(one, ast.If | ast.Try) for one in work.text.owners(last.statement)):
        (of,) = given
        work.replace(last.statement, f"{kept}, {last.target} = {work.ps}.attach({model}, {of})")
    else:
        for one in around:
            work.tell(one.statement, f"{one.target} is wrapped in some cases only: take Horovod's optimizer off; {LINE}")


def _trains_between(work: Work, made: list[Made], place: ast.stmt) -> bool:
    """Does anything compute gradients before the last of the optimizers is made?"""
    loops = Loops(work)
    begun, end = min(one.statement.lineno for one in made), max(place.lineno, place.end_lineno or 0)
    own = {node for one in made for node in ast.walk(one.statement)}
    return any(
        isinstance(node, (*LOOPS, ast.Call)) and begun < node.lineno <= end and node not in own and loops.trains(node)
        for node in ast.walk(work.text.tree)
    )


def _insert(work: Work, place: ast.stmt, line: str) -> None:
    work.inserted.append(line)
    work.edits.append(work.text.below(place, [line]))


def _kept(work: Work, model: str, made: Made) -> str:
    """What the attached model is assigned to: `_` if its name is not the function's own, as it would hide the module's; empty if taken."""
    scope = work.text.scope(made.statement)
    if "." in model or not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return model
    shared = any(
        isinstance(one, ast.Global | ast.Nonlocal) and model in one.names and work.text.scope(one) is scope for one in ast.walk(scope)
    )
    own = any(
        work.text.scope(one) is scope and not any(isinstance(owner, ast.comprehension) for owner in work.text.owners(one))
        for one in work.names.bound.get(model, [])
    )
    if shared or own:
        return model
    return "" if work.names.loads.get("_") else "_"


def _moved(work: Work, model: str, last: Made) -> None:
    """Tell where the model goes to its device after it was attached."""
    scope = work.text.scope(last.statement)
    for call in work.calls():
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda") or work.text.of(call.func.value) != model:
            continue
        if work.text.scope(call) is not scope or call.lineno > last.statement.lineno:
            work.tell(call, f"{work.text.of(call)[:60]}: if this comes after ps.attach, move the model before it", by_hand=False)


def _model(work: Work, made: Made, wrapped: dict[str, ast.Call]) -> str:
    """The model whose parameters an optimizer is given, as it is written; empty where that is not seen."""
    roots = _roots(work, made.call)
    if not roots and made.wrapped:
        given = keyword(made.call, "optimizer", 0)
        name = work.text.of(given) if given is not None else ""
        roots = {root for one in _optimizers(work) if one.target == name for root in _roots(work, one.call)}
    if roots:
        parts = [root.split(".") for root in sorted(roots)]
        shared = [words[0] for words in zip(*parts, strict=False) if len(set(words)) == 1]
        return ".".join(shared) if parts[0][: len(shared)] == shared and shared not in ([], ["self"]) else ""
    names = [name for name in wrapped if name]
    return names[0] if len(names) == 1 else ""


def _roots(work: Work, call: ast.Call) -> set[str]:
    """Of what the parameters in a call's arguments are, also by way of a variable."""
    found = set()
    given = [*call.args, *(one.value for one in call.keywords)]
    given += [value for one in given if isinstance(one, ast.Name) and (value := work.only_value(one.id)) is not None]
    for node in (node for one in given for node in ast.walk(one)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARAMETERS:
            of = node.func.value
            if isinstance(of, ast.Attribute) and of.attr == "module":
                of = of.value
            if all(isinstance(part, ast.Name | ast.Attribute | ast.expr_context) for part in ast.walk(of)):
                found.add(work.text.of(of))
    return found


def _common(work: Work, statements: list[ast.stmt]) -> ast.stmt:
    """The last statement of the innermost block that holds all of these."""
    for place in (statements[-1], *work.text.owners(statements[-1])):
        if isinstance(place, ast.stmt):
            block = work.text.block(place)
            holding = [next((one for one in block if one in (each, *work.text.owners(each))), None) for each in statements]
            if all(one is not None for one in holding):
                return max((one for one in holding if one is not None), key=lambda one: one.lineno)
    raise AssertionError("statements of one scope share a block")
