"""Whole scripts that train in this process and are started again from each record that they make.

All is psjob's own but the wire: a job of one worker, whose updates the shards' rule makes here. So a script is started again from every
place in milliseconds, with the weights, files and printed lines of that moment.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from psjob import rules
from psjob.api import attach as attaching
from psjob.api import clipping, reporting, training_job
from psjob.process import config, ownfiles
from psjob.rules.base import BlockState
from psjob.worker import exits
from psjob.worker.exits import SessionEnd
from psjob.worker.session import WorkerSession
from tests.tensors.restarted_scripts import Refusal, nothing, place, some, surroundings


@dataclass(frozen=True)
class Moment:
    """Between two steps, or at the end: the record, what the shards hold, the script's files, and how many lines were printed."""

    clock: int
    record: bytes
    blocks: list[BlockState]
    files: dict[str, bytes]
    printed: int


@dataclass
class Run:
    """What one process of a script did."""

    moments: list[Moment] = field(default_factory=list)
    end: Moment | None = None
    lines: list[str] = field(default_factory=list)
    ending: str = ""
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights and buffers at its end."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What it had written by then."""


class Again(BaseException):
    """The process begins again, with this environment."""


def run(folder: Path, source: str, start: Moment | None = None, name: str = "run-1") -> Run:
    """Run a script in an empty folder from its beginning, or as it would be started again at this moment. `name`: that of the run."""
    try:
        return _run(folder, source, start, {}, name)
    except Again as again:
        shutil.rmtree(folder)
        return _run(folder, source, start, again.args[0], name)


def _run(folder: Path, source: str, start: Moment | None, environment: Mapping[str, str], name: str) -> Run:
    made, blocks = Run(), [] if start is None else [block.copy() for block in start.blocks]
    folder.mkdir()
    for file, content in (start.files if start is not None else {}).items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
    path = folder / "train.py"
    path.write_text(source)
    out = _Lines(made)
    seed = 7 if start is None else 8  # another process has other random numbers until the script seeds them
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with _process(made, blocks, start, folder, name), contextlib.chdir(folder), contextlib.redirect_stdout(out):
        ownfiles.note_reads(environment)
        try:
            exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})  # noqa: S102
            assert attaching.current is not None
            attaching.current.leave()
        except Refusal as refusal:
            made.ending = f"refused: {refusal}"
        except SystemExit as left:
            made.ending = "through" if left.code == 0 else f"exit {left.code}"
    made.files = _files(folder)
    return made


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Lines(io.StringIO):
    """Notes each line as it is printed."""

    def __init__(self, made: Run) -> None:
        super().__init__()
        self._made, self._rest = made, ""

    def write(self, text: str) -> int:
        *whole, self._rest = (self._rest + text).split("\n")
        self._made.lines += [line for line in whole if line.startswith("line ")]
        return len(text)


@contextlib.contextmanager
def _process(made: Run, blocks: list[BlockState], start: Moment | None, folder: Path, name: str) -> Iterator[None]:
    """The globals of one process, in which the shards' part of the session is done here."""

    def session_at(at: config.Place, *given: Any) -> WorkerSession:
        session = WorkerSession(at, *given)
        _served(session, made, blocks, start, folder)
        return session

    def refuse(message: str) -> None:
        raise Refusal(message)

    here = replace(place(1, 0), run=name)
    with surroundings(here), contextlib.ExitStack() as stack:
        for what in (
            mock.patch.object(config, "place", return_value=here),
            mock.patch.object(reporting, "worker_place", return_value=here),
            mock.patch.object(attaching, "_pending", []),
            mock.patch.object(attaching, "_wanted", {}),
            mock.patch.object(exits, "watch_exit", nothing),
            mock.patch.object(clipping.Clipping, "install", nothing),
            mock.patch.object(training_job, "session_at", session_at),
            mock.patch.object(training_job, "exit_refused", refuse),
            mock.patch.object(ownfiles, "exit_refused", refuse),
        ):
            stack.enter_context(what)
        yield


def _served(session: WorkerSession, made: Run, blocks: list[BlockState], start: Moment | None, folder: Path) -> None:
    """The session's calls, answered as shards with one worker answer them. `blocks` has a state for each parameter."""
    rule = rules.named(session.rule)
    own: list[torch.Tensor] = []

    def join(parameters: Sequence[torch.Tensor], initial: Any, _hyperparameters: Any) -> None:
        own.extend(parameters)
        content = initial()
        if start is None:
            session.machine.initial = content
            blocks.extend(rule.init(p.detach().flatten().clone()) for p in parameters)
        else:
            session.machine.clock, session.machine.record = start.clock, start.record
        _give(parameters)

    def push(grads: Any, told: Any, skip: bool, scale: float, taking: Sequence[torch.Tensor]) -> None:
        if session.reduces:  # the script's own optimizer steps with the mean of the gradients
            for into, gradient in zip(taking, grads or [None] * len(taking), strict=True):
                into.zero_() if gradient is None else into.copy_(gradient)
            session.exchange.skipped = skip or grads is None
            session.stepped()
            return
        given = [] if grads is None or skip else [(row, g * scale) for row, g in enumerate(grads) if g is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for _, g in given])) if given else torch.zeros(())
        limit = session.exchange.clip.norm
        factor = 1.0 if limit is None else min(1.0, limit / (float(norm) + 1e-6))
        for row, gradient in given:
            rule.apply(blocks[row], (gradient * factor).flatten(), told[session.layout.table[row].group])
        _give(taking)
        session.stepped()

    def _give(taking: Sequence[torch.Tensor]) -> None:
        for into, block in zip(taking, blocks, strict=True):
            into.data.copy_(block.weights.view_as(into))

    def edge(make: Any, large: bool = False) -> None:
        if session.reduces:
            for block, p in zip(blocks, own, strict=True):
                block.weights = p.detach().flatten().clone()
        made.moments.append(Moment(session.clock, bytes(make()), [block.copy() for block in blocks], _files(folder), len(made.lines)))

    def leave(make: Any, parameters: Sequence[torch.Tensor]) -> None:
        job, end = attaching.current, bytes(make())
        assert job is not None
        made.final = {f"{n}.{name}": t.clone() for n, pair in enumerate(job.pairs) for name, t in pair.model.state_dict().items()}
        made.end = Moment(session.clock, end, [block.copy() for block in blocks], _files(folder), len(made.lines))
        raise SessionEnd("left", "")

    for name in ("heartbeat", "inside_round", "close", "watch", "report", "inputs"):
        setattr(session, name, nothing)

    def begin_again(_mode: str, more: Mapping[str, str]) -> None:
        raise Again(more)

    session.begin_again = begin_again  # type: ignore[method-assign]
    session.join, session.step_boundary, session.leave = join, edge, leave  # type: ignore[method-assign]
    session.push, session.exchange.finish = push, nothing  # type: ignore[method-assign, assignment]


@dataclass
class Restarts:
    """What a script's restarts have come to."""

    undisturbed: Run
    made: int = 0
    refusals: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def restarts(folder: Path, source: str, most: int = 8, every_line: bool = True) -> Restarts:
    """Start a script again from `most` of its records, and from one of those that each such start makes.

    `every_line`: all that is printed must be the same, but for what comes again; else the last line must.
    """
    found = Restarts(run(folder / "undisturbed", source))
    first = found.undisturbed

    def compare(moment: Moment, before: list[str], left: int) -> None:
        found.made += 1
        again = run(folder / f"start{found.made}", source, moment)
        if again.ending.startswith("refused"):
            found.refusals.append(again.ending)
            return
        lines = list(dict.fromkeys([*before, *again.lines]))
        same = lines == first.lines if every_line else lines[-1] == first.lines[-1]
        differ = [name for name, tensor in first.final.items() if name not in again.final or not again.final[name].equal(tensor)]
        differ += [name for name, content in first.files.items() if again.files.get(name) != content]
        if again.ending != first.ending or not same or differ:
            found.wrong.append(f"from step {moment.clock}: {again.ending}, {differ}, printed {lines} in place of {first.lines}")
        elif left and again.moments:
            each = again.moments[len(again.moments) // 2]
            compare(each, [*before, *again.lines[: each.printed]], left - 1)

    for moment in some(first.moments, most) if first.ending == "through" else ():
        compare(moment, first.lines[: moment.printed], 1)
    if first.end is not None:  # the process was lost after that, and no checkpoint said yet that it had left
        for name in ("run-1", "run-2"):  # the second continues from the first, which was stopped then
            again = run(folder / f"end of {name}", source, first.end, name)
            if again.ending != "through" or again.moments or again.end is None or again.end.record != first.end.record:
                found.wrong.append(f"from its end: {again.ending}, {len(again.moments)} records, printed {again.lines}")
    return found
