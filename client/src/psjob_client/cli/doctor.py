"""`psjob doctor`: what stands between a job and its training, on this machine or on a cluster. On a cluster nothing is created."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from psjob_client.cli.output import TextForm, TextOutput, echo, emit
from psjob_client.cli.render import documents
from psjob_client.doctor import machine_facts
from psjob_client.doctor.findings import ClusterFacts, Finding, judge_cluster, judge_machine, problem, sick
from psjob_client.doctor.fitting import judge_fit, pod_groups
from psjob_client.local.manifest import read_job, worker_commands
from psjob_client.problems import BadInput
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.render.objects import LABEL_ROLE, LABEL_STAGE

EXIT_WELL, EXIT_SICK = 0, 1
MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
EXAMPLES = """Examples:

  psjob doctor

  psjob doctor job.yaml

  psjob doctor job.yaml --context staging -n team-a

  psjob doctor --cluster -o json

Without --cluster, --context or -n this machine is looked at. With a manifest, whether that job would fit.

Exit codes: 0 no problem (warnings are none), 1 a problem, 2 nothing was looked at (bad input)."""


def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="A manifest: say too whether its job fits.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the cluster of the current context.")] = False,
    context: Annotated[str | None, typer.Option(help="Look at the cluster of this context.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="In this namespace of the cluster; absent: default.")] = None,
    kubeconfig: Annotated[str | None, typer.Option(metavar="FILE", help="The kubeconfig; absent: $KUBECONFIG or ~/.kube/config.")] = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Look at this machine or a cluster, and say what to do before a job is started there."""
    manifest = read_job(job) if job is not None else None
    if cluster or context is not None or namespace is not None or kubeconfig is not None:
        facts, fit = against(manifest, kubeconfig, context, namespace)
        found = judge_cluster(facts) + fit
    else:
        found = judge_machine(machine_facts.machine(Path.cwd()), manifest) + _command(manifest, job)
    _print(found, form)
    raise typer.Exit(EXIT_SICK if sick(found) else EXIT_WELL)


def _command(manifest: PSTrainingJob | None, job: Path | None) -> list[Finding]:
    """What `psjob run` would refuse of the job's command."""
    if manifest is None or job is None:
        return []
    try:
        worker_commands(manifest, job.absolute().parent)
    except BadInput as error:
        return [problem("job: command", line, "", "psjob run refuses it here") for line in error.lines]
    return []


def _print(found: Sequence[Finding], form: TextForm) -> None:
    if form is TextForm.json:
        emit(json.dumps({"problem": sick(found), "findings": [asdict(finding) for finding in found]}, indent=1) + "\n")
        return
    wide = max(len(finding.about) for finding in found)
    for finding in found:
        limit = f" (needed: {finding.limit})" if finding.limit else ""
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        echo(f"{MARKS[finding.level]}  {finding.about:<{wide}}  {finding.figure}{limit}{remedy}")
    counts = {level: sum(finding.level == level for finding in found) for level in ("problem", "warning")}
    echo(", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items()))


def against(
    job: PSTrainingJob | None, kubeconfig: str | None, context: str | None, namespace: str | None
) -> tuple[ClusterFacts, list[Finding]]:
    """What is seen of the cluster, and what that means for `job`; no finding without one. `namespace` None: the job's, else default."""
    from psjob_client.doctor.cluster_facts import Tried, cluster  # the Kubernetes client takes a second to import

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
    return facts, judge_fit(facts, job, pod_groups(job, asking), pod_groups(job, given))
