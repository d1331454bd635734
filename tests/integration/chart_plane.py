"""A control plane on which the chart is installed, and a job there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cluster_fixtures import own_control_plane
from tests.unit.api_manifest import GOOD


@pytest.fixture(scope="module")
def plane(plane_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A control plane of our own: these tests install and change the CRD, which all namespaces share."""
    with own_control_plane(tmp_path_factory.mktemp("chart-plane") / "state", audit=False, isolate=False) as cluster:
        yield str(cluster.kubeconfig)


def job(name: str) -> dict[str, Any]:
    return {**GOOD, "metadata": {"name": name}}
