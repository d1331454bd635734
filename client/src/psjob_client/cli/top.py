"""`psjob top`: jobs, or one of them with its processes, kept up to date on a terminal; elsewhere printed once."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from psjob_client.cli import rows
from psjob_client.cli.looking import gather
from psjob_client.cli.output import STYLES, echo, grid, say, table
from psjob_client.cli.where import Context, Folder, Kubeconfig, Local, MaybeName, Namespace, Where, plain
from psjob_client.jobs.view import HistoryView, JobView
from psjob_client.problems import JobProblem
from psjob_client.sdk.client import AsyncClient
from psjob_operator.printable import printable

EXAMPLES = """Examples:

  psjob top

  psjob top digits -n team-a

  psjob top --once | head"""
MOST = 40
"""Rows that are shown."""


def top(
    name: MaybeName = None,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, as where this is no terminal.")] = False,
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Watch running jobs, or one job and its processes; Ctrl-C ends the watching alone."""
    where = Where(local, folder, namespace, context, kubeconfig)
    clients = (where.of(plain(name)),) if name else gather(where)
    try:
        asyncio.run(_watch(clients, plain(name) if name else None, every, once or not sys.stdout.isatty()))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _watch(clients: tuple[AsyncClient, ...], name: str | None, every: float, once: bool) -> None:
    try:
        if once:
            await _print(clients, name)
            return
        with Live(Text("…"), auto_refresh=False, transient=False) as live:
            while True:
                shown, active = await _picture(clients, name)
                live.update(shown, refresh=True)
                if name and not active:
                    return
                await asyncio.sleep(every)
    finally:
        await asyncio.gather(*(client.close() for client in clients))


async def _print(clients: tuple[AsyncClient, ...], name: str | None) -> None:
    now = time.time()
    if name is None:
        jobs, problems = await _jobs(clients)
        for problem in problems:
            say(f"psjob: {problem}")
        table(rows.WATCHED, rows.jobs(jobs, now, rows.WATCHED))
        return
    job = await clients[0].get(name)
    for word, text in rows.facts(job, now):
        echo(f"{word + ':':<12} {text}")
    table(rows.PROCESSES, rows.processes(job))


async def _picture(clients: tuple[AsyncClient, ...], name: str | None) -> tuple[RenderableType, bool]:
    now = time.time()
    if name is not None:
        job, history = await clients[0].get(name), await clients[0].metrics(name)
        return of_job(job, history, now), job.active
    jobs, problems = await _jobs(clients)
    parts: list[RenderableType] = [Text(printable(problem), "yellow") for problem in problems]
    more = [Text(f"and {len(jobs) - MOST} more", "dim")] if len(jobs) > MOST else []
    shown = (
        grid(rows.WATCHED, rows.jobs(jobs[:MOST], now, rows.WATCHED)) if jobs else Text("nothing runs; `psjob list` shows what has ended")
    )
    return Group(*parts, shown, *more), True


async def _jobs(clients: tuple[AsyncClient, ...]) -> tuple[list[JobView], list[str]]:
    answers = await asyncio.gather(*(client.list() for client in clients), return_exceptions=True)
    found: list[JobView] = []
    problems: list[str] = []
    for answer in answers:
        if isinstance(answer, JobProblem):
            if len(clients) == 1:
                raise answer
            problems.append(answer.in_terminal)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += [job for job in answer if job.active]
    return sorted(found, key=lambda job: job.created or 0.0, reverse=True), problems


def of_job(job: JobView, history: HistoryView, now: float) -> RenderableType:
    """One job: what is known, curves of its numbers, its processes."""
    lines = [
        Text.assemble((f"{word + ':':<12} ", "dim"), (text, STYLES.get(text.split(" ")[0], ""))) for word, text in rows.facts(job, now)
    ]
    curves = grid(rows.METRICS, [rows.metric(one) for one in history.series[:8]]) if history.series else Text("")
    listed = rows.processes(job)
    more = [Text(f"and {len(listed) - MOST} more", "dim")] if len(listed) > MOST else []
    return Group(*lines, Text(""), curves, Text(""), grid(rows.PROCESSES, listed[:MOST]), *more)
