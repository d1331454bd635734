"""The road of a manifest, followed through a real operator: from the event that a watch brings to the POST of a pod."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.operator_harness import World, manifest
from tests.support import roads
from tests.support.older import Older

pytestmark = [pytest.mark.cluster, pytest.mark.rotating, pytest.mark.timeout(240)]
JOBS = 5
SECTION = "From a manifest to a process"


@dataclass
class Traced(Older):
    """Starts the operator of this checkout, which writes what it enters to `folder`/trace."""

    @property
    def environment(self) -> dict[str, str]:
        return roads.traced(self.folder / "trace", SECTION)


def test_a_manifest_goes_through_the_files_of_the_walk(place: World, tmp_path: Path) -> None:
    for operator in place.operators:
        operator.kill()
    place.operator(launcher=Traced(tmp_path))
    windows = []
    for index in range(JOBS):
        name = f"road-{index}"
        began = time.monotonic_ns()
        place.create(manifest(name, workers=1))
        place.until("the worker's pod", lambda name=name: any(f"{name}-worker" in pod["metadata"]["name"] for pod in place.items("pods")))
        windows.append((began, time.monotonic_ns()))
        time.sleep(1)
    roads.compare("manifest", SECTION, tmp_path / "trace", windows)
