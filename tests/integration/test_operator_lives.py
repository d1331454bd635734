"""Twelve lives are recorded anew from the real operator and API server: they are what the files of `lives/` hold. Nothing differs from the
manifest, by gitops-engine wherever the job rests, and by kubectl at its end.

`PSJOB_RECORD=1 pytest tests/integration/test_operator_lives.py` writes the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import lives, recording
from tests.integration.gitops_engines import Engines, Judges, row_of, steady, table
from tests.integration.lives import Life
from tests.integration.operator_harness import World
from tests.integration.recording import Watcher, face

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
OPERATOR = ("--progress-seconds=3600",)
"""No shard is there to be asked, which a life that takes long would tell."""
WAYS = ["threeWay", "structured", "serverSide"]


@pytest.fixture(scope="module")
def watcher(place: World) -> Watcher:
    return Watcher(place.cluster.api, place.namespace)


@pytest.fixture(scope="module")
def engine(gitops_programs: None, place: World) -> Iterator[Engines]:
    made = Engines(("diff", str(place.cluster.kubeconfig)))
    yield made
    made.close()


@pytest.fixture(scope="module")
def judges(gitops_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    made = Judges.of(tmp_path_factory.mktemp("judges"))
    yield made
    made.close()


def kubectl_diff(place: World, manifest: dict[str, Any]) -> str:
    """What kubectl prints, client-side and server-side; empty where neither finds a difference."""
    printed = ""
    for way in ([], ["--server-side", "--field-manager=gitops"]):
        done = place.cluster.run_kubectl("diff", "-n", place.namespace, "-f", "-", *way, stdin=json.dumps(manifest), check=False)
        printed += f"kubectl diff {way}: {done.stdout}{done.stderr}" if done.returncode else ""
    return printed


@pytest.mark.parametrize("name", lives.ALL)
def test_a_life_is_as_recorded_and_never_differs_from_its_manifest(
    place: World, watcher: Watcher, engine: Engines, judges: Judges, name: str
) -> None:
    rested: list[tuple[Any, ...]] = []

    def rests(manifest: dict[str, Any], live: dict[str, Any]) -> None:
        if rested[-1:] != [face(live)]:
            rested.append(face(live))
        found = steady(place, name, lambda now: engine.ask({"config": manifest, "live": now}))
        assert found["ways"] == WAYS and found["modified"] == [], found

    life = Life(place, watcher, name, rests)
    lives.ALL[name](life)
    said = steady(place, name, lambda now: kubectl_diff(place, life.manifest))
    assert not said, said
    now = life.recorded()
    rows = table()
    for live in now:
        assert judges.ask(live) == row_of(live, rows).verdicts, live["status"]
    if os.environ.get("PSJOB_RECORD") == "1":
        recording.write(name, now)
    told = iter([face(live) for live in recording.read(name)])
    assert all(one in told for one in rested), f"the recording of {name} lacks, in this order: {rested}"
    assert face(recording.read(name)[-1]) == face(now[-1])
    known = {mark for each in lives.ALL for live in recording.read(each) for mark in face(live)[3:]}
    new = {mark for live in now for mark in face(live)[3:]} - known
    assert not new, f"no recording has these conditions; record {name} anew: {new}"


def test_a_difference_is_found(place: World, engine: Engines, name: str) -> None:
    """Each way of comparing sees a changed field of the manifest, and a changed field of the live object."""
    manifest: dict[str, Any] = lives.manifest(name, runPolicy={"backoffLimit": 3})
    manifest["metadata"]["namespace"] = place.namespace
    place.apply(manifest)
    wanted = {**manifest, "spec": {**manifest["spec"], "runPolicy": {"backoffLimit": 4}}}
    assert steady(place, name, lambda live: engine.ask({"config": wanted, "live": live}))["modified"] == WAYS
    assert steady(place, name, lambda live: kubectl_diff(place, wanted)).count("kubectl diff [") == 2
    place.edit(name, runPolicy={"backoffLimit": 5})
    assert steady(place, name, lambda live: engine.ask({"config": manifest, "live": live}))["modified"] == WAYS
