"""Points of the script at which all workers meet, for libraries whose loops have barriers, and reduce and gather values.

Points are counted: by what was asked before `attach`, and after it by the pass over the data, the batch of it, and what was asked since.
So a worker that begins again comes to the same points, and hears what was said there.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any, Final

import torch

from psjob.api import advice
from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.api.training_job import TrainingJob
from psjob.layout import memory
from psjob.process.errors import refuse
from psjob.protocol import records
from psjob.resume import tagged
from psjob.worker import rendezvous


def everyone(what: str) -> None:
    """Wait until all workers have called this. In a job `what` names the call to people who wait."""
    _met(what, "")


def wait_for_first(what: str) -> None:
    """Wait until rank 0 has called this; rank 0 waits for nobody."""
    place = worker_place()
    _met(what, "", waits=place is not None and place.rank > 0, first=True)


def of_all(value: Any, what: str) -> list[Any]:
    """What each worker has given, by rank; tensors are on the CPU.

    In lines that run again after a restart, which others do not run, it is this worker's value for each of them. Refuses what has no form
    as JSON and tensors, and more than `points.MOST_BYTES`.
    """
    place = worker_place()
    if place is None or place.config.workers == 1:
        return [value]
    heard = _met(what, write_value(value, what))
    return [value] * place.config.workers if heard is None else [read_value(each) for each in heard]


OPS: Final = ("mean", "avg", "sum", "max", "min")


def reduced(value: Any, op: Any, what: str) -> Any:
    """The mean, sum, largest or smallest of what all workers have in training, for Lightning and Fabric."""
    name = op.lower() if isinstance(op, str) else str(getattr(op, "name", "mean" if op is None else op)).lower()
    if name not in OPS:
        refuse(f"{what} with {name} in a job; take one of {', '.join(OPS)}")
    if not _stand_together(what):
        return value
    given = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
    whole = torch.stack([one.to(given.device) for one in of_all(given, what)])
    if name in ("max", "min"):
        return whole.amax(0) if name == "max" else whole.amin(0)
    found = whole.sum(0, dtype=given.dtype)
    return found / len(whole) if name in ("mean", "avg") else found


def gathered(value: torch.Tensor, sync_grads: bool, what: str) -> torch.Tensor:
    """What all workers have in training, one after the other along a new first dimension."""
    if sync_grads:
        refuse(f"{what} with sync_grads=True in a job: gradients do not flow between workers. Compute the loss of this worker's batch")
    heard = of_all(value, what) if _stand_together(what) else [value]
    return torch.stack([one.to(value.device) for one in heard])


def _stand_together(what: str) -> bool:
    """Do workers stand at the same step? Says so where they do not."""
    job = attaching.current
    if job is None or job.clips:
        return job is not None
    mode = job.place.config.mode
    advice.tell_once("gather", f"{what} in training takes each worker's own value: in mode {mode} they do not stand at the same step")
    return False


class _Count:
    """How often each was asked since `at` was another."""

    def __init__(self) -> None:
        self._at = ""
        self._asked: Counter[str] = Counter()

    def next(self, at: str, what: str) -> int:
        """The number of this question."""
        if at != self._at:
            self._at, self._asked = at, Counter()
        self._asked[what] += 1
        return self._asked[what] - 1


_count = _Count()


def _met(what: str, said: str, waits: bool = True, first: bool = False) -> list[str] | None:
    place, job = worker_place(), attaching.current
    if place is None or place.config.workers == 1:
        return [said]
    at = records.BEFORE if job is None else _place_of(job)
    name = f"{at}, {what} {_count.next(at, what)}"

    def check() -> None:
        if job is not None:
            job.carry_out(job.session.check)

    try:
        return rendezvous.meet_workers(place, name, said, check, waits=waits and (job is None or not job.behind), first=first)
    except rendezvous.NotMet as problem:
        (refuse if job is None else job.refuse)(
            f"{what} waits for other workers: {problem}. Call it on every worker, at the same place of the script"
        )
        raise AssertionError from None


def _place_of(job: TrainingJob) -> str:
    under_way = job.places.under_way
    return f"after pass {job.places.begun}" if under_way is None else f"pass {under_way[0]}, batch {under_way[1]}"


def write_value(value: Any, what: str) -> str:
    """As text. Refuses what has no form."""
    tensors: list[torch.Tensor] = []
    try:
        body = tagged.encode_value(value, tensors)
    except tagged.Unwritable as problem:
        refuse(f"{what} between the workers of a job takes numbers, texts, tensors and lists and dicts of them: {problem}")
    parts = []
    for tensor in tensors:
        whole = memory.contiguous_values(tensor)
        raw = base64.b64encode(memory.view(whole)).decode()
        parts.append([str(whole.dtype).removeprefix("torch."), list(whole.shape), raw])
    text = json.dumps([body, parts])
    most, got = records.MOST_BYTES, len(text)
    if got > most:
        refuse(f"{what} between the workers of a job takes at most {most >> 20} MiB of each, got {got >> 20} MiB; gather less")
    return text


def read_value(text: str) -> Any:
    """What was written."""
    body, parts = json.loads(text)
    return tagged.decode_value(body, [_tensor(*part) for part in parts])


def _tensor(dtype: str, shape: list[int], raw: str) -> torch.Tensor:
    whole = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    memory.view(whole)[:] = base64.b64decode(raw)
    return whole
