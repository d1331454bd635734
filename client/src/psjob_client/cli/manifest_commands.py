"""The verbs over a manifest before a job is started: init writes one, validate and doctor judge it, render shows its objects.

`psjob validate` judges as the API server, the operator and `psjob run` do. `psjob doctor` says what stands between a job and its training,
on this machine or on a cluster, where nothing is created. `psjob crd` prints the definition of PSTrainingJob.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import typer
import yaml

from psjob_client.cli.options import Settings
from psjob_client.cli.output import TextForm, TextOutput, echo, emit
from psjob_client.convert.draft import command_of, image_of, job_name
from psjob_client.doctor import machine_facts
from psjob_client.doctor.findings import ClusterFacts, Finding, judge_cluster, judge_machine, problem, sick
from psjob_client.doctor.fitting import judge_fit, pod_groups
from psjob_client.lint import FileFinding, Judged, Level, judge_text
from psjob_client.local.manifest import read_job, read_text, worker_commands
from psjob_client.problems import BadInput
from psjob_operator import keys
from psjob_operator import render as objects
from psjob_operator.api.crd import NoAnchors, crd_yaml
from psjob_operator.api.field_rule import Problem, shown
from psjob_operator.api.load import LARGEST_TEXT, load_job
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.contract import AUTHORITY, CERTIFICATE, WORKER_CERTIFICATE
from psjob_operator.plan.actions import Action, CreateProcess, EnsureClaim, EnsureConfig, EnsureKey, EnsurePairClaim, EnsureService
from psjob_operator.plan.objects import listening_workers, volume
from psjob_operator.plan.observed_state import ObservedState, ResumeSource
from psjob_operator.plan.plan import plan
from psjob_operator.render.objects import LABEL_ROLE, LABEL_STAGE

TEMPLATES = files("psjob_client") / "templates"
"""A folder a template, each file with this suffix; what all have in common is in `_common`."""
SUFFIX, COMMON, MANIFEST = ".tmpl", "_common", "job.yaml"
TESTED = {"torch": "2.15.0", "transformers": "5.23.0", "lightning": "2.6.6", "accelerate": "1.15.0"}
"""For requirements.txt, where a package is not installed here."""
NO_UID = "00000000-0000-0000-0000-000000000000"
"""Stands for the uid that the API server gives, and for the run of a job to continue from."""
NO_KEY = bytes(32)
"""Stands for each key of a run."""
RUNTIME_IMAGE = "psjob-runtime:latest"
EXIT_GOOD, EXIT_BAD = 0, 1
"""Of validate and doctor."""
MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}
INIT_EXAMPLES = """Examples:

  psjob init

  psjob init hello && psjob run hello/job.yaml

  psjob init mnist --template lightning --image registry.example.com/me/mnist:1 --workers 4

Exit codes: 0 the files are written, 2 nothing was written."""
VALIDATE_EXAMPLES = """Examples:

  psjob validate job.yaml

  psjob validate --strict jobs/*.yaml

  psjob validate --server -n team-a job.yaml

  psjob render job.yaml > /dev/null && psjob validate -o json job.yaml

A line is FILE:LINE: FIELD: what is wrong; what to do. A file may hold several documents; objects of other kinds are not judged.
With --server, -n, --context or --kubeconfig the cluster is asked too: limit ranges, quota, claims, classes, Pod Security, policies.

Exit codes: 0 all are valid, 1 one is not (with --strict: or has a warning), 2 a file cannot be read, or no cluster answers."""
DOCTOR_EXAMPLES = """Examples:

  psjob doctor

  psjob doctor job.yaml

  psjob doctor job.yaml --context staging -n team-a

  psjob doctor --cluster -o json

Without --cluster, --context or -n this machine is looked at. With a manifest, whether that job would fit.

Exit codes: 0 no problem (warnings are none), 1 a problem, 2 nothing was looked at (bad input)."""
Kubeconfig = Annotated[str | None, typer.Option(metavar="FILE", help="The kubeconfig; absent: $KUBECONFIG or ~/.kube/config.")]


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files are written; made if it is not there.")] = Path(),
    template: Annotated[str, typer.Option(help="What the script trains with: pytorch, transformers, lightning or accelerate.")] = "pytorch",
    name: Annotated[str | None, typer.Option(help="The job's name; absent: made from the folder's.")] = None,
    image: Annotated[str | None, typer.Option(help="The workers' image; absent: registry.example.com/NAME:1.")] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="Number of workers.")] = 2,
    shards: Annotated[int, typer.Option(metavar="N", help="Number of shards.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Write a manifest, a training script and a Dockerfile to start from."""
    name = name if name is not None else job_name(folder.absolute().name)
    image = image if image is not None else image_of(name)
    words = {"name": name, "image": image, "workers": str(workers), "shards": str(shards), "mode": "sync", **versions()}
    words["command"] = command_of(["python", "train.py"])
    made = {file: Template(text).substitute(words) for file, text in _template_texts(template).items()}
    job, problems = load_job(made[MANIFEST])
    if job is None:
        raise BadInput(*(f"nothing was written: {problem}" for problem in problems))
    if job.spec.workers.template["spec"]["containers"][0]["image"] != image:
        raise BadInput(f"--image {image}: is no name of an image, and nothing was written; give one such as {image_of(name)}")
    there = [file for file in made if (folder / file).exists()]
    if there and not force:
        raise BadInput(
            f"{folder}: holds {', '.join(there)} already, and nothing was written; name another folder, or give --force to overwrite"
        )
    _write_all(folder, made)
    echo(f"{name}: wrote {', '.join(made)} in {folder.absolute()}")
    echo("Next:")
    if any(_installed(package) is None for package in _packages(made)):
        echo(f"  pip install -r {_quoted_path(folder, 'requirements.txt')}")
    echo(f"  psjob run {_quoted_path(folder, 'job.yaml')}        trains on this machine")
    echo(f"  docker build -t {image} {shlex.quote(str(folder))} && docker push {image}")
    echo(f"  psjob submit {_quoted_path(folder, 'job.yaml')}     trains on a cluster")


def manifest_template() -> str:
    """That of every job."""
    return (TEMPLATES / COMMON / f"{MANIFEST}{SUFFIX}").read_text()


def versions() -> dict[str, str]:
    """Of the packages that scripts import: what is installed here, else what psjob is tested with."""
    return {package: _installed(package) or tested for package, tested in TESTED.items()}


def _template_texts(template: str) -> dict[str, str]:
    names = sorted(place.name for place in TEMPLATES.iterdir() if place.is_dir() and not place.name.startswith("_"))
    if template not in names:
        raise BadInput(f"--template {template}: there is no such template; take {', '.join(names)}")
    places = [place for folder in (COMMON, template) for place in (TEMPLATES / folder).iterdir() if place.name.endswith(SUFFIX)]
    places.sort(key=lambda place: (place.name != f"{MANIFEST}{SUFFIX}", place.name))
    return {place.name.removesuffix(SUFFIX): place.read_text() for place in places}


def _packages(made: dict[str, str]) -> list[str]:
    return [line.partition("==")[0] for line in made["requirements.txt"].split()]


def _installed(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def _quoted_path(folder: Path, file: str) -> str:
    return shlex.quote(str(folder / file))


def _write_all(folder: Path, made: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in made.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror or error}; name a folder that you may write to") from None


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…|-", help="Manifests; - for standard input.")],
    strict: Annotated[bool, typer.Option("--strict", help="Also warn of what is legal and likely wrong, and fail for it.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Ask a cluster too what only it knows. Nothing is created.")] = False,
    context: Annotated[str | None, typer.Option(help="The cluster of this context.")] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="In this namespace; absent: the manifest's, or default.")
    ] = None,
    kubeconfig: Kubeconfig = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Check manifests by the rules of the API server, with the line of each value; without a cluster unless --server asks one."""
    asks = server or any(value is not None for value in (context, namespace, kubeconfig))

    def asked(job: PSTrainingJob) -> Iterator[tuple[Level, Problem]]:
        if asks:
            yield from _of_cluster(job, kubeconfig, context, namespace)

    results = [judge_text(file if file != "-" else "<stdin>", _manifest_text(file), strict=strict, asked=asked) for file in files]
    if form is TextForm.json:
        emit(json.dumps(_judged_json(results), indent=1) + "\n")
    else:
        for result in results:
            _print_judged(result)
    raise typer.Exit(EXIT_BAD if any(result.findings for result in results) else EXIT_GOOD)


def _of_cluster(job: PSTrainingJob, kubeconfig: str | None, context: str | None, namespace: str | None) -> Iterator[tuple[Level, Problem]]:
    """What a cluster has against the job. A job waits for most of it, and nobody need see it wait."""
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


def _manifest_text(file: str) -> bytes:
    return sys.stdin.buffer.read(LARGEST_TEXT + 1) if file == "-" else read_text(Path(file), "a PSTrainingJob manifest", ("job.yaml",))


def _print_judged(result: Judged) -> None:
    for finding in result.findings:
        echo(str(finding))
    for name in result.jobs:
        echo(f"{result.file}: {name}: valid")
    if result.aside:
        echo(f"{result.file}: {result.aside} {'object' if result.aside == 1 else 'objects'} of other kinds: not judged")


def _judged_json(results: list[Judged]) -> dict[str, Any]:
    return {
        "valid": not any(finding.level == "error" for result in results for finding in result.findings),
        "files": [
            {
                "file": result.file,
                "jobs": list(result.jobs),
                "others": result.aside,
                "findings": [_finding_row(finding) for finding in result.findings],
            }
            for result in results
        ],
    }


def _finding_row(finding: FileFinding) -> dict[str, Any]:
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


def doctor(
    job: Annotated[Path | None, typer.Argument(metavar="[JOB.yaml]", help="A manifest: say too whether its job fits.")] = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="Look at the cluster of the current context.")] = False,
    context: Annotated[str | None, typer.Option(help="Look at the cluster of this context.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="In this namespace of the cluster; absent: default.")] = None,
    kubeconfig: Kubeconfig = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Look at this machine or a cluster, and say what to do before a job is started there."""
    manifest = read_job(job) if job is not None else None
    if cluster or context is not None or namespace is not None or kubeconfig is not None:
        facts, fit = against(manifest, kubeconfig, context, namespace)
        found = judge_cluster(facts) + fit
    else:
        found = judge_machine(machine_facts.machine(Path.cwd()), manifest) + _of_command(manifest, job)
    _print_findings(found, form)
    raise typer.Exit(EXIT_BAD if sick(found) else EXIT_GOOD)


def _of_command(manifest: PSTrainingJob | None, job: Path | None) -> list[Finding]:
    """What `psjob run` would refuse of the job's command."""
    if manifest is None or job is None:
        return []
    try:
        worker_commands(manifest, job.absolute().parent)
    except BadInput as error:
        return [problem("job: command", line, "", "psjob run refuses it here") for line in error.lines]
    return []


def _print_findings(found: Sequence[Finding], form: TextForm) -> None:
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


def render(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Manifest of one PSTrainingJob.")],
    settings: Settings = None,
    runtime_image: Annotated[
        str, typer.Option(envvar="PSJOB_RUNTIME_IMAGE", help="Image that puts the psjob library into workers' pods.")
    ] = RUNTIME_IMAGE,
) -> None:
    """Print every object that the operator would create, as YAML; the job's uid and its keys are written as zeros."""
    emit(render_yaml(read_job(job, tuple(settings or ())), runtime_image))


def render_yaml(job: PSTrainingJob, runtime_image: str = RUNTIME_IMAGE) -> str:
    """The documents of `documents` as YAML, without anchors."""
    return yaml.dump_all(
        documents(job, runtime_image), Dumper=NoAnchors, sort_keys=False, width=140, allow_unicode=True, explicit_start=True
    )


def documents(job: PSTrainingJob, runtime_image: str = RUNTIME_IMAGE, *, asks_nothing: bool = False) -> list[dict[str, Any]]:
    """Service, ConfigMap, claim, keys and pods of a job's first turn, in the order of their creation. A suspended job shows what it
    will have, a job of another controller what it would have. `asks_nothing`: as where a LimitRange takes the place of psjob's requests."""
    snapshot = ObservedState(
        name=job.metadata.name,
        namespace=job.metadata.namespace or "default",
        uid=NO_UID,
        generation=1,
        resource_version="0",
        created=0.0,
        spec=job.spec.model_copy(update={"suspend": None, "managed_by": None}),
        status=None,
        runtime_image=runtime_image,
        resume_source=ResumeSource(NO_UID, True, volume(job.metadata.name, job.spec)),
    )
    pods = objects.Pods(snapshot, asks_nothing=asks_nothing)
    return [_document(snapshot, action, pods) for action in plan(snapshot, 0.0).actions]


def _document(snapshot: ObservedState, action: Action, pods: objects.Pods) -> dict[str, Any]:
    match action:
        case EnsureService():
            return objects.service(snapshot)
        case EnsureConfig():
            return objects.config(snapshot, action.format, action.encryption, action.resumed_from)
        case EnsureClaim():
            return objects.claim(snapshot)
        case EnsurePairClaim():
            return objects.pair_claim(snapshot, action.index, action.number)
        case EnsureKey():
            return objects.key_secret(snapshot, action.number, dict.fromkeys(keys.NAMES, NO_KEY), _no_certificates(snapshot, action))
        case CreateProcess():
            return pods.pod(action)
        case _:
            raise AssertionError(f"a new job's first turn never has {type(action).__name__}")


def _no_certificates(snapshot: ObservedState, action: EnsureKey) -> dict[str, bytes]:
    """Empty files, of the names that they will have."""
    if not action.certificates:
        return {}
    shards = [CERTIFICATE.format(index=index) for index in range(snapshot.spec.shards.replicas)]
    workers = [WORKER_CERTIFICATE.format(index=index) for index in range(listening_workers(snapshot.spec))]
    return dict.fromkeys([AUTHORITY, *shards, *workers], b"")


def crd() -> None:
    """Print the CRD of PSTrainingJob, ready for `kubectl apply -f -`."""
    emit(crd_yaml())
