"""How a script asks for its data is read from its frames."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from tqdm import tqdm

from psjob.api import script_code
from psjob.api.script_code import BatchRequest, site, way
from psjob.process import errors

Ways = list[BatchRequest]


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
    assert any(each.advances(first[0], made_by_loop=False) for each in first[1:]) == moves


def reused(loader: Loader) -> None:
    for _ in range(2):
        for _ in loader:
            pass


def reused_in_a_tuple(loader: Loader) -> None:
    for _ in "ab":
        for _i, _ in enumerate(loader):
            pass


def reused_over_one_iterator(loader: Loader) -> None:
    batches = iter(loader)
    for _ in "abc":
        for _ in batches:
            break


@pytest.mark.parametrize(
    ("script", "made_by_loop", "moves"), [(reused, True, False), (reused_in_a_tuple, False, False), (reused_over_one_iterator, False, True)]
)
def test_a_name_that_two_loops_assign_is_told_from_a_loop_that_advances(
    script: Callable[[Loader], None], made_by_loop: bool, moves: bool
) -> None:
    loader = Loader()
    script(loader)
    first, *others = loader.ways[:3]
    assert any(each.advances(first, made_by_loop) for each in others) == moves


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
        (lambda it: enumerate(once(it), 1), "enumerate counts what a generator makes of the data"),
        (lambda it: zip(it, once(it), strict=False), ""),
        (lambda it: map(str, it), ""),
        (itertools.cycle, "itertools.cycle counts or keeps what it was given"),
        (lambda it: itertools.islice(enumerate(it), 3), "itertools.islice counts or keeps what it was given"),
        (lambda it: zip(it, range(3), strict=False), "zip goes over a range_iterator beside the data"),
        (lambda it: enumerate(zip([1, 2], it, strict=False)), "zip goes over a list_iterator beside the data"),
    ],
)
def test_what_counts_is_found_around_an_iterator(made: Callable[[Any], Any], told: str) -> None:
    iterator: Any = iter(Loader())
    around = iter(made(iterator))
    first = next(around)
    assert script_code.keeps_count(iterator, script_code.holders(iterator, None), lambda _other: False) == told
    assert first is not None


def pairs(iterator: Iterator[int]) -> Iterator[tuple[int, int]]:
    for one in iterator:
        yield one, one


class Frames:
    """An iterator that keeps what went over it when it was asked."""

    def __init__(self) -> None:
        self.chain: list[script_code.Holder] = []

    def __iter__(self) -> Iterator[int]:
        made: list[Any] = []
        made.append(self._ask(made))
        return cast(Iterator[int], made[0])

    def _ask(self, itself: list[Any]) -> Iterator[int]:
        for number in range(2):
            self.chain = script_code.holders(itself[0], sys._getframe(1))
            yield number


@pytest.mark.parametrize(
    ("made", "found", "told"),
    [
        (lambda data: enumerate(tqdm(data, disable=True)), ["generator", "enumerate"], ""),
        (lambda data: tqdm(enumerate(data), disable=True), ["enumerate", "generator"], ""),
        (lambda data: enumerate(pairs(data)), ["generator", "enumerate"], "enumerate counts what a generator makes of the data"),
        (lambda data: pairs(pairs(data)), ["generator", "generator"], ""),
        (lambda data: itertools.islice(tqdm(data, disable=True), 2), ["generator", "islice"], "itertools.islice counts or keeps"),
        (lambda data: enumerate(itertools.chain(data, data)), ["chain", "enumerate"], "enumerate counts what a chain makes of the data"),
        (lambda data: enumerate(filter(None, data)), ["filter", "enumerate"], "enumerate counts what a filter makes of the data"),
    ],
)
def test_what_counts_is_found_around_generators_that_run(made: Callable[[Any], Any], found: list[str], told: str) -> None:
    data = Frames()
    for _ in made(data):
        pass
    assert [type(each.thing).__name__ for each in data.chain] == found
    assert script_code.keeps_count(None, data.chain, lambda _other: False).startswith(told) and bool(told) == bool(
        script_code.keeps_count(None, data.chain, lambda _other: False)
    )


def test_what_goes_over_a_zip_is_told_from_what_goes_into_it() -> None:
    data = Frames()
    for _ in enumerate(tqdm(zip(enumerate(data), range(2), strict=False), disable=True)):
        pass
    assert [(type(each.thing).__name__, each.joins) for each in data.chain] == [
        ("enumerate", False),
        ("zip", False),
        ("generator", True),
        ("enumerate", True),
    ]


@pytest.mark.parametrize("start", [0, 1, -3])
def test_an_enumerate_goes_on(start: int) -> None:
    iterator: Any = iter(Loader())
    around = enumerate(once(iterator), start)
    assert next(around) == (start, 0)
    (counter,) = (each for each in script_code.holders(iterator, None) if isinstance(each.thing, enumerate))
    assert script_code.count_on(counter.thing, 5)
    assert list(around) == [(start + 6, 1), (start + 7, 2)]
    assert not script_code.count_on(zip(), 5)


def test_a_loop_that_makes_its_iterator_itself_is_known() -> None:
    found = []

    class Made:
        def __iter__(self) -> Iterator[int]:
            found.append(script_code.is_looped(sys._getframe(1)))
            return iter(())

    for _ in Made():
        pass
    list(Made())
    list(pairs(cast(Iterator[int], Made())))
    for _ in enumerate(Made()):
        pass
    assert found == [True, False, False, False], "of a generator somebody else may go over what it gives"


class Left:
    """Gives numbers, and notes where it is dropped before its end: is it left by a loop, and which number had the script then?"""

    def __init__(self) -> None:
        self.found: list[tuple[bool, object]] = []
        self.elses: list[bool] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(9)
        except GeneratorExit:
            frame = sys._getframe(1)
            while frame.f_back is not None and not script_code.is_script_code(frame.f_code):
                frame = frame.f_back
            left = script_code.left_by(sys._getframe(1))
            self.found.append((left is not None, frame.f_locals.get("n")))
            self.elses.append(left is not None and script_code.has_else(left))
            raise


def left_by_break(data: Left) -> None:
    n = 0
    for n in data:
        if n == 3:
            break
    n = 100


def left_by_return(data: Left) -> int:
    for n, _ in enumerate(tqdm(data, disable=True)):
        if n == 3:
            return n
    return 100


def left_in_a_block(data: Left) -> None:
    n = 0
    with contextlib.suppress(ValueError):
        while n < 100:
            for n, _ in zip(data, range(9), strict=False):
                if n == 3:
                    break
            n = 100


def left_beside_an_else(data: Left) -> None:
    n = 0
    for n in data:
        if n == 3:
            break
    else:
        n = 100


def left_inside_an_else(data: Left) -> None:
    for _ in range(2):
        n = 0
        for n in data:
            if n == 3:
                break
    else:
        for n in data:
            if n == 3:
                break


def held_by_a_variable(data: Left) -> None:
    numbers: Any = iter(data)
    for n in numbers:
        if n == 3:
            break
    n = 100
    numbers = None


def ended_by_an_error(data: Left) -> None:
    with contextlib.suppress(ValueError):
        for n in data:
            if n == 3:
                raise ValueError


def asked_by_calls(data: Left) -> None:
    n = next(iter(data))
    n += next(number for number in data if number == 3)


@pytest.mark.parametrize(("script", "found"), [
    (left_by_break, [(True, 3)]),
    (left_by_return, [(True, 3)]),
    (left_in_a_block, [(True, 3)]),
    (left_beside_an_else, [(True, 3)]),
    (left_inside_an_else, [(True, 3)] * 3),
    (held_by_a_variable, [(False, 100)]),
    (ended_by_an_error, [(False, 3)]),
    (asked_by_calls, [(False, 0), (False, 0)]),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_loop_that_leaves_its_data_is_known_by_the_instruction_that_drops_it(
    script: Callable[[Left], object], found: list[tuple[bool, object]]
) -> None:
    data = Left()
    for _ in range(40):  # until the interpreter has specialised the function
        script(data)
    assert len(data.found) == 40 * len(found)
    assert data.found[-len(found) :] == data.found[: len(found)]
    assert [left for left, _ in data.found[: len(found)]] == [left for left, _ in found]
    assert all(n == wanted for (left, n), (_, wanted) in zip(data.found, found, strict=False) if left)
    assert set(data.elses) == {script is left_beside_an_else}


def test_what_is_cleared_away_while_psjob_works_is_not_left_by_a_loop() -> None:
    """The garbage collector may find an old iterator at any moment."""
    data = Left()
    held: list[Iterator[int]] = [iter(data)]
    next(held[0])
    source = "def batches(held):\n    try:\n        yield 1\n    finally:\n        held.clear()\n"
    names: dict[str, Any] = {}
    exec(compile(source, f"{errors.HERE}api/data.py", "exec"), names)  # noqa: S102
    for _ in names["batches"](held):
        break
    assert [left for left, _ in data.found] == [False]


def test_a_long_body_makes_no_endless_generator() -> None:
    """Its jump back has a long argument, and leads to what extends that of the loop's head."""
    lines = "".join(f"        z{number} = b * {number} + {number}\n" for number in range(80))
    names: dict[str, Any] = {}
    exec(compile(f"def batches(data):\n    for b in data:\n{lines}        yield b\n", "train.py", "exec"), names)  # noqa: S102
    data = Loader()
    assert len(list(names["batches"](data))) > 0
    assert not any(each.endless for each in data.ways)


def test_installed_packages_are_not_the_scripts() -> None:
    assert script_code.is_script_code(one_by_one.__code__) and not script_code.is_script_code(pytest.fixture.__code__)
