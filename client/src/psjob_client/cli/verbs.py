"""The verbs over jobs, the same for runs of this machine and jobs of a cluster, as `psjob VERB` and `kubectl psjob VERB`."""

from __future__ import annotations

import typer

from psjob_client.cli import looking, steering, top
from psjob_client.cli.helping import Helped
from psjob_client.cli.scripts import ScriptCommand


def register(cli: typer.Typer) -> None:
    """Put them into the command line, in the order in which help lists them."""
    cli.command("list", cls=Helped, epilog=looking.LIST_EXAMPLES)(looking.list_jobs)
    cli.command(cls=Helped, epilog=looking.GET_EXAMPLES)(looking.get)
    cli.command(cls=Helped, epilog=looking.LOGS_EXAMPLES)(looking.logs)
    cli.command(cls=Helped, epilog="Example: psjob events digits -n team-a")(looking.events)
    cli.command(cls=Helped, epilog="Example: psjob metrics digits --name loss -o csv > loss.csv")(looking.metrics)
    cli.command(cls=Helped, epilog=top.EXAMPLES)(top.top)
    cli.command(cls=ScriptCommand, epilog=steering.SUBMIT_EXAMPLES)(steering.submit)
    cli.command("wait", cls=Helped, epilog=steering.WAIT_EXAMPLES)(steering.wait_for)
    cli.command(cls=Helped, epilog="Example: kubectl psjob suspend digits -n team-a")(steering.suspend)
    cli.command(cls=Helped, epilog="Example: kubectl psjob resume digits -n team-a")(steering.resume)
    cli.command(cls=Helped, epilog="Example: psjob checkpoint digits")(steering.checkpoint)
    cli.command(cls=Helped, epilog="Example: psjob checkpoints digits")(looking.checkpoints)
    cli.command(cls=Helped, epilog="Example: psjob delete digits -n team-a")(steering.delete)
    cli.command(cls=Helped, epilog=steering.CLEAN_EXAMPLES)(steering.clean)
