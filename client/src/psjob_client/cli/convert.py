"""`psjob convert`: manifests of other operators or a launcher's command as a PSTrainingJob, and a script as one for psjob."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from psjob_client.cli.options import Helped
from psjob_client.cli.output import emit, say
from psjob_client.convert.draft import Converted, Wishes
from psjob_client.convert.launcher import is_launcher, quoted
from psjob_client.convert.script.port import Ported, ported
from psjob_client.convert.sources import from_text, from_words, yaml_of
from psjob_client.local.manifest import read_text
from psjob_client.problems import BadInput
from psjob_operator.api.load import LARGEST_TEXT

EXAMPLES = """Examples:

  psjob convert train.py

  psjob convert --write train.py

  psjob convert pytorchjob.yaml > job.yaml

  kubectl get tfjob mnist -o yaml | psjob convert - --save job.yaml

  psjob convert --image registry.example.com/mnist:1 torchrun --nproc-per-node=4 train.py --epochs 3

A script is not run. Its edits are printed as a diff, which patch takes, and nothing is written without --write or --save.

What could not be carried over is listed on standard error and at the head of the YAML, with what to do.
The written YAML passes psjob validate.

Exit codes: 0 converted, 1 a script is converted but for the lines that are listed, 2 it cannot be."""
LINE = "psjob.line"
WRITTEN_AS = "--"
SCRIPT = ".py"
IN_PART = 1
OTHER_FILE = "give --save FILE with a file that can be"
COLOURS = {"+": typer.colors.GREEN, "-": typer.colors.RED, "@": typer.colors.CYAN}
"""Of a diff's lines on a terminal."""


class LineCommand(Helped):
    """Options of psjob end where a torchrun command begins: the rest is that command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        start = next((i for i, word in enumerate(args) if word == WRITTEN_AS or is_launcher(args[i:])), len(args))
        line = args[start:]
        if not line and args and not args[-1].startswith("-") and args[-2:-1] != ["--command"]:
            line = quoted(args[-1]) or []
            start = len(args) - bool(line)
        ctx.meta[LINE] = line[1:] if line[:1] == [WRITTEN_AS] else line
        rest: list[str] = super().parse_args(ctx, args[:start])
        return rest


def convert(
    ctx: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE…|-|torchrun …",
            help="Scripts that end in .py, manifests, - for standard input, or a command of torchrun or accelerate launch.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the YAML, or the converted script, here.")] = None,
    in_place: Annotated[bool, typer.Option("--write", help="Write the converted scripts in their place.")] = False,
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
    """Turn a script for DDP or Horovod into one for psjob, or a TFJob, MXJob, PyTorchJob, TrainJob or torchrun command into a manifest."""
    line: list[str] = ctx.meta.get(LINE) or []
    wishes = Wishes(name, image, shards, _words(command))
    if sources and not line and all(source.endswith(SCRIPT) for source in sources):
        _scripts(sources, out, in_place, wishes)
        return
    _no_scripts(sources or [], in_place)
    if bool(sources) == bool(line):
        both = "files and a torchrun command" if line else "nothing to convert"
        raise BadInput(f"psjob convert was given {both}; name manifests, or -, or write a torchrun command")
    jobs = [from_words(line, wishes)] if line else [job for source in sources or () for job in _of_source(source, wishes)]
    text = yaml_of(jobs)
    if out is None:
        emit(text)
    else:
        _not_itself(out, sources or [])
        _save(out, text, f"--save {out}:", "name another file")
    for job in jobs:
        _tell(job)


def _no_scripts(sources: list[str], in_place: bool) -> None:
    if mixed := [source for source in sources if source.endswith(SCRIPT)]:
        raise BadInput(f"{mixed[0]}: is a script and stands beside manifests; convert scripts in a command of their own")
    if in_place:
        raise BadInput("--write: is for scripts that end in .py; a manifest is written by --save FILE")


def _scripts(sources: list[str], out: Path | None, in_place: bool, wishes: Wishes) -> None:
    """Show the edits of each script, or write them."""
    given = {"--name": wishes.name, "--image": wishes.image, "--shards": wishes.shards, "--command": wishes.command}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise BadInput(f"{wrong[0]}: is for manifests; a script has none: leave it out, and start it by psjob run {sources[0]}")
    if out is not None and (in_place or len(sources) > 1):
        why = "names one file and --write the other" if in_place else f"names one file for {len(sources)} scripts"
        raise BadInput(f"--save {out}: {why}; give one script and one of the two")
    read = [_script(source) for source in sources]
    for source, (script, made) in zip(sources, read, strict=True):
        if in_place:
            _save(Path(source), made.after, f"--write: {source}", OTHER_FILE)
        elif out is not None:
            _not_itself(out, [source])
            _save(out, made.after, f"--save: {out}", OTHER_FILE)
        else:
            _show(made.diff(source))
        _tell_of_script(source, script, made, in_place or out is not None)
    if not all(made.is_whole for _, made in read):
        raise typer.Exit(IN_PART)


def _script(source: str) -> tuple[str, Ported]:
    raw = read_text(Path(source), "a script to convert")
    if len(raw) > LARGEST_TEXT:
        raise BadInput(f"{source}: is larger than {LARGEST_TEXT} bytes, which is more than is read; convert the module that trains")
    try:
        script = raw.decode()
        return script, ported(script)
    except UnicodeDecodeError as error:
        raise BadInput(f"{source}: is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except BadInput as error:
        raise BadInput(*(f"{source}: {line}" for line in error.lines)) from None


def _show(diff: str) -> None:
    for line in diff.splitlines(keepends=True):
        typer.secho(line, fg=COLOURS.get(line[:1]), nl=False)


def _tell_of_script(source: str, script: str, made: Ported, written: bool) -> None:
    left = [remark for remark in made.remarks if remark.by_hand]
    if script == made.after and not left:
        say(f"{source}: nothing to change: it is a script for psjob")
    for title, remarks in (("left to you", left), ("look at", [remark for remark in made.remarks if not remark.by_hand])):
        if remarks:
            say(f"{title}:")
        for remark in remarks:
            say(f"  {source}:{remark.line}: {remark.sentence}")
    if script != made.after and not written:
        say(f"nothing was written; psjob convert --write {shlex.quote(source)} makes these edits")


def _save(path: Path, text: str, said: str, remedy: str) -> None:
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise BadInput(f"{said} cannot be written: {error.strerror or error}; {remedy}") from None


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
        jobs, aside = from_text(text, wishes)
    except BadInput as error:
        raise BadInput(*(f"{source}: {line}" for line in error.lines)) from None
    for line in aside:
        say(f"{source}: {line}")
    return jobs


def _not_itself(out: Path, sources: list[str]) -> None:
    if any(source != "-" and Path(source).resolve() == out.resolve() for source in sources):
        raise BadInput(f"--save {out}: is the source itself; name another file, or give --write for a script")


def _tell(job: Converted) -> None:
    say(f"{job.source} -> PSTrainingJob {job.manifest['metadata']['name']}")
    for note in job.notes:
        say(f"  {note}")
