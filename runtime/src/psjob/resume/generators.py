"""The states of all random generators that a script may have drawn from."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

WORDS = 624
"""Of the state of a Mersenne twister."""


def generators() -> dict[str, Any]:
    """Their states now."""
    return Generators().states()


def check_generators(found: Mapping[str, Any]) -> None:
    """Raises ValueError for a state that numpy would not refuse: it reads at the place that the state names, also beyond its words."""
    told = found.get("numpy")
    if told is None or told["bit_generator"] != "MT19937":  # of another kind numpy looks itself
        return
    place, words = told["state"]["pos"], told["state"]["key"]
    if type(place) is not int or not 0 <= place <= WORDS or words.shape != (WORDS,):
        raise ValueError(f"a state of numpy's generator at place {str(place)[:20]}, expected 0 to {WORDS}")


def put_generators(found: Mapping[str, Any]) -> None:
    """Put back what `generators` gave."""
    if "python" in found:
        version, words, gauss = found["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in found:
        import numpy  # the script drew from it before

        numpy.random.set_state(found["numpy"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(found["cuda"][: torch.cuda.device_count()])
    if "torch" in found:
        torch.set_rng_state(found["torch"])


class Generators:
    """Asked at every step: what has not been drawn from since is not copied again."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._python: Any = None

    def states(self) -> dict[str, Any]:
        """Their states now: the very object that was returned last where nothing was drawn. It is not to be changed."""
        found, before = self._now(), self._found
        if found.keys() != before.keys() or not all(_same(one, before[name]) for name, one in found.items()):
            self._found = found
        return self._found

    def _now(self) -> dict[str, Any]:
        python = random.getstate()
        if self._python != python:
            self._python, (version, words, gauss) = python, python
            told: Any = (version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss)
        else:
            told = self._found["python"]
        found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": told}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    return bool(one.tobytes() == other.tobytes() if hasattr(one, "tobytes") else one == other)
