"""`psjob convert`: manifests of other operators, or a torchrun command, as a PSTrainingJob."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from psjob_client.convert import write
from psjob_client.convert.draft import Converted, Wishes
from psjob_client.local.errors import BadInput
from psjob_client.local.manifest import read_text
from psjob_operator.api.load import LARGEST_TEXT

EXAMPLES = """Examples:

  psjob convert pytorchjob.yaml > job.yaml

  kubectl get tfjob mnist -o yaml | psjob convert - -o job.yaml

  psjob convert --image registry.example.com/mnist:1 torchrun --nproc-per-node=4 train.py --epochs 3

What could not be carried over is listed on standard error and at the head of the YAML, with what to do.
The written YAML passes psjob validate.

Exit codes: 0 converted, 2 it cannot be."""
LINE = "psjob.line"
WRITTEN_AS = "--"


class LineCommand(TyperCommand):
    """Options of psjob end where a torchrun command begins: the rest is that command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        start = next((i for i, word in enumerate(args) if word == WRITTEN_AS or _begins(args[i:])), len(args))
        line = args[start:]
        ctx.meta[LINE] = line[1:] if line[:1] == [WRITTEN_AS] else line
        rest: list[str] = super().parse_args(ctx, args[:start])
        return rest


def convert(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None, typer.Argument(metavar="FILE…|-|torchrun …", help="Manifests, - for standard input, or a torchrun command.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the YAML here, not to standard output.")] = None,
    name: Annotated[str | None, typer.Option(help="The job's name; absent: that of the source.")] = None,
    image: Annotated[str | None, typer.Option(help="The workers' image; absent: that of the source.")] = None,
    shards: Annotated[
        int | None, typer.Option(metavar="N", help="Number of shards; absent: as many parameter servers as the source has, or 1.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What a worker starts, where the source leaves it to the image: 'python /app/train.py'."),
    ] = None,
) -> None:
    """Turn a TFJob, MXJob, PyTorchJob, TrainJob or a torchrun command into a PSTrainingJob."""
    line: list[str] = ctx.meta.get(LINE) or []
    wishes = Wishes(name, image, shards, _words(command))
    if bool(sources) == bool(line):
        both = "files and a torchrun command" if line else "nothing to convert"
        raise BadInput(f"psjob convert was given {both}; name manifests, or -, or write a torchrun command")
    jobs = [write.from_words(line, wishes)] if line else [job for source in sources or () for job in _of_source(source, wishes)]
    text = write.yaml_of(jobs)
    if out is None:
        typer.echo(text, nl=False)
    else:
        _write(out, text, sources or [])
    for job in jobs:
        _tell(job)


def _begins(words: list[str]) -> bool:
    from psjob_client.convert.launcher import is_launcher

    return is_launcher(words)


def _words(command: str | None) -> tuple[str, ...] | None:
    if command is None:
        return None
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise BadInput(f"--command {command}: cannot be read ({error}); close its quotes") from None
    if not words:
        raise BadInput("--command: must name a program, such as --command 'python /app/train.py'")
    return words


def _of_source(source: str, wishes: Wishes) -> list[Converted]:
    text = sys.stdin.buffer.read(LARGEST_TEXT + 1) if source == "-" else read_text(Path(source), "a manifest to convert")
    try:
        jobs, aside = write.from_text(text, wishes)
    except BadInput as error:
        raise BadInput(*(f"{source}: {line}" for line in error.lines)) from None
    for line in aside:
        print(f"{source}: {line}", file=sys.stderr)
    return jobs


def _write(out: Path, text: str, sources: list[str]) -> None:
    if any(source != "-" and Path(source).resolve() == out.resolve() for source in sources):
        raise BadInput(f"--output {out}: is the source itself; name another file")
    try:
        out.write_text(text)
    except OSError as error:
        raise BadInput(f"--output {out}: cannot be written: {error.strerror or error}; name another file") from None


def _tell(job: Converted) -> None:
    print(f"{job.source} -> PSTrainingJob {job.manifest['metadata']['name']}", file=sys.stderr)
    for note in job.notes:
        print(f"  {note}", file=sys.stderr)
