"""The verbs that change something: submit, wait, suspend, resume, checkpoint, delete, clean."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from psjob_client.cli import options
from psjob_client.cli.options import ANYWHERE, JobScope, Name, Names, Settings, bare_name, go
from psjob_client.cli.output import Form, echo, job_names, print_data, say
from psjob_client.cli.read_commands import clients_of, renamed
from psjob_client.convert.draft import image_of, job_name
from psjob_client.jobs.runs import LocalJobs
from psjob_client.jobs.view import JobView
from psjob_client.local.manifest import as_written, read_job
from psjob_client.problems import BadInput, Conflict
from psjob_client.sdk.client import AsyncClient
from psjob_client.sdk.manifest import IMAGE, build, imported_beside
from psjob_client.text import span
from psjob_operator.contract import GROUP, KIND
from psjob_operator.plan import objects

WHAT = f"{KIND.lower()}.{GROUP}"
PHASES = ("Pending", "Running", "Recovering", "Suspended", "Complete", "Failed")
SUBMIT_EXAMPLES = """Examples:

  psjob submit job.yaml -n team-a --wait

  psjob submit train.py --workers 4 --image registry.example.com/me/torch:1 -- --lr 0.1

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


def parse_span(text: str) -> float:
    """`90s`, `10m`, `1h30m`, or a number of seconds. Raises BadInput."""
    if re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", text):
        return float(text)
    found = re.fullmatch("([0-9]{1,5}h)?([0-9]{1,5}m)?([0-9]{1,5}s)?", text)
    if found is None or not text:
        raise BadInput(f"{text!r} is no span of time; give such as 90s, 10m or 1h30m")
    hours, minutes, rest = (int(part[:-1]) if part else 0 for part in found.groups())
    return float(hours * 3600 + minutes * 60 + rest)


Timeout = Annotated[str, typer.Option(metavar="TIME", help="The longest wait, such as 90s or 1h30m.")]
Wait = Annotated[bool | None, typer.Option("--wait/--no-wait", help="Wait until no process is left; absent: only on this machine.")]


def save_manifest(path: Path, text: str) -> None:
    """Write the manifest of a script to a file of the working folder. Raises BadInput for any other place."""
    if path.absolute().parent != Path.cwd():
        raise BadInput(f"--save {path}: a manifest's folder is its working folder; name a file in {Path.cwd()}")
    try:
        if path.exists() and path.read_text() != text:
            raise BadInput(f"--save {path}: is there already, with another text, and was not changed; name another file")
        path.write_text(text)
    except OSError as error:
        raise BadInput(f"--save {path}: cannot be written: {error.strerror or error}; name another file") from None


def submit(
    ctx: typer.Context,
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB.yaml|SCRIPT.py",
            help="Manifest of one PSTrainingJob; -: from standard input. Or a script, which is sent along; what follows it, and is no "
            "option of psjob, are its arguments.",
        ),
    ],
    workers: options.Workers = None,
    shards: options.Shards = None,
    mode: options.Mode = None,
    image: Annotated[
        str | None, typer.Option(help=f"The workers' image: Python, torch and what the script imports; of a script {IMAGE} if absent.")
    ] = None,
    in_image: Annotated[bool, typer.Option("--in-image", help="SCRIPT.py lies in the image; it is not sent.")] = False,
    module: options.Module = False,
    settings: Settings = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job is Complete.")] = False,
    timeout: Timeout = "24h",
    output: Annotated[Form, typer.Option("--output", "-o", help="table, json, yaml or name.")] = Form.table,
    where: JobScope = ANYWHERE,
) -> None:
    """Start a job on the cluster, or with --local on this machine, where it continues in the background."""
    given = options.given_options(workers=workers, shards=shards, mode=mode, image=image)
    if options.takes_script(job, module):
        made = read_job(job, tuple(settings or ()), _of_script(job, ctx.args, module, in_image, where.says_local, given))
    elif in_image:
        raise BadInput(f"--in-image: {job} is a manifest, whose command says what runs; --in-image is for a script")
    else:
        made = read_job(job, (*(settings or ()), *options.settings_of(given)))
    if not where.says_local and (bare := [one["name"] for one in made.spec.workers.template["spec"]["containers"] if not one.get("image")]):
        raise BadInput(
            f"{job}: the container {bare[0]} of the workers has no image, which only this machine does without; "
            "name one that the cluster can pull: --image registry.example.com/me/train:1"
        )
    where = where if where.says_local else renamed(where, made.metadata.namespace)
    client = where.machine() if where.says_local else where.cluster()
    most = parse_span(timeout)

    async def starting() -> JobView:
        place = await client.place()
        if isinstance(place, LocalJobs):
            work_folder = Path.cwd() if str(job) == "-" or options.takes_script(job, module) else job.absolute().parent
            name = await place.submit(as_written(made), work_folder=work_folder)
        else:
            name = await place.submit(as_written(made))
        view = await client.get(name)
        if output is Form.table:
            same = where if where.says_local else replace(where, namespace=view.namespace)
            said = f"{name} runs" if where.says_local else f"{WHAT}/{name} created"
            echo(f"{said}; `{shlex.join(['psjob', 'logs', name, '-f', *same.words()])}` follows it")
        return await client.wait(name, timeout=most) if wait else view

    view = go(client, starting())
    if not print_data(output, view) and output is Form.name:
        job_names([view])
    elif wait and output is Form.table:
        _tell(view)


def _of_script(path: Path, arguments: Sequence[str], module: bool, in_image: bool, here: bool, given: dict[str, Any]) -> str:
    """The manifest of a script, as text. On a cluster the script travels in it, but for one that lies in the image."""
    if not in_image:
        options.must_exist(path, module)
    if (in_image or module) and not here and "image" not in given:
        raise BadInput(f"--image is missing: name the image that {path} lies in, such as --image {image_of(path.stem)}")
    if in_image or module or here:
        words = ["python", *(["-m"] if module else []), str(path), *arguments]
        name = job_name(str(path).rpartition(".")[2] if module else path.stem)
        return yaml.safe_dump(build([word.replace("$", "$$") for word in words], name=name, **given), sort_keys=False)
    beside = imported_beside(path)
    if beside:
        raise BadInput(
            f"{path}: imports {', '.join(beside)}, and only the script itself is sent. Put the files into an image, and say so: "
            f"psjob submit {path} --image {image_of(path.stem)} --in-image"
        )
    return yaml.safe_dump(build(path, arguments=arguments, **given), sort_keys=False)


def wait_for(
    name: Name,
    phase: Annotated[list[str] | None, typer.Option("--for", metavar="PHASE", help=f"One of {', '.join(PHASES)}. Repeatable.")] = None,
    timeout: Timeout = "24h",
    where: JobScope = ANYWHERE,
) -> None:
    """Wait until a job is Complete, or in another phase."""
    wanted = [one.capitalize() for one in phase or ["Complete"]]
    unknown = [one for one in wanted if one not in PHASES]
    if unknown:
        raise BadInput(f"--for {unknown[0]}: there is no such phase; there are {', '.join(PHASES)}")
    client = where.of(bare_name(name))
    _tell(go(client, client.wait(bare_name(name), phases=wanted, timeout=parse_span(timeout))))


def suspend(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask if the checkpoints are lost by it.")] = False,
    wait: Wait = None,
    timeout: Timeout = "2m",
    where: JobScope = ANYWHERE,
) -> None:
    """Take a last checkpoint of a job and end all its processes."""
    client, most = where.of(bare_name(name)), parse_span(timeout)

    async def suspending() -> str:
        place = await client.place()
        here = isinstance(place, LocalJobs)
        if risk := await place.at_risk(bare_name(name)):
            say(risk)
            _must_agree(f"the checkpoints of {bare_name(name)}", yes)
        waits = here if wait is None else wait
        await place.suspend(bare_name(name), most if waits else None)
        if waits:
            return f"{bare_name(name)} is suspended"
        return f"{bare_name(name)} makes a last checkpoint" if here else _patched(name, "suspend: true")

    echo(go(client, suspending()))


def resume(
    name: Name,
    where: JobScope = ANYWHERE,
) -> None:
    """Continue with a suspended job from its checkpoint; on this machine in a new run, in the background."""
    client = where.of(bare_name(name))

    async def resuming() -> str:
        place = await client.place()
        goes_on = await place.resume(bare_name(name))
        if isinstance(place, LocalJobs):
            return f"{goes_on} continues from the last checkpoint; `psjob logs {goes_on} -f` follows it"
        return _patched(name, "suspend: false")

    echo(go(client, resuming()))


def checkpoint(
    name: Name,
    timeout: Timeout = "3m",
    where: JobScope = ANYWHERE,
) -> None:
    """Ask a running job for a checkpoint now, and wait until it is committed. A cluster needs up to two minutes for the request."""
    client = where.of(bare_name(name))
    made = go(client, client.checkpoint(bare_name(name), timeout=parse_span(timeout)))
    echo(f"checkpoint of step {made.step} is committed")


def delete(
    found: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before checkpoints of this machine are removed.")] = False,
    timeout: Timeout = "1m",
    where: JobScope = ANYWHERE,
) -> None:
    """End jobs and remove them: on this machine with their checkpoints, on a cluster without those of a claim that is retained."""
    most = parse_span(timeout)
    for name in map(bare_name, found):
        client = where.of(name)

        async def deleting(client: AsyncClient = client, name: str = name) -> str:
            place = await client.place()
            job = await client.get(name)
            if job.where == "local":
                _must_agree(f"{job.place} with its checkpoints", yes)
            await place.delete(job.id, most)
            if claim := _claim_left(job):
                say(f"its checkpoints stay on the claim {claim}; kubectl delete pvc {claim} -n {job.namespace} removes them")
            return f"{job.id} is removed" if job.where == "local" else f"{WHAT}/{name} deleted"

        echo(go(client, deleting()))


def _claim_left(job: JobView) -> str:
    """The claim that the operator has made for a job of a cluster, if it stays when the job is deleted."""
    kept = (job.manifest or {}).get("spec", {}).get("checkpoint", {})
    policy = kept.get("persistentVolumeClaimRetentionPolicy") or {}
    own = job.where != "local" and not kept.get("volume") and not kept.get("disabled")
    return objects.claim_name(job.name) if own and policy.get("whenDeleted", "Retain") == "Retain" else ""


def clean(
    older: Annotated[str, typer.Option("--older-than", metavar="TIME", help="Only what ended so long ago, such as 24h.")] = "24h",
    suspended: Annotated[bool, typer.Option("--suspended", help="Runs of this machine too that were suspended.")] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Name what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Timeout = "1m",
    where: JobScope = ANYWHERE,
) -> None:
    """Remove jobs that are Complete or Failed. Without an option that names a cluster: runs of only this machine."""
    least, most = parse_span(older), parse_span(timeout)
    client = clients_of(where)[0]
    now = time.time()

    async def cleaning() -> None:
        jobs = [job for job in await client.list() if job.over or (suspended and job.where == "local" and job.suspended)]
        old = [job for job in jobs if now - (job.ended or now) >= least]
        for job in old:
            echo(f"{job.id}  {job.phase}  ended {span(now - (job.ended or now))} ago")
        if not old:
            say(f"psjob: nothing ended more than {older} ago; there are {len(jobs)} ended ones")
        elif not dry:
            _must_agree(f"{len(old)} ended jobs" + (" with their checkpoints" if old[0].where == "local" else ""), yes)
            for job in old:
                await client.delete(job.id, timeout=most)
            say(f"psjob: removed {len(old)}")

    go(client, cleaning())


def _must_agree(what: str, yes: bool) -> None:
    """To have `what` removed for good."""
    if yes:
        return
    if not (typer.get_text_stream("stdin").isatty() and typer.get_text_stream("stdout").isatty()):
        raise BadInput(f"nothing was removed: to remove {what} for good, add --yes")
    if not typer.confirm(f"Remove {what} for good?"):
        raise Conflict("nothing was removed")


def _patched(name: str, change: str) -> str:
    return f"{WHAT}/{bare_name(name)} patched ({change})"


def _tell(view: JobView) -> None:
    place = "on this machine" if view.where == "local" else f"in namespace {view.namespace}"
    echo(f"{view.id} {place} is {view.phase} at {view.unit} {view.progress.step}")
