"""The site, built once for all tests of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from hack.site.__main__ import build


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; test processes beside this one share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "site"
    with FileLock(shared / "site.lock"):
        if not folder.exists():
            assert build(folder) == ""
    return folder
