"""Scripts that run in this process and are started again from each record that they make.

All is psjob's own but the wire: shards would answer a step with weights, and here a step is noted. So a script is started again from
every place in milliseconds.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from psjob.api import advice, data, script_code, values
from psjob.api import attach as attaching
from psjob.api import data as epochs
from psjob.api.attach import take_over
from psjob.api.attachable import Pair
from psjob.api.training_job import TrainingJob
from psjob.process import errors
from psjob.process.config import CompressionConfig, Config, ProcessContext, ShardAddress
from psjob.worker.exits import SessionEnd
from tests.live.live_shards import NEVER
from tests.support.runkeys import handed

MOST_SECONDS = 4.0
"""Processor time of a script; one that takes longer goes round in circles."""
HEAD = """import itertools

import torch
from tqdm import tqdm

import psjob as ps

def main(loader, other, val, step, model, opt, note):
"""
"""What a script's body stands in: loaders of 6, 9 and 3 batches for one worker, and `step(batch, …)`, which trains on batches."""


class Circles(BaseException):
    """The script does not come to its end."""


class Refusal(BaseException):
    """The script was refused, with a sentence."""


@dataclass(frozen=True)
class Record:
    """Of one moment between two steps: so many steps had effect before it."""

    clock: int
    content: bytes


@dataclass
class Run:
    """What one process of a script did."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    """Those with effect: the batches, what a buffer of the model held, and what was drawn."""
    made_of: tuple[Any, ...] = ()
    """The step that is being made."""
    notes: list[Any] = field(default_factory=list)
    """What the script noted, the notes of lines that ran again included."""
    records: list[Record] = field(default_factory=list)
    ending: str = ""
    """`through`, or why the process ended before."""
    told: list[str] = field(default_factory=list)


def run(folder: Path, body: str, record: Record | None = None, workers: int = 1, rank: int = 0) -> Run:
    """Run a script from its beginning, or as its process would be started again with this record."""
    made = Run()
    indented = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    path = folder / "train.py"
    path.write_text(f"{HEAD}{indented}\n")
    code = compile(path.read_text(), str(path), "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)  # noqa: S102
    torch.manual_seed(0)
    random.seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    here = place(workers, rank)
    with surroundings(here), mock.patch.object(advice, "tell_once", lambda kind, sentence: made.told.append(sentence)):
        job = _attached(here, model, optimizer, made, record)
        loaders = [_loader(count * workers, first, workers) for count, first in ((6, 0), (9, 100), (3, 200))]
        signal.signal(signal.SIGVTALRM, _circles)
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        try:
            names["given"] = (*loaders, _stepping(model, optimizer, made), model, optimizer, made.notes.append)
            exec("main(*given)", names)  # noqa: S102
            job.leave()
        except Refusal as refusal:
            made.ending = f"refused: {refusal}"
        except SystemExit as left:
            made.ending = "through" if left.code == 0 else f"exit {left.code}"
        except Exception as error:
            made.ending = f"raised {error!r}"
        except Circles:
            made.ending = "goes round in circles"
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return made


@dataclass
class Restarts:
    """What a script's restarts have come to, from records of its undisturbed run and of started scripts."""

    undisturbed: Run
    made: int = 0
    refused: int = 0
    """Those that were refused with a sentence: lines between passes, which run again, decide there when the script ends."""
    wrong: list[str] = field(default_factory=list)
    """Those that made other steps, noted another thing last, or ended in another way, with the first difference."""


def restarts(folder: Path, body: str, most: int = 5, depth: int = 2, workers: int = 1, rank: int = 0) -> Restarts:
    """Start the script again from `most` of its records, and from some of those that the started scripts make, `depth` starts deep."""
    found = Restarts(run(folder, body, None, workers, rank))
    first = found.undisturbed

    def compare(record: Record, left: int) -> None:
        again = run(folder, body, record, workers, rank)
        found.made += 1
        wanted = first.steps[record.clock :]
        if again.ending.startswith("refused"):
            found.refused += 1
        elif (again.steps, again.notes[-1:], again.ending) != (wanted, first.notes[-1:], first.ending):
            at = next((at for at, (one, other) in enumerate(zip(again.steps, wanted, strict=False)) if one != other), len(again.steps))
            found.wrong.append(
                f"from step {record.clock}, at {record.clock + at}: {again.steps[at : at + 2]} in place of {wanted[at : at + 2]}, "
                f"{len(again.steps)} steps of {len(wanted)}, {again.ending!r}, noted {again.notes[-1:]} in place of {first.notes[-1:]}"
            )
        elif left > 1:
            for each in some(again.records, 2):
                compare(each, left - 1)

    for record in some(first.records, most) if first.ending == "through" else ():
        compare(record, depth)
    return found


def some(records: Sequence[Record], most: int) -> list[Record]:
    """So many at most, the first and the last among them."""
    if len(records) <= most:
        return list(records)
    return [records[round(at * (len(records) - 1) / (most - 1))] for at in range(most)]


class Counting(torch.nn.Module):
    """One parameter, and a buffer that counts what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return (self.weight * values).sum()


def _stepping(model: Counting, optimizer: torch.optim.Optimizer, made: Run) -> Any:
    def step(*batches: Any, last: bool = True) -> None:
        model(torch.ones(1)).backward()
        batches_of.append(tuple(int(batch) for batch in batches))
        if last:
            made.made_of = tuple(batches_of), int(model.seen), round(float(torch.rand(1)), 4)
            batches_of.clear()
            optimizer.step()
            optimizer.zero_grad()

    batches_of: list[tuple[int, ...]] = []
    return step


def _attached(here: ProcessContext, model: Counting, optimizer: torch.optim.Optimizer, made: Run, record: Record | None) -> TrainingJob:
    """The job, as `attach` makes it, with nobody at the other end of its streams."""
    pair = Pair("", model, optimizer)
    job = TrainingJob(here, [pair], {})
    session = job.session

    def edge(make: Any, large: bool = False) -> None:
        made.records.append(Record(session.clock, bytes(make())))

    def push(grads: Any, *_others: Any) -> None:
        made.steps.append(made.made_of if grads is not None else ("absent",))
        session.stepped()

    def leave(make: Any, _parameters: Any) -> None:
        make()
        raise SessionEnd("left", "")

    def refuse(message: str) -> None:
        raise Refusal(message)

    for name in ("join", "heartbeat", "inside_round", "close"):
        setattr(session, name, nothing)
    session.step_boundary, session.leave = edge, leave  # type: ignore[method-assign]
    session.push, session.exchange.finish = push, nothing  # type: ignore[method-assign, assignment]
    job.refuse = refuse  # type: ignore[method-assign, assignment]
    job.clipping._refuse = job.weight_guard._refuse = refuse  # type: ignore[assignment]
    if record is not None:
        session.machine.clock, session.machine.record = record.clock, record.content
    attaching.current = job
    job.join()
    take_over(job, pair)
    return job


def _circles(*_given: Any) -> None:
    raise Circles


def nothing(*_given: Any) -> None:
    pass


def _loader(count: int, first: int, workers: int) -> Any:
    short = workers > 1  # the last round has too few batches
    return data.shard(torch.utils.data.DataLoader(torch.arange(first, first + count - short), batch_size=1, shuffle=True))


def place(workers: int, rank: int) -> ProcessContext:
    shards = (ShardAddress("127.0.0.1", 1, 2),)
    compression = CompressionConfig()
    config = Config(
        "job", "run-1", "0" * 64, "sync", 5, None, workers, shards, NEVER, "AllWorkers", 10.0, 60.0, 1, 1 << 32, compression, "auto", None
    )
    return ProcessContext("worker", rank, "run-1", 1, 0, 0, f"worker-{rank}-r1", config, None, None, 0, "", handed("worker", rank, 1))


@contextlib.contextmanager
def surroundings(here: ProcessContext) -> Iterator[None]:
    """The globals of one process. Functions of the tests are no functions of the script."""
    foreign = (*errors.package_folders(), f"{Path(__file__).parents[1]}/")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(errors, "package_folders", return_value=foreign))
        stack.enter_context(mock.patch("os.register_at_fork"))  # it would keep every session
        stack.enter_context(mock.patch.object(attaching, "current", None))
        stack.enter_context(mock.patch.object(epochs, "worker_place", return_value=here))
        stack.enter_context(mock.patch.object(values, "_state", values.ScriptState()))
        script_code.is_script_code.cache_clear()
        data.Taken._looked_up.clear()
        try:
            yield
        finally:
            script_code.is_script_code.cache_clear()
