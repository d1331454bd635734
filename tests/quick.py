"""Which cases of a table `make test` runs, where the table has many that show the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from tests.soaking import rotating


def rest_rotates(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test: `make test` runs the quick ones, and the others rotate."""
    found = list(cases)
    assert set(quick) <= set(found), f"no cases: {set(quick) - set(found)}"
    return [case if case in quick else rotating(case) for case in found]
