"""What one object of a job's author costs the operator, which serves all others too. Manifests that are slow are grown further."""

from __future__ import annotations

import json
import time
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from psjob_operator.api.validate import LARGEST_SPEC, validate_job
from psjob_operator.cluster.cache import JobStore
from psjob_operator.cluster.client import JOBS, Key
from psjob_operator.cluster.observe import _spec
from tests.costs import LIMIT_SECONDS, MOST_BYTES, dearest
from tests.fuzzing import changed_json, json_changes
from tests.soaking import soak
from tests.unit.api_manifest import GOOD, changed
from tests.unit.api_template_cases import WORKER

POD = "spec.workers.template.spec"
ENV = [{"name": f"A{number}", "value": "x"} for number in range(20)]
SEEDS: dict[str, dict[str, Any]] = {
    "env": {f"{WORKER}.env": ENV},
    "unknown": {f"{POD}.{name}{number}": 1 for number in range(20) for name in ("volume", "x")},
    "empty": {f"{POD}.containers": [{}, {}, {}]},
    "tolerations": {f"{POD}.tolerations": [{"key": "a"}] * 10, "spec.ps.template": {"spec": {"tolerations": [{"key": "a"}] * 10}}},
    "words": {f"{WORKER}.command": ["x"] * 50, f"{WORKER}.args": ["x"] * 50},
    "mounts": {f"{WORKER}.volumeMounts": [{"name": "a", "mountPath": "/a"}] * 9, f"{POD}.volumes": [{"name": "a", "emptyDir": {}}] * 9},
    "rules": {"spec.runPolicy": {"failureRules": [{"action": "Ignore", "exitCodes": [1, 2]}] * 9}},
    "stages": {"spec.stages": [{"name": f"s{number}", "replicas": 1} for number in range(9)]},
    "options": {"spec.training": {"ruleOptions": {f"x{number}": 1.0 for number in range(20)}}},
    "volume": {"spec.checkpoint": {"volume": {"projected": {"sources": [{}] * 20}}}},
    "metadata": {"metadata.labels": {f"a{number}": "" for number in range(20)}},
}


def observed(text: bytes) -> float:
    """Seconds in which the operator takes in what the API server says of a job, once kopf has read its JSON."""
    raw = json.loads(text)
    raw["metadata"] = {**raw.get("metadata", {}), "namespace": "space", "name": "job", "uid": "u", "resourceVersion": "7"}
    store = JobStore()
    began = time.thread_time()
    store.put(JOBS, raw)
    job = store.job(Key("space", "job"))
    assert job is not None
    _spec(job, SimpleNamespace(observed=None))  # type: ignore[arg-type]
    return time.thread_time() - began


def change(random: Random, one: bytes, other: bytes) -> bytes:
    """More of a part of what is there, in the room of a spec that is taken or of a whole object; or a part of another, or any change."""
    raw = json.loads(one)
    if random.random() < 0.2:
        made = changed_json(raw, json_changes(random))
        whole = isinstance(made, dict) and all(isinstance(made.get(part), dict) for part in ("metadata", "spec"))
        return json.dumps(made).encode() if whole else one  # the API server takes no other
    part: Any = raw if random.random() < 0.1 else raw["spec"]
    above = raw
    while isinstance(part, dict | list) and part:
        if random.random() < 0.3 and not (isinstance(part, dict) and "template" in part):
            _more(random, part, random.choice((LARGEST_SPEC, MOST_BYTES)) - len(one))
            break
        above = part
        part = random.choice(list(part.values() if isinstance(part, dict) else part))
    if isinstance(above, dict) and random.random() < 0.1:
        above.update(json.loads(other)["spec"].get("training", {}))
    return json.dumps(raw, separators=(",", ":")).encode()


def _more(random: Random, part: Any, room: int) -> None:
    times = random.choice((2, 10, room // max(1, len(json.dumps(part, separators=(",", ":"))))))
    if isinstance(part, list):
        part.extend(part * max(0, times - 1))
    else:
        part.update({f"{name}{number}": value for number in range(times) for name, value in list(part.items())[:50]})


@pytest.mark.parametrize(("name", "rounds"), [*((name, 4) for name in SEEDS), *(soak(name, 100) for name in SEEDS)])
@pytest.mark.timeout(3600)
def test_no_object_of_a_mebibyte_costs_the_operator_more_than_a_tenth_of_a_second(name: str, rounds: int) -> None:
    seed = 1 if rounds < 100 else Random().randrange(1 << 32)
    first = json.dumps(changed(GOOD, SEEDS[name])).encode()
    took, worst = dearest([first, *(change(Random(number), first, first) for number in range(4))], change, len, observed, rounds, seed)
    assert took <= LIMIT_SECONDS, f"{took:.3f} s of {len(worst)} bytes: {worst[:500]!r} … {worst[-300:]!r}, seed {seed}"


@pytest.mark.parametrize("part", ["spec", "status", "metadata"])
def test_a_mebibyte_of_empty_objects_is_not_looked_at_one_by_one(part: str) -> None:
    raw = {**GOOD, part: {**GOOD.get(part, {}), "x": [{}] * 330_000}}
    job, problems = validate_job(raw)
    assert (job is None) == (part == "spec")
    assert len(problems) == (part == "spec")


def test_of_a_spec_that_is_too_large_small_fields_hold() -> None:
    """Who runs it, and whether it is to run. Its size is told each time."""
    body = changed(GOOD, {"spec.suspend": True, "spec.managedBy": "example.com/other", f"{WORKER}.env": ENV * 500})
    body["metadata"] |= {"namespace": "space", "uid": "u", "resourceVersion": "7", "generation": 3}
    store = JobStore()
    store.put(JOBS, body)
    job = store.job(Key("space", body["metadata"]["name"]))
    assert job is not None and job.size > LARGEST_SPEC and not job.large
    spec, problems = _spec(job, SimpleNamespace(observed=None))  # type: ignore[arg-type]
    assert (spec.suspend, spec.managed_by, spec.ps.shards) == (True, "example.com/other", body["spec"]["ps"]["shards"])
    assert len(problems) == 1 and f"is {job.size} bytes as JSON" in problems[0]
