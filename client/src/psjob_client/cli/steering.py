"""The verbs that change something: submit, wait, suspend, resume, checkpoint, delete, clean."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from psjob_client.cli.looking import gather, renamed
from psjob_client.cli.output import Form, data, job_names, say
from psjob_client.cli.where import Context, Folder, Kubeconfig, Local, Name, Names, Namespace, Where, go, plain
from psjob_client.jobs.problems import Conflict
from psjob_client.jobs.view import JobView
from psjob_client.local.errors import BadInput
from psjob_client.local.manifest import as_written, read_job
from psjob_client.local.words import span
from psjob_client.sdk.client import AsyncClient
from psjob_client.sdk.machine import Machine
from psjob_operator.api import duration
from psjob_operator.contract import GROUP, KIND

WHAT = f"{KIND.lower()}.{GROUP}"
PHASES = ("Pending", "Running", "Recovering", "Suspended", "Complete", "Failed")
SUBMIT_EXAMPLES = """Examples:

  psjob submit job.yaml -n team-a --wait

  psjob submit job.yaml --local --set spec.workers.replicas=2

  psjob get digits -o json | jq .manifest | psjob submit -"""
WAIT_EXAMPLES = """Examples:

  psjob wait digits --timeout 1h

  psjob wait digits --for Running -n team-a && psjob logs digits -f -n team-a

Exit codes: 0 it is there, 1 it ended otherwise or the time has passed."""
CLEAN_EXAMPLES = """Examples:

  psjob clean --dry-run

  psjob clean --older-than 24h --yes

  psjob clean -n team-a --older-than 30m"""


def seconds(text: str) -> float:
    """`90s`, `10m`, `1h30m`, or a number of seconds. Raises BadInput."""
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else duration.seconds(text)
    except ValueError:
        raise BadInput(f"{text!r} is no span of time; give such as 90s, 10m or 1h30m") from None


Timeout = Annotated[str, typer.Option(metavar="TIME", help="The longest wait, such as 90s or 1h30m.")]
Wait = Annotated[bool | None, typer.Option("--wait/--no-wait", help="Wait until no process is left; absent: on this machine alone.")]


def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Manifest of one PSTrainingJob; -: from standard input.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Set a value of the manifest, typed as YAML. Repeatable.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job is Complete.")] = False,
    timeout: Timeout = "24h",
    output: Annotated[Form, typer.Option("--output", "-o", help="table, json, yaml or name.")] = Form.table,
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Start a job on the cluster, or with --local on this machine, where it goes on in the background."""
    made = read_job(job, tuple(settings or ()))
    where = renamed(Where(local, folder, namespace, context, kubeconfig), None if local or folder else made.metadata.namespace)
    client = where.machine() if where.says_local else where.cluster()
    most = seconds(timeout)

    async def starting() -> JobView:
        place = await client.place()
        if isinstance(place, Machine):
            work_folder = Path.cwd() if str(job) == "-" else job.absolute().parent
            name = await place.submit(as_written(made), work_folder=work_folder)
        else:
            name = await place.submit(as_written(made))
        view = await client.get(name)
        if output is Form.table:
            same = where if where.says_local else replace(where, namespace=view.namespace)
            said = f"{name} runs" if where.says_local else f"{WHAT}/{name} created"
            typer.echo(f"{said}; `{shlex.join(['psjob', 'logs', name, '-f', *same.words()])}` follows it")
        return await client.wait(name, timeout=most) if wait else view

    view = go(client, starting())
    if not data(output, view) and output is Form.name:
        job_names([view])
    elif wait and output is Form.table:
        _tell(view)


def wait_for(
    name: Name,
    phase: Annotated[list[str] | None, typer.Option("--for", metavar="PHASE", help=f"One of {', '.join(PHASES)}. Repeatable.")] = None,
    timeout: Timeout = "24h",
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Wait until a job is Complete, or in another phase."""
    wanted = [one.capitalize() for one in phase or ["Complete"]]
    unknown = [one for one in wanted if one not in PHASES]
    if unknown:
        raise BadInput(f"--for {unknown[0]}: there is no such phase; there are {', '.join(PHASES)}")
    client = Where(local, folder, namespace, context, kubeconfig).of(plain(name))
    _tell(go(client, client.wait(plain(name), phases=wanted, timeout=seconds(timeout))))


def suspend(
    name: Name,
    wait: Wait = None,
    timeout: Timeout = "2m",
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Take a last checkpoint of a job and end all its processes."""
    client, most = Where(local, folder, namespace, context, kubeconfig).of(plain(name)), seconds(timeout)

    async def suspending() -> str:
        place = await client.place()
        here = isinstance(place, Machine)
        waits = here if wait is None else wait
        await place.suspend(plain(name), most if waits else None)
        if waits:
            return f"{plain(name)} is suspended"
        return f"{plain(name)} makes a last checkpoint" if here else _patched(name, "suspend: true")

    typer.echo(go(client, suspending()))


def resume(
    name: Name,
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Go on with a suspended job from its checkpoint; on this machine in a new run, in the background."""
    client = Where(local, folder, namespace, context, kubeconfig).of(plain(name))

    async def resuming() -> str:
        place = await client.place()
        goes_on = await place.resume(plain(name))
        if isinstance(place, Machine):
            return f"{goes_on} goes on from the last checkpoint; `psjob logs {goes_on} -f` follows it"
        return _patched(name, "suspend: false")

    typer.echo(go(client, resuming()))


def checkpoint(
    name: Name,
    timeout: Timeout = "3m",
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Ask a running job for a checkpoint now, and wait until it is committed. A cluster needs up to two minutes for the request."""
    client = Where(local, folder, namespace, context, kubeconfig).of(plain(name))
    made = go(client, client.checkpoint(plain(name), timeout=seconds(timeout)))
    typer.echo(f"checkpoint of step {made.step} is committed")


def delete(
    found: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before checkpoints of this machine are removed.")] = False,
    timeout: Timeout = "1m",
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """End jobs and remove them: on this machine with their checkpoints, on a cluster without those of a claim that is retained."""
    where, most = Where(local, folder, namespace, context, kubeconfig), seconds(timeout)
    for name in map(plain, found):
        client = where.of(name)

        async def deleting(client: AsyncClient = client, name: str = name) -> str:
            place = await client.place()
            job = await client.get(name)
            if job.where == "local":
                _must_agree(f"{job.place} with its checkpoints is removed", yes)
            await place.delete(job.id, most)
            return f"{job.id} is removed" if job.where == "local" else f"{WHAT}/{name} deleted"

        typer.echo(go(client, deleting()))


def clean(
    older: Annotated[str, typer.Option("--older-than", metavar="TIME", help="Only what ended so long ago, such as 24h.")] = "24h",
    suspended: Annotated[bool, typer.Option("--suspended", help="Runs of this machine too that were suspended.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Name what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Timeout = "1m",
    local: Local = False,
    folder: Folder = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Remove jobs that are Complete or Failed. Without an option that names a cluster: runs of this machine alone."""
    where, least, most = Where(local, folder, namespace, context, kubeconfig), seconds(older), seconds(timeout)
    client = gather(where)[0]
    now = time.time()

    async def cleaning() -> None:
        jobs = [job for job in await client.list() if job.over or (suspended and job.where == "local" and job.phase == "Suspended")]
        old = [job for job in jobs if now - (job.ended or now) >= least]
        for job in old:
            typer.echo(f"{job.id}  {job.phase}  ended {span(now - (job.ended or now))} ago")
        if not old:
            say(f"psjob: nothing ended more than {older} ago; there are {len(jobs)} ended ones")
        elif not dry:
            _must_agree(f"{len(old)} ended jobs are removed" + (" with their checkpoints" if old[0].where == "local" else ""), yes)
            for job in old:
                await client.delete(job.id, timeout=most)
            say(f"psjob: removed {len(old)}")

    go(client, cleaning())


def _must_agree(what: str, yes: bool) -> None:
    if yes:
        return
    if not (typer.get_text_stream("stdin").isatty() and typer.get_text_stream("stdout").isatty()):
        raise BadInput(f"{what}, for good: add --yes")
    if not typer.confirm(f"{what}, for good. Go on?"):
        raise Conflict("nothing was removed")


def _patched(name: str, change: str) -> str:
    return f"{WHAT}/{plain(name)} patched ({change})"


def _tell(view: JobView) -> None:
    place = "on this machine" if view.where == "local" else f"in namespace {view.namespace}"
    typer.echo(f"{view.id} {place} is {view.phase} at {view.unit} {view.progress.step}")
