"""What slices the data by rank goes: DistributedSampler and set_epoch. `ps.shard` slices in the loop that trains."""

from __future__ import annotations

import ast

from psjob_client.convert.script.text import Edit
from psjob_client.convert.script.work import Work, assigned, constant, keyword

SAMPLERS = frozenset({"torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"})
LOADER = "DataLoader"


def convert(work: Work) -> None:
    """Take the samplers out of their loaders."""
    for call in work.calls():
        if work.full(call.func) in SAMPLERS:
            _sampler(work, call)
    _of_loaders(work)


def loaders(work: Work) -> dict[str, ast.Call]:
    """The DataLoaders of the script, by the text of what they are called."""
    found = {}
    for node in ast.walk(work.text.tree):
        target, value = assigned(node)
        if target is not None and isinstance(value, ast.Call) and is_loader(work, value):
            found[work.text.of(target)] = value
    return found


def is_loader(work: Work, call: ast.Call) -> bool:
    """Is this call DataLoader(…)?"""
    full = work.full(call.func) or work.text.of(call.func)
    return full.rpartition(".")[2] == LOADER


def _sampler(work: Work, call: ast.Call) -> None:
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


def _of_loaders(work: Work) -> None:
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


def _takes_sampler(work: Work, given: ast.keyword) -> bool:
    call = work.text.parents[given]
    return given.arg == "sampler" and isinstance(call, ast.Call) and is_loader(work, call)


def _set_epoch(work: Work, load: ast.expr) -> ast.stmt | None:
    """The statement `sampler.set_epoch(…)`."""
    attribute = work.text.parents[load]
    call = work.text.parents[attribute]
    if isinstance(attribute, ast.Attribute) and attribute.attr == "set_epoch" and isinstance(call, ast.Call):
        return work.stands_alone(call)
    return None


def _is_asked(work: Work, load: ast.Name) -> bool:
    """`sampler is None` and the like as the loader's `shuffle`, which is written anew."""
    compared = work.text.parents[load]
    above = work.text.parents[compared]
    return isinstance(compared, ast.Compare) and isinstance(above, ast.keyword) and above.arg == "shuffle"


def _is_counted(work: Work, load: ast.Name) -> bool:
    """`len(sampler)`."""
    call = work.text.parents[load]
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "len" and call.args == [load]


def _plain(work: Work, given: ast.keyword, sampler: ast.Call) -> None:
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


def _lengths(work: Work, loader: ast.Call) -> None:
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
