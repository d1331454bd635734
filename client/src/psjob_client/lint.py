"""`psjob validate`: the text of a file in, findings with their lines out.

Beside what is refused there is what is legal in a manifest and likely wrong (`likely_wrong`): one row a thought, each naming a field, its
value and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psjob_operator.api.field_rule import Problem, shown
from psjob_operator.api.load import Document, load_documents
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.template import TRAINED, asks_devices, container_of
from psjob_operator.api.validate import every_problem
from psjob_operator.contract import GROUP, KIND
from psjob_operator.plan import objects

Level = Literal["error", "warning"]
Asked = Callable[[PSTrainingJob], Iterable[tuple[Level, Problem]]]
"""What else is asked about a job in which nothing is wrong by itself."""
LAUNCHERS = re.compile(r"(?:^|[\s/])(torchrun|accelerate|deepspeed|mpirun|horovodrun)(?:\s|$)|torch\.distributed\.(?:run|launch)")
LAUNCHED = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"})
GPUS = ("nvidia.com/gpu", "amd.com/gpu")
GITOPS = ("argocd.argoproj.io/", "kustomize.toolkit.fluxcd.io/", "helm.toolkit.fluxcd.io/")
MANY_SHARDS = 8
"""Shards a worker that are more than anyone needs."""
OFTEN_SECONDS, OFTEN_STEPS = 5, 10


@dataclass(frozen=True)
class FileFinding:
    """One thing about one value of one file."""

    level: Level
    file: str
    line: int | None
    """From 1; None where it is about the file as a whole."""
    job: str
    """Name of the job; empty where it has none."""
    problem: Problem

    def __str__(self) -> str:
        """`job.yaml:7: spec.shards.replicas: Invalid value: 0: must be 1..256; …`."""
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        if self.level == "error":
            return f"{where}: {self.problem}"
        value = "" if self.problem.value is None else f"{shown(self.problem.value)}: "
        field = f"{self.problem.field}: " if self.problem.field else ""
        return f"{where}: warning: {field}{value}{self.problem.limit}; {self.problem.remedy}"


@dataclass(frozen=True)
class Judged:
    """What was found in one file."""

    file: str
    jobs: tuple[str, ...]
    """Names of its valid jobs."""
    aside: int
    """Number of objects of other kinds, which are not judged."""
    findings: tuple[FileFinding, ...]


def judge_text(file: str, text: str | bytes, *, strict: bool = False, asked: Asked = lambda _: ()) -> Judged:
    """Every PSTrainingJob in `text` (several documents, and Lists), by the rules of the API server, and by what is `asked`; with `strict`,
    warnings too."""
    documents, problems = load_documents(text)
    if problems:
        return Judged(file, (), 0, tuple(FileFinding("error", file, None, "", problem) for problem in problems))
    jobs: list[str] = []
    findings: list[FileFinding] = []
    aside = 0
    for document, at, raw in _objects(documents):
        if _is_of_others(raw):
            aside += 1
            continue
        name = _name(raw)
        found = list(_of_one(raw, strict, asked))
        findings += [_placed(level, file, document, at, name, problem) for level, problem in found]
        if not any(level == "error" for level, _ in found):
            jobs.append(name)
    if not findings and not jobs:
        findings.append(FileFinding("error", file, None, "", Problem("", None, f"holds no {KIND}", "name a file that does")))
    return Judged(file, tuple(jobs), aside, tuple(findings))


def _of_one(raw: Any, strict: bool, asked: Asked) -> Iterator[tuple[Level, Problem]]:
    job, problems = every_problem(raw)
    for problem in problems:
        yield "error", problem
    if job is not None and strict:
        for problem in likely_wrong(job):
            yield "warning", problem
    for level, problem in asked(job) if job is not None else ():
        if strict or level == "error":
            yield level, problem


def _placed(level: Level, file: str, document: Document, at: str, job: str, problem: Problem) -> FileFinding:
    path = ".".join(part for part in (at, problem.field) if part)
    return FileFinding(level, file, document.line(path), job, problem)


def _objects(documents: list[Document]) -> Iterator[tuple[Document, str, Any]]:
    """(document, path in it, object): those of a List one by one."""
    for document in documents:
        raw = document.value
        inner = raw.get("items") if isinstance(raw, Mapping) and str(raw.get("kind", "")).endswith("List") else None
        if isinstance(inner, list):
            yield from ((document, f"items[{i}]", item) for i, item in enumerate(inner))
        else:
            yield document, "", raw


def _is_of_others(raw: Any) -> bool:
    """Another kind of object, which a file may hold beside a job; one that only looks like it is judged."""
    if not isinstance(raw, Mapping):
        return False
    kind, group = raw.get("kind"), str(raw.get("apiVersion", "")).partition("/")[0]
    return isinstance(kind, str) and isinstance(raw.get("apiVersion"), str) and kind.lower() != KIND.lower() and group != GROUP


def _name(raw: Any) -> str:
    metadata = raw.get("metadata") if isinstance(raw, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name if isinstance(name, str) else ""


def likely_wrong(job: PSTrainingJob) -> list[Problem]:
    """Every warning about a valid job, in the order of its fields."""
    return [problem for look in LOOKS for problem in look(job)]


def _numbers(job: PSTrainingJob) -> Iterator[Problem]:
    spec = job.spec
    workers, shards, mode = spec.workers.replicas, spec.shards.replicas, spec.training.mode
    if shards > MANY_SHARDS * workers:
        yield Problem(
            "spec.shards.replicas", shards, f"is more than {MANY_SHARDS} times spec.workers.replicas ({workers})", "are the two mixed up?"
        )
    if workers == 1 and mode != "sync":
        yield Problem("spec.training.mode", mode, "makes no difference with one worker", "leave it out, or raise spec.workers.replicas")


def _policies(job: PSTrainingJob) -> Iterator[Problem]:
    policy = job.spec.run_policy
    if policy.backoff_limit == 0:
        yield Problem(
            "spec.runPolicy.backoffLimit", 0, "fails the job at its first failure", "leave it out, so that a lost process returns"
        )
    deadline = policy.active_deadline_seconds
    if deadline is not None and not job.spec.checkpoint.disabled and job.spec.checkpoint.period_seconds >= deadline:
        yield Problem(
            "spec.runPolicy.activeDeadlineSeconds",
            deadline,
            f"comes before the first checkpoint by time (spec.checkpoint.periodSeconds: {job.spec.checkpoint.period_seconds})",
            "shorten it, or raise the deadline",
        )
    marks = [*job.metadata.labels, *job.metadata.annotations]
    if policy.ttl_seconds_after_finished is not None and any(mark.startswith(GITOPS) for mark in marks):
        yield Problem(
            "spec.runPolicy.ttlSecondsAfterFinished",
            policy.ttl_seconds_after_finished,
            "deletes a job that a GitOps engine makes again, and it would be trained again",
            "leave it out",
        )


def _runtime_class(job: PSTrainingJob) -> Iterator[Problem]:
    worker, shard = job.spec.workers.template.get("spec") or {}, (job.spec.shards.template or {}).get("spec") or {}
    name = worker.get("runtimeClassName")
    if name and asks_devices(worker) and "runtimeClassName" not in shard:
        yield Problem(
            "spec.workers.template.spec.runtimeClassName",
            name,
            "is not the shards' too, since nodes without devices may not have it",
            "set it in spec.shards.template.spec where it isolates pods, or set it there to null",
        )


def _checkpoints(job: PSTrainingJob) -> Iterator[Problem]:
    kept = job.spec.checkpoint
    if kept.disabled:
        yield Problem(
            "spec.checkpoint.disabled", True, "fails the job when a shard is lost", "leave it out, unless a lost job costs nothing"
        )
        return
    if kept.period_seconds < OFTEN_SECONDS:
        yield Problem("spec.checkpoint.periodSeconds", kept.period_seconds, "writes more than it trains", f"take {OFTEN_SECONDS} or more")
    if kept.every_steps is not None and kept.every_steps < OFTEN_STEPS:
        yield Problem("spec.checkpoint.everySteps", kept.every_steps, "writes more than it trains", f"take {OFTEN_STEPS} or more")
    if kept.resume_from is not None and kept.resume_from.job is not None and kept.volume is None:
        yield Problem(
            "spec.checkpoint.volume",
            None,
            f"is absent: on a cluster the claim of this job is another than that of job {kept.resume_from.job}",
            f"name its claim: {{persistentVolumeClaim: {{claimName: {objects.claim_name(kept.resume_from.job)}}}}}",
        )
    if kept.volume is not None and kept.volume.source().get("hostPath") is not None:
        yield Problem(
            "spec.checkpoint.volume.hostPath",
            None,
            "is another folder on each node",
            "a shard that returns elsewhere finds nothing: name a claim",
        )


def _containers(job: PSTrainingJob) -> Iterator[Problem]:
    for path, template in job.spec.worker_templates().items():
        container = container_of(template, TRAINED) or {}
        yield from _container(container, f"{path}.spec.containers[{template['spec']['containers'].index(container)}]")


def _container(container: dict[str, Any], at: str) -> Iterator[Problem]:
    yield from _image(container.get("image"), at)
    words = [*container["command"], *(container.get("args") or [])]
    launcher = next((found for word in words if (found := LAUNCHERS.search(word))), None)
    if launcher:
        yield Problem(
            f"{at}.command", launcher[0].strip(), "starts processes of its own, and each of them joins as the same worker",
            "psjob starts the workers: write [python, train.py], or use psjob convert",
        )  # fmt: skip
    yield from _variables(container.get("env") or [], at)
    if container.get("envFrom"):
        yield Problem(
            f"{at}.envFrom", None, "is read only on a cluster", "psjob run refuses it: write values under env to train on a laptop too"
        )
    resources = container.get("resources") or {}
    if not isinstance(resources, dict) or not (resources.get("requests") or resources.get("limits")):
        yield Problem(
            f"{at}.resources",
            None,
            "asks for nothing",
            "workers may share a full node and are the first to be evicted: add requests and limits",
        )
    else:
        limits = resources.get("limits") or {}
        for name in GPUS:
            if isinstance(limits, dict) and str(limits.get(name, "0")).isdigit() and int(limits.get(name, 0)) > 1:
                yield Problem(
                    f"{at}.resources.limits.{name}", limits[name], "is for one process, since a worker is one",
                    "take 1 and raise spec.workers.replicas, unless the script uses them all",
                )  # fmt: skip


def _image(image: Any, at: str) -> Iterator[Problem]:
    if not isinstance(image, str) or not image:
        yield Problem(f"{at}.image", image, "is needed on a cluster", "name the image that holds torch and the script")
        return
    tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
    if "@" not in image and tag in ("", "latest"):
        yield Problem(f"{at}.image", image, "may be another image when a worker is started again", "give it a tag of its own, or a digest")


def _variables(env: list[dict[str, Any]], at: str) -> Iterator[Problem]:
    for i, entry in enumerate(env):
        name = entry["name"]
        if name in LAUNCHED:
            yield Problem(f"{at}.env[{i}].name", name, "is for torch.distributed", "ps.rank() and ps.world() say who is who; leave it out")
        if entry.get("valueFrom") is not None:
            yield Problem(
                f"{at}.env[{i}].valueFrom",
                None,
                "is read only on a cluster",
                "psjob run refuses it: write a value to train on a laptop too",
            )


LOOKS: tuple[Callable[[PSTrainingJob], Iterator[Problem]], ...] = (_numbers, _policies, _runtime_class, _checkpoints, _containers)
