"""A job against a cluster: what the cluster says of its pods, its volumes and itself. Nothing is created."""

from __future__ import annotations

import asyncio

from psjob_client.cli.render import documents
from psjob_client.doctor.cluster import ClusterFacts
from psjob_client.doctor.findings import Finding
from psjob_client.doctor.fitting import judge_fit, pods_of
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.render.objects import LABEL_ROLE, LABEL_STAGE


def against(
    job: PSTrainingJob | None, kubeconfig: str | None, context: str | None, namespace: str | None
) -> tuple[ClusterFacts, list[Finding]]:
    """What is seen of the cluster, and what that means for `job`; no finding without one. `namespace` None: the job's, else default."""
    from psjob_client.doctor.ask import Tried, cluster  # the Kubernetes client takes a second to import

    place = namespace or (job.metadata.namespace if job is not None else None) or "default"
    if job is None:
        return asyncio.run(cluster(kubeconfig, context, place, None, [])), []
    asking, given = documents(job), documents(job, asks_nothing=True)
    seats = {}
    for one, bare in zip(asking, given, strict=True):
        if one["kind"] == "Pod":
            labels = one["metadata"]["labels"]
            seats[labels[LABEL_ROLE], labels.get(LABEL_STAGE)] = Tried(one, bare)
    facts = asyncio.run(cluster(kubeconfig, context, place, job.to_manifest(), list(seats.values())))
    return facts, judge_fit(facts, job, pods_of(job, asking), pods_of(job, given))
