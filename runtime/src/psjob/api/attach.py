"""`attach`: the one line that makes a script a worker of a job, and the optimizer that it gives back."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch

from psjob.api import advice, stagecuts
from psjob.api.attachable import check, check_alone, stepper
from psjob.api.attached import AttachedJob
from psjob.api.pairs import FirstUse, Later, Pair, check_name, is_next_phase, later_groups, pairs_of, refuse_more
from psjob.api.rulechoice import check_kind
from psjob.api.stagecuts import check_first_values
from psjob.api.takeover import begin_phase, check_phase, take_over
from psjob.embeddings.rowtables import attach_alone
from psjob.process import config, ownfiles, supervise, tracebacks
from psjob.process.errors import Refused, exit_refused, refuse
from psjob.process.startup import integration_of, integrations_in_use
from psjob.worker import exits, rewind

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T", bound=torch.optim.Optimizer)
current: AttachedJob | None = None
_pending: list[Pair] = []
"""Attached by name, while no model of them was used."""
_wanted: dict[str, Any] = {}
"""What else `attach` was given with them."""
_first_use = FirstUse(lambda: settle())
_attaching = threading.Lock()


@overload
def attach(
    model: M, optimizer: T, *, name: str | None = None, overlap: bool = False, later: Later = (), **stateful: Any
) -> tuple[M, T]: ...
@overload
def attach(
    model: M, optimizer: Sequence[T], *, name: str | None = None, overlap: bool = False, **stateful: Any
) -> tuple[M, Sequence[T]]: ...
@overload
def attach(model: M, *, overlap: bool = False, **stateful: Any) -> tuple[M, torch.optim.Optimizer]: ...
def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    name: str | None = None,
    overlap: bool = False,
    later: Later = (),
    **stateful: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]:
    """Make this script a worker of the job that runs it; outside a job both are returned unchanged, and the same is refused.

    Afterwards `model` holds the job's weights and `optimizer.step()` pushes the gradients and takes the new weights.

    Args:
        model: what is trained. All parameters that need a gradient are the optimizer's.
        optimizer: new, without steps of its own, or several in a tuple, each of which makes steps of its own. A model of `Table`s only
            needs none. The object that is returned in its place has `step()`, at which pushes count.
        name: one word for this model, if a script attaches several, such as the two of a GAN. Attach all of them before the first is
            run, copied or asked for its state: the job begins then. Optimizers of several classes, or of the same parameters, step on the
            workers, in mode sync.
        overlap: send gradients during backward, and let `step` return before all weights have come. Each module waits for its own weights
            at its next forward. Code that reads weights in another way must call `psjob.wait()` first. A gradient must stay as backward
            left it until `step` (no clipping by hand, no GradScaler).
        later: what `optimizer.add_param_group` adds after attach, such as a backbone that is trained from the third epoch on. Give for each
            group a module or its parameters, in their order. Until then these are parameters of the job without a gradient.
        stateful: what else a restart must put back, by name (schedulers, a GradScaler …): objects with `state_dict` and `load_state_dict`.

    Returns:
        The model and the optimizer that were given.

    Raises:
        Refused: where the script asks for what cannot be done. In a job this process ends with status 77 and the sentence.

    Example:
        >>> import torch, psjob as ps
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    """
    __tracebackhide__ = True
    try:
        place = config.place()
        given = stepper(model) if optimizer is None else optimizer
        inner = [_inner(each) for each in (given if isinstance(given, list | tuple) else [given])]
        if place is None:
            check_alone(model, inner, name, overlap, later, stateful)
            for each in inner:
                attach_alone(model, each)
            return model, given
        for library in integrations_in_use():
            library.mark(place)
        if current is not None and is_next_phase(current.pairs, model, inner, name):
            _check_next(current, inner[0], overlap, later, stateful)
            begin_phase(current, inner[0], stateful)
            for library in integrations_in_use():
                library.attached(inner[0])
            return model, given
        with _attaching:
            pairs = _checked(place, model, inner, name, overlap, later, stateful)
            _pending.extend(pairs)
            _wanted.update(stateful)
            _wanted[OVERLAP] = overlap or _wanted.get(OVERLAP, False)
    except Refused as refused:
        refuse(str(refused))
    if name is None and not any(library.moves(model) for library in integrations_in_use()):
        settle()
    else:
        for pair in pairs:
            _first_use.watch(pair)
    return model, given


def _inner(optimizer: Any) -> Any:
    """The torch optimizer that makes the steps of a library's."""
    knows = integration_of(optimizer)
    return optimizer if knows is None else knows.given(optimizer)


OVERLAP = "overlap=True"
"""No name of an argument."""


def _checked(
    place: config.Place, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str | None, overlap: bool,
    later: Later, stateful: dict[str, Any],
) -> list[Pair]:  # fmt: skip
    if name is not None:
        check_name(name, _pending)
    if current is not None or (_pending and name is None):
        refuse_more(current.pairs if current is not None else _pending)
    if place.role != "worker":
        raise Refused(f"attach was called in a process of role {place.role}")
    if twice := sorted(stateful.keys() & _wanted.keys()):
        raise Refused(f"attach(…, {twice[0]}=…) was given twice; take another name for it")
    supervise.guard()
    rewind.check_possible()
    rewind.claim(place)
    cuts = stagecuts.known(model, place.config)
    check_first_values(cuts.memory, model)
    if place.config.stages and (name is not None or overlap or len(optimizers) > 1):
        odd = "name" if name is not None else "overlap" if overlap else "the other optimizers"
        raise Refused(f"a job of stages trains one model with one optimizer, without overlap; leave {odd} out")
    added = later_groups(later, optimizers)
    check(model, optimizers, stateful, added, cuts.memory is not None)
    for optimizer in optimizers:
        check_kind(optimizer)
    return pairs_of(name, model, optimizers, added, cuts)


def _check_next(job: AttachedJob, optimizer: torch.optim.Optimizer, overlap: bool, later: Later, stateful: dict[str, Any]) -> None:
    """Raise Refused for what cannot be the next phase of an attached model."""
    check(job.model, [optimizer], stateful)
    check_kind(optimizer)
    check_phase(job, optimizer, overlap, later)


def settle() -> None:
    """Join the job with what was attached; nothing where nothing waits for that."""
    global current
    if current is not None or not _pending or (place := config.place()) is None:
        return
    _first_use.stop()
    stateful = dict(_wanted)
    overlap = bool(stateful.pop(OVERLAP))
    try:
        with _attaching:
            current = AttachedJob(place, tuple(_pending), stateful, overlap)
    except Refused as refused:
        _pending.clear()
        exit_refused(str(refused))
    assert current is not None
    _watch_exit(current)
    ownfiles.follow(lambda: current is not None and current.behind)
    current.session.watch()
    current.join()
    for pair in current.pairs:
        take_over(current, pair)
        for library in integrations_in_use():
            library.attached(pair.optimizer)
    current.clipping.install()
    current.unattached.watch()
    advice.tell_of_sync_norm(current.model, current.place.config.workers)


MISSING = (LookupError, NameError, AttributeError, TypeError, ValueError, ArithmeticError)
"""What a script raises that reads what is not there."""
LINES_AGAIN = (
    "{kind}: {value}. It was raised by lines that run again after a restart, before the script stood where it was. A pass that was "
    "finished gives nothing there: no gradients, no lists of tensors, no outputs of the model. Write `for epoch in ps.epochs(n)`, which "
    "gives the epochs that are left, and keep in ps.state what is read before it"
)


def _watch_exit(job: AttachedJob) -> None:
    """A script that ends with 0 leaves the job; any other end is a crash. SIGTERM asks for a stop at the next edge."""

    def leave() -> None:
        try:
            if terminations.met and not job.through:
                job.interrupt()
            job.leave()
        except SystemExit as end:
            if end.code not in (0, None):
                exits.finish(int(str(end.code)))

    def on_term(_number: int, _frame: Any) -> None:
        job.session.stop()

    if threading.current_thread() is not threading.main_thread():
        exits.watch_thread()
    terminations = exits.Terminations(on_term)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_term)
    tracebacks.shorten_errors()
    crashes = sys.excepthook

    def on_error(kind: Any, value: Any, trace: Any) -> None:
        crashes(kind, value, trace)
        if job.comes_back and (issubclass(kind, MISSING) or kind is RuntimeError):
            try:
                job.refuse(LINES_AGAIN.format(kind=kind.__name__, value=str(value)[:200]))
            except SystemExit as end:
                exits.finish(int(str(end.code)))

    sys.excepthook = on_error
    exits.watch(lambda: job.session.joined and not job.session.ended, leave)
