"""`psjob`: the command line."""

from __future__ import annotations

import os
import traceback
from importlib.metadata import version as installed
from typing import Annotated

import typer

from psjob_client.cli import change_commands, compare, convert, manifest_commands, read_commands, run, simulate, stages, topology
from psjob_client.cli.options import Helped, HelpedGroup, ScriptCommand, with_option_groups
from psjob_client.cli.output import echo, say
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


COMMANDS = (
    ("run", run.run, run.EXAMPLES, ScriptCommand),
    ("compare", compare.compare, compare.EXAMPLES, Helped),
    ("convert", convert.convert, convert.EXAMPLES, convert.LineCommand),
    ("crd", manifest_commands.crd, "Example: psjob crd | kubectl apply -f -", Helped),
    ("doctor", manifest_commands.doctor, manifest_commands.DOCTOR_EXAMPLES, Helped),
    ("init", manifest_commands.init, manifest_commands.INIT_EXAMPLES, Helped),
    ("render", manifest_commands.render, "Example: psjob render job.yaml | less", Helped),
    ("plan-stages", stages.plan_stages, stages.EXAMPLES, Helped),
    ("plan-topology", topology.plan_topology, topology.EXAMPLES, Helped),
    ("list", read_commands.list_jobs, read_commands.LIST_EXAMPLES, Helped),
    ("get", read_commands.get, read_commands.GET_EXAMPLES, Helped),
    ("logs", read_commands.logs, read_commands.LOGS_EXAMPLES, Helped),
    ("events", read_commands.events, "Example: psjob events digits -n team-a", Helped),
    ("metrics", read_commands.metrics, "Example: psjob metrics digits --name loss -o csv > loss.csv", Helped),
    ("top", read_commands.top, read_commands.TOP_EXAMPLES, Helped),
    ("submit", change_commands.submit, change_commands.SUBMIT_EXAMPLES, ScriptCommand),
    ("wait", change_commands.wait_for, change_commands.WAIT_EXAMPLES, Helped),
    ("suspend", change_commands.suspend, "Example: kubectl psjob suspend digits -n team-a", Helped),
    ("resume", change_commands.resume, "Example: kubectl psjob resume digits -n team-a", Helped),
    ("checkpoint", change_commands.checkpoint, "Example: psjob checkpoint digits", Helped),
    ("checkpoints", read_commands.checkpoints, "Example: psjob checkpoints digits", Helped),
    ("delete", change_commands.delete, "Example: psjob delete digits -n team-a", Helped),
    ("clean", change_commands.clean, change_commands.CLEAN_EXAMPLES, Helped),
    ("ui", read_commands.ui, read_commands.UI_EXAMPLES, Helped),
    ("validate", manifest_commands.validate, manifest_commands.VALIDATE_EXAMPLES, Helped),
)
for _name, _command, _examples, _kind in COMMANDS:
    cli.command(_name, cls=_kind, epilog=_examples)(with_option_groups(_command))
cli.add_typer(simulate.cli, name="simulate")


@cli.command(cls=Helped, epilog="Example: psjob version")
def version() -> None:
    """Print the version."""
    echo(f"psjob {installed('psjob-operator')}")


if __name__ == "__main__":
    app()
