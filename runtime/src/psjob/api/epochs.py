"""`epochs` and `state`: a loop that goes on in the middle after a restart, and what it carries from pass to pass."""

from __future__ import annotations

import sys
from typing import Any, Self

from psjob.api import attach as attaching
from psjob.api.attached import AttachedJob
from psjob.api.datacursor import AFTER
from psjob.api.reporting import worker_place
from psjob.api.state import State, the_state
from psjob.process.errors import Refused, refuse


def epochs(count: int | None = None) -> Epochs:
    """Loop over epochs, so that a restart goes on in the middle of one.

    A script that is started again is given the epochs that are not finished, the first of them the one that was under way. Before its
    body runs, everything is as it was when that epoch began: `ps.state`, what `attach` was given, buffers, learning rates and random
    generators. At the place in the data where the record was taken they are put back as they were there. Call it after `attach`. Several
    loops, one after the other, are known by their order. Outside a job it is `range(count)`.

    Args:
        count: how many epochs; None: until the script leaves the loop.

    Returns:
        An iterator over the numbers of the epochs, from 0. Its `len` is how many are left; without `count` it has none.

    Raises:
        Refused: for a count that is no number of epochs, and in a job before `attach`. A job's process ends with
            status 77 and the sentence.

    Example:
        >>> import psjob as ps
        >>> state = ps.state(seen=0)
        >>> for epoch in ps.epochs(3):
        ...     state.seen += 1
        >>> epoch, state.seen
        (2, 3)
    """
    __tracebackhide__ = True
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        refuse(f"ps.epochs takes a number of epochs, such as ps.epochs(10), or nothing; got {count!r:.40}")
    return Epochs(count)


class Epochs:
    """One loop over epochs; made by `psjob.epochs`."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._number: int | None = None
        """Of this loop, once it has begun in a job."""
        self._next = 0
        self._over = False
        self._left = False
        """The script has come to the loop's end in this process."""

    def __iter__(self) -> Self:
        return self

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("ps.epochs() without a count has no length")
        self._job()
        return 0 if self._is_over else self._count - self._next

    def __next__(self) -> int:
        job = self._job()
        is_over = self._is_over
        epoch = AFTER if is_over else self._next
        if job is not None and self._number is not None and not self._left:
            self._left = is_over
            job.begin_epoch(self._number, epoch, sys._getframe(1))
            if not is_over:
                job.totals.begin_epoch(self._count, epoch, job.session.clock)
        if is_over:
            raise StopIteration
        self._next += 1
        return epoch

    @property
    def _is_over(self) -> bool:
        return self._over or (self._count is not None and self._next >= self._count)

    def _job(self) -> AttachedJob | None:
        """The job; this loop has begun in it then."""
        job = _attached("ps.epochs was asked for an epoch", "everything")
        if job is not None and self._number is None:
            self._number = job.loops.begin(job.places.begun)
            over, at = job.loops.was_over(self._number), job.loops.was_at(self._number)
            if over is not None:
                self._over, job.places.begun = True, over
            elif at is not None:
                self._next, job.places.begun = at
        return job


def state(**first: Any) -> State:
    """Declare what the script carries from pass to pass, such as the best loss so far; a restart puts it back.

    In a job the values are in every resume record of this worker. They are read and assigned after `attach`. A restart puts them back
    before the first line that can read them. At the place in the data where the record was taken it puts them back again. Outside a job
    they are plain attributes.

    Args:
        first: by name, first values: numbers, texts, None, lists, dicts, sets, tensors and arrays, or objects with `state_dict` and
            `load_state_dict`, such as a scheduler that is made after `attach`. Tensors come back on the CPU, unless there is one of that
            name and shape.

    Returns:
        The one namespace of this process: `state.best`, `state.best = 0.5`. Further calls add names to it.

    Raises:
        Refused: for a name that is given twice, for a value that could not be put back, and in a job where a value is read or assigned
            before `attach`. A job's process ends with status 77 and the sentence.

    Example:
        >>> import psjob as ps
        >>> state = ps.state(best=0.0, history=[])
        >>> state.best = 0.5
        >>> state.history.append(state.best)
        >>> state.best, state.history
        (0.5, [0.5])
    """
    __tracebackhide__ = True
    one = the_state(lambda how: _attached(f"ps.state was {how}", "the values"))
    try:
        one._declare(first)
    except Refused as refused:
        refuse(str(refused))
    return one


def _attached(done: str, back: str) -> AttachedJob | None:
    """The job, and None outside one; before `attach` the script has `done` what it may not, and this process ends."""
    if worker_place() is None:
        return None
    attaching.settle()
    if attaching.current is None:
        refuse(f"{done} before attach; call attach first: a restart puts {back} back there")
    return attaching.current
