"""Do all workers read the same data? `ps.shard` gives each its part, so that data which are a part already would be cut twice. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MOST_PASSES: Final = 64
"""Passes of which it is kept what was told."""

REMEDY: Final = (
    "psjob.shard gives each worker its part, and data that are a part by rank already would be cut twice. Give it all of the data, made "
    "with one seed. Or loop over the loader without psjob.shard"
)


@dataclass(frozen=True)
class Told:
    """What a worker tells of the data of one pass that it trains on, as it begins. None: it is not known, or not the same twice."""

    site: int
    """Where in the script the pass is: a checksum."""
    number: int
    loader: str
    """Names of classes."""
    data: str
    length: int | None
    """Samples; None: a stream."""
    batch: int | None
    """Samples of a batch."""
    processes: int | None
    """That read a stream."""
    content: int | None
    """Checksums: of what samples are made of, of some samples,"""
    samples: int | None
    traits: int | None
    """of numbers and texts that the data keep,"""
    first: int | None
    """and of the order of samples, or of what was read first, where it is not `ordered`."""
    ordered: bool = True


@dataclass(frozen=True)
class Difference:
    """Between two workers. `sure`: samples are lost, or trained twice."""

    sentence: str
    sure: bool


class Alike:
    """What was told first of each pass, by the worker of lowest rank so far."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, int], tuple[int, Told]] = {}

    def see(self, rank: int, told: Told) -> Difference | None:
        """What worker `rank` tells. How it differs from what another has told of the same pass, if it does."""
        key = told.site, told.number
        known = self._told.get(key)
        if known is None or rank <= known[0]:
            self._told[key] = rank, told
            for old in list(self._told)[:-MOST_PASSES]:
                del self._told[old]
        if known is None or known[0] == rank:
            return None
        return difference(*sorted([known, (rank, told)], key=lambda each: each[0]))


def difference(one: tuple[int, Told], other: tuple[int, Told]) -> Difference | None:
    """What two workers, a rank and its data each, read otherwise."""
    (lower, a), (higher, b) = one, other
    who = f"worker {higher}"
    if a.batch != b.batch and a.batch is not None and b.batch is not None:
        return Difference(
            f"{who} takes batches of {b.batch} samples, worker {lower} of {a.batch}. psjob.shard deals out batches by their number: "
            "samples would be trained twice or never. Take one batch size on all workers",
            True,
        )
    if a.processes != b.processes and a.processes is not None and b.processes is not None:
        return Difference(
            f"{who} reads {b.data} by num_workers={b.processes}, worker {lower} by {a.processes}. The batches of a stream are counted in "
            "each process that reads it. Take one num_workers on all workers",
            True,
        )
    if (a.loader, a.data) != (b.loader, b.data):
        return Difference(f"{who} reads {b.data} by {b.loader}, worker {lower} {a.data} by {a.loader}. {REMEDY}", True)
    if a.length != b.length:
        return Difference(f"{who} has {b.length} samples of {b.data}, worker {lower} {a.length}. {REMEDY}", True)
    if _differ(a.content, b.content) or _differ(a.samples, b.samples):
        return Difference(f"the {b.length} samples of {b.data} are not the same on {who} as on worker {lower}. {REMEDY}", True)
    if not _differ(a.first, b.first):
        return None
    if a.ordered and b.ordered:
        return Difference(
            f"{who} draws another order of {b.data} than worker {lower}: samples would be trained twice or never. Seed what its sampler "
            "draws from alike on all workers",
            True,
        )
    if a.length is not None:
        return Difference(
            f"{who} draws other samples of {b.data} than worker {lower}, as by weights of its own. Each worker takes its part of its own "
            "draw. Give the samplers of all workers the same weights and seeds",
            False,
        )
    if _differ(a.traits, b.traits):
        return Difference(f"{who} reads other samples from {b.data} than worker {lower}, and keeps other numbers in it. {REMEDY}", True)
    return Difference(
        f"{who} reads other samples from {b.data} than worker {lower}: it slices by rank by itself, or draws without a seed. {REMEDY}",
        False,
    )


def _differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other
