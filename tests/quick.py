"""Less work for `make test`: a few cases of a table that has many, and imports that begin before tests do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.soaking import rotating


def rest_rotates(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test: `make test` runs the quick ones, and the others rotate."""
    found = list(cases)
    assert set(quick) <= set(found), f"no cases: {set(quick) - set(found)}"
    return [case if case in quick else rotating(case) for case in found]


def begin_imports(session: pytest.Session, folder: Path, *several: Sequence[str]) -> None:
    """Let the servers of `tests.warm` import, where a test of this folder may start a job, before tests are forked from this process."""
    here = (item for item in session.items if folder in item.path.parents)
    if not session.config.option.collectonly and any("tmp_path" in getattr(item, "fixturenames", ()) for item in here):
        for preloaded in several:
            warm.prepare(preloaded)
