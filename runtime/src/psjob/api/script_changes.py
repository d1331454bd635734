"""What a script changes by itself in weights and gradients, and the sentences that say so.

- `WeightGuard`: weights that it changes between two steps. The shards hold the weights, so the next step would undo such a change.
- `OwnGradients`: gradients that it changes between backward and step, where DDP has the mean; and sparse ones.
- `LeftGradients`: gradients that a step has left, and that it continues with in place of clearing them; and those that change after they
  were clipped. No record holds them, so a script that was started again has none where the process before had some. And where the shards
  clip, those of the worker are as they were before. A script that clears them first never sees that; one that adds to them is refused.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

import torch

from psjob.api import advice
from psjob.layout import devices, memory
from psjob.worker.session import WorkerSession

VALUES: Final = 1 << 14
"""Values that one look reads. A model of fewer is compared as a whole."""
LEAST: Final = 8
"""Values of each parameter, where it has so many."""
ROWS: Final = 1024
"""Parameters that one look reads. Of more the looks take turns."""
ROUNDING: Final = 8
"""Units in the last place of the largest value: what adding to weights and subtracting the same leaves behind is no change."""


@dataclass(frozen=True)
class Change:
    """`seen` says what a parameter was and is."""

    row: int
    seen: str


@dataclass
class _Look:
    """If a parameter lies, and a view of some of its values."""

    place: int
    kind: tuple[torch.Size, torch.dtype, torch.device]
    values: torch.Tensor


@dataclass
class _Turn:
    """Parameters that are looked at together; those of a device and size of number are read as one tensor."""

    rows: list[int]
    groups: list[list[int]] = field(default_factory=list)
    views: list[list[torch.Tensor]] = field(default_factory=list)

    def read(self) -> list[torch.Tensor]:
        """The values as they are, for each group."""
        return [torch.cat(views) for views in self.views]


class LentWeights(Protocol):
    """What is known of weights that live in memory which the shards lend: they write there, and this process has pages of its own."""

    def shows(self, row: int) -> bool:
        """Are a row's values the shard's own memory, which may move on by itself?"""

    def untouched(self) -> bool:
        """Do all weights live there, and has this process written to none of their pages?"""

    def held(self, row: int) -> torch.Tensor:
        """A copy of what the shards hold of a row, 1-D."""


class WeightChangeDetector:
    """Of weights that all live in the shards' `lent` memory no value is read until this process has written to one of their pages."""

    def __init__(self, parameters: Sequence[torch.Tensor], lent: LentWeights) -> None:
        self._parameters, self._lent = parameters, lent
        there = [row for row, p in enumerate(parameters) if _readable(p)]
        self._count = max(LEAST, VALUES // max(1, min(len(there), ROWS)))
        self._turns = [_Turn(there[begin : begin + ROWS]) for begin in range(0, len(there), ROWS)]
        self._looks: dict[int, _Look] = {}
        self._now: _Turn | None = None
        """Of the last `remember`; None while a step is under way."""
        self._held: list[torch.Tensor] | None = []
        """None: the shards' memory holds what they were."""
        self._versions: list[int] = []
        self._doubted: set[int] = set()
        """Written to in place without a change of the values that were looked at."""
        self._whole: dict[int, torch.Tensor] = {}
        """Copies of those."""

    def forget(self) -> None:
        """A step begins: where it does not come to its end, nobody knows what the weights should be."""
        self._now = None

    def remember(self) -> None:
        """The weights are the job's now."""
        if not self._turns:
            return
        turn = self._turns.pop(0)
        self._turns.append(turn)
        with torch.no_grad():
            self._find(turn)
            self._held = None if self._lent.untouched() else turn.read()
            self._versions = [_version(self._parameters[row]) for row in turn.rows]
            self._whole = {row: self._parameters[row].detach().clone() for row in self._doubted}
        self._doubted.clear()
        self._now = turn

    def change(self) -> Change | None:
        """The first parameter that is not as it was remembered."""
        if self._now is None:
            return None
        with torch.no_grad():
            moved = self._find(self._now)
            for row, before in moved:
                kind = self._looks[row].kind
                if before != kind:
                    return Change(row, f"it was {_kind(before)} and is {_kind(kind)}")
            if self._held is None:
                found = self._of_lent(self._now.rows if not self._lent.untouched() else [row for row, _ in moved])
            else:
                found = self._of_values(self._now, self._held)
            return found or self._elsewhere(self._now)

    def _of_lent(self, rows: Iterable[int]) -> Change | None:
        for row in rows:
            p = self._parameters[row]
            before = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="cpu")
            before.copy_(self._lent.held(row).view(p.shape))
            if (found := self._seen(row, _sample(before, self._count), self._looks[row].values.to("cpu"))) is not None:
                return found
        return None

    def _of_values(self, turn: _Turn, whole: list[torch.Tensor]) -> Change | None:
        for rows, held, now in zip(turn.groups, whole, turn.read(), strict=True):
            if torch.equal(held, now):
                continue
            sizes = [self._looks[row].values.numel() for row in rows]
            for row, before, after in zip(rows, torch.split(held, sizes), torch.split(now, sizes), strict=True):
                if (found := self._seen(row, before, after)) is not None:
                    return found
        return None

    def _elsewhere(self, turn: _Turn) -> Change | None:
        """Of parameters that were written to, beside the values that are looked at: of those the whole is compared next time."""
        for row, version in zip(turn.rows, self._versions, strict=True):
            p = self._parameters[row]
            if version == _version(p):
                continue
            self._doubted.add(row)
            if row in self._whole and (found := self._seen(row, *(memory.bits(t).flatten() for t in (self._whole[row], p)))) is not None:
                return found
        return None

    def _seen(self, row: int, before: torch.Tensor, now: torch.Tensor) -> Change | None:
        found = _difference(before, now, self._parameters[row].dtype)
        return None if found is None or self._lent.shows(row) else Change(row, found)

    def _find(self, turn: _Turn) -> list[tuple[int, tuple[torch.Size, torch.dtype, torch.device]]]:
        """Look where each parameter lies now; rows and what they were before, of those that lie elsewhere."""
        moved = []
        for row in turn.rows:
            p, look = self._parameters[row], self._looks.get(row)
            if look is None or look.place != p.data_ptr():
                kind = p.shape, p.dtype, p.device
                moved.append((row, kind if look is None else look.kind))
                self._looks[row] = _Look(p.data_ptr(), kind, _sample(p.detach(), self._count))
        if moved:
            kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for row in turn.rows:
                values = self._looks[row].values
                kinds.setdefault((values.device, values.dtype), []).append(row)
            turn.groups = list(kinds.values())
            turn.views = [[self._looks[row].values for row in rows] for rows in turn.groups]
        return moved


def _readable(p: torch.Tensor) -> bool:
    return p.layout is torch.strided and p.device.type != "meta" and type(p.data) is torch.Tensor and p.numel() > 0


def _version(p: torch.Tensor) -> int:
    return 0 if p.is_inference() else p._version


def _sample(p: torch.Tensor, count: int) -> torch.Tensor:
    """A view of at most `count` values, spread over `p`."""
    p = memory.bits(p)
    dense = p.permute(sorted(range(p.dim()), key=p.stride, reverse=True))
    if not dense.is_contiguous():
        return p.as_strided((min(*p.shape, count, count),), (sum(p.stride()),))
    step = max(1, p.numel() // count)
    step -= step > 1 and step % 2 == 0  # odd, so that of a power of two columns each has its turn
    return dense.view(-1)[::step][:count]


def _difference(before: torch.Tensor, now: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What of two views of bits differs by more than rounding."""
    dtype = dtype.to_real()
    old, new = before.view(dtype), now.view(dtype)
    other = before != now
    if dtype.is_floating_point:
        limit = ROUNDING * torch.finfo(dtype).eps * old.abs().nan_to_num(0.0, 0.0, 0.0).max()
        other &= ~((new - old).abs() <= limit)
    places = other.nonzero()
    if not len(places):
        return None
    place = int(places[0])
    several = f", one of {len(places)}" if len(places) > 1 else ""
    was, is_now = old[place].item(), new[place].item()
    digits = 4 if f"{was:.4g}" != f"{is_now:.4g}" else 9
    return f"a value was {was:.{digits}g} and is {is_now:.{digits}g}{several}"


def _kind(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"


class _SharedWeights:
    """`LentWeights` of the data path of now."""

    def __init__(self, session: WorkerSession, parameters: Sequence[torch.Tensor]) -> None:
        self._session, self._parameters = session, parameters

    def shows(self, row: int) -> bool:
        return self._session.exchange.sharing.shows(row, self._parameters[row])

    def untouched(self) -> bool:
        return self._session.exchange.sharing.untouched()

    def held(self, row: int) -> torch.Tensor:
        return self._session.exchange.sharing.held(row)


class WeightGuard:
    """Of an attached job. If the workers step by themselves, or weights land while the script runs, it looks until the first step.

    `refuse` ends the process with a sentence, and `carry_out` runs a call of the session.
    """

    def __init__(
        self, session: WorkerSession, parameters: Sequence[torch.Tensor], steps_alone: bool, lands_later: bool,
        carry_out: Callable[[Callable[[], Any]], Any], refuse: Callable[[str], NoReturn],
    ) -> None:  # fmt: skip
        self._session, self._steps_alone, self._lands_later = session, steps_alone, lands_later
        self._carry_out, self._refuse = carry_out, refuse
        self._placement = devices.Placement([], [])
        self._parameters = parameters
        self._weights = WeightChangeDetector(parameters, _SharedWeights(session, parameters))

    def joined(self) -> None:
        """The model holds the job's weights for the first time."""
        self._placement = devices.Placement([spec.name for spec in self._session.layout.table], self._parameters)
        self._weights.remember()

    def stepped(self) -> None:
        """The shards have answered a step."""
        if not self._lands_later:
            self._weights.remember()

    def forget(self) -> None:
        """The weights are the script's."""
        self._weights.forget()

    def refuse_before_step(self) -> None:
        """The next step would undo what was changed."""
        self.refuse_moved()
        if not self._steps_alone and (found := self._change()) is not None:
            self._refuse(
                f"parameter {found[0]} was changed by hand after step {self._session.clock} ({found[1].seen}), and the shards hold "
                "the weights. Change them before attach or under a parametrization, put them back before a step, or set "
                "training.updateAt: worker"
            )
        self._weights.forget()

    def refuse_before_landing(self) -> None:
        """The answer to a push under way would undo what was changed."""
        self.refuse_moved()
        if (found := self._change()) is not None:
            self._refuse(
                f"parameter {found[0]} was changed by hand ({found[1].seen}) while a push was under way, whose answer takes its place. "
                "Call ps.wait() before weights are changed, and put them back before a step"
            )
        self._weights.forget()

    def refuse_moved(self) -> None:
        """In every mode: the shards, and the copies from and to the model, are made for what was there at attach."""
        if problem := self._placement.moved():
            self._carry_out(self._session.check)  # the shards may have begun anew
            self._refuse(f"{problem}. The shards have the job's weights as they were at attach. {devices.MOVE_BEFORE}")

    def refuse_without_step(self, made: int) -> None:
        """The script trains in another way than by the attached optimizer, of which it has come through `made` steps."""
        if made == 0:
            self.refuse_moved()
        if made == 0 and (found := self._change()) is not None:
            self._refuse(
                f"parameter {found[0]} was changed by hand ({found[1].seen}), and no step of the attached optimizer was made. "
                "Train with optimizer.step() of the one that was given to attach"
            )

    def leave(self, made: int) -> bool:
        """The job ends, after `made` steps, with the weights of the last; has the script left them in the model?"""
        self.refuse_without_step(made)
        if problem := self._placement.moved(all_of_them=True):
            if self._steps_alone:
                self._refuse(f"{problem}, and the job takes its last weights from the workers. Move or cast a copy of the model")
            print(
                f"psjob: {problem}; final.safetensors holds the weights of the last step as they were at attach",
                file=sys.stderr,
                flush=True,
            )
            self._weights.forget()
            return False
        found = None if self._steps_alone else self._change()
        if found is not None:
            print(
                f"psjob: parameter {found[0]} was changed by hand after the last step ({found[1].seen}); final.safetensors holds the "
                "weights of that step. Keep others by torch.save",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        self._weights.forget()
        return found is None

    def once(self, name: str, loss: Any) -> Callable[[], Any]:
        """A closure for the optimizer's own step: `loss` is what the script's gave at the weights with which the step begins."""
        self._weights.remember()
        asked = False

        def again() -> Any:
            nonlocal asked
            if asked or self._weights.change() is not None:
                self._refuse(
                    f"{name} evaluates its closure at other weights inside its step, whose gradients a job does not "
                    "average. Move the weights in the script, put them back, and step torch's optimizer"
                )
            asked = True
            return loss

        return again

    def _change(self) -> tuple[str, Change] | None:
        """What the script has written into a parameter since, after its name."""
        change = self._weights.change()
        if change is None:
            return None
        self._carry_out(self._session.check)  # the shards may have begun anew
        return self._session.layout.table[change.row].name, change


STEPS = 3
"""Looked at from the first on."""


class OwnGradients:
    """Tells of it once, on standard error. `names` are the parameters'."""

    def __init__(self, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self._parameters, self._names = parameters, names
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, the gradient that backward left, and its version then."""
        self._steps = 0
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._seen(row))  # type: ignore[no-untyped-call]
            for row, p in enumerate(parameters)
            if p.requires_grad and p.is_leaf
        ]

    def step(self, rows: Iterable[int], scaled: bool) -> None:
        """A step is made of the gradients of `rows`. Those that a GradScaler has unscaled are `scaled`, and not looked at."""
        if not self._hooks:
            return
        changed = next((row for row in rows if self._changed(row)), None) if not scaled else None
        self._steps += 1
        if changed is not None:
            print(
                f"psjob: the gradient of {self._names[changed]} was changed by hand before optimizer.step(). It is this worker's own, and "
                "the mean is taken after the change; clip_grad_norm_ and clip_grad_value_ clip the mean",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        if changed is not None or self._steps == STEPS:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _seen(self, row: int) -> Callable[[torch.Tensor], None]:
        def hook(p: torch.Tensor) -> None:
            if p.grad is not None and not p.grad._is_view():  # those of one memory count their versions together
                self._left[row] = weakref.ref(p.grad), p.grad._version

        return hook

    def _changed(self, row: int) -> bool:
        now, left = self._parameters[row].grad, self._left.get(row)
        return now is not None and left is not None and (left[0]() is not now or left[1] != now._version)


WATCHED: Final = 8
"""So many parameters, the smallest ones, are looked at."""


class WatchedGradients:
    """Of a few small parameters: have their gradients changed since the script was given a batch, or since its last step?

    For `is_graphed` see `LeftGradients`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], is_graphed: Callable[[torch.Tensor], bool]) -> None:
        self._is_graphed = is_graphed
        self.small = sorted((p for p in parameters if p.requires_grad), key=torch.Tensor.numel)[:WATCHED]
        self._given: list[tuple[torch.Tensor | None, int]] = []
        self._left: list[tuple[weakref.ref[torch.Tensor] | None, int]] = []
        """After the last step; the gradients need not be kept for that."""

    def batch_given(self) -> None:
        """The script is given a batch: a later change shows that it was used."""
        self._given = self._now()

    def step_made(self) -> None:
        """The script has made a step, or a step was made for it."""
        self._left = [(None if grad is None else weakref.ref(grad), version) for grad, version in self._now()]

    @property
    def changed(self) -> bool:
        """Have gradients changed since the last batch was given?"""
        return not self.small or bool(self._changed_since(self._given))

    @property
    def waiting(self) -> bool:
        """Do gradients wait that were added after the last step? No record holds them."""
        left = [(None if ref is None else ref(), version) for ref, version in self._left] or [(None, -1)] * len(self.small)
        return any(p.grad is not None and not self._is_graphed(p.grad) and bool(p.grad.any()) for p in self._changed_since(left))

    def _changed_since(self, then: Sequence[tuple[torch.Tensor | None, int]]) -> list[torch.Tensor]:
        """Those whose gradient is another one than then, or was written to."""
        pairs = zip(self.small, then, strict=False)
        return [p for p, (grad, version) in pairs if p.grad is not grad or (grad is not None and grad._version != version)]

    def _now(self) -> list[tuple[torch.Tensor | None, int]]:
        return [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.small]


def dense(parameters: Sequence[torch.Tensor], names: Sequence[str], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Sparse gradients as dense ones, of which the rules of the shards make the same step. A log line says that they are sent so."""
    sparse = [row for row, g in enumerate(grads) if g is not None and g.layout is not torch.strided]
    size = sum(parameters[row].nbytes for row in sparse)
    advice.tell_once(
        "sparse",
        f"sparse gradients, such as that of {names[sparse[0]]}, are sent as dense ones: {size / 1e6:.1f} MB per step. ps.Embedding sends "
        "the rows of a batch only",
    )
    for row in sparse:
        parameters[row].grad = parameters[row].grad.to_dense()  # type: ignore[union-attr]
    return [parameters[row].grad if row in sparse else g for row, g in enumerate(grads)]


NAME: Final = "gradients left"
"""Of these in a resume record."""
LOST: Final = (
    "a gradient that the step before has left was added to, or used again, after a restart, and no record holds it. Call zero_grad before "
    "the first backward of each step, and make no step without a backward"
)
UNCLIPPED: Final = (
    "a gradient that the step before has left was clipped by the shards at the last step, and is added to, or used again, as it was "
    "before. Call zero_grad before the first backward of each step, or set training.updateAt: worker"
)
CHANGED: Final = (
    "a gradient was changed after it was clipped, and the mean gradient of a step is clipped as the step is made. Clip right before each "
    "step, when its gradients are complete"
)


class LeftGradients:
    """Of all parameters. A few small ones show what becomes of all: those of `watched`, by row.

    A gradient that was made while a CUDA graph is captured is written by each replay, which no version counts. It is taken for fresh.
    """

    counts_again = True
    """It is put back where the script stands, and not before."""

    def __init__(self, parameters: Sequence[torch.Tensor], watched: Collection[int]) -> None:
        self._parameters, self._watched = parameters, tuple(watched)
        self._stepped: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, the gradient as it was after the last step, and its version."""
        self._armed: dict[int, tuple[weakref.ref[torch.Tensor], int, str]] = {}
        """By row, a gradient that is to be cleared before it is used, its version, and why."""
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        """By row, a gradient that was added to before it was cleared, and why no step may be made of it."""
        self._clipped: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By row, a gradient as it was when the script clipped it for the step that comes."""
        self._graphed: dict[int, weakref.ref[torch.Tensor]] = {}
        """By row, a gradient that was made in a capture."""
        self._hooks: dict[int, Any] = {
            row: self._parameters[row].register_post_accumulate_grad_hook(self._added(row))  # type: ignore[no-untyped-call]
            for row in self._watched
            if parameters[row].requires_grad  # a frozen one has no such hook, and is looked at by the step itself
        }
        self._pushed: Sequence[torch.Tensor | None] = ()
        """The gradients of the step that is made now, by row; empty: none is made, or nobody has said them."""
        self._within: Callable[[int], bool] = _none
        """Rows of the step that is made now: a record may be made before it is over, of the moment after it."""

    def problem(self, rows: Callable[[int], bool]) -> str:
        """Why the step that is made now, of these rows, would be wrong; empty: it is not."""
        self._within = rows
        if any(rows(row) and not self._is_as(row, then) for row, then in self._clipped.items()):
            return CHANGED
        again = (why for row, (_, _, why) in self._armed.items() if rows(row) and self._is_as(row, self._armed[row][:2]))
        used = (why for row, (grad, why) in self._used.items() if rows(row) and grad() is self._parameters[row].grad is not None)
        return next(used, "") or next(again, "")

    def pushed(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """The step that is made now is of these gradients, by row. They stay with their parameters until it is over."""
        self._pushed = gradients

    def clip(self, rows: Collection[int]) -> bool:
        """The script clips the gradients of these rows, which is done in the step that comes. Were the same ones clipped before?"""
        again = any(row in self._clipped and self._is_as(row, self._clipped[row]) for row in rows)
        for row in set(self._watched).intersection(rows):
            if (grad := self._parameters[row].grad) is not None:
                self._clipped[row] = weakref.ref(grad), grad._version
        return again

    def forget(self, rows: Callable[[int], bool]) -> None:
        """A step of these rows is over, also one that was not made."""
        self._pushed = ()
        self._clipped = {row: then for row, then in self._clipped.items() if not rows(row)}

    def stepped(self, rows: Callable[[int], bool], clipped: bool) -> None:
        """A step of these rows was made. `clipped`: on the shards only."""
        self._within, self._pushed = _none, ()
        for row in filter(rows, self._watched):
            self._armed.pop(row, None)
            self._stepped.pop(row, None)
            if (grad := self._parameters[row].grad) is not None:
                self._stepped[row] = weakref.ref(grad), grad._version
        if clipped:
            self._arm(filter(rows, list(self._stepped)), UNCLIPPED)

    def state_dict(self) -> dict[str, Any]:
        """Rows that have a gradient; whether the script has cleared it since the last step."""
        pushed = self._pushed or [None] * len(self._parameters)  # to ask a parameter for its gradient takes ten times as long
        there = [row for row, g in enumerate(pushed) if g is not None or self._parameters[row].grad is not None]
        left = [row for row, then in self._stepped.items() if not self._within(row) and self._is_as(row, then)]
        left += [row for row in filter(self._within, self._watched) if self._parameters[row].grad is not None]
        return {"rows": there, "cleared": not left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Zeros in the place of gradients that no record holds, to be cleared before they are used; nothing else was known to be there."""
        rows = [row for row in state.get("rows", ()) if row < len(self._parameters)]
        for row in rows:
            p = self._parameters[row]
            if p.grad is None and p.is_leaf:
                p.grad = torch.zeros_like(p)
        if rows and not state.get("cleared", True):
            self._arm(rows, LOST)

    def _is_as(self, row: int, then: tuple[weakref.ref[torch.Tensor], int]) -> bool:
        grad = self._parameters[row].grad
        return grad is not None and then[0]() is grad and then[1] == grad._version

    def _arm(self, rows: Any, why: str) -> None:
        for row in rows:
            grad = self._parameters[row].grad
            if row in self._watched and grad is not None and not self.is_graphed(grad):
                self._armed[row] = weakref.ref(grad), grad._version, why

    def is_graphed(self, grad: torch.Tensor) -> bool:
        """Is it the memory into which a captured graph writes? Between two replays it says nothing."""
        return any(made() is grad for made in self._graphed.values())

    def _added(self, row: int) -> Callable[[torch.Tensor], None]:
        """Autograd adds in place: what was cleared before is another tensor by then, or was written to twice."""

        def hook(p: torch.Tensor) -> None:
            if devices.capturing():
                if p.grad is not None:
                    self._graphed[row] = weakref.ref(p.grad)
                    self._armed.pop(row, None)
                return
            if (armed := self._armed.get(row)) is not None:
                grad, version, why = armed
                if self._is_as(row, (grad, version + 1)):
                    self._used[row] = grad, why
                del self._armed[row]

        return hook


def _none(_row: int) -> bool:
    return False
