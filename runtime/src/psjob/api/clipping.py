"""Clipping of the mean gradient over all workers, as DDP clips it, and not of a worker's own.

`training.sync.maxGradNorm`, `psjob.clip_grad_norm_` and, once a model is attached, torch's own functions for its parameters mean the same.

Several optimizers may be clipped by one norm, as the whole model's with Muon and AdamW. The norm is that of all their mean gradients, so
the first of their steps pushes them all. If the shards step, they update all of these parameters then. If the workers step, each
keeps the clipped means of the others. The steps of the others follow, and push nothing.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any, NoReturn

import torch
from torch.nn import utils

from psjob.api.attachable import Pair
from psjob.api.script_changes import LeftGradients
from psjob.layout import devices
from psjob.process.errors import Refused
from psjob.worker.exchange import GradientClip

Parameters = torch.Tensor | Iterable[torch.Tensor]


class Clipping:
    """Of an attached job. `limit` is the manifest's.

    `applies`: a step is the mean over all workers, so that what is clipped is that. `rows`: some lie on the shards. `refuse` ends the
    process with a sentence.
    """

    def __init__(
        self, limit: float | None, pairs: Sequence[Pair], parameters: Sequence[torch.Tensor], left: LeftGradients, applies: bool,
        rows: bool, refuse: Callable[[str], NoReturn],
    ) -> None:  # fmt: skip
        self._limit, self._parameters, self._left, self._applies, self._rows = limit, parameters, left, applies, rows
        self._refuse = refuse
        self.pairs = pairs
        """Those that are attached now."""
        self._asked: dict[Pair, ClipRequest] = {}
        """What the script asks for between two steps."""
        self._due: dict[Pair, Pushed] = {}
        """Steps that are still to follow."""
        self._last: dict[Pair, GradientClip] = {}
        """Of the last step of each that was made of a batch."""

    def asked(self, pair: Pair) -> bool:
        """Does the script clip the next step of `pair`?"""
        return pair in self._asked

    def rows(self, pair: Pair) -> Callable[[int], bool]:
        """Is a row of the table a parameter whose gradient goes with the step of `pair`?"""
        asked = self._asked.get(pair)
        together = (pair,) if asked is None else asked.pairs
        return pair.has if len(together) == 1 else lambda row: any(each.has(row) for each in together)

    def again(self, pair: Pair) -> None:
        """The script's loop has no batch for the next step, which is clipped as the one before."""
        clip = self._last.get(pair, GradientClip())
        if clip != GradientClip():
            self.ask([pair], clip)

    def take(self, pair: Pair) -> GradientClip:
        """That of the step of `pair` that is made now."""
        asked = self._asked.pop(pair, None)
        self._last[pair] = clip = GradientClip() if asked is None else asked.clip
        return clip.within(GradientClip(norm=self._limit))

    @property
    def waits(self) -> bool:
        """Are there steps whose gradients were pushed, and that were not made?"""
        return bool(self._due)

    def check_over(self) -> None:
        """Raises Refused if such a step is missing."""
        if self._due:
            late = next(iter(self._due))
            raise Refused(
                f"{optimizer_name(late)} was clipped by one norm with another optimizer, which made its step, and "
                f"{optimizer_name(late)} made none. Make the steps of all that are clipped together, one after the other, or clip each by "
                "its own parameters"
            )

    def ask(self, pairs: Sequence[Pair], clip: GradientClip, again: bool = False) -> None:
        """The script clips the next steps of `pairs`, by one norm. `again`: the same gradients, once more.

        Raises Refused if it has clipped one in another way already.
        """
        self.check_over()
        tightest = clip
        for pair in pairs:
            before = self._asked.get(pair)
            if before is not None and (before.clip.norm is None) != (clip.norm is None):
                raise Refused("a step is clipped by norm and by value, and the shards are not told which comes first. Clip in one way")
            if before is not None and clip.norm is not None and set(before.pairs) != set(pairs):
                raise Refused(
                    f"{optimizer_name(pair)} is clipped by its own norm and by one with other optimizers before its step, and the shards "
                    "clip once. Clip in one way"
                )
            if before is not None and again:
                tightest = tightest.within(before.clip)
        self._asked.update(dict.fromkeys(pairs, ClipRequest(tightest, tuple(pairs))))

    def begin(self, pair: Pair) -> Pushed | None:
        """A step of `pair` is made: what was pushed of it already, or None. Raises Refused if another one is due."""
        pushed = self._due.pop(pair, None)
        if pushed is None:
            self.check_over()
            asked = self._asked.get(pair)
            if asked is None:
                self._check_apart(pair)
            for other in () if asked is None else asked.pairs:
                if other is not pair:
                    self._asked.pop(other, None)
                    self._due[other] = Pushed(other)
        return pushed

    def note(self, skipped: bool) -> None:
        """The gradients of the step under way, and of those that follow, were pushed."""
        for pushed in self._due.values():
            pushed.note(skipped)

    def end(self, pair: Pair) -> None:
        """A step of `pair` is over, also one that was not made: the next one may be clipped in another way."""
        self._asked.pop(pair, None)

    def _check_apart(self, pair: Pair) -> None:
        """Raises Refused for a step of parameters that were clipped for an optimizer that has them too."""
        for other, asked in self._asked.items():
            if not set(other.rows).isdisjoint(pair.rows) and asked.clip.norm is not None:
                raise Refused(
                    f"{optimizer_name(pair)} makes a step, and its gradients were clipped by one norm with all those of "
                    f"{optimizer_name(other)}, which has them too. Clip the parameters of the optimizer that steps next"
                )

    def install(self) -> None:
        """Let torch's functions clip the mean where they are given the attached parameters, however a script has imported them."""
        _replace(utils.clip_grad_norm_, self._by_norm)
        _replace(utils.clip_grad_value_, self._by_value)

    def _by_norm(self, plain: Any) -> Any:
        def clip(
            parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
        ) -> Any:
            given = _list(parameters)
            if not self._of_job(given):
                return plain(given, max_norm, norm_type, error_if_nonfinite, foreach)
            if norm_type != 2:
                self._refuse(
                    f"norm_type is {norm_type}, and the mean gradient of all workers is clipped by its 2-norm. Take 2, or clip by value"
                )
            if float(max_norm) != math.inf:  # else the script wants to know the norm, and clips nothing
                self._clip(given, "clip_grad_norm_", GradientClip(norm=self._above_zero("max_norm", max_norm)))
            return utils.get_total_norm([p.grad for p in given if p.grad is not None], norm_type, error_if_nonfinite, foreach)

        return clip

    def _by_value(self, plain: Any) -> Any:
        def clip(parameters: Parameters, clip_value: float, foreach: bool | None = None) -> None:
            given = _list(parameters)
            if self._of_job(given):
                self._clip(given, "clip_grad_value_", GradientClip(value=self._above_zero("clip_value", clip_value)))
            else:
                plain(given, clip_value, foreach)

        return clip

    def _of_job(self, given: list[torch.Tensor]) -> bool:
        """Are these the attached ones, in a mode whose update is the mean of all workers?"""
        attached = {id(p) for p in self._parameters}
        return self._applies and any(id(p) in attached for p in given)

    def _clip(self, given: list[torch.Tensor], name: str, clip: GradientClip) -> None:
        if devices.capturing():
            self._refuse(devices.in_capture(name, "clip after each replay, right before optimizer.step()"))
        if self._rows:
            self._refuse(f"{name}: the rows that lie on the shards have no part in the mean gradient that is clipped; leave clipping out")
        there = {p for p in given if p.grad is not None}
        chosen = [[pair] for pair in self.pairs if there == {p for p in pair.parameters if p.grad is not None} and _meet(pair, given)]
        if not chosen and (several := joint(self.pairs, there)):
            chosen = [several] if clip.norm is not None else [[pair] for pair in several]
        if not chosen:
            self._refuse(f"{name} was given {_told(self.pairs, self._parameters, there)}")
        again = self._left.clip([row for row, p in enumerate(self._parameters) if p in there])
        try:
            for pairs in chosen:
                self.ask(pairs, clip, again)
        except Refused as refused:
            self._refuse(str(refused))

    def _above_zero(self, name: str, value: Any) -> float:
        number = float(value)
        if not number > 0:
            self._refuse(f"{name} is {number:g}, must be above 0")
        return number


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


def clip_alone(parameters: Iterable[torch.Tensor], clip: GradientClip) -> None:
    """Clip gradients that lie in this process, where the workers step by themselves."""
    with torch.no_grad():
        given = list(parameters)
        if clip.value is not None:
            _plain(utils.clip_grad_value_)(given, clip.value, None)
        if clip.norm is not None:
            _plain(utils.clip_grad_norm_)(given, clip.norm, 2.0, False, None)


@dataclass(frozen=True)
class ClipRequest:
    """How a script clips the next steps of these."""

    clip: GradientClip
    pairs: tuple[Pair, ...]


@dataclass
class Pushed:
    """The gradients of a step that is still to come, which went with the step of another optimizer."""

    pair: Pair
    skipped: bool = False
    """The shards made no update of them."""
    _seen: list[tuple[torch.Tensor, weakref.ref[torch.Tensor] | None, int]] = field(default_factory=list)

    def note(self, skipped: bool) -> None:
        """They were pushed just now."""
        self.skipped = skipped
        self._seen = [(p, None if p.grad is None else weakref.ref(p.grad), _version(p.grad)) for p in self.pair.parameters]

    def check(self) -> None:
        """Raises Refused if they are not what they were then."""
        for p, grad, version in self._seen:
            if p.grad is not (None if grad is None else grad()) or _version(p.grad) != version:
                raise Refused(
                    f"a gradient of {optimizer_name(self.pair)} of shape {tuple(p.shape)} was changed or cleared between the step of "
                    "another optimizer and its own, and one norm clips both. Make the steps one after the other, and call zero_grad after "
                    "the last"
                )


def joint(pairs: Sequence[Pair], given: Collection[torch.Tensor]) -> list[Pair]:
    """Those whose parameters with a gradient are together all of `given`, none in two of them; empty: no such ones."""
    wanted = {id(p) for p in given}
    found: list[Pair] = []
    seen: set[int] = set()
    for pair in pairs:
        own = {id(p) for p in pair.parameters if p.grad is not None}
        if own and own <= wanted:
            if own & seen:
                return []
            found.append(pair)
            seen |= own
    return found if seen == wanted else []


def optimizer_name(pair: Pair) -> str:
    """The optimizer, for a reader: its class, and the model's name if it has one."""
    return f"{pair.plain.__name__} of {pair.name}" if pair.name else pair.plain.__name__


def _version(grad: torch.Tensor | None) -> int:
    return -1 if grad is None else grad._version


def _list(parameters: Parameters) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _meet(pair: Pair, given: Collection[torch.Tensor]) -> bool:
    own = {id(p) for p in pair.parameters}
    return any(id(p) in own for p in given)


def _told(pairs: Sequence[Pair], parameters: Sequence[torch.Tensor], there: Collection[torch.Tensor]) -> str:
    """Why the mean gradient of a step cannot be clipped as a script asks, and what to do."""
    if strange := len([p for p in there if all(p is not own for own in parameters)]):
        return (
            f"{strange} parameters with a gradient that no attached optimizer has. Attach their optimizer too, or clip them by themselves"
        )
    if len(pairs) == 1:
        whole = sum(p.grad is not None for p in parameters)
        return (
            f"{len(there)} of the {whole} parameters of a step, whose mean gradient is clipped as a whole; give it model.parameters(), or "
            "set spec.training.sync.maxGradNorm"
        )
    return (
        f"{len(there)} parameters, which are a part of what an attached optimizer has, or are in two of them. The mean gradient of a step "
        "is clipped as a whole. Call it once for each optimizer, or once for all, with all of their parameters"
    )


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
