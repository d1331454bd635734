"""`attach`: the one line that makes a script a worker of a job, and the optimizer that it gives back.

That is the script's own object, whose `step` goes through the job. Scripts that look for the state of an optimizer whose steps the shards
make get its place.

A model that is attached again with another optimizer is in the next phase of its training. If the workers step, the new optimizer
takes the place of the one before, and its state begins. The shards cannot change their rule, so where they step this is refused. Both
optimizers may be given at once, and each is stepped in its phase.
"""

from __future__ import annotations

import copyreg
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, overload

import torch

from psjob.api import advice, compatibility, stage_cuts
from psjob.api.attachable import (
    AT_ONCE,
    FirstUse,
    Later,
    Pair,
    check_alone,
    check_attachable,
    check_model_name,
    check_parameters,
    is_next_phase,
    later_groups,
    next_added,
    pairs_of,
    refuse_more,
    stepper,
)
from psjob.api.compatibility import Features
from psjob.api.rule_choice import check_kind
from psjob.api.stage_cuts import check_first_values
from psjob.api.training_job import TrainingJob
from psjob.embeddings.row_tables import attach_alone
from psjob.layout import devices
from psjob.process import config, errors, own_files, supervise
from psjob.process.errors import Refused, exit_refused, refuse
from psjob.process.startup import integration_of, integrations_in_use
from psjob.rules import optimizers
from psjob.worker import exits, rewind

M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T", bound=torch.optim.Optimizer)
current: TrainingJob | None = None
_pending: list[Pair] = []
"""Attached by name, while no model of them was used."""
_wanted: dict[str, Any] = {}
"""What else `attach` was given with them."""
_first_use = FirstUse(lambda: join_job())
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
            at its next forward. Code that reads weights in another way must call `psjob.wait()` first. A gradient that is
            changed between backward and `step` is sent again.
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
        join_job()
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
    place: config.ProcessContext, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], name: str | None, overlap: bool,
    later: Later, stateful: dict[str, Any],
) -> list[Pair]:  # fmt: skip
    if name is not None:
        check_model_name(name, _pending)
    if current is not None or (_pending and name is None):
        refuse_more(current.pairs if current is not None else _pending)
    if place.role != "worker":
        raise Refused(f"attach was called in a process of role {place.role}")
    if twice := sorted(stateful.keys() & _wanted.keys()):
        raise Refused(f"attach(…, {twice[0]}=…) was given twice; take another name for it")
    supervise.guard(_end_broken)
    rewind.check_possible()
    rewind.claim_place(place)
    cuts = stage_cuts.known_cuts(model, place.config)
    check_first_values(cuts.memory, model)
    compatibility.refuse_clashes(Features(named=name is not None, pairs=len(optimizers), overlap=overlap), place.config)
    added = later_groups(later, optimizers)
    check_attachable(model, optimizers, stateful, added, cuts.memory is not None)
    for optimizer in optimizers:
        check_kind(optimizer)
    return pairs_of(name, model, optimizers, added, cuts)


def _check_next(job: TrainingJob, optimizer: torch.optim.Optimizer, overlap: bool, later: Later, stateful: dict[str, Any]) -> None:
    """Raise Refused for what cannot be the next phase of an attached model."""
    check_attachable(job.model, [optimizer], stateful)
    check_kind(optimizer)
    check_phase(job, optimizer, overlap, later)


def join_job() -> None:
    """Join the job with what was attached; nothing where nothing waits for that."""
    global current
    if current is not None or not _pending or (place := config.place()) is None:
        return
    _first_use.stop()
    stateful = dict(_wanted)
    overlap = bool(stateful.pop(OVERLAP))
    try:
        with _attaching:
            current = TrainingJob(place, tuple(_pending), stateful, overlap)
    except Refused as refused:
        _pending.clear()
        exit_refused(str(refused))
    assert current is not None
    _watch_exit(current)
    own_files.follow_writes(lambda: current is not None and current.behind)
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


def _watch_exit(job: TrainingJob) -> None:
    """A script that ends with 0 leaves the job; any other end is a crash. SIGTERM asks for a stop at the next step boundary."""

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
        exits.watch_thread(_look_for_device)
    terminations = exits.Terminations(on_term)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_term)
    errors.shorten_errors()
    crashes = sys.excepthook

    def on_error(kind: Any, value: Any, trace: Any) -> None:
        crashes(kind, value, trace)
        if _look_for_device(value):
            return
        if job.comes_back and (issubclass(kind, MISSING) or kind is RuntimeError):
            try:
                job.refuse(LINES_AGAIN.format(kind=kind.__name__, value=str(value)[:200]))
            except SystemExit as end:
                exits.finish(int(str(end.code)))

    sys.excepthook = on_error
    exits.watch_exit(lambda: job.session.joined and not job.session.state.ended, leave)


def _where() -> str:
    """The GPUs of the attached model, in words; empty: it has none."""
    if current is None:
        return ""
    try:
        return devices.gpus_of(current.parameters)
    except RuntimeError:  # torch has not asked for their names before, and the driver tells nothing any more
        return " or ".join(dict.fromkeys(str(p.device) for p in current.parameters if p.is_cuda))


def _look_for_device(error: BaseException) -> bool:
    """The script ends with this error: does it say that its GPU is lost? Then the process ends as one that has lost it."""
    lost = devices.lost_device(error)
    if lost is not None:
        exits.lose_device(lost.fact(_where()), lost.step)
    return lost is not None


def _end_broken(sentence: str) -> None:
    """A thread of psjob's has failed: end this process, as one that has lost its GPU where the error says so."""
    lost = devices.lost_device(sentence)
    if lost is not None:
        exits.end_device_lost(lost.fact(_where()), lost.step)
    supervise.end_broken(sentence)


Reconstruction = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def take_over(job: TrainingJob, pair: Pair) -> None:
    """Give the optimizer, this very object (schedulers hold it already), a class whose `step` goes through the job."""
    original, optimizer = pair.plain, pair.optimizer
    own_step = getattr(original.step, "__wrapped__", original.step) if getattr(original.step, "hooked", False) else original.step
    """Without the hooks of a step: they are called around ours, and would be called again within it."""

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = (lambda: _plain_step(closure, loss)) if job.steps_alone else None
        self._opt_called = True
        job.step(pair, own)
        return loss

    def _plain_step(closure: Callable[[], Any] | None, loss: Any) -> None:
        if closure is None:
            own_step(optimizer)
        else:
            own_step(optimizer, job.weight_guard.once(original.__name__, loss))
            job.weight_guard.forget()

    def state_dict(self: Any) -> dict[str, Any]:
        if job.steps_alone:
            pair.told = dict(original.state_dict(self))
            return dict(pair.told)
        if job.place.config.stages:
            job.refuse("optimizer.state_dict() in a job of stages: this worker has only the state of its stage. Checkpoints hold all of it")
        if job.place.local:
            job.refuse(
                f"optimizer.state_dict() in process {job.place.local} of worker {job.place.index}: only process 0 asks the shards for it. "
                "Call it where ps.is_first() is true"
            )
        job.catch_up()  # weights and state of one step
        raw = job.carry_out(job.session.block_states)
        begun = {**original.state_dict(job.optimizer), "state": _begun(job)}
        whole = optimizers.assemble_state(begun, job.choice.like or job.rule, job.session.layout, raw)
        own = {number: whole["state"][row] for number, row in enumerate(pair.own) if row in whole["state"]}
        pair.told = {**original.state_dict(self), "state": own}
        return dict(pair.told)

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        if pair.told is None or not _same(state.get("state"), pair.told["state"]):
            job.refuse(
                "load_state_dict after attach: the shards hold the optimizer state; begin from a checkpoint with checkpoint.resumeFrom"
            )
        for group, numbers in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in numbers.items() if key != "params"})

    def add_param_group(self: Any, group: dict[str, Any]) -> None:
        original.add_param_group(self, job.carry_out(lambda: next_added(pair.later[pair.added :], group)))
        pair.added += 1
        pair.hold()
        job.optimizer.param_groups[:] = [each for other in job.pairs for each in other.groups]

    def reduce_ex(self: Any, _protocol: Any) -> Reconstruction:
        return reconstruction(original, self, None if job.steps_alone else self.state_dict()["state"])

    def state_of(self: Any) -> Any:
        return self.__dict__["state"]

    def set_state(self: Any, state: Any) -> None:
        if isinstance(self.__dict__.get("state"), OnShards):
            self.__dict__["state"].clear()
        self.__dict__["state"] = state

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]
    hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    names = {"step": hooked, "state_dict": state_dict, "load_state_dict": load_state_dict, "add_param_group": add_param_group,
             "_step_supports_amp_scaling": True, "__reduce_ex__": reduce_ex}  # fmt: skip
    pair.hold()
    pair.begun = dict(optimizer.state)
    if not job.steps_alone:
        names["state"] = property(state_of, set_state)
        optimizer.__dict__["state"] = OnShards(job.refuse)
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_opt_called"] = True  # epochs that are already done make a scheduler's first step come before ours
    optimizer.__class__ = type(original.__name__, (original,), names)


def check_phase(job: TrainingJob, optimizer: torch.optim.Optimizer, overlap: bool, later: Later) -> None:
    """Raise Refused if this job cannot continue with another optimizer."""
    old, new = job.pairs[0].plain.__name__, type(optimizer).__name__
    if job.session.reduces:
        check_parameters(job.parameters, job.model, optimizer)
        if overlap or later:
            what = "overlap" if overlap else "later"
            raise Refused(f"attach was called again, with {what}=…, which only the first call takes; leave it out")
        return
    if job.session.mode.name == "sync" and not job.place.config.stages:
        raise Refused(
            f"attach was called again with {new}, and the shards step by the rule and with the state of {old}. {AT_ONCE}. Or set "
            "training.updateAt: worker"
        )
    raise Refused(
        f"attach was called again with {new}, and training.mode {job.place.config.mode} continues with {old}. Change the numbers of its "
        "param_groups, or train the second phase in a job of its own, whose script loads final.safetensors of the first before attach"
    )


def begin_phase(job: TrainingJob, optimizer: torch.optim.Optimizer, stateful: dict[str, Any]) -> Pair:
    """Continue with `optimizer`. What it was given with takes the place of what has the same name."""
    old = job.pairs[0]
    pair = Pair("", old.model, optimizer, cuts=old.cuts)
    rows = {id(p): row for row, p in enumerate(job.parameters)}
    pair.rows = [rows[id(p)] for p in pair.parameters]
    job.go_on_with(pair, stateful)
    take_over(job, pair)
    return pair


class OnShards(dict[Any, Any]):
    """Stands for `optimizer.state`. It is empty to a loop; a look at a parameter's state, and a change, are refused.

    `refuse` ends the process with a sentence.
    """

    def __init__(self, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[()]]:
        return dict, ()

    def __deepcopy__(self, _memo: object) -> dict[Any, Any]:
        return {}

    def _read(self, *_given: object) -> NoReturn:
        self._refuse(
            "optimizer.state of a parameter: the shards hold it. optimizer.state_dict()['state'] has a copy, by the parameter's number. "
            "Or set training.updateAt: worker"
        )

    def _write(self, *_given: object, **_named: object) -> NoReturn:
        self._refuse(
            "a change of optimizer.state: the shards hold it, and would not see that. Set training.updateAt: worker, so that the script's "
            "own optimizer makes the steps"
        )

    __getitem__ = __contains__ = get = _read
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = _write


def reconstruction(kind: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, state: Mapping[int, Any] | None) -> Reconstruction:
    """How pickles and copies make torch's own optimizer of an attached one.

    Args:
        kind: its class before attach.
        optimizer: the attached one.
        state: as `state_dict()["state"]`, by the number of the parameter; None: the optimizer has its own.
    """
    held = dict(kind.__getstate__(optimizer))
    if state is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held["state"] = {parameters[number]: one for number, one in state.items()}
    return copyreg._reconstructor, (kind, object, None), held  # type: ignore[attr-defined]


def _begun(job: TrainingJob) -> dict[int, Any]:
    """The state with which optimizers were made (Adagrad has some), by row."""
    rows = {p: row for row, p in enumerate(job.parameters)}
    return {rows[p]: state for pair in job.pairs for p, state in pair.begun.items() if p in rows}


def _same(state: Any, other: Any) -> bool:
    """Is this the optimizer state that was told? Libraries load it again to move it to a device."""
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return state is other or (state.shape == other.shape and torch.equal(state.to(other), other))
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(_same(state[key], other[key]) for key in state)
    if isinstance(state, list | tuple) and isinstance(other, list | tuple):
        return len(state) == len(other) and all(map(_same, state, other))
    return bool(state == other)
