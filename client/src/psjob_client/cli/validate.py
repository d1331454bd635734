"""`psjob validate`: manifests judged as the API server, the operator and `psjob run` judge them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from psjob_client.cli.output import TextForm, TextOutput, echo, emit
from psjob_client.doctor.findings import judge_cluster
from psjob_client.lint import FileFinding, Judged, Level, judge_text
from psjob_client.local.manifest import read_text
from psjob_client.problems import BadInput
from psjob_operator.api.field_rule import Problem, shown
from psjob_operator.api.load import LARGEST_TEXT
from psjob_operator.api.spec import PSTrainingJob

EXIT_VALID, EXIT_INVALID = 0, 1
EXAMPLES = """Examples:

  psjob validate job.yaml

  psjob validate --strict jobs/*.yaml

  psjob validate --server -n team-a job.yaml

  psjob render job.yaml > /dev/null && psjob validate -o json job.yaml

A line is FILE:LINE: FIELD: what is wrong; what to do. A file may hold several documents; objects of other kinds are not judged.
With --server, -n, --context or --kubeconfig the cluster is asked too: limit ranges, quota, claims, classes, Pod Security, policies.

Exit codes: 0 all are valid, 1 one is not (with --strict: or has a warning), 2 a file cannot be read, or no cluster answers."""


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…|-", help="Manifests; - for standard input.")],
    strict: Annotated[bool, typer.Option("--strict", help="Also warn of what is legal and likely wrong, and fail for it.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Ask a cluster too what only it knows. Nothing is created.")] = False,
    context: Annotated[str | None, typer.Option(help="The cluster of this context.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="In this namespace; absent: the manifest's, or default.")
    ] = None,
    kubeconfig: Annotated[str | None, typer.Option(metavar="FILE", help="The kubeconfig; absent: $KUBECONFIG or ~/.kube/config.")] = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Check manifests by the rules of the API server, with the line of each value; without a cluster unless --server asks one."""
    asks = server or any(value is not None for value in (context, namespace, kubeconfig))

    def asked(job: PSTrainingJob) -> Iterator[tuple[Level, Problem]]:
        if asks:
            yield from _of_cluster(job, kubeconfig, context, namespace)

    results = [judge_text(file if file != "-" else "<stdin>", _text(file), strict=strict, asked=asked) for file in files]
    if form is TextForm.json:
        emit(json.dumps(_json(results), indent=1) + "\n")
    else:
        for result in results:
            _tell(result)
    raise typer.Exit(EXIT_INVALID if any(result.findings for result in results) else EXIT_VALID)


def _of_cluster(job: PSTrainingJob, kubeconfig: str | None, context: str | None, namespace: str | None) -> Iterator[tuple[Level, Problem]]:
    """What a cluster has against the job. A job waits for most of it, and nobody need see it wait."""
    from psjob_client.cli.doctor import against  # the planner takes a while to import

    facts, fit = against(job, kubeconfig, context, namespace)
    if facts.unreachable:
        raise BadInput(f"--server: {facts.server}: {facts.unreachable}; look at --context and the kubeconfig: kubectl cluster-info")
    place = [finding for finding in judge_cluster(facts) if finding.about in ("namespace", "CRD")]
    for finding in (*place, *fit):
        if finding.level != "ok":
            about, limit = finding.about.removeprefix("job: "), f", {finding.limit}" if finding.limit else ""
            # Nodes may come, by an autoscaler or a person.
            level: Level = "error" if finding.level == "problem" and " pods" not in about else "warning"
            yield level, Problem("", None, f"{about}: {finding.figure}{limit}", finding.remedy)


def _text(file: str) -> bytes:
    return sys.stdin.buffer.read(LARGEST_TEXT + 1) if file == "-" else read_text(Path(file), "a PSTrainingJob manifest", ("job.yaml",))


def _tell(result: Judged) -> None:
    for finding in result.findings:
        echo(str(finding))
    for name in result.jobs:
        echo(f"{result.file}: {name}: valid")
    if result.aside:
        echo(f"{result.file}: {result.aside} {'object' if result.aside == 1 else 'objects'} of other kinds: not judged")


def _json(results: list[Judged]) -> dict[str, Any]:
    return {
        "valid": not any(finding.level == "error" for result in results for finding in result.findings),
        "files": [
            {
                "file": result.file,
                "jobs": list(result.jobs),
                "others": result.aside,
                "findings": [_row(finding) for finding in result.findings],
            }
            for result in results
        ],
    }


def _row(finding: FileFinding) -> dict[str, Any]:
    problem = finding.problem
    return {
        "level": finding.level,
        "line": finding.line,
        "job": finding.job or None,
        "field": problem.field or None,
        "value": None if problem.value is None else shown(problem.value),
        "limit": problem.limit,
        "remedy": problem.remedy or None,
    }
