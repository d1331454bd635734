"""Jobs of short scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import begin_imports
from tests.scripts import IMPORTS


def pytest_collection_finish(session: pytest.Session) -> None:
    begin_imports(session, Path(__file__).parent, IMPORTS)
