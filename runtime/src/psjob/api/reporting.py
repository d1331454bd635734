"""What a script may ask of and tell to its job. Outside a job each answers as a job of one worker would."""

from __future__ import annotations

import math
import secrets
from functools import cache
from pathlib import Path
from typing import Any

import torch

from psjob.api import attach as attaching
from psjob.api import trackers
from psjob.api.training_job import TrainingJob
from psjob.checkpoint import disk, files
from psjob.checkpoint.disk import CheckpointProblem
from psjob.embeddings.embedding import exported, unwinding
from psjob.layout import devices, memory
from psjob.process import config
from psjob.process.errors import Refused, refuse


def rank() -> int:
    """Tell this worker's number.

    Returns:
        From 0 to `world() - 1`; 0 outside a job.

    Example:
        >>> import psjob as ps
        >>> ps.rank()
        0
    """
    place = worker_place()
    return 0 if place is None else place.rank


def world() -> int:
    """Tell how many workers the job has.

    Returns:
        spec.workers.replicas, times spec.workers.processes; 1 outside a job.

    Example:
        >>> import psjob as ps
        >>> ps.world()
        1
    """
    place = worker_place()
    return 1 if place is None else place.world


def is_first() -> bool:
    """Tell whether this is the process that evaluates, prints and saves.

    Returns:
        True on rank 0 and outside a job.

    Example:
        >>> import psjob as ps
        >>> if ps.is_first():
        ...     print("accuracy", 0.9)
        accuracy 0.9
    """
    return rank() == 0


def step() -> int:
    """Tell how many steps this worker has made since the job began, restarts included.

    Returns:
        Optimizer steps, in mode local rounds; 0 outside a job.

    Example:
        >>> import psjob as ps
        >>> ps.step()
        0
    """
    return 0 if attaching.current is None else attaching.current.session.clock


def report(**numbers: float | int | torch.Tensor) -> None:
    """Tell the job numbers for its status and display.

    If several ranks report one name, rank 0's numbers are taken. Rank 0 also writes them, as `psjob/NAME`, to the runs of TensorBoard,
    MLflow and Weights & Biases that it has open. A call costs one small message; outside a job nothing.

    Args:
        numbers: `loss`, `total` (optimizer steps in all, for an ETA; not needed with `ps.epochs` and `ps.shard`) and metrics of your
            own: numbers, or tensors of one element. A `loss` that is NaN or inf is reported as divergence in status, summary and exit
            code. Others that are not finite are left out. The last 256 names are kept, 64 characters of each.

    Raises:
        Refused: what is no number, or a tensor of several elements, in a job. Its process ends with status 77 and the sentence.

    Example:
        >>> import torch, psjob as ps
        >>> ps.report(loss=torch.tensor(0.25), total=1000, accuracy=0.9)
    """
    job = attaching.current
    if job is None or job.behind:
        return
    if devices.capturing():
        job.refuse(devices.in_capture("ps.report", "report after a replay"))
    plain = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in numbers.items()}
    job.totals.by_script |= "total" in plain
    if job.rounds is not None and "total" in plain:
        plain["total"] = job.rounds.rounds_in(_number(job, "total", plain["total"]))
    told = {name[:64]: _number(job, name, value) for name, value in list(plain.items())[:256]}
    job.session.report({name: value if math.isfinite(value) else str(value) for name, value in told.items()})
    if is_first():
        at = job.session.clock if job.rounds is None else job.rounds.at_step
        trackers.tell_trackers({name: value for name, value in told.items() if name != "total"}, at)


def _number(job: TrainingJob, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        tensor = isinstance(value, torch.Tensor)
        what = f"a tensor of shape {tuple(value.shape)}" if tensor else f"{type(value).__name__} {str(value)[:40]!r}"
        job.refuse(f"ps.report({name}=…) takes a number or a tensor of one element, got {what}. Report its mean, such as x.mean()")
    return number


def checkpoint() -> None:
    """Ask for a checkpoint soon, beside the ones by time and by steps; training continues meanwhile. Nothing outside a job.

    Example:
        >>> import psjob as ps
        >>> ps.checkpoint()
    """
    if attaching.current is not None:
        attaching.current.session.checkpoint()


def wait() -> None:
    """Wait until the attached model holds the job's weights.

    In mode local it ends the open round, and every worker should call it at the same step, such as before an evaluation. In other modes it
    is needed with `attach(…, overlap=True)` or `training.delay` only: before a read of parameters that is neither a forward pass nor
    `state_dict`. Without them it costs nothing.

    Example:
        >>> import psjob as ps
        >>> ps.wait()
    """
    if attaching.current is not None:
        if devices.capturing():
            attaching.current.refuse(devices.in_capture("ps.wait", "wait outside of the capture"))
        attaching.current.wait()


def export(path: str | Path, model: torch.nn.Module | None = None) -> None:
    """Write parameters and buffers as one safetensors file that plain torch loads, under the names of `model.state_dict()`.

    In a job only rank 0 writes. The file appears whole or not at all; one of that name is replaced. Rows of a `ps.Embedding` or `ps.Table`
    are in it as in `final.safetensors`: `NAME.weight`, and `NAME.ids` beside it if their number is not known. Its `anchor` is not.

    Args:
        path: any name that the system takes.
        model: None takes the attached one.

    Raises:
        ValueError: no model was given and none is attached, it holds what safetensors has no word for, or rows that are not attached.
        OSError: the file cannot be written there.

    Example:
        >>> import os, tempfile, torch, psjob as ps
        >>> path = os.path.join(tempfile.mkdtemp(), "weights.safetensors")
        >>> ps.export(path, torch.nn.Linear(2, 1))
        >>> from safetensors.torch import load_file
        >>> sorted(load_file(path))
        ['bias', 'weight']
    """
    job = attaching.current
    if model is None:
        if job is None:
            raise ValueError("export before attach needs the model: export(path, model)")
        model = job.model
    if not is_first():
        return
    target = Path(path).absolute()
    state = {name: memory.contiguous_values(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    tensors = exported(model, state)
    # Of its own name: processes that export to one path at a time do not meet, and no file of the user's is taken for ours.
    passing = f"psjob-{secrets.token_hex(8)}.part"
    try:
        unwinding(model, lambda: _write(target.parent, passing, tensors))
        disk.rename_whole(target.parent, passing, target.name)
    except CheckpointProblem as problem:
        said, cause = str(problem).replace(passing, target.name), problem.__cause__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, said) from None
        raise ValueError(said) from None


def _write(folder: Path, name: str, tensors: list[files.Entry]) -> None:
    files.write_blocks(folder, name, tensors, {"format": "pt"})


@cache
def worker_place() -> config.ProcessContext | None:
    """This worker's place, before `attach` too: scripts slice their data by rank as they load it."""
    try:
        place = config.place()
    except Refused as refused:
        refuse(str(refused))
    return place if place is not None and place.role == "worker" else None
