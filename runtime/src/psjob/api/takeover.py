"""The optimizer that `attach` gives back: the script's own object, whose `step` goes through the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from psjob.api.later import next_added
from psjob.api.optimizerstate import OnShards, Reconstruction, reconstruction
from psjob.rules import optimizers
from psjob.worker.states import block_states

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob
    from psjob.api.pairs import Pair


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
            job.refuse(
                "optimizer.state_dict() in a job of stages: this worker has the state of its stage alone. Checkpoints hold all of it"
            )
        if job.place.local:
            job.refuse(
                f"optimizer.state_dict() in process {job.place.local} of worker {job.place.index}: process 0 alone asks the shards for it. "
                "Call it where ps.is_first() is true"
            )
        raw = job.carry_out(lambda: block_states(job.session))
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
