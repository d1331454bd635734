"""The site, built once for all tests of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from hack.site.__main__ import build
from tests.support.forks import in_main, shared_path

SITE = "site"


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the site, which all processes of this run of pytest share."""
    folder = shared_path(SITE)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            assert build(folder) == ""
    return folder


def pytest_unconfigure() -> None:
    """Remove the site when the run is over."""
    if in_main():
        shutil.rmtree(shared_path(SITE), ignore_errors=True)
        Path(f"{shared_path(SITE)}.lock").unlink(missing_ok=True)
