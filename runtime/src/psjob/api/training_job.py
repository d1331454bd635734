"""An attached script: what it steps, what a restart puts back, and how its process ends."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from psjob import contract
from psjob.api import advice, clipping, compatibility, script_changes, stage_cuts, trackers, values, variables
from psjob.api.attachable import (
    AddedGroups,
    Models,
    Pair,
    PhaseState,
    TrainedFlags,
    aliases,
    features_of,
    joined_pairs,
    table_of,
    tell_frozen,
)
from psjob.api.consistency import FirstInputs, Stepping, Unattached, WeightDigests
from psjob.api.data_cursor import DataCursor, EpochLoops, Totals
from psjob.api.recording import BEHIND, EXTRA, ExtraState, PlainState, ResumeRecorder
from psjob.api.rule_choice import LrScaling, as_it_runs, check_state_size, chosen_rule
from psjob.api.script_changes import LeftGradients, OwnGradients, WatchedGradients, WeightGuard, dense
from psjob.api.stage_cuts import buffers_told
from psjob.embeddings.row_tables import RowTables
from psjob.layout import devices
from psjob.process import config, own_files
from psjob.process.errors import Refused, exit_refused, leave_message
from psjob.protocol.worker.local_group import split_records
from psjob.resume import record
from psjob.rules import optimizers
from psjob.worker import exits
from psjob.worker.exchange import GradientClip
from psjob.worker.exits import EXIT_OF, SessionEnd
from psjob.worker.local_group import session_at
from psjob.worker.local_updates import LocalRounds, WorkerSideRule
from psjob.worker.overlap import before_reads, install, tree_of
from psjob.worker.rows import Carried
from psjob.worker.step_parts import UPDATE, own_time

JOIN_SECONDS = 5.0
TRAINED = "parameters trained"
OWN = (values.NAME, TRAINED, variables.NAME, EXTRA, script_changes.NAME)


def _kept_for(things: Collection[str], kept: record.ResumeRecord) -> record.ResumeRecord:
    """The record with an empty state of those of psjob's own that records of earlier versions do not have."""
    return dataclasses.replace(kept, stateful={**{name: {} for name in OWN if name in things}, **kept.stateful})


def _knows_data(kept: record.ResumeRecord) -> bool:
    """Does the record say where the script stood in its data, and not in its epochs only?"""
    return "begun" in (kept.cursor or {})


THROUGH = "through"
"""In the place of a record that was taken at the script's end."""


class TrainingJob:
    """The attached script: its models, optimizers and session. One per process."""

    def __init__(self, place: config.ProcessContext, pairs: Sequence[Pair], stateful: dict[str, Any], overlap: bool = False) -> None:
        model, optimizer = joined_pairs(pairs)
        self.pairs = pairs
        self._stepping = pairs[0]
        self._aside: list[torch.Tensor] = []
        self._pushed: clipping.Pushed | None = None
        """Of the step under way, if its gradients went with that of another optimizer."""
        place = as_it_runs(place, optimizer)
        self.place, self.model, self.optimizer = place, model, optimizer
        self.parameters, table = table_of(model, optimizer, pairs[0].cuts.stages)
        stage_cuts.check_stage_table(place.config, table)
        if not place.config.stages:
            tell_frozen(model, table)
        self.piped = -1
        """The clock at which `pipe.step` was called last."""
        self.choice = chosen_rule(optimizer, place.config)
        self.rule = self.choice.rule
        self.lr = LrScaling.of(place.config, optimizer)
        self.half = WorkerSideRule.of(self.rule, self.parameters, [spec.group for spec in table])
        self.tables = RowTables(model, optimizer, place.config.seed)
        compatibility.refuse_clashes(features_of(pairs, overlap, self.tables.specs, self.half is not None), place.config)
        self.session = session_at(place, table, self.rule, aliases(model, table), self.tables.specs, self.tables.first)
        self.memory = pairs[0].cuts.memory
        if self.memory is not None:
            self.session.first = self.memory.attached(table).fill
        if self.session.stage_links is not None:
            self.session.stage_links.ahead = pairs[0].cuts.ahead
        check_state_size(self.rule, len(self.session.layout.blocks), place.config.workers)
        self.session.rows.hyperparameters = self.tables.hyperparameters()
        self.rounds = LocalRounds.of(self.session, self.parameters, self._hyperparameters)
        self.session.on_layout = lambda: self._data_path(overlap)
        self._data_path(overlap)
        self.session.exchange.compression.check(0 if self.half is None else self.half.nbytes)
        self.replay = 0
        """Steps (in mode local: rounds) made again without effect, from its record or its beginning to the job's clock."""
        resumed = place.begins_again and place.number == 1 and place.rewinds == 0
        self.places, self.loops, self.totals = DataCursor(edited=resumed), EpochLoops(), Totals()
        self.zipped: object = None
        """A `zip` over the last pass that was over before a restart, and over others beside it, which it may ask for their end."""
        self.owes = 0
        """Steps of batches given again that were left out where batches are read ahead; they are made between passes."""
        self.steps = Stepping()
        self.watched = WatchedGradients(self.parameters, lambda grad: self.left.is_graphed(grad))
        small = {id(p) for p in self.watched.small}
        self.left = LeftGradients(self.parameters, [row for row, p in enumerate(self.parameters) if id(p) in small and p.is_leaf])
        """Those of the last step, which a script should clear."""
        several = place.config.workers > 1 and not place.config.stages
        self.inputs = FirstInputs(pairs[0].model, lambda sums: self.session.inputs(sums)) if several else None
        """None where there is nobody to have the same data, or the script uses `ps.shard`."""
        told = several and self.clips and place.rank == 0
        self.gradients = OwnGradients(self.parameters, [spec.name for spec in table]) if told else None
        self.clipping = clipping.Clipping(
            place.config.max_grad_norm, pairs, self.parameters, self.left, self.clips, bool(self.tables.specs), self.refuse
        )
        self.weight_guard = WeightGuard(self.session, self.parameters, self.steps_alone, overlap, self.carry_out, self.refuse)
        self.unattached = Unattached(model, self.parameters, pairs, place.config.workers > 1, self.steps)
        self.digests = WeightDigests(
            self.session, model, self.parameters, self.tables.anchors, self.rounds is not None, self.unattached, self.steps
        )
        self.session.at_step_boundary = self.digests.step_boundary
        self.restored: record.ResumeRecord | None = None
        """To be put back where the script stands as this record says."""
        self._passes_again = 0
        self.beginning: record.ResumeRecord | None = None
        """Of its epoch, to be put back where that begins."""
        self._passed: dict[int, int] = {}
        """By identity of a dataset, the clock at its first pass."""
        self._fresh = True
        """This process continues from no other."""
        self._files: own_files.Read | None = None
        """What the process before had read as it began to train, until this one stands at its place."""
        self.buffers = pairs[0].cuts.buffers
        """Those that this worker's records hold; None: all of the model."""
        ahead = not self.steps_alone and self.half is None
        own = self._own()
        known = [*stateful.values(), *(part for pair in pairs for part in (pair.model, pair.optimizer))]
        self.variables = variables.Variables(known, resumed)
        psjobs = {
            values.NAME: values.the_state(),
            TRAINED: TrainedFlags(model),
            variables.NAME: self.variables,
            script_changes.NAME: self.left,
        }
        kept = {**stateful, **psjobs, **ExtraState.of(model), **self._added(), **own}
        self.records = ResumeRecorder(self.session, model, optimizer, kept, ahead, self.buffers, self.memory is not None, own)

    def _added(self) -> dict[str, Any]:
        return {"parameter groups added": AddedGroups(self.pairs)} if any(pair.later for pair in self.pairs) else {}

    def _own(self) -> dict[str, Any]:
        """Objects of psjob's whose state steps change, by name."""
        own: dict[str, Any] = {}
        made = PhaseState if len(self.pairs) == 1 and not self.pairs[0].name else PlainState
        for number, pair in enumerate(self.pairs if self.steps_alone else ()):
            word = f"optimizer{f' of {pair.name}' if pair.name else ''} (worker side)"
            own[f"{word}, {number}" if word in own else word] = made(pair.plain, pair.optimizer)
        half: dict[str, Any] = {} if self.half is None else {f"{self.rule} (worker side)": self.half}
        return own | half

    def go_on_with(self, pair: Pair, stateful: Mapping[str, Any]) -> None:
        """The optimizer of `pair` takes the place of the one before."""
        self.carry_out(self.clipping.check_over)
        self.pairs, self._stepping, self.optimizer = (pair,), pair, pair.optimizer
        self.clipping.pairs = self.pairs
        self.records.go_on_with(pair.optimizer, stateful)
        self.variables.keep(pair.optimizer, *stateful.values())
        self.unattached.know(pair)

    def _data_path(self, overlap: bool) -> None:
        apart = frozenset(row for row, p in enumerate(self.parameters) if id(p) in self.tables.anchors)
        tree = tree_of(self.model, self.parameters) if overlap else None
        self.session.choose_data_path(self.parameters, tree, apart, self.pairs[0].cuts.late is not None, self._recorded_behind)

    def _recorded_behind(self) -> bool:
        """Was a push under way when the record was taken from which this process continues?"""
        taken = self.session.record
        return taken is not None and bool(record.unpack(taken).wire.get(BEHIND))

    # -- in and out ----------------------------------------------------------------------------

    def join(self) -> None:
        self.carry_out(lambda: self.session.join(self.parameters, self.records.initial, self._hyperparameters()))
        if self.rounds is not None:
            self.rounds.begin()
        self.tables.bind(Carried(self.session.rows, self.carry_out))
        self.session.rows.first = {}
        if self.session.overlap is not None:
            install(self.model, self.session.overlap, self.carry_out, lambda: self.replay > 0)
        if self.session.exchange.delay:
            before_reads(self.model, self.catch_up)
        self.replay = self.session.clock
        if self.session.record is not None:
            restored = record.unpack(self.session.record)
            if THROUGH in (restored.cursor or {}):  # of this run, or of one that was stopped as its scripts ended
                self._leave_again(bytes(self.session.record))
            self.restored, self._fresh = restored, False
            self._files = restored.stateful.get(variables.NAME, {}).get("files")
            wire = restored.wire
            self.session.exchange.compression.load(wire if self.session.machine.residual else {**wire, "left": {}})
            self.carry_out(lambda: self._find_place(restored))
        elif self.session.initial is not None:
            initial = record.unpack(self.session.initial)
            told = buffers_told(self.buffers, self.memory, initial.buffers)
            self.carry_out(lambda: record.restore_buffers(initial, self.model, told))
        self.weight_guard.joined()
        self.digests.begin()

    def _find_place(self, restored: record.ResumeRecord) -> None:
        """Where the script will stand as its record says: at a place in its data, or after so many steps since its epoch's beginning."""
        cursor = restored.cursor or {}
        if "loops" in cursor:
            self.loops.load(cursor["loops"])
            self.beginning = record.beginning_of(restored)
            if not _knows_data(restored):
                self.places.load(self.loops.kept_at)
        if _knows_data(restored):
            self.places.load(cursor)
            self.replay -= restored.step
        elif self.beginning is not None:
            self.replay -= self.beginning.step
        if _knows_data(restored) or self.beginning is not None:
            self._put_back_early(self.beginning or restored)

    def _put_back_early(self, kept: record.ResumeRecord) -> None:
        """What the script may look at before it stands at its place, as buffers in an evaluation."""
        record.restore_buffers(kept, self.model, self.buffers, self.records.built.forms)
        early = {name: thing for name, thing in self.records.between.items() if not getattr(thing, "counts_again", False)}
        whole = _kept_for(early, kept)
        stateful = {name: value for name, value in whole.stateful.items() if name in early}
        record.restore_objects(dataclasses.replace(whole, stateful=stateful), early)

    @property
    def made(self) -> int:
        """Steps that the script has come through, those without effect included."""
        return self.session.clock - self.replay if self.rounds is None else self.rounds.steps

    @property
    def clips(self) -> bool:
        """Is a step the mean over all workers, so that what is clipped is that?"""
        return self.session.mode.name == "sync" and not self.session.mode.decided

    @property
    def steps_alone(self) -> bool:
        """The script's optimizer steps in this process, and its state is here."""
        return self.session.reduces or self.rounds is not None

    def advise(self, dataset: object) -> None:
        """A pass over it begins: say once what a restart does to a loop without `ps.epochs`."""
        known = self._passed.setdefault(id(dataset), self.session.clock)
        if known < self.session.clock and not self.loops.begun and not self.places.gone_on and self._fresh:
            advice.tell_once("again", advice.AGAIN)

    def began(self) -> None:
        """The script has begun to train. A plain loop that continued from files which its first start had not read begins again without."""
        if self._files is not None and own_files.other(self._files) and not self.variables.by_epochs:
            self.refuse("")

    def passed_again(self, frame: FrameType, site: str, number: int) -> None:
        """A pass that was finished before a restart begins again in this frame, at that place of the script, and is given nothing."""
        self._passes_again += 1
        if self.restored is not None:
            self.variables.lend(frame, self.restored.stateful.get(variables.NAME, {}), site, number)

    def begin_epoch(self, loop: int, epoch: int, frame: FrameType) -> None:
        """The script is given an epoch of a loop of `ps.epochs` in this frame, or AFTER: the loop is over."""
        kept, stands = self.beginning, self.loops.was_at(loop)
        again = None
        self.variables.by_epochs = True
        self.variables.at_step(frame)
        if kept is not None and stands is not None and stands[0] == epoch and self.restored is not None:
            again, self.beginning = self.restored.beginning, None
            self.carry_out(lambda: self._restore(kept, self.records.between))
        self.make_owed()
        self.catch_up()
        follows, at = self.loops.under_way == loop, None
        if not self.watched.waiting:
            at = self.carry_out(lambda: self.places.begin_epoch(epoch, follows))
        self.loops.give(loop, epoch, self.places.begun, at if again is None else self.loops.kept_at)
        if at is not None:
            self.carry_out(lambda: self.records.begin_epoch(again))
        self.variables.at(None)

    def put_back(self) -> None:
        """The script stands where its record was taken: restore what the record holds."""
        restored, self.restored = self.restored, None
        if restored is not None:
            self.carry_out(lambda: self._restore(restored, self.records.kept))
            self._files = None
            own_files.stand()
            self.session.came_back(self._passes_again)

    def _restore(self, kept: record.ResumeRecord, things: Mapping[str, Any]) -> None:
        whole = _kept_for(things, kept)
        record.restore(whole, self.model, things, self.optimizer, self.buffers, self.records.built.forms)

    @property
    def behind(self) -> bool:
        """Does the script run lines again, which were run before it was started again?"""
        return self.replay > 0 or self.restored is not None

    @property
    def comes_back(self) -> bool:
        """Does the script run lines again that were through, towards its epoch or its place in the data? Steps there count for nothing."""
        restored = self.restored
        return restored is not None and not self.places.gone_on and (self.beginning is not None or _knows_data(restored))

    @property
    def cursor(self) -> dict[str, Any] | None:
        """The script's place, in its data and its epochs, for a record; None if neither is known."""
        place, loops = self.places.state, self.loops.state
        if place is None and loops is None:
            return None
        return {**(place or {}), **({} if loops is None else {"loops": loops})}

    @property
    def training(self) -> bool:
        """Is a step to be expected of the next batch?"""
        trains = self.model.trains if isinstance(self.model, Models) else self.model.training
        return (trains or self.places.trains) and torch.is_grad_enabled()

    @property
    def waits_at_its_place(self) -> bool:
        """The script's place is known, but gradients wait, so that it could not continue from there."""
        return self.places.known and self.pairs[0].cuts.late is None and self.watched.waiting

    def make_owed(self) -> None:
        """Make the steps that are owed, without a gradient."""
        while self.owes:
            self.owes -= 1
            self.absent_step()
            if not self.places.known:
                self.step_boundary()

    @own_time
    def step_boundary(self) -> None:
        """The script asks for its next batch (or, without `shard`, has made a step).

        A record belongs to the start of a round, and to a moment at which no gradient is accumulated: a step is begun anew from it.
        """
        if devices.capturing():
            self.refuse(devices.in_capture("ps.shard's loader", "copy each batch into the graph's input before its replay"))
        if self.places.batches:
            self.weight_guard.refuse_without_step(self.made)
        using = self.training or (torch.is_grad_enabled() and self.watched.changed)
        within = (self.rounds is not None and self.rounds.open) or (self.places.batches > 0 and using and not self.places.only_within)
        within = within or self.waits_at_its_place or self.clipping.waits
        if self.replay or self.comes_back or within:
            self.carry_out(self.session.heartbeat if self.replay else self.session.inside_round)
            return
        if (late := self.pairs[0].cuts.late) is not None:
            late().step_boundary()
            return
        self._tell_total()
        self.carry_out(lambda: self.session.step_boundary(lambda: self.records.make(self.cursor), self.half is not None))

    def _tell_total(self) -> None:
        if self.place.rank == 0 and (total := self.totals.news(self.session.clock)) is not None:
            self.session.report({"total": float(total if self.rounds is None else self.rounds.rounds_in(float(total)))})

    def wait(self) -> None:
        """The model holds the weights of the last step when this returns."""
        if self._end_round() and not self.places.known:
            self.step_boundary()
        self.carry_out(self.session.exchange.finish)
        self.catch_up()

    def catch_up(self) -> None:
        """With a delay: the model holds the weights of the last step when this returns, but where the script runs lines again."""
        other = threading.get_ident() != self.steps.thread  # it reads what there is while this one trains
        if other or self.behind or devices.capturing() or not self.session.exchange.behind:
            return
        self.weight_guard.refuse_before_landing()
        self.carry_out(self.session.exchange.catch_up)
        self.weight_guard.stepped()

    @property
    def through(self) -> bool:
        """Is the script known to have come to the end of its loops? Only `ps.epochs` says so."""
        return self.loops.begun > 0 and self.loops.under_way < 0 and not self.places.batches

    def interrupt(self) -> None:
        """The script has ended itself because of SIGTERM: it continues where it is started again. Raises SystemExit."""
        message = (
            "the script ended on SIGTERM with exit code 0 before its loop was over. It continues when it is started again. Without a "
            "handler of its own it would stop after a checkpoint"
        )
        print(f"psjob: {message}", file=sys.stderr, flush=True)
        self.session.close(JOIN_SECONDS)
        leave_message({"ending": message})
        raise SystemExit(EXIT_OF["stopped"])

    def leave(self) -> None:
        self.carry_out(self.clipping.check_over)
        self.make_owed()
        self._end_round()
        on_its_way = self.restored is not None or (self.replay and self._fresh)
        if on_its_way and not self.places.gone_on:
            self.refuse(self._too_early())
        if (late := self.pairs[0].cuts.late) is not None and not self.replay:
            late().drain()
        if self.weight_guard.leave(self.made):
            self.carry_out(self.digests.leave)
        end = {**(self.cursor or {}), THROUGH: True}
        self.carry_out(lambda: self.session.leave(lambda: self.records.make(end, last=True), self.parameters))

    def _leave_again(self, end: bytes) -> None:
        """The script had come to its end before its process was lost, and only the checkpoint that says so was not yet made."""
        self.carry_out(lambda: self.session.leave(lambda: split_records(end)[0], self.parameters))

    def _too_early(self) -> str:
        made, clock = self.session.clock - self.replay, self.session.clock
        return (
            f"the script ended before it stood where it was when its process was lost: it had made {clock} steps then, and came to step "
            f"{made} again. A script that is started again runs what is between its passes (evaluation, early stopping) again, and ended "
            "on other results than the first time. Write `for epoch in ps.epochs(n)`, and keep what decides when the loop ends, such as "
            "the best score and the patience that is left, in ps.state(…)"
        )

    # -- steps ---------------------------------------------------------------------------------

    def step(self, pair: Pair, original: Callable[[], Any] | None) -> None:
        """One step, of the parameters of `pair`. `original` makes the optimizer's own step (worker-side update)."""
        if devices.capturing():
            self.refuse(devices.in_capture("optimizer.step()", "call optimizer.step() after each replay"))
        if pair not in self.pairs:
            self.refuse(f"{pair.plain.__name__} makes a step, and {self.pairs[0].plain.__name__} was attached in its place; step that one")
        by_steps, parts = not self.places.known, self.session.parts
        before, original = parts.begin_step(), parts.timed(UPDATE, original)
        if by_steps:
            self.variables.at_step(sys._getframe(1))
        self._pushed = self.carry_out(lambda: self.clipping.begin(pair))
        self.steps.under_way = True
        self._make_step(pair, original)
        self.steps.under_way = False
        if by_steps:
            self.variables.at(None)
        self.watched.step_made()
        self.clipping.end(pair)
        self.left.forget(pair.has)
        self._pushed = None
        parts.end_step(before)

    def _make_step(self, pair: Pair, original: Callable[[], Any] | None) -> None:
        if self.places.skipping or self.comes_back:
            return
        if problem := pair.problem():
            self.refuse(problem)
        if not (clock := self.session.clock) & (clock - 1):  # soon, and seldom later
            self.unattached.look()
        self._stepping, pair.told, self.steps.thread = pair, None, threading.get_ident()
        if self.places.step():
            self.absent_step()
            return
        if self.inputs is not None:
            self._look()
        if self._replayed():
            return
        if self.rounds is None:
            self._push_step(original)
        else:
            self._inner_step(self.rounds, original)
        if not self.places.known:
            self.step_boundary()

    def _look(self) -> None:
        assert self.inputs is not None
        if self.places.begun:
            self.inputs.stop()
            self.inputs = None
        else:
            self.carry_out(self.inputs.step)

    def _push_step(self, original: Callable[[], Any] | None) -> None:
        pair = self._stepping
        if self._pushed is not None:
            self._follow(self._pushed, original)
            return
        has = self.clipping.rows(pair)
        if problem := self.left.problem(has):
            self.refuse(problem)
        grads = [p.grad if has(row) and id(p) not in self.tables.anchors else None for row, p in enumerate(self.parameters)]
        scale, skip = optimizers.amp(pair.optimizer)
        if pair.cuts.piped and (odd := stage_cuts.step_problem(pair.cuts, pair.optimizer, grads, self.piped == self.session.clock)):
            self.refuse(odd)
        if pair.cuts.late is not None:
            pair.cuts.late().stepped(self.carry_out(self._hyperparameters), self._taken_clip())
            return
        if self.gradients is not None:
            self.gradients.step(
                (row for row, g in enumerate(grads) if g is not None), getattr(pair.optimizer, "found_inf", None) is not None
            )
        if self.tables.counts and (getattr(pair.optimizer, "found_inf", None) is not None or self.place.config.non_finite == "skip"):
            self.refuse("a skipped step loses what a ps.Table was given; train in bfloat16, without GradScaler and nonFinite: skip")
        if {g.layout for g in grads if g is not None} - {torch.strided}:
            grads = dense(self.parameters, [spec.name for spec in self.session.layout.table], grads)
        if self.clipping.waits and getattr(pair.optimizer, "found_inf", None) is not None:
            self.refuse(
                "one norm clips several optimizers, and a GradScaler decides for each of them whether its step is made. Clip each by its "
                "own parameters, or train in bfloat16"
            )
        clipped = self.clipping.asked(pair) and not self.session.reduces
        self.left.pushed(grads)
        self._exchange(grads, skip, scale, original)
        self.left.stepped(has, clipped)

    def _follow(self, pushed: clipping.Pushed, original: Callable[[], Any] | None) -> None:
        """The step of an optimizer whose gradients went with that of another one: nothing is pushed."""
        self.carry_out(pushed.check)
        self._exchange(None, False, 1.0, original, pushed)

    def _inner_step(self, rounds: LocalRounds, original: Callable[[], Any] | None) -> None:
        """A step of the worker's own; one that a GradScaler skips counts too, so that all end their rounds at the same step."""
        scale, skip = optimizers.amp(self._stepping.optimizer)
        for p in self.parameters:
            if p.grad is not None and scale != 1.0:
                p.grad.mul_(scale)
        optimizers.clear_marks(self._stepping.optimizer)
        self.weight_guard.refuse_moved()
        self.weight_guard.forget()
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
        pair = self._stepping
        if not self.steps.under_way:
            self.steps.without_batch += 1
            self.clipping.again(pair)
        own = (lambda: pair.plain.step(pair.optimizer)) if self.session.reduces else None
        self._exchange(None, False, 1.0, own, self._pushed)
        self.watched.step_made()

    def _replayed(self) -> bool:
        """Was this step made before, by the process that this one follows?"""
        if not self.replay:
            return False
        self.tables.forget()
        self.carry_out(self.session.heartbeat)
        if self.rounds is None or self.rounds.step_again():
            self._made_again()
        return True

    def _made_again(self) -> None:
        self.replay -= 1
        restored = self.restored
        stands = restored is not None and not _knows_data(restored) and restored.step == self.session.clock - self.replay
        if stands or self.replay == 0:
            self.put_back()

    def _hyperparameters(self) -> list[dict[str, float | bool]]:
        """What the shards' rule works with as optimizer and clock are now, a parameter group each; none where the workers step."""
        return [] if self.session.reduces else self.lr.hyperparameters(self.choice.hyperparameters(self.optimizer), self.session.clock)

    def _exchange(
        self, grads: list[torch.Tensor | None] | None, skip: bool, scale: float, original: Callable[[], Any] | None,
        pushed: clipping.Pushed | None = None,
    ) -> None:  # fmt: skip
        self.weight_guard.refuse_before_step()
        clock, hyperparameters = self.session.clock, self.carry_out(self._hyperparameters)
        rows = [None] * len(self.tables.specs) if grads is None else self.tables.gradients(scale)
        skip = self.carry_out(lambda: self.session.exchange.finite.skips(grads, rows, skip))
        pair = self._stepping
        has = self.clipping.rows(pair)
        clip = self._taken_clip()
        self.session.exchange.clip = GradientClip() if self.session.reduces else clip
        if self.half is not None and grads is not None and not skip:
            grads, scale = self.half.outgoing(grads, hyperparameters, scale), 1.0
        self.carry_out(lambda: self.session.rows.offer(rows, self.lr.hyperparameters(self.tables.hyperparameters(), clock)))
        self.session.exchange.may_skip = getattr(pair.optimizer, "found_inf", None) is not None
        if original is None:
            if not self.places.known:  # the step boundary comes right after this step, and nothing of its record changes until then
                self.session.exchange.meanwhile = self.records.prepare
            self.carry_out(lambda: self.session.push(grads, hyperparameters, skip, scale, self._taking(has)))
            if pushed is None:
                self.clipping.note(False)
            if grads is not None:
                self.digests.stepping(hyperparameters, clip)
            self.weight_guard.stepped()
            return
        own = [pushed is None and has(row) for row in range(len(self.parameters))]
        means = [p.grad if mine and p.grad is not None else torch.empty_like(p) for p, mine in zip(self.parameters, own, strict=True)]
        self.carry_out(lambda: self.session.push(grads, hyperparameters, skip, scale, means))
        nowhere = self.session.nowhere
        for index, (p, mean, mine) in enumerate(zip(self.parameters, means, own, strict=True)):
            if mine:
                p.grad = None if index in nowhere else mean
        optimizers.clear_marks(self._stepping.optimizer)
        clipping.clip_alone([p for p, mine in zip(self.parameters, own, strict=True) if mine], clip)
        if pushed is None:
            self.clipping.note(self.session.exchange.skipped)
        skipped = self.session.exchange.skipped if pushed is None else pushed.skipped
        self.digests.stepping(self.optimizer.param_groups, clip)
        if not skipped:
            with self.lr.on(pair.optimizer, clock):
                original()

    def _taken_clip(self) -> GradientClip:
        """How the script, or the manifest, clips the step that is made now."""
        clip = self.clipping.take(self._stepping)
        if problem := stage_cuts.clip_problem(self.place.config, clip):
            self.refuse(problem)
        return clip

    def _taking(self, has: Callable[[int], bool]) -> Sequence[torch.Tensor]:
        """Where the weights go that a step of these rows is answered with. Others are unchanged, and graphs that use them live on."""
        if len(self.pairs) == 1:
            return self.parameters
        if not self._aside:
            self._aside = [torch.empty_like(p) for p in self.parameters]
        return [p if has(row) else aside for row, (p, aside) in enumerate(zip(self.parameters, self._aside, strict=True))]

    # -- endings -------------------------------------------------------------------------------

    def carry_out(self, call: Callable[[], Any]) -> Any:
        """Run a call of the session; where it raises an ending, end this process (or exec it again) as that asks."""
        try:
            if torch.is_inference_mode_enabled():  # the script evaluates, and what is made now is used in training too
                with torch.inference_mode(False), torch.no_grad():
                    return call()
            return call()
        except SessionEnd as ending:
            how, message = ending.how, ending.message
        except Refused as refused:  # a record that has grown too large, or one of other objects than attach was given
            how, message = "refused", str(refused)
        self.session.close(0.0 if how == "rewind" else JOIN_SECONDS)  # exec ends threads; one may be dialling a shard that is gone
        if how == "rewind":
            exits.end_if_device_lost()
            self.session.begin_again(message, trackers.hand_over())
        if how == "refused":
            self.refuse(message)
        if message:
            print(f"psjob: {message}", file=sys.stderr, flush=True)
        if how in ("stopped", "lost", "fenced"):
            met = self.session.state.fenced_by
            leave_message({"ending": message, "fenced": {"start": met}} if how == "fenced" and met else {"ending": message})
        if self.place.config_path and threading.current_thread() is not threading.main_thread():  # the script would go past the thread
            exits.finish(EXIT_OF[how])
        raise SystemExit(EXIT_OF[how])

    def refuse(self, message: str) -> NoReturn:
        """End this process with that sentence; or begin again, if files of its own have led a started one past its place."""
        __tracebackhide__ = True
        if not self.session.state.ended:
            self.session.close(JOIN_SECONDS)
        files = [] if self._files is None else own_files.other(self._files)
        if files:
            named = ", ".join(map(os.path.basename, files[:3]))
            print(
                f"psjob: the script continued from {named}, written after its record. It begins again without", file=sys.stderr, flush=True
            )
            self.session.begin_again("", {**trackers.hand_over(), contract.ENV_LEFT_OUT: json.dumps(files)})
        exit_refused(message)
