"""Clipping of the mean gradient over all workers, as DDP clips it, and not of a worker's own.

`training.maxGradNorm`, `psjob.clip_grad_norm_` and, once a model is attached, torch's own functions for its parameters mean the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import utils

from psjob.api.pairs import Asking, joint
from psjob.process.errors import Refused
from psjob.worker.exchange import Clip

if TYPE_CHECKING:
    from psjob.api.attached import AttachedJob
    from psjob.api.pairs import Pair

Parameters = torch.Tensor | Iterable[torch.Tensor]


class Clipping:
    """Of an attached job. `limit` is the manifest's."""

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self.asking = Asking()
        self._last: dict[Pair, Clip] = {}
        """Of the last step of each that was made of a batch."""

    def ask(self, pairs: Sequence[Pair], clip: Clip, again: bool = False) -> None:
        """The script clips the next steps of `pairs`, by one norm. `again`: the same gradients, once more.

        Raises Refused if it has clipped one in another way already.
        """
        self.asking.ask(pairs, clip, again)

    def asked(self, pair: Pair) -> bool:
        """Does the script clip the next step of `pair`?"""
        return self.asking.of(pair) is not None

    def rows(self, pair: Pair) -> Callable[[int], bool]:
        """Is a row of the table a parameter whose gradient goes with the step of `pair`?"""
        asked = self.asking.of(pair)
        together = (pair,) if asked is None else asked.pairs
        return pair.has if len(together) == 1 else lambda row: any(each.has(row) for each in together)

    def again(self, pair: Pair) -> None:
        """The script's loop has no batch for the next step, which is clipped as the one before."""
        clip = self._last.get(pair, Clip())
        if clip != Clip():
            self.ask([pair], clip)

    def take(self, pair: Pair) -> Clip:
        """That of the step of `pair` that is made now."""
        given = self.asking.of(pair)
        self.asking.end(pair)
        asked = None if given is None else given.clip
        self._last[pair] = asked or Clip()
        return (asked or Clip()).within(Clip(norm=self._limit))


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """Clip the gradient of the step under way by its norm.

    In a job of mode sync the mean gradient over all workers is clipped, when the step is made. Its norm is taken over all parameters on all
    shards, as in DDP. Elsewhere, and for other parameters than the attached ones, this is torch's function.

    Args:
        parameters: all parameters of the attached model, those without a gradient may be missing.
        max_norm: above 0.
        norm_type: 2 in a job of mode sync.
        error_if_nonfinite: looks at this worker's own gradient in a job.
        foreach: as torch has it.

    Returns:
        The norm: in a job of mode sync that of this worker's own gradient, since that of the mean is not known yet. In a job of stages that
        is its stage's, and 0 without flush.

    Raises:
        SystemExit: with status 77 and a sentence, for another norm, or a part of the parameters, in a job of mode sync.

    Example:
        >>> import torch, psjob as ps
        >>> layer = torch.nn.Linear(2, 1); layer(torch.ones(1, 2)).sum().backward()
        >>> round(float(ps.clip_grad_norm_(layer.parameters(), 1.0)), 3)
        1.732
    """
    return utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_alone(parameters: Iterable[torch.Tensor], clip: Clip) -> None:
    """Clip gradients that lie in this process, where the workers step by themselves."""
    with torch.no_grad():
        given = list(parameters)
        if clip.value is not None:
            _plain(utils.clip_grad_value_)(given, clip.value, None)
        if clip.norm is not None:
            _plain(utils.clip_grad_norm_)(given, clip.norm, 2.0, False, None)


def install(job: AttachedJob) -> None:
    """Let torch's functions clip the mean where they are given the attached parameters, however a script has imported them."""
    _replace(utils.clip_grad_norm_, _by_norm(job))
    _replace(utils.clip_grad_value_, _by_value(job))


def _by_norm(job: AttachedJob) -> Callable[[Any], Any]:
    def replacement(plain: Any) -> Any:
        def clip(
            parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Any:
            given = _list(parameters)
            if not _of_job(job, given):
                return plain(given, max_norm, norm_type, error_if_nonfinite, foreach)
            if norm_type != 2:
                job.refuse(
                    f"norm_type is {norm_type}, and the mean gradient of all workers is clipped by its 2-norm. Take 2, or clip by value"
                )
            if float(max_norm) != math.inf:  # else the script wants to know the norm, and clips nothing
                _ask(job, given, "clip_grad_norm_", Clip(norm=_above_zero(job, "max_norm", max_norm)))
            return utils.get_total_norm([p.grad for p in given if p.grad is not None], norm_type, error_if_nonfinite, foreach)

        return clip

    return replacement


def _by_value(job: AttachedJob) -> Callable[[Any], Any]:
    def replacement(plain: Any) -> Any:
        def clip(parameters: Parameters, clip_value: float, foreach: bool | None = None) -> None:
            given = _list(parameters)
            if _of_job(job, given):
                _ask(job, given, "clip_grad_value_", Clip(value=_above_zero(job, "clip_value", clip_value)))
            else:
                plain(given, clip_value, foreach)

        return clip

    return replacement


def _list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _of_job(job: AttachedJob, given: list[torch.Tensor]) -> bool:
    """Are these the attached ones, in a mode whose update is the mean of all workers?"""
    attached = {id(p) for p in job.parameters}
    return job.clips and any(id(p) in attached for p in given)


def _ask(job: AttachedJob, given: list[torch.Tensor], name: str, clip: Clip) -> None:
    if job.tables.specs:
        job.refuse(f"{name}: the rows that lie on the shards have no part in the mean gradient that is clipped; leave clipping out")
    there = {p for p in given if p.grad is not None}
    chosen = [[pair] for pair in job.pairs if there == {p for p in pair.parameters if p.grad is not None} and _meet(pair, given)]
    if not chosen and (several := joint(job.pairs, there)):
        chosen = [several] if clip.norm is not None else [[pair] for pair in several]
    if not chosen:
        job.refuse(f"{name} was given {_told(job, there)}")
    again = job.left.clip([row for row, p in enumerate(job.parameters) if p in there])
    try:
        for pairs in chosen:
            job.clipping.ask(pairs, clip, again)
    except Refused as refused:
        job.refuse(str(refused))


def _meet(pair: Pair, given: Collection[torch.Tensor]) -> bool:
    own = {id(p) for p in pair.parameters}
    return any(id(p) in own for p in given)


def _told(job: AttachedJob, there: Collection[torch.Tensor]) -> str:
    """Why the mean gradient of a step cannot be clipped as a script asks, and what to do."""
    if strange := len([p for p in there if all(p is not own for own in job.parameters)]):
        return (
            f"{strange} parameters with a gradient that no attached optimizer has. Attach their optimizer too, or clip them by themselves"
        )
    if len(job.pairs) == 1:
        whole = sum(p.grad is not None for p in job.parameters)
        return (
            f"{len(there)} of the {whole} parameters of a step, whose mean gradient is clipped as a whole; give it model.parameters(), or "
            "set spec.training.maxGradNorm"
        )
    return (
        f"{len(there)} parameters, which are a part of what an attached optimizer has, or are in two of them. The mean gradient of a step "
        "is clipped as a whole. Call it once for each optimizer, or once for all, with all of their parameters"
    )


def _above_zero(job: AttachedJob, name: str, value: Any) -> float:
    number = float(value)
    if not number > 0:
        job.refuse(f"{name} is {number:g}, must be above 0")
    return number


def _replace(function: Any, replacement: Callable[[Any], Any]) -> None:
    """Give a decorated function of torch another inside, so that whoever imported it before has that too. Done once a process."""
    with _replacing:
        for cell in function.__closure__ or ():
            inside = cell.cell_contents
            if isinstance(cell, CellType) and isinstance(inside, FunctionType) and function not in _insides:
                _insides[function] = inside
                cell.cell_contents = replacement(inside)


def _plain(function: Any) -> Any:
    """Torch's own inside."""
    return _insides.get(function, function)


_insides: dict[Any, Any] = {}
_replacing = threading.Lock()
