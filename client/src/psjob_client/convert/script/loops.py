"""The training of a script: its loops, the data that they read, and what was put around model and optimizer.

Epochs become `ps.epochs`, and the loader's loop goes over `ps.shard`. What slices the data by rank goes: DistributedSampler and set_epoch.
DistributedDataParallel and hvd.DistributedOptimizer go, `ps.attach` comes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from psjob_client.convert.script.text import HOROVOD, Edit, ScriptEdits, assigned, constant, keyword

AROUND = ("enumerate", "tqdm", "track")
"""Calls that give the items of their first argument."""
EPOCHS, SHARD = "psjob.epochs", "psjob.shard"
BY_HAND = "for epoch in ps.epochs(n)"
SAMPLERS = frozenset({"torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"})
LOADER = "DataLoader"
WRAPPERS = frozenset({"torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel"})
OPTIMIZER = f"{HOROVOD}.DistributedOptimizer"
SYNC_NORM = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
PARAMETERS = ("parameters", "named_parameters")
LOOPS = (ast.For, ast.While, ast.AsyncFor)
LINE = "after model and optimizer are made, write: model, opt = ps.attach(model, opt)"


class Loops:
    """What of a script trains."""

    def __init__(self, work: ScriptEdits) -> None:
        self.work = work
        self.functions: dict[str, list[ast.AST]] = {}
        for node in ast.walk(work.text.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
        self.loaders = loaders(work)

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


def convert_loops(work: ScriptEdits) -> None:
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


def inside(work: ScriptEdits, items: ast.expr) -> ast.expr:
    """Without enumerate and progress bars."""
    while isinstance(items, ast.Call) and items.args and work.text.of(items.func).rpartition(".")[2] in AROUND:
        items = items.args[0]
    return items


def _over_sharded(work: ScriptEdits, loop: ast.For) -> bool:
    """The loop's loader was given by `ps.shard` before."""
    items = inside(work, loop.iter)
    value = work.only_value(items.id) if isinstance(items, ast.Name) else None
    return isinstance(value, ast.Call) and work.full(value.func) == SHARD


def _is_range(work: ScriptEdits, loop: ast.For) -> ast.Call | None:
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
        return isinstance(items, ast.Name | ast.Attribute) or (isinstance(items, ast.Call) and is_loader(work, items))

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


def _inside(work: ScriptEdits, loop: ast.For, others: set[ast.For]) -> bool:
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


def _as_epochs(work: ScriptEdits, loop: ast.For, call: ast.Call) -> None:
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


def convert_data(work: ScriptEdits) -> None:
    """Take the samplers out of their loaders."""
    for call in work.calls():
        if work.full(call.func) in SAMPLERS:
            _sampler(work, call)
    _of_loaders(work)


def loaders(work: ScriptEdits) -> dict[str, ast.Call]:
    """The DataLoaders of the script, by the text of what they are called."""
    found = {}
    for node in ast.walk(work.text.tree):
        target, value = assigned(node)
        if target is not None and isinstance(value, ast.Call) and is_loader(work, value):
            found[work.text.of(target)] = value
    return found


def is_loader(work: ScriptEdits, call: ast.Call) -> bool:
    """Is this call DataLoader(…)?"""
    full = work.full(call.func) or work.text.of(call.func)
    return full.rpartition(".")[2] == LOADER


def _sampler(work: ScriptEdits, call: ast.Call) -> None:
    above = work.text.parents[call]
    if isinstance(above, ast.keyword) and _takes_sampler(work, above):
        _plain(work, above, call)
        return
    target = assigned(above)[0]
    name = target.id if isinstance(target, ast.Name) else ""
    loads = work.names.loads.get(name, [])
    given = [work.text.parents[load] for load in loads if isinstance(work.text.parents[load], ast.keyword)]
    epochs = [statement for load in loads if (statement := _set_epoch(work, load)) is not None]
    takes = [one for one in given if isinstance(one, ast.keyword) and _takes_sampler(work, one)]
    asked = [one for one in loads if _is_asked(work, one)]
    dataset = keyword(call, "dataset", 0)
    counted = [work.text.parents[one] for one in loads if isinstance(dataset, ast.Name) and _is_counted(work, one)]
    if work.only_value(name) is not call or not takes or len(takes) + len(epochs) + len(asked) + len(counted) != len(loads):
        work.tell(
            call,
            "DistributedSampler is made or used in a way that is not seen through: give the DataLoader shuffle=True, and take the sampler"
            " and its set_epoch out",
        )
        return
    assert isinstance(above, ast.stmt)
    work.remove(above)
    for statement in epochs:
        work.remove(statement)
    for one in takes:
        _plain(work, one, call)
    for length in counted:
        assert isinstance(dataset, ast.Name)
        work.replace(length, f"len({dataset.id})")
        work.tell(length, f"len({name}) became len({dataset.id}): the samples of all workers, not of one", by_hand=False)


def _of_loaders(work: ScriptEdits) -> None:
    """`loader.sampler`, which is no DistributedSampler any more."""
    given = [one for call in work.calls() if is_loader(work, call) for one in call.keywords if one.arg == "sampler"]
    ours = [one for one in given if one in work.seen]
    if not ours:
        return
    for node in ast.walk(work.text.tree):
        if not isinstance(node, ast.Attribute) or node.attr != "sampler" or not isinstance(node.ctx, ast.Load) or work.is_gone(node):
            continue
        statement = _set_epoch(work, node)
        if statement is not None and len(ours) == len(given):
            work.remove(statement)
        else:
            work.tell(node, f"{work.text.of(node)}: a loader has no DistributedSampler any more: take it out")


def _takes_sampler(work: ScriptEdits, given: ast.keyword) -> bool:
    call = work.text.parents[given]
    return given.arg == "sampler" and isinstance(call, ast.Call) and is_loader(work, call)


def _set_epoch(work: ScriptEdits, load: ast.expr) -> ast.stmt | None:
    """The statement `sampler.set_epoch(…)`."""
    attribute = work.text.parents[load]
    call = work.text.parents[attribute]
    if isinstance(attribute, ast.Attribute) and attribute.attr == "set_epoch" and isinstance(call, ast.Call):
        return work.stands_alone(call)
    return None


def _is_asked(work: ScriptEdits, load: ast.Name) -> bool:
    """`sampler is None` and the like as the loader's `shuffle`, which is written anew."""
    compared = work.text.parents[load]
    above = work.text.parents[compared]
    return isinstance(compared, ast.Compare) and isinstance(above, ast.keyword) and above.arg == "shuffle"


def _is_counted(work: ScriptEdits, load: ast.Name) -> bool:
    """`len(sampler)`."""
    call = work.text.parents[load]
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "len" and call.args == [load]


def _plain(work: ScriptEdits, given: ast.keyword, sampler: ast.Call) -> None:
    """The loader shuffles as its sampler did."""
    loader = work.text.parents[given]
    assert isinstance(loader, ast.Call)
    wanted = keyword(sampler, "shuffle", 3)
    shuffle = "True" if wanted is None else work.text.of(wanted)
    there = next((one for one in loader.keywords if one.arg == "shuffle"), None)
    if there is not None:
        work.edits.append(Edit(*work.text.span(there.value), shuffle))
        work.edits.append(work.text.without_argument(loader, given))
    elif constant(wanted) is False:
        work.edits.append(work.text.without_argument(loader, given))
    else:
        work.edits.append(Edit(*work.text.span(given), f"shuffle={shuffle}"))
    for name, why in (
        ("drop_last", "ps.shard gives each worker the same number of steps; DataLoader(drop_last=True) leaves out an incomplete batch"),
        ("seed", "the order comes from spec.training.seed of the manifest"),
    ):
        if keyword(sampler, name) is not None:
            work.tell(sampler, f"{name} of the sampler is left out: {why}", by_hand=False)
    work.seen.update({given, *ast.walk(sampler)})
    _lengths(work, loader)


def _lengths(work: ScriptEdits, loader: ast.Call) -> None:
    """`len(loader)` was one process's."""
    target = assigned(work.text.parents[loader])[0]
    name = work.text.of(target) if target is not None else ""
    for call in work.calls():
        if isinstance(call.func, ast.Name) and call.func.id == "len" and call.args and work.text.of(call.args[0]) == name:
            work.tell(
                call,
                f"len({name}) counts the batches of all workers now; len({work.ps}.shard({name})) counts those of one",
                by_hand=False,
            )


@dataclass(frozen=True)
class Made:
    """A place where an optimizer is made and named."""

    statement: ast.stmt
    call: ast.Call
    target: str
    wrapped: bool = False
    """It is Horovod's around another one, and the whole statement is replaced."""


def convert_wrapping(work: ScriptEdits) -> None:
    """Take the wrappers off, and attach."""
    wrapped = _unwrap(work)
    _wrapped_uses(work, wrapped)
    if not any(work.full(call.func) == "psjob.attach" for call in work.calls()):
        _attach(work, wrapped)


def _unwrap(work: ScriptEdits) -> dict[str, ast.Call]:
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


def _wrapped_uses(work: ScriptEdits, wrapped: dict[str, ast.Call]) -> None:
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


def _comes_after(work: ScriptEdits, node: ast.Attribute, call: ast.Call) -> bool:
    return work.text.scope(node) is work.text.scope(call) and node.lineno > call.lineno


def _attach(work: ScriptEdits, wrapped: dict[str, ast.Call]) -> None:
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


def _horovods(work: ScriptEdits) -> list[Made]:
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


def _options(work: ScriptEdits, call: ast.Call) -> None:
    for given in call.keywords:
        if given.arg == "compression":
            work.tell(given.value, "compression: is set in the manifest, such as spec.training.compression.push: fp16", by_hand=False)
        elif given.arg not in ("optimizer", "named_parameters"):
            work.tell(given.value, f"{given.arg or '**'} of Horovod's optimizer is left out: psjob has no such option", by_hand=False)


def _optimizers(work: ScriptEdits) -> list[Made]:
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


def _attach_one(work: ScriptEdits, made: list[Made], wrapped: dict[str, ast.Call]) -> None:
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


def _trains_between(work: ScriptEdits, made: list[Made], place: ast.stmt) -> bool:
    """Does anything compute gradients before the last of the optimizers is made?"""
    loops = Loops(work)
    begun, end = min(one.statement.lineno for one in made), max(place.lineno, place.end_lineno or 0)
    own = {node for one in made for node in ast.walk(one.statement)}
    return any(
        isinstance(node, (*LOOPS, ast.Call)) and begun < node.lineno <= end and node not in own and loops.trains(node)
        for node in ast.walk(work.text.tree)
    )


def _insert(work: ScriptEdits, place: ast.stmt, line: str) -> None:
    work.inserted.append(line)
    work.edits.append(work.text.below(place, [line]))


def _kept(work: ScriptEdits, model: str, made: Made) -> str:
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


def _moved(work: ScriptEdits, model: str, last: Made) -> None:
    """Tell where the model goes to its device after it was attached."""
    scope = work.text.scope(last.statement)
    for call in work.calls():
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("to", "cuda") or work.text.of(call.func.value) != model:
            continue
        if work.text.scope(call) is not scope or call.lineno > last.statement.lineno:
            work.tell(call, f"{work.text.of(call)[:60]}: if this comes after ps.attach, move the model before it", by_hand=False)


def _model(work: ScriptEdits, made: Made, wrapped: dict[str, ast.Call]) -> str:
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


def _roots(work: ScriptEdits, call: ast.Call) -> set[str]:
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


def _common(work: ScriptEdits, statements: list[ast.stmt]) -> ast.stmt:
    """The last statement of the innermost block that holds all of these."""
    for place in (statements[-1], *work.text.owners(statements[-1])):
        if isinstance(place, ast.stmt):
            block = work.text.block(place)
            holding = [next((one for one in block if one in (each, *work.text.owners(each))), None) for each in statements]
            if all(one is not None for one in holding):
                return max((one for one in holding if one is not None), key=lambda one: one.lineno)
    raise AssertionError("statements of one scope share a block")
