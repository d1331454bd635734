"""`psjob`: the command line."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import nullcontext
from importlib.metadata import version as installed
from pathlib import Path
from typing import Annotated

import typer

from psjob_client.cli import simulate, verbs
from psjob_client.cli.compare import EXAMPLES as COMPARE_EXAMPLES
from psjob_client.cli.compare import compare
from psjob_client.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from psjob_client.cli.convert import LineCommand, convert
from psjob_client.cli.crd import crd
from psjob_client.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from psjob_client.cli.doctor import doctor
from psjob_client.cli.init import EXAMPLES as INIT_EXAMPLES
from psjob_client.cli.init import init
from psjob_client.cli.render import render
from psjob_client.cli.stages import EXAMPLES as STAGES_EXAMPLES
from psjob_client.cli.stages import plan_stages
from psjob_client.cli.topology import EXAMPLES as TOPOLOGY_EXAMPLES
from psjob_client.cli.topology import plan_topology
from psjob_client.cli.ui import EXAMPLES as UI_EXAMPLES
from psjob_client.cli.ui import page_beside
from psjob_client.cli.ui import ui as ui_command
from psjob_client.cli.validate import EXAMPLES as VALIDATE_EXAMPLES
from psjob_client.cli.validate import validate
from psjob_client.jobs.problems import JobProblem
from psjob_client.local.errors import BadInput
from psjob_client.local.request import FIRST, Request
from psjob_client.local.run import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, run_job

DEBUG = "PSJOB_DEBUG"
RUN_EXAMPLES = """Examples:

  psjob run examples/digits/job.yaml

  psjob run job.yaml --set spec.training.mode=async --set spec.workers.replicas=2

  psjob run job.yaml --fault kill:ps-1@step=200 --summary summary.json

  psjob run job.yaml --resume .psjob/digits-1121-120000-a1b2c3

Exit codes: 0 Complete, 1 Failed, 2 nothing was started (bad input), 3 Complete but the loss is NaN or inf, 130 interrupted."""

cli = typer.Typer(
    name="psjob",
    help="Trains PyTorch models with a parameter server: on this machine, or on Kubernetes from the same manifest.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def app() -> None:
    """Run the command line. No traceback reaches the user unless --debug asks for it."""
    try:
        cli()
    except BadInput as error:
        for line in error.lines:
            print(f"psjob: {line}", file=sys.stderr)
        raise SystemExit(EXIT_BAD_INPUT) from None
    except JobProblem as problem:
        for line in str(problem).splitlines():
            print(f"psjob: {line}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # Our reader has gone, as with `psjob … | head`; nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(EXIT_FAILED) from None
    except Exception as error:
        if os.environ.get(DEBUG):
            traceback.print_exc()
        else:
            told = f"{type(error).__name__}: {error}"
            print(f"psjob: {told}; this is psjob's own fault: `psjob --debug …` shows where it happened", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@cli.callback(epilog="Example: psjob run examples/digits/job.yaml")
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a fault of psjob.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


@cli.command(epilog=RUN_EXAMPLES)
def run(
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.yaml",
            help="Manifest of one PSTrainingJob; its folder is the working folder. -: from standard input, to work in this folder.",
        ),
    ],
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
    request = Request(job, tuple(settings or ()), tuple(fault or ()), summary, resume, progress, history, name, logs, work_folder)
    with page_beside() if ui else nullcontext():
        code = run_job(request)
    raise typer.Exit(code)


cli.command(epilog=COMPARE_EXAMPLES)(compare)
cli.command(cls=LineCommand, epilog=CONVERT_EXAMPLES)(convert)
cli.command(epilog="Example: psjob crd | kubectl apply -f -")(crd)
cli.command(epilog=DOCTOR_EXAMPLES)(doctor)
cli.command(epilog=INIT_EXAMPLES)(init)
cli.command(epilog="Example: psjob render examples/digits/job.yaml | less")(render)
cli.command(epilog=STAGES_EXAMPLES)(plan_stages)
cli.command(epilog=TOPOLOGY_EXAMPLES)(plan_topology)
cli.add_typer(simulate.cli, name="simulate")
verbs.register(cli)
cli.command("ui", epilog=UI_EXAMPLES)(ui_command)
cli.command(epilog=VALIDATE_EXAMPLES)(validate)


@cli.command(epilog="Example: psjob version")
def version() -> None:
    """Print the version."""
    typer.echo(f"psjob {installed('psjob-operator')}")


if __name__ == "__main__":
    app()
