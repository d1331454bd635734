"""A namespace of a test's own, without an operator, for modules that import `place` in place of the module's of conftest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operator_harness import World, world
from tests.support.cluster_fixtures import Cluster


@pytest.fixture
def place(control_plane: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with world(control_plane, namespace, tmp_path) as made:
        yield made
