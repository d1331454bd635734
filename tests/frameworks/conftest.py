"""Jobs of training loops of other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.frameworks import IMPORTS
from tests.quick import begin_imports


def pytest_collection_finish(session: pytest.Session) -> None:
    begin_imports(session, Path(__file__).parent, IMPORTS, warm.PRELOADED)
