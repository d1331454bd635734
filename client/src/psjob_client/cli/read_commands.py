"""The verbs that look: list, get, logs, events, metrics, checkpoints, top, ui. The same for this machine's runs and a cluster's jobs."""

from __future__ import annotations

import asyncio
import csv
import enum
import io
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from psjob_client.cli.options import ANYWHERE, JobScope, MaybeName, Name, bare_name, go, has_cluster
from psjob_client.cli.output import (
    CHECKPOINT_COLUMNS,
    EVENT_COLUMNS,
    JOB_COLUMNS,
    METRIC_COLUMNS,
    PROCESS_COLUMNS,
    STAGE_COLUMNS,
    STYLES,
    WATCHED_COLUMNS,
    WIDE_COLUMNS,
    Form,
    Output,
    checkpoint_row,
    echo,
    emit,
    event_row,
    grid,
    job_facts,
    job_names,
    job_rows,
    log_line,
    metric_row,
    point_rows,
    print_data,
    process_rows,
    say,
    short_name,
    stage_rows,
    table,
)
from psjob_client.jobs.view import HistoryView, JobView
from psjob_client.local.run import EXIT_INTERRUPTED
from psjob_client.problems import BadInput, JobProblem
from psjob_client.sdk.client import AsyncClient
from psjob_client.text import json_text, yaml_text
from psjob_operator.printable import printable

EVERYWHERE = ""
LIST_EXAMPLES = """Examples:

  psjob list

  psjob list -n team-a -o wide

  psjob list --local -o json | jq -r '.[] | select(.phase == "Failed") | .id'"""
GET_EXAMPLES = """Examples:

  psjob get digits

  psjob get digits -n team-a -o yaml

  psjob get digits -o json | jq .progress.loss"""
LOGS_EXAMPLES = """Examples:

  psjob logs digits

  psjob logs digits -p worker-0 -f

  psjob logs digits -n team-a --tail 20"""
TOP_EXAMPLES = """Examples:

  psjob top

  psjob top digits -n team-a

  psjob top --once | head"""
UI_EXAMPLES = """Examples:

  psjob ui

  psjob ui -n team-a --no-browser --port 8899

From another machine: ssh -L 8899:127.0.0.1:8899 HOST, and there psjob ui --port 8899 --no-browser."""
MOST = 40
"""Rows that are shown."""


class Points(enum.StrEnum):
    """What `metrics -o` takes."""

    table = "table"
    csv = "csv"
    json = "json"
    yaml = "yaml"


def list_jobs(
    output: Output = Form.table,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of every namespace.")] = False,
    where: JobScope = ANYWHERE,
) -> None:
    """List runs of this machine and jobs of the cluster, the newest first."""
    where = replace(where, namespace=EVERYWHERE) if everywhere else where
    _print_jobs(_all(where), output, _nothing(where))


def get(
    name: MaybeName = None,
    output: Output = Form.table,
    where: JobScope = ANYWHERE,
) -> None:
    """Show a job: phase, progress, processes, checkpoint, warnings. Without a name: as list."""
    if name is None:
        _print_jobs(_all(where), output, _nothing(where))
        return
    client = where.of(bare_name(name))
    job = go(client, client.get(bare_name(name)))
    if print_data(output, job):
        return
    if output is Form.name:
        job_names([job])
        return
    for word, text in job_facts(job, time.time()):
        echo(f"{word + ':':<12} {text}")
    if job.stages:
        echo("")
        table(STAGE_COLUMNS, stage_rows(job))
    if job.shards or job.workers:
        echo("")
        table(PROCESS_COLUMNS, process_rows(job))


def logs(
    name: Name,
    process: Annotated[str | None, typer.Option("--process", "-p", help="worker-0, shard-1, or a whole name; absent: all.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines of each process.")] = None,
    where: JobScope = ANYWHERE,
) -> None:
    """Print what the processes of a job print; with several of them, each line begins with its process."""
    client = where.of(bare_name(name))

    async def printing() -> int:
        lines = 0
        # The job's name, which a run of this machine does not tell by its own.
        job = (await client.get(bare_name(name))).name
        async for line in client.logs(bare_name(name), process, follow=follow, tail=tail):
            log_line(line.text if process else f"{short_name(line.process, job):<10} | {line.text}")
            lines += 1
        return lines

    try:
        printed = go(client, printing())
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not printed:
        say(f"psjob: no process of {name} has printed anything" + (f" that is {process}; `psjob get {name}` names them" if process else ""))


def events(
    name: Name,
    output: Output = Form.table,
    where: JobScope = ANYWHERE,
) -> None:
    """Show what happened to a job, the oldest first: starts, restarts, failures, checkpoints."""
    client = where.of(bare_name(name))
    found = go(client, client.events(bare_name(name)))
    if print_data(output, found):
        return
    if not found:
        say(f"psjob: there are no events of {name}; a cluster keeps events for an hour")
        return
    table(EVENT_COLUMNS, [event_row(one) for one in found])


def checkpoints(
    name: Name,
    output: Output = Form.table,
    where: JobScope = ANYWHERE,
) -> None:
    """List a job's committed checkpoints, the newest first; on a cluster only the newest is known."""
    client = where.of(bare_name(name))
    found = go(client, client.checkpoints(bare_name(name)))
    if print_data(output, found):
        return
    if not found:
        say(f"psjob: {name} has no committed checkpoint")
        return
    table(CHECKPOINT_COLUMNS, [checkpoint_row(one, time.time()) for one in found])


def metrics(
    name: Name,
    only: Annotated[list[str] | None, typer.Option("--name", help="Only this number, such as loss. Repeatable.")] = None,
    output: Annotated[Points, typer.Option("--output", "-o", help="table, csv, json or yaml.")] = Points.table,
    where: JobScope = ANYWHERE,
) -> None:
    """Show loss, steps a second and the script's own numbers; csv has two points a second. Of a cluster those of running jobs are known."""
    client = where.of(bare_name(name))
    history = go(client, client.metrics(bare_name(name)))
    unknown = [one for one in only or () if history.of(one) is None]
    if unknown:
        known = ", ".join(one.name for one in history.series) or "none yet"
        raise BadInput(f"--name {unknown[0]}: {name} has reported no such number; there are: {known}")
    if only:
        history = history.model_copy(update={"series": tuple(one for one in history.series if one.name in only)})
    if output in (Points.json, Points.yaml):
        emit((json_text if output is Points.json else yaml_text)(history.to_manifest()))
    elif output is Points.csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("time", "step", "name", "value"), *point_rows(history)])
        emit(text.getvalue())
    elif history.series:
        table(METRIC_COLUMNS, [metric_row(one) for one in history.series])
    else:
        say(f"psjob: {name} has reported no number yet; a script reports with ps.report(loss=…)")


def clients_of(where: JobScope) -> tuple[AsyncClient, ...]:
    """All places that are meant."""
    if where.says_cluster:
        return (where.cluster(),)
    return (where.machine(),) if where.says_local or not has_cluster() else (where.machine(), where.cluster())


def _all(where: JobScope) -> list[JobView]:
    clients = clients_of(where)

    async def asking() -> list[JobView]:
        try:
            jobs, problems = await _jobs(clients)
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        for problem in problems:
            say(f"psjob: only runs of this machine: {problem}")
        return jobs

    return asyncio.run(asking())


async def _jobs(clients: tuple[AsyncClient, ...]) -> tuple[list[JobView], list[str]]:
    """The jobs of all places, the newest first, and why some of several places could not be read. The only place raises its problem."""
    answers = await asyncio.gather(*(client.list() for client in clients), return_exceptions=True)
    problems = [answer.in_terminal for answer in answers if isinstance(answer, JobProblem) and len(clients) > 1]
    found: list[JobView] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            if not isinstance(answer, JobProblem) or len(clients) == 1:
                raise answer
        else:
            found += answer
    return sorted(found, key=lambda job: job.created or 0.0, reverse=True), problems


def _print_jobs(jobs: Sequence[JobView], output: Form, nothing: str) -> None:
    if print_data(output, jobs):
        return
    if not jobs:
        say(nothing)
    elif output is Form.name:
        job_names(jobs)
    else:
        now, head = time.time(), WIDE_COLUMNS if output is Form.wide else JOB_COLUMNS
        table(head, job_rows(jobs, now, head))


def _nothing(where: JobScope) -> str:
    if where.says_cluster:
        return "psjob: there is no job in that namespace; `psjob submit JOB.yaml` makes one, `psjob list -A` shows all namespaces"
    return f"psjob: there is no run in {where.here / '.psjob'}, nor a job on a cluster; `psjob run` and `psjob submit` start one"


def renamed(where: JobScope, namespace: str | None) -> JobScope:
    """The same, in the namespace that a manifest names."""
    return where if where.namespace is not None or namespace is None else replace(where, namespace=namespace)


def top(
    name: MaybeName = None,
    every: Annotated[float, typer.Option(min=0.2, max=3600, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, as where this is no terminal.")] = False,
    where: JobScope = ANYWHERE,
) -> None:
    """Watch running jobs, or one job and its processes; Ctrl-C ends only the watching."""
    clients = (where.of(bare_name(name)),) if name else clients_of(where)
    try:
        asyncio.run(_watch(clients, bare_name(name) if name else None, every, once or not sys.stdout.isatty()))
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
        table(WATCHED_COLUMNS, job_rows([job for job in jobs if job.active], now, WATCHED_COLUMNS))
        return
    job = await clients[0].get(name)
    for word, text in job_facts(job, now):
        echo(f"{word + ':':<12} {text}")
    table(PROCESS_COLUMNS, process_rows(job))


async def _picture(clients: tuple[AsyncClient, ...], name: str | None) -> tuple[RenderableType, bool]:
    now = time.time()
    if name is not None:
        job, history = await clients[0].get(name), await clients[0].metrics(name)
        return of_job(job, history, now), job.active
    jobs, problems = await _jobs(clients)
    jobs = [job for job in jobs if job.active]
    parts: list[RenderableType] = [Text(printable(problem), "yellow") for problem in problems]
    more = [Text(f"and {len(jobs) - MOST} more", "dim")] if len(jobs) > MOST else []
    shown = (
        grid(WATCHED_COLUMNS, job_rows(jobs[:MOST], now, WATCHED_COLUMNS))
        if jobs
        else Text("nothing runs; `psjob list` shows what has ended")
    )
    return Group(*parts, shown, *more), True


def of_job(job: JobView, history: HistoryView, now: float) -> RenderableType:
    """One job: what is known, curves of its numbers, its processes."""
    lines = [Text.assemble((f"{word + ':':<12} ", "dim"), (text, STYLES.get(text.split(" ")[0], ""))) for word, text in job_facts(job, now)]
    curves = grid(METRIC_COLUMNS, [metric_row(one) for one in history.series[:8]]) if history.series else Text("")
    listed = process_rows(job)
    more = [Text(f"and {len(listed) - MOST} more", "dim")] if len(listed) > MOST else []
    return Group(*lines, Text(""), curves, Text(""), grid(PROCESS_COLUMNS, listed[:MOST]), *more)


def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open it in a browser.")] = True,
    where: JobScope = ANYWHERE,
) -> None:
    """Show jobs and comparisons as a live page, which only reads and is served only to this machine."""
    from psjob_client.ui.server import Page, browser_opened

    with Page(clients_of(where), where.here, port) as page:
        say("psjob: the page is at this address, only on this machine; anyone here who has the address can read it; Ctrl-C ends it")
        echo(page.address)
        sys.stdout.flush()
        try:
            with browser_opened(page.address) if browser else nullcontext():
                page.wait()
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def page_beside() -> Iterator[None]:
    """The page of this machine's runs, for as long as one trains."""
    from psjob_client.ui.server import Page

    where = JobScope(local=True)
    with Page((where.machine(),), where.here) as page:
        say(f"psjob: the page is at {page.address}")
        yield
