"""A small heap: what earlier tests have left is gone through by no collection and by no search for what refers to an object."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def small_heap() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.fixture(scope="module")
def small_heaps() -> Iterator[None]:
    with small_heap():
        yield


@pytest.fixture
def small_heap_each(small_heaps: None) -> None:
    """Also without what the tests of this file have left, such as modules that a test loaded."""
    gc.freeze()
