"""`psjob`: the command line."""

from __future__ import annotations

import os
import traceback
from importlib.metadata import version as installed
from typing import Annotated

import typer

from psjob_client.cli import looking, simulate, steering
from psjob_client.cli.compare import EXAMPLES as COMPARE_EXAMPLES
from psjob_client.cli.compare import compare
from psjob_client.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from psjob_client.cli.convert import LineCommand, convert
from psjob_client.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from psjob_client.cli.doctor import doctor
from psjob_client.cli.init import EXAMPLES as INIT_EXAMPLES
from psjob_client.cli.init import init
from psjob_client.cli.options import Helped, HelpedGroup, ScriptCommand, grouped
from psjob_client.cli.output import echo, say
from psjob_client.cli.render import crd, render
from psjob_client.cli.run import EXAMPLES as RUN_EXAMPLES
from psjob_client.cli.run import run
from psjob_client.cli.stages import EXAMPLES as STAGES_EXAMPLES
from psjob_client.cli.stages import plan_stages
from psjob_client.cli.topology import EXAMPLES as TOPOLOGY_EXAMPLES
from psjob_client.cli.topology import plan_topology
from psjob_client.cli.validate import EXAMPLES as VALIDATE_EXAMPLES
from psjob_client.cli.validate import validate
from psjob_client.local.run import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from psjob_client.problems import BadInput, JobProblem

DEBUG = "PSJOB_DEBUG"
cli = typer.Typer(
    name="psjob",
    cls=HelpedGroup,
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
            say(f"psjob: {line}")
        raise SystemExit(EXIT_BAD_INPUT) from None
    except JobProblem as problem:
        for line in problem.in_terminal.splitlines():
            say(f"psjob: {line}")
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
            say(f"psjob: {told}; this is psjob's own fault: `psjob --debug …` shows where it happened")
        raise SystemExit(EXIT_FAILED) from None


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@cli.callback(
    epilog="""Examples:

psjob init hello && psjob run hello/job.yaml

psjob run train.py --workers 4

psjob COMMAND --help"""
)
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a fault of psjob.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


cli.command("run", cls=ScriptCommand, epilog=RUN_EXAMPLES)(run)
cli.command(cls=Helped, epilog=COMPARE_EXAMPLES)(compare)
cli.command(cls=LineCommand, epilog=CONVERT_EXAMPLES)(convert)
cli.command(cls=Helped, epilog="Example: psjob crd | kubectl apply -f -")(crd)
cli.command(cls=Helped, epilog=DOCTOR_EXAMPLES)(doctor)
cli.command(cls=Helped, epilog=INIT_EXAMPLES)(init)
cli.command(cls=Helped, epilog="Example: psjob render job.yaml | less")(render)
cli.command(cls=Helped, epilog=STAGES_EXAMPLES)(plan_stages)
cli.command(cls=Helped, epilog=TOPOLOGY_EXAMPLES)(plan_topology)
cli.add_typer(simulate.cli, name="simulate")
cli.command("list", cls=Helped, epilog=looking.LIST_EXAMPLES)(grouped(looking.list_jobs))
cli.command(cls=Helped, epilog=looking.GET_EXAMPLES)(grouped(looking.get))
cli.command(cls=Helped, epilog=looking.LOGS_EXAMPLES)(grouped(looking.logs))
cli.command(cls=Helped, epilog="Example: psjob events digits -n team-a")(grouped(looking.events))
cli.command(cls=Helped, epilog="Example: psjob metrics digits --name loss -o csv > loss.csv")(grouped(looking.metrics))
cli.command(cls=Helped, epilog=looking.TOP_EXAMPLES)(grouped(looking.top))
cli.command(cls=ScriptCommand, epilog=steering.SUBMIT_EXAMPLES)(grouped(steering.submit))
cli.command("wait", cls=Helped, epilog=steering.WAIT_EXAMPLES)(grouped(steering.wait_for))
cli.command(cls=Helped, epilog="Example: kubectl psjob suspend digits -n team-a")(grouped(steering.suspend))
cli.command(cls=Helped, epilog="Example: kubectl psjob resume digits -n team-a")(grouped(steering.resume))
cli.command(cls=Helped, epilog="Example: psjob checkpoint digits")(grouped(steering.checkpoint))
cli.command(cls=Helped, epilog="Example: psjob checkpoints digits")(grouped(looking.checkpoints))
cli.command(cls=Helped, epilog="Example: psjob delete digits -n team-a")(grouped(steering.delete))
cli.command(cls=Helped, epilog=steering.CLEAN_EXAMPLES)(grouped(steering.clean))
cli.command("ui", cls=Helped, epilog=looking.UI_EXAMPLES)(grouped(looking.ui))
cli.command(cls=Helped, epilog=VALIDATE_EXAMPLES)(validate)


@cli.command(cls=Helped, epilog="Example: psjob version")
def version() -> None:
    """Print the version."""
    echo(f"psjob {installed('psjob-operator')}")


if __name__ == "__main__":
    app()
