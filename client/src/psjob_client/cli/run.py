"""`psjob run`: a job on this machine, of a manifest or of a script."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from psjob_client.cli import options
from psjob_client.cli.change_commands import save_manifest
from psjob_client.cli.manifest_commands import manifest_template
from psjob_client.cli.options import Settings
from psjob_client.cli.read_commands import page_beside
from psjob_client.convert.draft import Script
from psjob_client.local.manifest import FIRST, Request
from psjob_client.local.run import run_job
from psjob_client.problems import BadInput

EXAMPLES = """Examples:

  psjob run train.py --workers 4

  psjob run job.yaml

  psjob run train.py --shards 2 --mode async --save job.yaml -- --lr 0.1

  psjob run job.yaml --set spec.training.mode=async --set spec.workers.replicas=2

  psjob run job.yaml --fault kill:shard-1@step=200 --summary summary.json

  psjob run job.yaml --resume .psjob/digits-1121-120000-a1b2c3

Exit codes: 0 Complete, 1 Failed, 2 nothing was started (bad input), 3 the loss is NaN or inf, 4 workers differ, 130 interrupted."""


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
    workers: options.Workers = None,
    shards: options.Shards = None,
    mode: options.Mode = None,
    module: options.Module = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the manifest of the script, for a cluster.")] = None,
    settings: Settings = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT:PROCESS@step=N[+Ss]|checkpoint=N",
            help="kill or stop shard-<i>, crash or hang the process that serves in it, or kill worker-<i>, when step N is complete. +Ss: S "
            "seconds later. checkpoint=N: a shard while it writes checkpoint N. Repeatable.",
        ),
    ] = None,
    summary: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a summary of the run as JSON.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Start from the last checkpoint of this run's folder.")] = None,
    progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show how far training is.")] = True,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write steps and metrics while they come, as JSON lines; the last has staleness, gap and idle time."
        ),
    ] = None,
    ui: Annotated[bool, typer.Option("--ui", help="Serve the page of `psjob ui` while it trains, and print its address.")] = False,
    logs: Annotated[str, typer.Option(metavar="all|none|0,2", help="Workers whose lines are shown.")] = FIRST,
    name: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    work_folder: Annotated[Path | None, typer.Option("--work-folder", hidden=True)] = None,
) -> None:
    """Train a job on this machine, each shard and worker a process."""
    given = options.given_options(workers=workers, shards=shards, mode=mode)
    laid, text, typed, arguments = list(settings or ()), None, list[str](), list(ctx.args)
    if options.takes_script(job, module):
        options.must_exist(job, module)
        text = Script(str(job), arguments, module, **given).manifest(manifest_template())
        typed = [*(["-m"] if module else []), *(word for field, value in given.items() for word in (f"--{field}", str(value)))]
        work_folder = work_folder or Path.cwd()
    else:
        if save is not None:
            raise BadInput(f"--save {save}: {job} is a manifest already; --save writes that of a script")
        laid += options.settings_of(given)
    request = Request(
        job, tuple(laid), tuple(fault or ()), summary, resume, progress, history, name, logs, work_folder,
        text=text, options=tuple(typed), arguments=tuple(arguments),
    )  # fmt: skip
    if save is not None and text is not None:
        save_manifest(save, text)
    with page_beside() if ui else nullcontext():
        code = run_job(request)
    raise typer.Exit(code)
