"""Less work for `make test`: a few cases of a table that has many, and imports that begin before tests do."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from tests import frameworks
from tests.support import warm
from tests.support.soaking import rotating


def rest_rotates(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test: `make test` runs the quick ones, and the others rotate."""
    found = list(cases)
    assert set(quick) <= set(found), f"no cases: {set(quick) - set(found)}"
    return [case if case in quick else rotating(case) for case in found]


FOLDERS = {
    "live": (warm.PRELOADED, warm.LIGHT, warm.COMPILING),
    "e2e": (warm.COMPILING,),
    "scripts": (warm.COMPILING,),
    "restarts": (warm.COMPILING,),
    "frameworks": (frameworks.IMPORTS, warm.PRELOADED),
    "programs": (frameworks.IMPORTS,),
}
"""By folder of tests, the imports that their processes begin with."""


def begin_imports(session: pytest.Session, folders: Iterable[str]) -> None:
    """Let the servers of `warm` import, for these folders, while this process continues; once for all runners, which are its forks."""
    if session.config.getoption("runners") and not session.config.option.collectonly:
        for folder in sorted(set(folders) & FOLDERS.keys()):
            for preloaded in FOLDERS[folder]:
                warm.prepare(preloaded)
