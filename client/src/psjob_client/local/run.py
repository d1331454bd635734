"""`psjob run`: the main path of the local backend, from the request to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psjob_client import problems
from psjob_client.local import run_folder
from psjob_client.local.backend import Backend
from psjob_client.local.console import Display, Story
from psjob_client.local.faults import FaultRecovery, Faults, parse_faults, strike_at
from psjob_client.local.manifest import Request, read_job, worker_commands
from psjob_client.local.monitor import RunWatch, attach_verdict, poll_shards
from psjob_client.local.process import Sites, reserve_ports
from psjob_client.local.record import keep_history
from psjob_client.local.run_folder import ONE_HOST, Folder, RunKeys, local_encryption, new_folder, parse_logs, resumed_folder
from psjob_client.local.status import lateness, numbers, passes_again, staleness_line, step_line, step_parts
from psjob_client.problems import BadInput
from psjob_operator.api.spec import JobSpec
from psjob_operator.plan.objects import listening_workers

TOLD_ELSEWHERE = ("loss", "grad_norm")
"""Numbers that are not told at the end: the display has had them."""
EXIT_COMPLETE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_DIFFER, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130
TURN = 0.25
"""Seconds between two looks where nothing wakes us."""


def run_job(request: Request, sites: Sites | None = None) -> int:
    """Train the job of a manifest with processes of this machine; the exit code of `psjob run`.

    They listen on free ports of the loopback address, or where `sites` says.

    Raises:
        BadInput: what was asked cannot be done; nothing was started.
    """
    began = time.time()
    backend, faults, story = _prepare(request, sites)
    try:
        result = asyncio.run(_train(request, backend, faults, story))
    finally:
        backend.close()
        story.display.close()
    return _conclude(request, backend, faults.recoveries, story, result, time.time() - began)


def _prepare(request: Request, sites: Sites | None) -> tuple[Backend, Faults, Story]:
    job = read_job(request.manifest, request.settings, request.text)
    problems.must_be_installed("psjob run")
    if job.spec.suspend:
        raise BadInput("spec.suspend: is true, which means zero processes; train here with --set spec.suspend=false")
    commands = worker_commands(job, (request.work_folder or request.manifest.parent).absolute())
    faults = Faults([*parse_faults(request.faults, job.spec.shards.replicas, job.spec.workers.replicas)])
    shown = parse_logs(request.logs, job.spec.workers.replicas)
    source = resumed_folder(request.resume, job.spec)
    resume = source[0] if source else None
    for option, path in (("--summary", request.summary), ("--history", request.history)):
        if path is not None and not path.absolute().parent.is_dir():
            raise BadInput(f"{option} {path}: there is no folder {path.absolute().parent}; make it, or name another file")
    if request.history is not None:
        _writable(request.history)
    sites = sites or reserve_ports(job.spec.shards.replicas)
    folder = new_folder(job.metadata.name, Path.cwd(), request.run)
    keys = _keys(folder, job.spec)
    watch = RunWatch(float(job.spec.shards.progress_deadline_seconds), keys.questions, began_at=0 if resume is None else None)
    watch.hearers.append(faults.hear)
    story = Story(
        Display(job.metadata.name, progress=request.progress, unit="round" if job.spec.training.mode == "local" else "step"), folder, shown
    )
    backend = Backend(job, folder, commands, sites, watch, story.event, keys, story.ended, resume)
    backend.prepare()
    story.opening(job, commands[0] if request.text is None else replace(commands[0], unused=()), request.words())
    if source is not None:
        story.display.say(f"continues from {story.display.unit} {source[1]} of {story.near(source[0])}")
    return backend, faults, story


def _keys(folder: Folder, spec: JobSpec) -> RunKeys:
    try:
        seats = (spec.shards.replicas, spec.workers.replicas, local_encryption(spec) != ONE_HOST, listening_workers(spec))
        return run_folder.make_keys(folder.path / "keys", *seats)
    except OSError as error:
        raise BadInput(f"{folder.path / 'keys'}: cannot be made: {error.strerror or error}; it holds the keys of this run") from None


def _writable(history: Path) -> None:
    try:
        history.write_text("")
    except OSError as error:
        raise BadInput(f"--history {history}: cannot be written: {error.strerror or error}; name another file") from None


async def _train(request: Request, backend: Backend, faults: Faults, story: Story) -> str:
    """Until the job is over or the user has had enough; the phase it ends in."""
    wake = asyncio.Event()
    interrupts = _listen(wake)
    shards, current = backend.sites.shards, functools.partial(backend.current, "shard")
    beside = [
        asyncio.create_task(poll_shards(backend.watch, shards, current, lambda: faults.recovering, wake)),
        asyncio.create_task(strike_at(faults, backend, story.display.say, wake)),
    ]
    if request.history is not None:
        beside.append(asyncio.create_task(keep_history(backend, request.history)))
    try:
        while not backend.over and not interrupts:
            _must_go_on(beside)
            backend.verdict = _verdict(backend, story)
            if backend.verdict:
                break
            wake_at = backend.turn()
            if backend.ended:
                backend.stop()
            story.show(backend)
            await _pause(wake, wake_at)
        if interrupts or backend.verdict:
            await _stop(backend, story, wake, interrupts)
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    story.show(backend)
    if backend.verdict:
        return "Failed"
    return (backend.status and backend.status.end) or "Suspended"


def _verdict(backend: Backend, story: Story) -> str | None:
    now = time.time()
    failed = backend.failures.verdict(backend.watch.made, backend.watch.progress_at, now)
    restarted = any(shard.attempt > 1 for shard in (backend.status.shards if backend.status else ()))
    unattached = attach_verdict(backend.watch, backend.children, restarted)
    return failed or unattached or story.standing.verdict(backend.watch.coordinator, now)


def _must_go_on(beside: list[asyncio.Task[None]]) -> None:
    """A poll that died would leave a shard unwatched: its fault is ours, and is shown at once."""
    for task in beside:
        if task.done():
            task.result()


async def _stop(backend: Backend, story: Story, wake: asyncio.Event, interrupts: list[int]) -> None:
    """Everyone leaves, the shards last, after a checkpoint where the job could continue; a second Ctrl-C kills."""
    backend.interrupted = bool(interrupts)
    if backend.verdict:
        story.display.say(f"{backend.verdict.partition(':')[0]}: all processes are ended", "yellow")
    elif not backend.ended:
        what = f"a last checkpoint is made, up to {backend.grace:.0f} s" if backend.watch.unsaved else "there is nothing to save"
        story.display.say(f"stopping: {what} (Ctrl-C again kills)")
    backend.stop()
    while any(child.running for child in backend.children):
        if len(interrupts) > 1:
            backend.stop(kill=True)
        elif backend.watch.moving and backend.watch.unsaved:
            backend.wait_longer(backend.grace)
        backend.reap()
        story.show(backend)
        await _pause(wake, None)


async def _pause(wake: asyncio.Event, until: float | None) -> None:
    longest = TURN if until is None else max(0.0, min(TURN, until - time.time()))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(longest):
            await wake.wait()
    wake.clear()


def _listen(wake: asyncio.Event) -> list[int]:
    """The signals that ask us to end, as they come; the end of a child only wakes."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def heard(number: int) -> None:
        seen.append(number)
        wake.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, heard, number)
    loop.add_signal_handler(signal.SIGCHLD, wake.set)
    return seen


def _conclude(request: Request, backend: Backend, recoveries: Sequence[FaultRecovery], story: Story, result: str, seconds: float) -> int:
    told, whole = backend.watch.coordinator, summary(backend, recoveries, result, seconds)
    story.record.close(backend, result, whole)
    if request.summary is not None:
        try:
            request.summary.write_text(json.dumps(whole, indent=1) + "\n")
        except OSError as error:
            story.display.say(f"--summary {request.summary}: cannot be written: {error.strerror or error}")
    for recovery in recoveries:
        story.display.say(str(recovery))
    if result == "Suspended":
        story.farewell(request, backend)
        return EXIT_INTERRUPTED
    if result != "Complete":
        story.display.say(f"Failed: {failure(backend) or 'see the logs'}; logs are in {story.near(backend.folder.path / 'logs')}", "red")
        return EXIT_FAILED
    began, unit = backend.watch.began_at or 0, story.display.unit
    made = f"{backend.watch.step} {unit}s" if not began else f"{backend.watch.made} {unit}s, to {unit} {backend.watch.step},"
    made, where = f"{made} in {seconds:.1f} s", story.near(backend.folder.path)
    if diverged := told.get("diverged"):
        remedy = "lower the learning rate, or set training.sync.maxGradNorm"
        story.display.say(f"Diverged: {diverged}; the weights after {made} are of no use; {remedy}; checkpoints are in {where}", "red")
    elif drift := told.get("drift"):
        story.display.say(f"Workers differ: {drift}; {made}; weights and checkpoints are in {where}", "red")
    else:
        which = f" {sha[:12]}" if (sha := whole["weights_sha256"]) else ""
        story.display.say(f"Complete: {made}; weights{which} and checkpoints are in {where}")
    if parts := step_parts(told):
        story.display.say(f"a {unit} took {step_line(parts)}")
    if told.get("stepAdvice"):
        story.display.say(str(told["stepAdvice"]))
    late = lateness(backend.watch.told.values())
    if late:
        story.display.say(staleness_line(late))
    for name, value in last_metrics(told).items():
        if name not in TOLD_ELSEWHERE:
            story.display.output(metric_line(name, value))
    return EXIT_DIVERGED if diverged else EXIT_DIFFER if told.get("drift") else EXIT_COMPLETE


def summary(backend: Backend, recoveries: Sequence[FaultRecovery], result: str, seconds: float) -> dict[str, Any]:
    """The whole of a run. Counters are those last heard of each attempt of each shard; what died unheard is not in them."""
    watch, status = backend.watch, backend.status
    told = watch.coordinator
    return {
        "result": result,
        "run": backend.folder.run,
        "steps": watch.step,
        "pushes": watch.total("pushes"),
        "applied": watch.total("applied"),
        "dropped": watch.total("dropped"),
        "duplicates_refused": watch.total("duplicatesRefused"),
        "updates_lost": watch.total("updatesLost"),
        "crashes": watch.total("crashes"),
        "passes_again": passes_again(told),
        "restarts": dict(status.restarts.causes) if status else {},
        "term": (status and status.internal.term) or 0,
        "attempts": [shard.attempt for shard in status.shards] if status else [],
        "seconds": round(seconds, 3),
        "codecs": told.get("codecs"),
        "transport": told.get("transport"),
        **(lateness(watch.told.values()) or {"staleness": None, "gap": None}),
        "step_parts": step_parts(told) or None,
        "step_advice": told.get("stepAdvice"),
        "warning": told.get("warning"),
        "non_finite": told.get("nonFinite"),
        "large_push": told.get("largePush"),
        "diverged": told.get("diverged"),
        "drift": told.get("drift"),
        "data_problem": told.get("dataProblem"),
        "buffers_differ": told.get("buffersDiffer"),
        "loss": told.get("loss"),
        "metrics": last_metrics(told),
        "weights_sha256": told.get("weightsSha256"),
        "checkpoints": max(len(watch.manifests), int(numbers(told, "committed"))),
        "checkpoint": told.get("checkpoint"),
        "workers": [worker for worker in told.get("workers") or () if isinstance(worker, dict)],
        "recoveries": [recovery.as_json() for recovery in recoveries],
        "failure": failure(backend),
    }


def last_metrics(coordinator: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that the script reported, in the order in which it first did."""
    told = coordinator.get("metrics")
    return {str(name): numbers(told, name) for name in told} if isinstance(told, Mapping) else {}


def metric_line(name: str, value: float) -> str:
    """`test accuracy 0.978`."""
    digits = f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.4g}"
    return f"{name.replace('_', ' ')} {digits}"


def failure(backend: Backend) -> str | None:
    """Why the job failed, in the plan's words or ours; None where it did not."""
    if backend.verdict:
        return backend.verdict
    failed = backend.status.condition("Failed") if backend.status is not None and backend.status.end == "Failed" else None
    return None if failed is None else f"{failed.reason}: {failed.message}"
