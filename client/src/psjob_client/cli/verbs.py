"""The verbs over jobs, the same for runs of this machine and jobs of a cluster, as `psjob VERB` and `kubectl psjob VERB`."""

from __future__ import annotations

import typer

from psjob_client.cli import looking, steering, top


def register(cli: typer.Typer) -> None:
    """Put them into the command line, in the order in which help lists them."""
    cli.command("list", epilog=looking.LIST_EXAMPLES)(looking.list_jobs)
    cli.command(epilog=looking.GET_EXAMPLES)(looking.get)
    cli.command(epilog=looking.LOGS_EXAMPLES)(looking.logs)
    cli.command(epilog="Example: psjob events digits -n team-a")(looking.events)
    cli.command(epilog="Example: psjob metrics digits --name loss -o csv > loss.csv")(looking.metrics)
    cli.command(epilog=top.EXAMPLES)(top.top)
    cli.command(epilog=steering.SUBMIT_EXAMPLES)(steering.submit)
    cli.command("wait", epilog=steering.WAIT_EXAMPLES)(steering.wait_for)
    cli.command(epilog="Example: kubectl psjob suspend digits -n team-a")(steering.suspend)
    cli.command(epilog="Example: kubectl psjob resume digits -n team-a")(steering.resume)
    cli.command(epilog="Example: psjob checkpoint digits")(steering.checkpoint)
    cli.command(epilog="Example: psjob checkpoints digits")(looking.checkpoints)
    cli.command(epilog="Example: psjob delete digits -n team-a")(steering.delete)
    cli.command(epilog=steering.CLEAN_EXAMPLES)(steering.clean)
