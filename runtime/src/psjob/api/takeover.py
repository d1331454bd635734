"""The optimizer that `attach` gives back: the script's own object, whose `step` goes through the job.

The state of an optimizer whose steps the shards make: scripts that look for it here are told where it is.

A model that is attached again with another optimizer is in the next phase of its training. Where the workers step, the new optimizer
takes the place of the one before, and its state begins. The shards cannot change their rule, so where they step this is refused. Both
optimizers may be given at once, and each is stepped in its phase.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from psjob.api.attached import AttachedJob
from psjob.api.pairs import AT_ONCE, Later, Pair, check_parameters, next_added
from psjob.process.errors import Refused
from psjob.rules import optimizers

Reconstruction = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def take_over(job: AttachedJob, pair: Pair) -> None:
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
            own_step(optimizer, job.by_hand.once(original.__name__, loss))
            job.by_hand.forget()

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


def check_phase(job: AttachedJob, optimizer: torch.optim.Optimizer, overlap: bool, later: Later) -> None:
    """Raise Refused where this job cannot go on with another optimizer."""
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


def begin_phase(job: AttachedJob, optimizer: torch.optim.Optimizer, stateful: dict[str, Any]) -> Pair:
    """Go on with `optimizer`. What it was given with takes the place of what has the same name."""
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


def _begun(job: AttachedJob) -> dict[int, Any]:
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
