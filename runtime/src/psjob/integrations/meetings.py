"""Points of the script at which all workers meet, for libraries whose loops have barriers and gather values.

Points are counted: by what was asked before `attach`, and after it by the pass over the data, the batch of it, and what was asked since.
So a worker that begins again comes to the same points, and hears what was said there."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import torch

from psjob.api import attach as attaching
from psjob.api.reporting import worker_place
from psjob.api.training_job import TrainingJob
from psjob.layout import memory
from psjob.process.errors import refuse
from psjob.protocol import records
from psjob.resume import tagged
from psjob.worker import rendezvous


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


def everyone(what: str) -> None:
    """Wait until all workers have called this. In a job `what` names the call to people who wait."""
    _met(what, "")


def first(what: str) -> None:
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
    heard = _met(what, written(value, what))
    return [value] * place.config.workers if heard is None else [read(each) for each in heard]


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
        return rendezvous.meet(place, name, said, check, waits=waits and (job is None or not job.behind), first=first)
    except rendezvous.NotMet as problem:
        (refuse if job is None else job.refuse)(
            f"{what} waits for other workers: {problem}. Call it on every worker, at the same place of the script"
        )
        raise AssertionError from None


def _place_of(job: TrainingJob) -> str:
    under_way = job.places.under_way
    return f"after pass {job.places.begun}" if under_way is None else f"pass {under_way[0]}, batch {under_way[1]}"


def written(value: Any, what: str) -> str:
    """As text. Refuses what has no form."""
    tensors: list[torch.Tensor] = []
    try:
        body = tagged.encode(value, tensors)
    except tagged.Unwritable as problem:
        refuse(f"{what} between the workers of a job takes numbers, texts, tensors and lists and dicts of them: {problem}")
    parts = []
    for tensor in tensors:
        whole = memory.plain(tensor)
        raw = base64.b64encode(memory.view(whole)).decode()
        parts.append([str(whole.dtype).removeprefix("torch."), list(whole.shape), raw])
    text = json.dumps([body, parts])
    most, got = records.MOST_BYTES, len(text)
    if got > most:
        refuse(f"{what} between the workers of a job takes at most {most >> 20} MiB of each, got {got >> 20} MiB; gather less")
    return text


def read(text: str) -> Any:
    """What was written."""
    body, parts = json.loads(text)
    return tagged.decode(body, [_tensor(*part) for part in parts])


def _tensor(dtype: str, shape: list[int], raw: str) -> torch.Tensor:
    whole = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
    memory.view(whole)[:] = base64.b64decode(raw)
    return whole
