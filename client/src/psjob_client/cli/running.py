"""`psjob run`: a job on this machine, of a manifest or of a script."""

from __future__ import annotations

import difflib
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from psjob_client.cli.init import manifest_template
from psjob_client.cli.ui import page_beside
from psjob_client.convert.fromscript import Script
from psjob_client.local.command import PYTHONS
from psjob_client.local.errors import BadInput
from psjob_client.local.request import FIRST, Request
from psjob_client.local.run import run_job
from psjob_operator.contract import MODES

EXAMPLES = """Examples:

  psjob run train.py --workers 4

  psjob run job.yaml

  psjob run train.py --shards 2 --mode async --save job.yaml -- --lr 0.1

  psjob run job.yaml --set spec.training.mode=async --set spec.workers.replicas=2

  psjob run job.yaml --fault kill:ps-1@step=200 --summary summary.json

  psjob run job.yaml --resume .psjob/digits-1121-120000-a1b2c3

Exit codes: 0 Complete, 1 Failed, 2 nothing was started (bad input), 3 Complete but the loss is NaN or inf, 130 interrupted."""
SCRIPT = ".py"
LAUNCHERS = PYTHONS | {"torchrun"}
FIELDS = {"workers": "spec.workers.replicas", "shards": "spec.ps.shards", "mode": "spec.training.mode"}


class RunCommand(TyperCommand):
    """Options that are not psjob's are the script's. A manifest takes none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {**(kwargs.pop("context_settings", None) or {}), "ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(*args, context_settings=settings, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)
        job = Path(ctx.params.get("job") or "")
        if ctx.args and not ctx.params.get("module") and job.suffix != SCRIPT:
            ctx.fail(self._too_much(job, ctx.args[0].partition("=")[0]))
        return rest

    def _too_much(self, job: Path, word: str) -> str:
        if str(job) in LAUNCHERS:
            return f"{job} {word}: is no manifest; give the script itself, such as psjob run train.py --workers 4"
        if not word.startswith("-"):
            return f"{word}: is one word too many behind {job}; only a script (SCRIPT.py) takes arguments"
        close = difflib.get_close_matches(word, [option for parameter in self.params for option in parameter.opts], 1)
        return f"No such option: {word}" + (f"; did you mean {close[0]}?" if close else "")


def run(
    ctx: typer.Context,
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.yaml|SCRIPT.py",
            help="Manifest of one PSTrainingJob; its folder is the working folder. -: from standard input, to work in this folder. Or a "
            "script, to train in this folder without a manifest; what follows it, and is no option of psjob, are its arguments.",
        ),
    ],
    workers: Annotated[int | None, typer.Option(metavar="N", help="Number of workers; of a script 2 if absent.")] = None,
    shards: Annotated[int | None, typer.Option(metavar="N", help="Number of shards; of a script 1 if absent.")] = None,
    mode: Annotated[str | None, typer.Option(help="Training mode, such as sync or async; of a script sync if absent.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT.py is the name of a module, as in python -m.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the manifest of the script, for a cluster.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a value of the manifest, typed as YAML. Repeatable.")
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT:PROCESS@step=N[+Ss]|cut=N",
            help="kill or stop ps-<i>, crash or hang the process that serves in it, or kill worker-<i>, when step N is complete. +Ss: S "
            "seconds later. cut=N: a shard while it writes checkpoint N. Repeatable.",
        ),
    ] = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a summary of the run as JSON.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Start from the last checkpoint of this run's folder.")] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show how far training is.")] = True,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write steps and metrics while they come, as JSON lines; the last has staleness (lag, gap) and idle time."
        ),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve the page of `psjob ui` while it trains, and print its address.")] = False,
    logs: Annotated[str, typer.Option(metavar="all|none|0,2", help="Workers whose lines are shown.")] = FIRST,
    name: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    work_folder: Annotated[Path | None, typer.Option("--work-folder", hidden=True)] = None,
) -> None:
    """Train a job on this machine, each shard and worker a process."""
    if mode is not None and mode not in MODES:
        close = difflib.get_close_matches(mode, MODES, 1)
        raise BadInput(f"--mode {mode}: " + (f"did you mean {close[0]}? " if close else "") + f"The modes are {', '.join(MODES)}")
    chosen = {"workers": workers, "shards": shards, "mode": mode}
    given = {field: value for field, value in chosen.items() if value is not None}
    laid, text, options, arguments = list(settings or ()), None, list[str](), list(ctx.args)
    if module or job.suffix == SCRIPT:
        text = _of_script(job, arguments, module, given)
        options = [*(["-m"] if module else []), *(word for field, value in given.items() for word in (f"--{field}", str(value)))]
        work_folder = work_folder or Path.cwd()
    else:
        if save is not None:
            raise BadInput(f"--save {save}: {job} is a manifest already; --save writes that of a script")
        laid += [f"{FIELDS[field]}={value}" for field, value in given.items()]
    request = Request(
        job, tuple(laid), tuple(fault or ()), summary, resume, progress, history, name, logs, work_folder,
        text=text, options=tuple(options), arguments=tuple(arguments),
    )  # fmt: skip
    if save is not None and text is not None:
        _save(save, text)
    with page_beside() if ui else nullcontext():
        code = run_job(request)
    raise typer.Exit(code)


def _of_script(path: Path, arguments: list[str], module: bool, given: dict[str, Any]) -> str:
    if not module and not path.is_file():
        raise BadInput(f"{path}: there is no such file; give the path of a script or of a manifest")
    return Script(str(path), arguments, module, **given).manifest(manifest_template())


def _save(path: Path, text: str) -> None:
    if path.absolute().parent != Path.cwd():
        raise BadInput(f"--save {path}: a manifest's folder is its working folder; name a file in {Path.cwd()}")
    try:
        if path.exists() and path.read_text() != text:
            raise BadInput(f"--save {path}: is there already, with another text, and was not changed; name another file")
        path.write_text(text)
    except OSError as error:
        raise BadInput(f"--save {path}: cannot be written: {error.strerror or error}; name another file") from None
