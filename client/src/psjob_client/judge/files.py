"""The main road of `psjob validate`: the text of a file in, findings with their lines out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from psjob_client.judge.likely import likely_wrong
from psjob_operator.api.field_rule import Problem, shown
from psjob_operator.api.load import Document, load_documents
from psjob_operator.api.spec import PSTrainingJob
from psjob_operator.api.validate import every_problem
from psjob_operator.contract import GROUP, KIND


@dataclass(frozen=True)
class Finding:
    """One thing about one value of one file."""

    level: Literal["error", "warning"]
    file: str
    line: int | None
    """From 1; None where it is about the file as a whole."""
    job: str
    """Name of the job; empty where it has none."""
    problem: Problem

    def __str__(self) -> str:
        """`job.yaml:7: spec.ps.shards: Invalid value: 0: must be 1..256; …`."""
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
    findings: tuple[Finding, ...]


Level = Literal["error", "warning"]
Asked = Callable[[PSTrainingJob], Iterable[tuple[Level, Problem]]]
"""What else is asked about a job in which nothing is wrong by itself."""


def judged(file: str, text: str | bytes, *, strict: bool = False, asked: Asked = lambda _: ()) -> Judged:
    """Every PSTrainingJob in `text` (several documents, and Lists), by the rules of the API server, and by what is `asked`; with `strict`,
    warnings too."""
    documents, problems = load_documents(text)
    if problems:
        return Judged(file, (), 0, tuple(Finding("error", file, None, "", problem) for problem in problems))
    jobs: list[str] = []
    findings: list[Finding] = []
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
        findings.append(Finding("error", file, None, "", Problem("", None, f"holds no {KIND}", "name a file that does")))
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


def _placed(level: Level, file: str, document: Document, at: str, job: str, problem: Problem) -> Finding:
    path = ".".join(part for part in (at, problem.field) if part)
    return Finding(level, file, document.line(path), job, problem)


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
