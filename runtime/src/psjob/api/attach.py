"""`attach`: the one line that makes a script a worker of a job, and the optimizer that it gives back."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from psjob.api.attachable import aliases, check, stepper, table_of
from psjob.api.lrscaling import LrScaling
from psjob.api.recording import PlainState, Recording
from psjob.api.rulechoice import as_it_runs, check_reduction, check_state, check_tables, chosen
from psjob.embeddings.inprocess import attach_alone
from psjob.embeddings.rowtables import RowTables
from psjob.process import config, supervise
from psjob.process.errors import Refused, exit_refused, leave_message
from psjob.resume import record
from psjob.rules import optimizers
from psjob.worker import exits, hooks, rewind
from psjob.worker.ending import EXIT_OF, SessionEnd
from psjob.worker.half import Half
from psjob.worker.overlap import Overlap
from psjob.worker.rounds import LocalRounds
from psjob.worker.rows import Carried
from psjob.worker.session import WorkerSession
from psjob.worker.staged import Staged
from psjob.worker.staging import Staging
from psjob.worker.states import block_states, without_gradient

JOIN_SECONDS = 5.0
M = TypeVar("M", bound=torch.nn.Module)
T = TypeVar("T", bound=torch.optim.Optimizer)


class AttachedJob:
    """The attached script: its model, optimizer and session. One a process."""

    def __init__(
        self,
        place: config.Place,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        stateful: dict[str, Any],
        overlap: bool = False,
    ) -> None:
        place = as_it_runs(place, optimizer)
        self.place, self.model, self.optimizer = place, model, optimizer
        self.plain: type[torch.optim.Optimizer] = type(optimizer)
        """The optimizer's class before attach: its own step and state."""
        self.parameters, table = table_of(model, optimizer)
        self.choice = chosen(optimizer, place.config)
        self.rule = self.choice.rule
        self.lr = LrScaling.of(place.config, optimizer)
        self.half = Half.of(self.rule, self.parameters, [spec.group for spec in table])
        self.tables = RowTables(model, optimizer, place.config.seed)
        check_reduction(place.config, self.tables.specs)
        check_tables(place.config, self.tables.specs)
        self.session = WorkerSession(place, table, self.rule, aliases(model, table), self.tables.specs, self.tables.first)
        check_state(self.rule, len(self.session.layout.blocks), place.config.workers)
        self.session.rows.hyperparameters = self.tables.hyperparameters()
        self.rounds = LocalRounds.of(self.session, self.parameters, self._hyperparameters, overlap)
        if overlap and self.half is not None:
            raise Refused(
                f"overlap=True sends gradients as they are; training.updateRule {self.rule} changes them first; attach without it"
            )
        self.overlap: Overlap | None = None
        self.session.on_layout = lambda: self._data_path(overlap)
        self._data_path(overlap)
        self.session.exchange.compression.check(0 if self.half is None else self.half.nbytes)
        self.replay = 0
        """Steps (in mode local: rounds) made again without effect, from its record or its beginning to the job's clock."""
        self.cursor: dict[str, int] | None = None
        self.restored: record.ResumeRecord | None = None
        self.records = Recording(self.session, model, optimizer, self._kept(stateful), ahead=not self.steps_alone and self.half is None)

    def _kept(self, stateful: dict[str, Any]) -> dict[str, Any]:
        """All objects whose state is in a record, by name."""
        own: dict[str, Any] = {"optimizer (worker side)": PlainState(self.plain, self.optimizer)} if self.steps_alone else {}
        half: dict[str, Any] = {} if self.half is None else {f"{self.rule} (worker side)": self.half}
        return stateful | own | half

    def _data_path(self, overlap: bool) -> None:
        session = self.session
        device = next((p.device for p in self.parameters if p.is_cuda), torch.device("cpu"))
        if overlap:
            apart = frozenset(row for row, p in enumerate(self.parameters) if id(p) in self.tables.anchors)
            tree = hooks.tree_of(self.model, self.parameters)
            session.exchange = self.overlap = Overlap(session, self.parameters, tree, Staging(session.layout, device), apart)
        elif device.type == "cuda":
            session.exchange = Staged(session, Staging(session.layout, device))

    # -- in and out ----------------------------------------------------------------------------

    def join(self) -> None:
        self.carry_out(lambda: self.session.join(self.parameters, lambda: self.records.make(None), self._hyperparameters()))
        if self.rounds is not None:
            self.rounds.begin()
        self.tables.bind(Carried(self.session.rows, self.carry_out))
        self.session.rows.first = {}
        if self.overlap is not None:
            hooks.install(self.model, self.overlap, self.carry_out, lambda: self.replay > 0)
        if self.session.record is not None:
            self.restored = record.unpack(self.session.record)
            wire = self.restored.wire
            self.session.exchange.compression.load(wire if self.session.machine.residual else {**wire, "left": {}})
        elif self.session.initial is not None:
            initial = record.unpack(self.session.initial)
            self.carry_out(lambda: record.restore_buffers(initial, self.model))
        self.replay = self._to_replay(self.restored)

    def _to_replay(self, restored: record.ResumeRecord | None) -> int:
        """Clocks since the record was taken, and without a place in the data those before it too."""
        return self.session.clock - (0 if restored is None or restored.cursor is None else restored.step)

    @property
    def made(self) -> int:
        """Steps that the script has come through, those without effect included."""
        return self.session.clock - self.replay if self.rounds is None else self.rounds.steps

    @property
    def steps_alone(self) -> bool:
        """The script's optimizer steps in this process, and its state is here."""
        return self.session.reduces or self.rounds is not None

    def put_back(self) -> None:
        """The script stands where its record was taken: restore what the record holds."""
        restored, self.restored = self.restored, None
        if restored is not None:
            self.carry_out(lambda: record.restore(restored, self.model, self.records.kept, self.optimizer))

    def edge(self, cursor: dict[str, int] | None) -> None:
        """The script asks for its next batch (or, without `shard`, has made a step). A record belongs to the start of a round."""
        self.cursor = cursor
        if self.replay or (self.rounds is not None and self.rounds.open):
            self.carry_out(self.session.stir if self.replay else self.session.inside_round)
            return
        self.carry_out(lambda: self.session.edge(lambda: self.records.make(cursor), self.half is not None))

    def wait(self) -> None:
        """The model holds the weights of the last step when this returns."""
        if self._end_round() and self.cursor is None:
            self.edge(None)
        self.carry_out(self.session.exchange.finish)

    def leave(self) -> None:
        self._end_round()
        self.carry_out(lambda: self.session.leave(lambda: self.records.make(self.cursor, last=True), self.parameters))

    # -- steps ---------------------------------------------------------------------------------

    def step(self, original: Callable[[], Any] | None) -> None:
        """One clock. `original` makes the optimizer's own step (worker-side update)."""
        if self._replayed():
            return
        if self.rounds is None:
            self._push_step(original)
        else:
            self._inner_step(self.rounds, original)
        if self.cursor is None:
            self.edge(None)

    def _push_step(self, original: Callable[[], Any] | None) -> None:
        grads = [None if id(p) in self.tables.anchors else p.grad for p in self.parameters]
        if {g.layout for g in grads if g is not None} - {torch.strided}:
            sparse = next(p for p, g in zip(self.parameters, grads, strict=True) if g is not None and g.layout is not torch.strided)
            self.refuse(f"a parameter of shape {tuple(sparse.shape)} has a sparse gradient; use dense gradients (sparse=False)")
        scale, skip = optimizers.amp(self.optimizer)
        if self.overlap is not None and getattr(self.optimizer, "found_inf", None) is not None:
            self.refuse("overlap=True sends gradients before a GradScaler has unscaled them; attach without it, or train in bfloat16")
        if self.tables.counts and (getattr(self.optimizer, "found_inf", None) is not None or self.place.config.non_finite == "skip"):
            self.refuse("a skipped step loses what a ps.Table was given; train in bfloat16, without GradScaler and nonFinite: skip")
        self._exchange(grads, skip, scale, original)

    def _inner_step(self, rounds: LocalRounds, original: Callable[[], Any] | None) -> None:
        """A step of the worker's own; one that a GradScaler skips counts too, so that all end their rounds at the same step."""
        scale, skip = optimizers.amp(self.optimizer)
        for p in self.parameters:
            if p.grad is not None and scale != 1.0:
                p.grad.mul_(scale)
        self._clear_marks()
        self.carry_out(lambda: rounds.step(original, skip))

    def _end_round(self) -> bool:
        """The script wants the job's weights: push the round that is open, if one is."""
        if self.rounds is None:
            return False
        if self.replay:
            if self.rounds.end_again():
                self._made_again()
            return False
        return bool(self.carry_out(self.rounds.end))

    def absent_step(self) -> None:
        """This rank has no batch in the round: it counts as absent and takes the new weights."""
        if self._replayed():
            return
        if self.rounds is not None:
            self._inner_step(self.rounds, None)
            return
        own = (lambda: self.plain.step(self.optimizer)) if self.session.reduces else None
        self._exchange(None, False, 1.0, own)

    def _replayed(self) -> bool:
        """Was this step made before, by the process that this one follows?"""
        if not self.replay:
            return False
        self.tables.forget()
        self.carry_out(self.session.stir)
        if self.rounds is None or self.rounds.step_again():
            self._made_again()
        return True

    def _made_again(self) -> None:
        self.replay -= 1
        if self.replay == 0:
            self.put_back()

    def _hyperparameters(self) -> list[dict[str, float | bool]]:
        """What the shards' rule works with as optimizer and clock are now, a parameter group each; none where the workers step."""
        return [] if self.session.reduces else self.lr.hyperparameters(self.choice.hyperparameters(self.optimizer), self.session.clock)

    def _exchange(self, grads: list[torch.Tensor | None] | None, skip: bool, scale: float, original: Callable[[], Any] | None) -> None:
        clock, hyperparameters = self.session.clock, self.carry_out(self._hyperparameters)
        rows = [None] * len(self.tables.specs) if grads is None else self.tables.gradients(scale)
        skip = self.carry_out(lambda: self.session.exchange.finite.skips(grads, rows, skip))
        if self.half is not None and grads is not None and not skip:
            grads, scale = self.half.outgoing(grads, hyperparameters, scale), 1.0
        self.carry_out(lambda: self.session.rows.offer(rows, self.lr.hyperparameters(self.tables.hyperparameters(), clock)))
        self.session.exchange.may_skip = getattr(self.optimizer, "found_inf", None) is not None
        if original is None:
            if self.cursor is None:  # the edge comes right after this step, and nothing of its record changes until then
                self.session.exchange.meanwhile = self.records.prepare
            self.carry_out(lambda: self.session.exchange.push(grads, hyperparameters, skip, scale, self.parameters))
            return
        means = [torch.empty_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.carry_out(lambda: self.session.exchange.push(grads, hyperparameters, skip, scale, means))
        nowhere = without_gradient(self.session)
        for index, (p, mean) in enumerate(zip(self.parameters, means, strict=True)):
            p.grad = mean if p.requires_grad and index not in nowhere else None
        self._clear_marks()
        if not self.session.exchange.skipped:
            with self.lr.on(self.optimizer, clock):
                original()

    def _clear_marks(self) -> None:
        """The gradients are unscaled already: the optimizer's own step shall not do it again."""
        for mark in ("grad_scale", "found_inf"):
            if hasattr(self.optimizer, mark):
                setattr(self.optimizer, mark, None)

    # -- endings -------------------------------------------------------------------------------

    def carry_out(self, call: Callable[[], Any]) -> Any:
        """Run a call of the session; where it raises an ending, end this process (or exec it again) as that asks."""
        try:
            return call()
        except SessionEnd as ending:
            how, message = ending.how, ending.message
        except Refused as refused:  # a record that has grown too large, or one of other objects than attach was given
            how, message = "refused", str(refused)
        self.session.close(JOIN_SECONDS)
        if how == "rewind":
            rewind.again(self.place.rewinds, message)
        if how == "refused":
            self.refuse(message)
        if message:
            print(f"psjob: {message}", file=sys.stderr, flush=True)
        if how in ("stopped", "lost", "fenced"):
            leave_message({"ending": message})
        raise SystemExit(EXIT_OF[how])

    def refuse(self, message: str) -> None:
        self.session.ended = True
        exit_refused(message)


current: AttachedJob | None = None
_attaching = threading.Lock()


@overload
def attach(model: M, optimizer: T, *, overlap: bool = False, **stateful: Any) -> tuple[M, T]: ...
@overload
def attach(model: M, *, overlap: bool = False, **stateful: Any) -> tuple[M, torch.optim.Optimizer]: ...
def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, overlap: bool = False, **stateful: Any
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make this script a worker of the job around it; outside a job both come back as they are.

    Afterwards `model` holds the job's weights and `optimizer.step()` pushes the gradients and takes the new weights.
    A model of `Table`s alone needs no optimizer: what comes back in its place has `step()`, at which pushes count.
    `stateful` names what else a restart must put back (schedulers, a GradScaler …): objects with `state_dict` and
    `load_state_dict`.

    `overlap` sends gradients while backward goes on, and lets `step` return while weights are still on their way: each module
    waits for its own at its next forward. Whoever reads weights in another way calls `psjob.wait()` first. A gradient must stay
    as backward left it until `step` (no clipping, no GradScaler).

    A script that asks for what cannot be done ends with a sentence and exit status 77.
    """
    global current
    try:
        place = config.place()
        optimizer = stepper(model) if optimizer is None else optimizer
        if place is None:
            attach_alone(model, optimizer)
            return model, optimizer
        with _attaching:
            if current is not None:
                raise Refused("attach was called twice; one model and one optimizer a process are trained by a job")
            if place.role != "worker":
                raise Refused(f"attach was called in a process of role {place.role}")
            supervise.guard()
            rewind.check_possible()
            check(model, optimizer, stateful)
            current = AttachedJob(place, model, optimizer, stateful, overlap)
    except Refused as refused:
        exit_refused(str(refused))
    assert current is not None and optimizer is not None
    _watch_exit(current)
    current.session.watch()
    current.join()
    _take_over(current, optimizer)
    return model, optimizer


def _take_over(job: AttachedJob, optimizer: torch.optim.Optimizer) -> None:
    """Give this very object (schedulers hold it already) a class whose `step` goes through the job."""
    original = job.plain

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        own = (lambda: original.step(self)) if job.steps_alone else None
        self._opt_called = True
        job.step(own)
        return loss

    def state_dict(self: Any) -> dict[str, Any]:
        if job.steps_alone:
            return dict(original.state_dict(self))
        raw = job.carry_out(lambda: block_states(job.session))
        return optimizers.assemble_state(original.state_dict(self), job.choice.like or job.rule, job.session.layout, raw)

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        job.refuse("load_state_dict after attach: the shards hold the optimizer state; begin from a checkpoint with checkpoint.resumeFrom")

    def add_param_group(self: Any, group: dict[str, Any]) -> None:
        job.refuse("add_param_group after attach: the parameter table is fixed; add the group before attach")

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # type: ignore[attr-defined]
    hooked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    names = {"step": hooked, "state_dict": state_dict, "load_state_dict": load_state_dict, "add_param_group": add_param_group,
             "_step_supports_amp_scaling": True}  # fmt: skip
    optimizer.__dict__.pop("step", None)
    optimizer.__dict__["_opt_called"] = True  # epochs that are already done make a scheduler's first step come before ours
    optimizer.__class__ = type(original.__name__, (original,), names)


def _watch_exit(job: AttachedJob) -> None:
    """A script that ends with 0 leaves the job; any other end is a crash. SIGTERM asks for a stop at the next edge."""

    def leave() -> None:
        try:
            job.leave()
        except SystemExit as end:
            if end.code not in (0, None):
                exits.finish(int(str(end.code)))

    def on_term(_number: int, _frame: Any) -> None:
        job.session.stop()

    exits.watch(lambda: job.session.joined and not job.session.ended, leave)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_term)
