"""`psjob ui`: jobs and comparisons as a page in the browser."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from psjob_client.cli.looking import gather
from psjob_client.cli.options import ANYWHERE, Where
from psjob_client.cli.output import echo, say
from psjob_client.local.run import EXIT_INTERRUPTED

EXAMPLES = """Examples:

  psjob ui

  psjob ui -n team-a --no-browser --port 8899

From another machine: ssh -L 8899:127.0.0.1:8899 HOST, and there psjob ui --port 8899 --no-browser."""


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")] = True,
    where: Where = ANYWHERE,
) -> None:
    """Show jobs and comparisons as a live page, which only reads and is served to this machine alone."""
    from psjob_client.ui.opening import opened
    from psjob_client.ui.server import Page

    with Page(gather(where), where.here, port) as page:
        say("psjob: the page is at this address, only on this machine; anyone here who has the address can read it; Ctrl-C ends it")
        echo(page.address)
        sys.stdout.flush()
        try:
            with opened(page.address) if browser else nullcontext():
                page.wait()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def page_beside() -> Iterator[None]:
    """The page of this machine's runs, for as long as one trains."""
    from psjob_client.ui.server import Page

    where = Where(local=True)
    with Page((where.machine(),), where.here) as page:
        say(f"psjob: the page is at {page.address}")
        yield
