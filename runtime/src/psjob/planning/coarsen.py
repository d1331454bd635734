"""Fewer places to cut: neighbouring modules become one block where that costs least."""

from __future__ import annotations

from psjob.planning.work import Work


def blocks(work: Work, most: int, seed: int = 0) -> list[int]:
    """The bounds of at most so many blocks, from 0 to the number of modules.

    The two neighbours that together take the least time become one, as often as needed. Another `seed` blurs those times by a fifth.
    """
    bounds = list(range(work.count + 1))

    def size(i: int) -> float:
        first, end = bounds[i - 1], bounds[i + 1]
        blur = 1 + 0.2 * noise(seed, first * work.count + end) if seed else 1.0
        return (work.forward(first, end) + work.backward(first, end)) * blur

    while len(bounds) - 1 > most:
        del bounds[min(range(1, len(bounds) - 1), key=size)]
    return bounds


def noise(seed: int, number: int) -> float:
    """A number from 0 to 1 that follows from these two, by the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    mask = 2**64 - 1
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95 + 0x9E3779B97F4A7C15) & mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return (word ^ (word >> 31)) / 2**64
