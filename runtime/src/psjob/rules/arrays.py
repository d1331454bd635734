"""The few operations on arrays that rules are written in: one rule runs on torch tensors (a shard) and on numpy arrays (a simulator).

Beside these, rules use only what both spell alike: `x *= number`, `x += y`, `x -= y`, `x /= y`, `x * y`, slices and `len`.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

Array: TypeAlias = torch.Tensor
"""A 1-D torch.Tensor, or a numpy.ndarray of float32 or float64 with the same bits of meaning; typed as the first."""


def add_scaled(out: Array, x: Array, alpha: float) -> None:
    """out += alpha * x, in place."""
    if isinstance(out, torch.Tensor):
        out.add_(x, alpha=alpha)
    else:
        out += alpha * x


def add_product(out: Array, x: Array, y: Array, alpha: float = 1.0) -> None:
    """out += alpha * x * y, in place."""
    if isinstance(out, torch.Tensor):
        out.addcmul_(x, y, value=alpha)
    else:
        product = x * y
        if alpha != 1.0:
            product *= alpha
        out += product


def added(x: Array, y: Array, alpha: float) -> Array:
    """x + alpha * y, a new array."""
    if isinstance(x, torch.Tensor):
        return torch.add(x, y, alpha=alpha)
    total = alpha * y
    total += x
    return total


def put(out: Array, x: Array) -> None:
    """out = x, element by element."""
    if isinstance(out, torch.Tensor):
        out.copy_(x)
    else:
        out[:] = x


def clip(x: Array, by: float) -> None:
    """What is beyond -by or by becomes that, in place."""
    if isinstance(x, torch.Tensor):
        x.clamp_(-by, by)
    else:
        x.clip(-by, by, out=x)


def copy(x: Array) -> Array:
    """The same values in memory of its own."""
    return x.clone() if isinstance(x, torch.Tensor) else x.copy()


Joining = Literal["add", "multiply", "maximum", "minimum", "logical_or", "logical_and", "logaddexp"]


def combine(operation: Joining, x: Array, y: Array, out: Array) -> Array:
    """out = x operation y, element by element; `out`, which may be either of them. Logical operations give 0 and 1."""
    if operation in ("logical_or", "logical_and") and not isinstance(out, torch.Tensor):
        out[:] = getattr(_library(x), operation)(x, y)
        return out
    getattr(_library(x), operation)(x, y, out=out)
    return out


def as_flags(x: Array) -> Array:
    """1 where x is not 0, else 0; in its dtype, a new array."""
    flags = full_like(x, 0)
    flags[x != 0] = 1
    return flags


def sorted_by_element(wholes: Sequence[Array]) -> Array:
    """The values of each element in rising order: a matrix of as many rows as there are arrays. NaN is the highest."""
    if isinstance(wholes[0], torch.Tensor):
        return torch.stack(list(wholes)).sort(0).values
    rows: Array = _library(wholes[0]).sort(_library(wholes[0]).stack(wholes), axis=0)
    return rows


def full_like(x: Array, fill: float) -> Array:
    """As long as `x` and of its dtype, every element `fill`."""
    full: Array = _library(x).full_like(x, fill)
    return full


def filled(x: Array, fill: float) -> Array:
    """`x` itself, every element `fill`."""
    x[:] = fill
    return x


def sqrt(x: Array) -> Array:
    """Square roots, a new array."""
    return x.sqrt() if isinstance(x, torch.Tensor) else _library(x).sqrt(x)


def absolute(x: Array) -> Array:
    """|x|, a new array."""
    return abs(x)


def sign(x: Array) -> Array:
    """-1, 0 or 1, a new array."""
    return x.sign() if isinstance(x, torch.Tensor) else _library(x).sign(x)


def shrunk(x: Array, by: float) -> Array:
    """x pulled towards zero by `by`, and 0 within it (the soft threshold), a new array."""
    if isinstance(x, torch.Tensor):
        return torch.nn.functional.softshrink(x, by)
    return x - x.clip(-by, by)


def is_torchs(x: Array) -> bool:
    """Is it a tensor (else it is an array of numpy's)?"""
    return isinstance(x, torch.Tensor)


def dtype_of(x: Array) -> str:
    """The name of its dtype, as layouts spell it."""
    return str(x.dtype).removeprefix("torch.")


def _library(x: Array) -> types.ModuleType:
    """torch or numpy, whose functions of these names are the same."""
    if isinstance(x, torch.Tensor):
        return torch
    import numpy

    return numpy
