"""Manifests of jobs, changed in every way that a person or a tool could: each is a job, or has problems in words."""

from __future__ import annotations

from random import Random
from typing import Any

import yaml

from psjob_operator.api.load import load_documents, load_job
from psjob_operator.api.status import short
from psjob_operator.api.validate import validate_job
from psjob_operator.plan.objects import cluster_config, config_digest
from psjob_operator.plan.observed_state import ObservedState
from psjob_operator.plan.plan import plan
from tests.fuzzing import Change, byte_changes, changed_bytes, changed_json, counts, fuzz, json_changes
from tests.unit.api_manifest import GOOD, changed

WHOLE = changed(
    GOOD,
    {
        "spec.training": {"mode": "async", "seed": 3, "reduction": "mean", "nonFinite": "skip", "transport": "tcp",
                          "compression": {"push": "int8", "pull": "bf16"}, "updateRule": "lr-over-lag"},
        "spec.checkpoint": {"interval": "30s", "keep": 3, "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete"},
                            "volumeClaimTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {
                                "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "10Gi"}}}}},
        "spec.runPolicy": {"backoffLimit": 6, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 9, "cleanPodPolicy": "Running"},
        "spec.workers.stepTimeoutSeconds": 60,
        "spec.workers.template.spec.volumes": [{"name": "data", "emptyDir": {}}],
        "spec.workers.template.spec.containers.0.resources": {"limits": {"cpu": "1", "nvidia.com/gpu": 1}},
        "metadata.labels": {"team": "a"},
    },
)  # fmt: skip
TEXT = yaml.safe_dump(WHOLE).encode()
ALIASED = TEXT + b"x: &a [1, 2]\ny: [*a, *a]\nz: {<<: {k: 1}}\n"
MOST = 64 << 20
"""Bytes of memory for a manifest here, of some KiB: YAML takes about half a KiB a value, and aliases stand for MOST_NODES at most."""


def judged(raw: Any) -> None:
    """A job that is taken can be planned; one that is not has a sentence for each problem."""
    job, problems = validate_job(raw)
    assert (job is None) == bool(problems)
    for problem in problems:
        assert str(problem).strip() and len(short(str(problem))) <= 300
    if job is not None:
        snapshot = ObservedState(job.metadata.name, "ns", "uid-1", 1, "1", 0.0, job.spec, None, live=True)
        assert config_digest(cluster_config(snapshot))
        plan(snapshot, 1.0)


@counts(200, 100_000)
def test_a_changed_manifest_is_a_job_or_has_problems(cases: int) -> None:
    assert load_job(TEXT)[0] is not None
    fuzz(cases, json_changes, lambda changes: judged(changed_json(WHOLE, changes)), MOST)


@counts(75, 20_000)
def test_changed_text_is_a_job_or_has_problems(cases: int) -> None:
    def make(random: Random) -> tuple[bytes, list[Change]]:
        return random.choice((TEXT, ALIASED)), byte_changes(random)

    def read(case: tuple[bytes, list[Change]]) -> None:
        text = changed_bytes(*case)
        job, problems = load_job(text)
        assert (job is None) == bool(problems) and all(str(problem).strip() for problem in problems)
        for document in load_documents(text)[0]:
            judged(document.value)

    fuzz(cases, make, read, MOST)
