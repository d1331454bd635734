"""Before tests are run by forks of this process (see hack/testing): what they start processes from has begun its imports once for all."""

from __future__ import annotations

import pytest

from tests import warm

FOLDERS = {"live", "e2e", "scripts"}
COMPILING = ("test_profiling", "test_collectives")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.getoption("runners", 0) or session.config.option.collectonly:
        return
    files = {item.path for item in session.items}
    if any(file.parent.name in FOLDERS for file in files):
        warm.prepare()
    if any(file.name.startswith("test_local_") for file in files):
        warm.prepare(warm.LIGHT)
    if any(file.name.startswith(COMPILING) for file in files):
        warm.prepare(warm.COMPILING)
