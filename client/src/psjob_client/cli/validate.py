"""`psjob validate`: manifests judged as the API server, the operator and `psjob run` judge them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from psjob_client.cli.output import TextForm, TextOutput, echo, emit
from psjob_client.judge.files import Finding, Judged, judged
from psjob_client.local.manifest import read_text
from psjob_operator.api.load import LARGEST_TEXT
from psjob_operator.api.problem import shown

EXIT_VALID, EXIT_INVALID = 0, 1
EXAMPLES = """Examples:

  psjob validate job.yaml

  psjob validate --strict jobs/*.yaml

  psjob render job.yaml > /dev/null && psjob validate -o json job.yaml

A line is FILE:LINE: FIELD: what is wrong; what to do. A file may hold several documents; objects of other kinds are not judged.

Exit codes: 0 all are valid, 1 one is not (with --strict: or has a warning), 2 a file cannot be read."""


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE…|-", help="Manifests; - for standard input.")],
    strict: Annotated[bool, typer.Option("--strict", help="Also warn of what is legal and likely wrong, and fail for it.")] = False,
    form: TextOutput = TextForm.text,
) -> None:
    """Check manifests without a cluster: the rules of the API server, with the line of each value."""
    results = [judged(file if file != "-" else "<stdin>", _text(file), strict=strict) for file in files]
    if form is TextForm.json:
        emit(json.dumps(_json(results), indent=1) + "\n")
    else:
        for result in results:
            _tell(result)
    raise typer.Exit(EXIT_INVALID if any(result.findings for result in results) else EXIT_VALID)


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


def _row(finding: Finding) -> dict[str, Any]:
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
