"""Weights that a script changes between two steps. The shards hold the weights, so the next step would undo such a change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

VALUES: Final = 1 << 14
"""Values that one look reads. A model of fewer is compared as a whole."""
LEAST: Final = 8
"""Values of each parameter, where it has so many."""
ROWS: Final = 1024
"""Parameters that one look reads. Of more the looks take turns."""
ROUNDING: Final = 8
"""Units in the last place of the largest value: what adding to weights and subtracting the same leaves behind is no change."""
_INTS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Change:
    """`seen` says what a parameter was and is."""

    row: int
    seen: str


@dataclass
class _Look:
    """Where the values of a parameter lie, and what they were."""

    place: int
    kind: tuple[torch.Size, torch.dtype, torch.device]
    values: torch.Tensor
    version: int = 0
    held: torch.Tensor | None = None


class ByHand:
    """`lent` says of a row whether its values are the shard's own memory, which may move on by itself."""

    def __init__(self, parameters: Sequence[torch.Tensor], lent: Callable[[int], bool]) -> None:
        self._parameters, self._lent = parameters, lent
        self._count = max(LEAST, VALUES // max(1, min(len(parameters), ROWS)))
        self._looks: dict[int, _Look] = {}
        self._rows: list[int] = []
        """Of the last `remember`; none while a step is under way."""
        self._groups: list[tuple[list[int], torch.Tensor]] = []
        self._turn = 0
        self._doubted: set[int] = set()
        """Written to in place without a change of the values that were looked at."""
        self._whole: dict[int, torch.Tensor] = {}
        """Copies of those."""

    def forget(self) -> None:
        """A step begins: where it does not come to its end, nobody knows what the weights should be."""
        self._rows = []

    def remember(self) -> None:
        """The weights are the job's now."""
        there = [row for row, p in enumerate(self._parameters) if _readable(p)]
        if len(there) > ROWS:
            there = (there[self._turn :] + there[: self._turn])[:ROWS]
            self._turn = (self._turn + ROWS) % len(self._parameters)
        with torch.no_grad():
            self._look(there)
            self._groups = []
            kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for row in there:
                look = self._looks[row]
                kinds.setdefault((look.kind[2], look.values.dtype), []).append(row)
            for rows in kinds.values():
                held = torch.cat([self._looks[row].values for row in rows])
                self._groups.append((rows, held))
                for row, part in zip(rows, held.split([self._looks[row].values.numel() for row in rows]), strict=True):
                    self._looks[row].held = part
            for row in there:
                self._looks[row].version = _version(self._parameters[row])
            self._whole = {row: self._parameters[row].detach().clone() for row in self._doubted}
        self._doubted.clear()
        self._rows = there

    def change(self) -> Change | None:
        """The first parameter that is not as it was remembered."""
        with torch.no_grad():
            moved = self._look(self._rows)
            for row in moved:
                before, now = moved[row], self._looks[row].kind
                if before != now:
                    return Change(row, f"it was {_kind(before)} and is {_kind(now)}")
            if self._rows and not all(torch.equal(torch.cat([self._looks[row].values for row in rows]), held) for rows, held in self._groups):
                for row in self._rows:
                    look = self._looks[row]
                    assert look.held is not None
                    found = _difference(look.held, look.values, self._parameters[row].dtype)
                    if found is not None and not self._lent(row):
                        return Change(row, found)
            return self._change_elsewhere()

    def _change_elsewhere(self) -> Change | None:
        """Of parameters that were written to, beside the values that are looked at: of those the whole is compared next time."""
        for row in self._rows:
            p = self._parameters[row]
            if self._looks[row].version == _version(p):
                continue
            self._doubted.add(row)
            whole = self._whole.get(row)
            if whole is not None and whole.shape == p.shape:
                found = _difference(_bits(whole).flatten(), _bits(p.detach()).flatten(), p.dtype)
                if found is not None and not self._lent(row):
                    return Change(row, found)
        return None

    def _look(self, rows: Sequence[int]) -> dict[int, tuple[torch.Size, torch.dtype, torch.device]]:
        """Find the values of each where it lies now; what those were that lie elsewhere."""
        moved = {}
        for row in rows:
            p, look = self._parameters[row], self._looks.get(row)
            if look is not None and look.place == p.data_ptr() and look.kind == (p.shape, p.dtype, p.device):
                continue
            fresh = _Look(p.data_ptr(), (p.shape, p.dtype, p.device), _sample(p.detach(), self._count))
            if look is not None:
                moved[row] = look.kind
                fresh.version, fresh.held = look.version, look.held
            self._looks[row] = fresh
        return moved


def _readable(p: torch.Tensor) -> bool:
    return p.layout is torch.strided and p.device.type != "meta" and type(p.data) is torch.Tensor and p.numel() > 0


def _version(p: torch.Tensor) -> int:
    return 0 if p.is_inference() else p._version


def _bits(p: torch.Tensor) -> torch.Tensor:
    """Integers of the same bits, so that NaN is equal to itself."""
    p = torch.view_as_real(p) if p.is_complex() else p
    return p.view(_INTS[p.element_size()])


def _sample(p: torch.Tensor, count: int) -> torch.Tensor:
    """A view of at most `count` values, spread over `p`."""
    p = _bits(p)
    dense = p.permute(sorted(range(p.dim()), key=lambda d: -p.stride(d)))
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
    several = f", and {len(places) - 1} more of {len(old)} that were compared" if len(places) > 1 else ""
    return f"a value was {old[place].item():.6g} and is {new[place].item():.6g}{several}"


def _kind(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"
