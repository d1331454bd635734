"""What a sampler draws, the same on every rank and again after a restart: all that it may draw from is seeded while it does.

A sampler may hold others, generators of its own, and a number of its epoch. They are found in its attributes. The script's
generators are afterwards as they were.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils import data as torch_data

from psjob.api import values
from psjob.process.errors import Refused
from psjob.resume.generators import generators, put_generators

_HELD: Final = ("sampler", "batch_sampler", "samplers", "batch_samplers")
"""Attributes in which samplers hold others, that may be of any class."""
_MOST_PARTS: Final = 64


def parts_of(sampler: Any) -> list[Any]:
    """It and the samplers that it holds, the outer before the inner."""
    found: list[Any] = []
    waiting = [sampler]
    while waiting and len(found) < _MOST_PARTS:
        part = waiting.pop(0)
        if any(part is one for one in found):
            continue
        found.append(part)
        for name, value in attributes(part).items():
            several = list(value)[:_MOST_PARTS] if type(value) in (list, tuple) else [value]
            waiting += [one for one in several if isinstance(one, torch_data.Sampler) or (name in _HELD and hasattr(one, "__iter__"))]
    return found


def check_whole(parts: Iterable[Any]) -> None:
    """Raises Refused if one of these samplers gives a rank its part. One that was made for a single rank gives all."""
    for part in parts:
        if hasattr(part, "rank") and getattr(part, "num_replicas", 1) != 1 and not _is_torchs(part):
            raise Refused(
                f"{type(part).__name__} gives each rank its part, and ps.shard does so too. Let it give all of the samples, as with rank=0 "
                "and num_replicas=1; or loop over the loader without ps.shard"
            )


def _is_torchs(part: Any) -> bool:
    """Is it a DistributedSampler that slices as torch's does?"""
    return isinstance(part, torch_data.DistributedSampler) and type(part).__iter__ is torch_data.DistributedSampler.__iter__


def begin_epoch(parts: Iterable[Any], epoch: int) -> None:
    """Tell samplers their epoch, before each time that they are asked: some count it themselves."""
    for part in parts:
        begin = getattr(part, "set_epoch", None)
        if callable(begin):
            begin(epoch)
        elif type(attributes(part).get("epoch")) is int:
            part.epoch = epoch


@contextmanager
def drawing(seed: tuple[int, ...], parts: Iterable[Any]) -> Iterator[None]:
    """Inside, everything that these samplers may draw from begins from `seed`, and torch's DistributedSamplers give all samples."""
    parts = list(parts)
    own = [value for part in parts for value in attributes(part).values() if values.generates(value)]
    with seeded(seed, own), _whole([part for part in parts if _is_torchs(part)]):
        yield


def length(thing: Any) -> int:
    """`len` of a loader or a sampler whose samplers of torch give all samples, not a rank's. Raises TypeError where there is none."""
    with _whole([part for part in parts_of(thing) if _is_torchs(part)]):
        return len(thing)


@contextmanager
def seeded(parts: tuple[Any, ...], own: Sequence[Any] = ()) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's generators and `own` begin from `parts`; afterwards they are as before."""
    kept, states = generators(), [values.state_of(generator) for generator in own]
    value = seed_all(parts)
    for generator in own:
        _seed(generator, value)
    try:
        yield
    finally:
        put_generators(kept)
        for generator, state in zip(own, states, strict=True):
            if state is not None:
                values.load_state(generator, state)


def seed_all(parts: tuple[Any, ...]) -> int:
    """Seed Python's, numpy's and torch's generators from `parts`; with which number."""
    value = random.Random(repr(parts)).getrandbits(63)  # noqa: S311 - a seed of the data's order, no key
    random.seed(value)
    torch.manual_seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value % (1 << 32))
    return value


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif hasattr(generator, "bit_generator"):  # numpy's
        generator.bit_generator.state = type(generator.bit_generator)(value).state
    else:
        generator.seed(value if isinstance(generator, random.Random) else value % (1 << 32))


@contextmanager
def _whole(samplers: Sequence[Any]) -> Iterator[None]:
    kept = [(sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size) for sampler in samplers]
    for sampler in samplers:
        count = len(sampler.dataset)
        sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = 1, 0, count, count
    try:
        yield
    finally:
        for sampler, before in zip(samplers, kept, strict=True):
            sampler.num_replicas, sampler.rank, sampler.num_samples, sampler.total_size = before


def attributes(thing: Any) -> dict[str, Any]:
    """What an object holds by name; empty of one that holds nothing so."""
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else {}
