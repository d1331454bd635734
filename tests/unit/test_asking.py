"""How a script asks for its data is read from its frames."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from psjob.api import asking
from psjob.api.asking import Way, site, way

Ways = list[Way]


class Loader:
    """Notes how each batch is asked for."""

    def __init__(self, batches: int = 3) -> None:
        self.ways, self._batches = Ways(), batches

    def __iter__(self) -> Iterator[int]:
        for batch in range(self._batches):
            self.ways.append(way(sys._getframe(1)))
            yield batch
        self.ways.append(way(sys._getframe(1)))


def one_by_one(loader: Loader) -> None:
    for _epoch in range(2):
        for _batch in loader:
            pass


def numbered(loader: Loader) -> None:
    for _i, _batch in enumerate(loader):
        pass


def several(loader: Loader) -> None:
    for _epoch in range(2):
        for _fold in "ab":
            while True:
                for _one, _two in zip(loader, loader, strict=True):
                    pass
                break


def whole(loader: Loader) -> None:
    for _batch in list(loader):
        pass


def by_calls(loader: Loader) -> None:
    batches, step = iter(loader), 0
    while step < 3:
        next(batches)
        step += 1


def by_steps(loader: Loader) -> None:
    batches = iter(loader)
    for _step in range(3):
        next(batches)


def infinite(loader: Loader) -> Iterator[int]:
    while True:
        for batch in loader:  # noqa: UP028 - a loop of its own
            yield batch


def endless(loader: Loader) -> None:
    for _step, _batch in zip(range(9), infinite(loader), strict=False):
        pass


def once(loader: Loader) -> Iterator[int]:
    for batch in loader:  # noqa: UP028 - a loop of its own
        yield batch


def delegating(loader: Loader) -> Iterator[int]:
    while True:
        yield from loader


def delegated(loader: Loader) -> None:
    for _step, _batch in zip(range(9), delegating(loader), strict=False):
        pass


def wrapped(loader: Loader) -> None:
    for _epoch in range(2):
        for _batch in once(loader):
            pass


class Iterates:
    """An iterator of a class, without an end."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._batches = loader, iter(loader)

    def __iter__(self) -> Iterates:
        return self

    def __next__(self) -> int:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self._loader)
            return next(self._batches)


def classy(loader: Loader) -> None:
    for _step, _batch in zip(range(5), Iterates(loader), strict=False):
        pass


@pytest.mark.parametrize(
    ("script", "called", "endless_", "moves"),
    [
        (one_by_one, False, False, False),
        (numbered, False, False, False),
        (several, False, False, False),
        (wrapped, False, False, False),
        (whole, True, False, False),
        (by_calls, True, False, False),
        (by_steps, True, False, True),
        (endless, False, True, False),
        (delegated, False, True, False),
        (classy, True, False, True),
    ],
)
def test_loops_and_calls_are_told_from_each_other(script: Callable[[Loader], None], called: bool, endless_: bool, moves: bool) -> None:
    """`moves`: a loop that is not over the data advances within a pass."""
    loader = Loader()
    script(loader)
    first = loader.ways[:3]
    assert {each.called for each in loader.ways} == {called}
    assert {each.endless for each in loader.ways} == {endless_}
    assert (len({tuple(each.values.items()) for each in first}) > 1) == moves


def test_loops_around_are_seen_by_their_variables() -> None:
    loader = Loader(1)
    one_by_one(loader)
    assert [next(iter(each.values.values())) for each in loader.ways] == [0, 0, 1, 1], "the innermost first"


def test_targets_of_loops_are_found_in_the_code() -> None:
    def code() -> Iterator[Any]:
        for _epoch in range(1):
            for _i, (_x, _y) in enumerate([(0, (1, 2))]):
                yield site(sys._getframe().f_code, sys._getframe().f_lasti)
            yield site(sys._getframe().f_code, sys._getframe().f_lasti)
        yield site(sys._getframe().f_code, sys._getframe().f_lasti)
        while True:
            yield site(sys._getframe().f_code, sys._getframe().f_lasti)
            return

    found = list(code())
    assert [each.targets for each in found] == [{"_epoch", "_i", "_x", "_y"}, {"_epoch"}, set(), set()]
    assert [each.looped for each in found] == [True, True, False, False], "the last one's loop never comes to its end"
    assert not any(each.drives for each in found)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (enumerate, ""),
        (lambda it: enumerate(once(it), 1), ""),
        (lambda it: zip(it, once(it), strict=False), ""),
        (lambda it: map(str, it), ""),
        (itertools.cycle, "itertools.cycle counts or keeps what it was given"),
        (lambda it: itertools.islice(enumerate(it), 3), "itertools.islice counts or keeps what it was given"),
        (lambda it: zip(it, range(3), strict=False), "zip goes over a range_iterator beside the data"),
        (lambda it: enumerate(zip([1, 2], once(it), strict=False)), "zip goes over a list_iterator beside the data"),
    ],
)
def test_what_counts_is_found_around_an_iterator(made: Callable[[Any], Any], told: str) -> None:
    iterator: Any = iter(Loader())
    around = iter(made(iterator))
    first = next(around)
    assert asking.keeps_count(iterator, asking.holders(iterator), lambda _other: False) == told
    assert first is not None


@pytest.mark.parametrize("start", [0, 1, -3])
def test_an_enumerate_goes_on(start: int) -> None:
    iterator: Any = iter(Loader())
    around = enumerate(once(iterator), start)
    assert next(around) == (start, 0)
    (counter,) = (each for each in asking.holders(iterator) if isinstance(each, enumerate))
    assert asking.count_on(counter, 5)
    assert list(around) == [(start + 6, 1), (start + 7, 2)]
    assert not asking.count_on(zip(), 5)


def test_installed_packages_are_not_the_scripts() -> None:
    assert asking.is_script(one_by_one.__code__) and not asking.is_script(pytest.fixture.__code__)
