"""Scripts as people have them, in one process: from each record a started one prints the lines and has the bits of the undisturbed one.

- Whole scripts that train in this process and are started again from each record that they make.
All is psjob's own but the wire: a job of one worker, whose updates the shards' rule makes here. So a script is started again from every
place in milliseconds, with the weights, files and printed lines of that moment.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from psjob import rules
from psjob.api import attach as attaching
from psjob.api import clipping, reporting, training_job
from psjob.process import config, own_files
from psjob.rules.base import BlockState
from psjob.worker import exits
from psjob.worker.exits import SessionEnd
from psjob.worker.session import WorkerSession
from tests.restarts.rewritten import FRAMEWORKS, SENTENCES, plain, scripts
from tests.scripts import cells
from tests.tensors.restarted_scripts import Refusal, nothing, place, some, surroundings

SCRIPTS = {name: source for name, source in scripts().items() if name not in FRAMEWORKS}


def each(names: Iterable[str], *always: str) -> list[Any]:
    """A parameter for each name; those that are not in `always` rotate."""
    return [pytest.param(name, id=name, marks=() if name in always else pytest.mark.rotating) for name in names]


pytestmark = pytest.mark.usefixtures("small_heap_each")
"""What goes over an iterator is looked for in the whole heap."""


@pytest.mark.parametrize("name", each(SCRIPTS, "snapshot", "gan", "unfreezes", "replay", "curriculum", "by_step"))
def test_a_restart_changes_no_line_and_no_bit(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, SCRIPTS[name], most=5)
    assert found.undisturbed.ending == "through" and len(found.undisturbed.lines) > 3, found.undisturbed
    assert not found.wrong, found.wrong[0]
    assert found.made > 5 and not found.refusals, found.refusals


@pytest.mark.parametrize("name", each(SCRIPTS, "early_stopping", "plateau", "average"))
def test_a_plain_loop_is_equal_or_refused(tmp_path: Path, name: str) -> None:
    found = restarts(tmp_path, plain(SCRIPTS[name]), most=4, every_line=False)
    assert found.undisturbed.ending == "through", found.undisturbed.ending
    assert not found.wrong, found.wrong[0]
    assert found.made > 2 and all(any(sentence in why for sentence in SENTENCES) for why in found.refusals), found.refusals


BEFORE = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))


def evaluate():
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), y).item()


first, history = evaluate(), [evaluate()]
best = first
for epoch in range(4):
    for inputs, targets in ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    best = min(best, evaluate())
    history.append(best / first)
    print("line epoch", epoch, best, first, history)
"""


def test_what_was_made_of_the_first_weights_is_put_back(tmp_path: Path) -> None:
    """Such as an evaluation before the loop, which a restart makes of later weights."""
    found = restarts(tmp_path, BEFORE, every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals
    assert not found.wrong, found.wrong[0]


def test_weights_that_are_moved_and_put_back_in_each_step_are_no_state(tmp_path: Path) -> None:
    """`moves` is made in a block of `torch.no_grad`, and read in the next one."""
    source = cells.SCRIPTS["sam"].text
    found = restarts(tmp_path, source.replace("    optimizer.step()\n", "    optimizer.step()\n    print('line', norm.item())\n"))
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


def test_a_loop_that_begins_where_its_snapshot_says_is_as_long_as_ever(tmp_path: Path) -> None:
    """As torch's tutorial has it. A start from its last snapshot would leave out what lies between that and the record."""
    found = restarts(tmp_path, plain(SCRIPTS["snapshot"]), most=5, every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


BY_STEP = """import glob
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(64, 4)
model, average = nn.Linear(4, 1), nn.Linear(4, 1)
average.load_state_dict(model.state_dict())
step, best = 0, 1e9
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
if FOUND:
    kept = torch.load("last.pt")
    step, best = kept["step"], kept["best"]
    average.load_state_dict(kept["average"])
loader = ps.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
ps.state(average=average)
while step < 40:
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.lerp_(new, 0.1)
    if loss.item() < best:
        best = loss.item()
        torch.save(model.state_dict(), "best.pt")
    torch.save({"step": step, "best": best, "average": average.state_dict()}, "last.pt")
    print("line", step, best, loss.item(), sum(p.sum().item() for p in average.parameters()))
"""


def test_a_loop_by_step_with_a_snapshot_is_as_long_as_ever(tmp_path: Path) -> None:
    found = restarts(tmp_path, BY_STEP.replace("FOUND", "os.path.isfile('last.pt')"), most=5, every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.refusals, found.refusals
    assert not found.wrong, found.wrong[0]


def test_a_script_that_knows_its_snapshot_from_elsewhere_is_refused_or_right(tmp_path: Path) -> None:
    found = restarts(tmp_path, plain(SCRIPTS["snapshot"]).replace("os.path.exists(path)", "path in os.listdir()"), every_line=False)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong[:1]
    assert found.refusals and all("snapshot.pt was written later than this worker's record" in why for why in found.refusals)


def test_a_file_that_was_there_and_is_written_over_is_refused_or_right(tmp_path: Path) -> None:
    """A run that continues from a file by an argument of its own, and writes that file: the first content is gone."""
    model = "torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))"
    first = f"torch.save({{'MODEL_STATE': {model}.state_dict(), 'EPOCHS_RUN': 2}}, 'snapshot.pt')"
    begin = f"import os\nimport torch\nif not os.path.exists('begun'):\n    open('begun', 'w').close()\n    {first}\n"
    source = begin + plain(SCRIPTS["snapshot"]).replace("max_epochs)", "8)")
    found = restarts(tmp_path, source, every_line=False)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong[:1]
    own = "Write `for epoch in ps.epochs(n)`, which gives what is left of it wherever the script begins"
    assert any(own in why for why in found.refusals), found.refusals


OF_WEIGHTS = """import copy
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import psjob as ps

torch.manual_seed(3)
x = torch.randn(64, 5)
y = x.sum(1, keepdim=True)
model = nn.Linear(5, 1)
model, optimizer = ps.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))


def step(inputs, targets, more=0.0):
    optimizer.zero_grad()
    out = model(inputs)
    loss = (out - targets).pow(2)
    (loss.mean() + more).backward()
    optimizer.step()
    return out.detach(), loss.detach()


class Outputs:
    def __init__(self):
        self.all = []

    def add(self, one):
        self.all.append(one)


loader = ps.shard(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
BEGIN
for epoch in LOOP:
    HEAD
    for inputs, targets in loader:
        STEP
    TAIL
    print("line", epoch, model.weight.sum().item(), SHOWN)
"""
SAME = {
    "a whole number in a list": ("first = [int((model(x) > 0).sum())]", "pass", "step(inputs, targets)", "pass", "first"),
    "classes": ("first = (model(x) > 0).long()", "pass", "step(inputs, targets * first.sum())", "pass", "first.sum()"),
    "the last loss": ("pass", "pass", "out, loss = step(inputs, targets)",
        "optimizer.param_groups[0]['lr'] = 0.05 / (1 + loss.max().item())", "0"),
}  # fmt: skip
MADE_ANEW = {
    "weights to be drawn to": (
        "first = [p.detach().clone() for p in model.parameters()]", "pass",
        "step(inputs, targets, sum((p - q).pow(2).sum() for p, q in zip(model.parameters(), first)))", "pass", "0",
    ),
    "a copy of the state": ("first = copy.deepcopy(model.state_dict())", "pass", "step(inputs, targets)", "pass", "first['bias'].item()"),
    "an output for each sample": ("first = model(x.repeat(8, 1)).detach()", "pass", "step(inputs, targets)", "pass", "first.sum().item()"),
    "a dataset of outputs": (
        "pass", "loader = ps.shard(DataLoader(TensorDataset(x, y + model(x).detach()), batch_size=8, shuffle=True))",
        "step(inputs, targets)", "pass", "0",
    ),
    "a subset": (
        "pass",
        "loader = ps.shard(DataLoader(Subset(TensorDataset(x, y), model(x).flatten().argsort()[:40].tolist()), batch_size=8))",
        "step(inputs, targets)", "pass", "0",
    ),
    "a list of outputs": ("pass", "outputs = Outputs()", "outputs.add(step(inputs, targets)[0])", "pass", "len(outputs.all)"),
}  # fmt: skip


def of_weights(loop: str, parts: tuple[str, str, str, str, str]) -> str:
    source = OF_WEIGHTS.replace("LOOP", loop)
    for word, part in zip(("BEGIN", "HEAD", "STEP", "TAIL", "SHOWN"), parts, strict=True):
        source = source.replace(word, part)
    return source


@pytest.mark.parametrize("loop", each(["range(4)", "ps.epochs(4)"], "range(4)"))
@pytest.mark.parametrize("name", SAME)
def test_what_is_made_of_weights_is_put_back(tmp_path: Path, name: str, loop: str) -> None:
    found = restarts(tmp_path, of_weights(loop, SAME[name]), most=5, every_line=False)
    assert found.undisturbed.ending == "through" and found.made > 8 and not found.wrong, found.wrong[:1]
    assert not found.refusals, found.refusals


@pytest.mark.parametrize("loop", each(["range(4)", "ps.epochs(4)"], "ps.epochs(4)"))
@pytest.mark.parametrize("name", MADE_ANEW)
def test_what_is_made_of_weights_and_is_large_is_refused(tmp_path: Path, name: str, loop: str) -> None:
    found = restarts(tmp_path, of_weights(loop, MADE_ANEW[name]), every_line=False)
    assert found.undisturbed.ending == "through" and not found.wrong, found.wrong[:1]
    assert found.refusals and all(any(sentence in why for sentence in SENTENCES) for why in found.refusals), found.refusals


LATER = """epoch, best, names = 0, 0, []
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    epoch, best, names = kept["epoch"], kept["best"], kept["names"]
    model.load_state_dict(kept["model"])
while epoch < 4:
    for inputs, targets in loader:
        step(inputs, targets)
    epoch += 1
    best = max(best, int((model(x) > 0).sum()))
    names.append(f"e{epoch}")
    torch.save({"epoch": epoch, "best": best, "names": names, "model": model.state_dict()}, "last.pt")
    print("line", epoch, model.weight.sum().item(), best, names)
"""


def test_a_snapshot_of_after_the_checkpoint_makes_no_loop_shorter(tmp_path: Path) -> None:
    """A process lives on after its last checkpoint, and writes files that the one after it finds."""
    source = of_weights("range(0)", ("pass", "pass", "pass", "pass", "0")) + LATER
    wanted = run(tmp_path / "undisturbed", source)
    assert wanted.ending == "through" and len(wanted.moments) > 30
    for at, later in ((1, 12), (1, 33), (5, 20), (14, 33), (20, 24)):
        moment = replace(wanted.moments[at], files=wanted.moments[later].files)
        again = run(tmp_path / f"from {at} with files of {later}", source, moment)
        assert again.ending == "through" and again.lines[-1] == wanted.lines[-1]
        assert all(again.final[name].equal(tensor) for name, tensor in wanted.final.items())


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
        own_files.note_reads(environment)
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

    def session_at(at: config.ProcessContext, *given: Any) -> WorkerSession:
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
            mock.patch.object(own_files, "exit_refused", refuse),
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
