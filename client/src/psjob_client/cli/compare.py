"""`psjob compare`: the same job in several modes, or several jobs, as a table and one HTML page."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from psjob_client import problems
from psjob_client.cli.options import Settings, complete_modes
from psjob_client.cli.output import TextForm, TextOutput, emit, ruled_table, say
from psjob_client.compare import outcome, report, sides
from psjob_client.compare.outcome import Comparison, SideOutcome, repeated, verdict_sentences
from psjob_client.compare.report import must_have_matplotlib
from psjob_client.compare.sides import Side, simulate_sides, train_side
from psjob_client.local.manifest import read_job
from psjob_client.local.run import EXIT_FAILED, EXIT_INTERRUPTED
from psjob_client.problems import BadInput
from psjob_operator.api.spec import PSTrainingJob, Training

EXAMPLES = """Examples:

  psjob compare job.yaml --modes sync,async

  psjob compare job.yaml --modes sync,async --repeat 3

  psjob compare job.yaml --modes sync,backup:1,bounded:3,async --simulate --slow 0=4 --set spec.workers.replicas=8

  psjob compare job.yaml --modes sync,sync:delay=1 --simulate --up 40 --down 40

  psjob compare plain.yaml dana.yaml --report rules.html

Exit codes: 0 the report is written, 1 a side failed (its reason is in the report), 2 nothing was started (bad input), 130 interrupted."""
LONGEST = 10**9
"""Seconds. What waits cannot count much further."""
TRAINED = "digits-64"
WHAT_IS_SIMULATED = f"Workers draw equal step times in every mode; what is trained is {TRAINED}, not the job's script"


def compare(
    jobs: Annotated[list[Path], typer.Argument(metavar="JOB.yaml…", help="One manifest, with --modes; or several, compared as they are.")],
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="MODE,…",
            help="sync, sync:delay=1, backup:1, bounded:3, softsync:2, async, threshold:16, local:50, local-async.",
            autocompletion=complete_modes,
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path, typer.Option("--report", metavar="FILE", help="The page.")] = Path("report.html"),
    form: TextOutput = TextForm.text,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", help="A side that takes longer is stopped; the steps that it made count.")
    ] = 600,
    repeat: Annotated[
        int, typer.Option(metavar="N", min=1, max=100, help="Train each side N times, with a seed each, and show the spread.")
    ] = 1,
    loss: Annotated[
        float | None, typer.Option(metavar="X", help="The loss that 'time to' is about; by default the lowest that all reached.")
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Modes on a virtual clock, with the job's number of workers.")] = False,
    speeds: Annotated[str | None, typer.Option(help="Simulated: homogeneous, heterogeneous, constant, or a file of step times.")] = None,
    slow: Annotated[list[str] | None, typer.Option(metavar="WORKER=FACTOR", help="Simulated: a slow worker. Repeatable.")] = None,
    stall: Annotated[str | None, typer.Option(metavar="CHANCExFACTOR", help="Simulated: steps that take longer.")] = None,
    crash: Annotated[list[str] | None, typer.Option(metavar="WORKER@TIME+AWAY", help="Simulated: a worker lost. Repeatable.")] = None,
    up: Annotated[float | None, typer.Option(metavar="T", help="Simulated: time that a push takes to the server.")] = None,
    down: Annotated[float | None, typer.Option(metavar="T", help="Simulated: time that weights take to a worker.")] = None,
    pushes: Annotated[int | None, typer.Option(metavar="N", help="Simulated: gradients in all.")] = None,
    rule: Annotated[str | None, typer.Option(help="Simulated: the rule; by default the manifest's, else nag.")] = None,
) -> None:
    """Run one job in several modes, or several jobs, here or simulated, and write one HTML page with table and plots."""
    must_have_matplotlib()
    problems.must_be_installed("psjob compare")
    if not 0 < deadline <= LONGEST:
        raise BadInput(f"--deadline {deadline:g}: must be a number of seconds above 0, at most {LONGEST}")
    if loss is not None and not math.isfinite(loss):
        raise BadInput(f"--loss {loss:g}: must be a finite number; leave it out for the lowest that all reached")
    if loss is not None and loss < 0 and simulate:
        raise BadInput(f"--loss {loss:g}: must be 0 or more with --simulate, whose loss is a cross-entropy")
    if repeat > 1 and simulate:
        raise BadInput(f"--repeat {repeat}: is for real runs; the simulator takes --seed, and one run of it says the same each time")
    _writable(out)
    read = [(path, read_job(path, tuple(settings or ()))) for path in jobs]
    given = {"speeds": speeds, "slow": slow, "stall": stall, "crash": crash, "up": up, "down": down, "pushes": pushes, "rule": rule}
    flags = {name: value for name, value in given.items() if value is not None and value != []}
    if flags and not simulate:
        raise BadInput(f"--{next(iter(flags))}: is for --simulate; a real run has the speeds of this machine")
    words = sides.words(modes) if modes else []
    if simulate:
        found, unit = _simulated(read, words, flags, deadline), "mean steps"
        name = f"{read[0][1].metadata.name}'s workers, simulated on {TRAINED}"
    else:
        planned = _sides(read, words, tuple(settings or ()))
        found, unit, name = _trained(planned, deadline, repeat), "s", ", ".join(dict.fromkeys(job.metadata.name for _, job in read))
    manifest = "\n---\n".join(path.read_text(errors="replace").strip() for path, _ in read)
    comparison = Comparison(name, unit, _about(simulate), manifest, found, loss)
    out.write_text(report.page(comparison), encoding="utf-8")
    outcome.keep(Path.cwd(), comparison, time.time())
    if form is TextForm.json:
        emit(json.dumps(comparison.as_json(), indent=1) + "\n")
    else:
        head, *rows = report.report_rows(comparison)
        ruled_table(head, rows, range(1, len(head)))
    for one in found:
        for said in ([] if one.result == "Complete" else [one.result]) + list(one.warnings):
            say(f"{one.title}: {said}")
    if verdict := verdict_sentences(comparison):
        say(verdict)
    say(f"the report is {out}")
    if any(one.result.startswith("Failed") for one in found):
        raise typer.Exit(EXIT_FAILED)


def _sides(read: Sequence[tuple[Path, PSTrainingJob]], words: Sequence[str], settings: tuple[str, ...]) -> list[Side]:
    """What is run. Every one is read before the first is started, so that what no job can do is refused by the manifest's own rules."""
    if words and len(read) > 1:
        raise BadInput("--modes: is for one manifest; several are compared as they are")
    if len(words or read) < 2:
        raise BadInput("there is one side only; give two modes or more, such as --modes sync,async, or two manifests")
    found = [sides.side_of(word, *_one(read)) for word in words] if words else sides.titled([path for path, _ in read])
    found = [Side(one.title, one.manifest, (*settings, *one.settings)) for one in found]
    for one in found:
        try:
            read_job(one.manifest, one.settings)
        except BadInput as error:
            raise BadInput(*(f"{one.title}: {line}" for line in error.lines)) from None
    return found


def _one(read: Sequence[tuple[Path, PSTrainingJob]]) -> tuple[Path, Training]:
    return read[0][0], read[0][1].spec.training


def _trained(planned: Sequence[Side], deadline: float, repeat: int) -> list[SideOutcome]:
    found = []
    try:
        for number, side in enumerate(planned, 1):
            runs = []
            for run, seeded in enumerate(_seeded(side, repeat), 1):
                which = f"{number} of {len(planned)}" + (f", run {run} of {repeat}" if repeat > 1 else "")
                with _progress(f"{side.title} ({which})") as told:
                    runs.append(train_side(seeded, deadline, told))
            found.append(repeated(runs))
    except KeyboardInterrupt:
        say("psjob compare: interrupted; no report is written")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    return found


def _seeded(side: Side, repeat: int) -> list[Side]:
    """The side as it is, and as often as is asked with the seeds that follow its own."""
    seed = read_job(side.manifest, side.settings).spec.training.seed or 0
    more = [replace(side, settings=(*side.settings, f"spec.training.seed={seed + number}")) for number in range(1, repeat)]
    return [side, *more]


def _simulated(
    read: Sequence[tuple[Path, PSTrainingJob]], words: Sequence[str], flags: Mapping[str, object], deadline: float
) -> list[SideOutcome]:
    if len(read) > 1:
        raise BadInput("--simulate: takes one manifest, whose number of workers counts; the modes are named by --modes")
    if len(words) < 2:
        raise BadInput("--simulate: give two modes or more, such as --modes sync,backup:1,async")
    spec = read[0][1].spec
    options = ["--workers", str(spec.workers.replicas)]
    if spec.training.update_rule and spec.training.mode != "local":  # there it is the outer rule, which is the mode's
        flags = {"rule": spec.training.update_rule} | dict(flags)
    for name, value in flags.items():
        options += [part for one in (value if isinstance(value, list) else [value]) for part in (f"--{name}", str(one))]
    try:
        return simulate_sides([sides.simulated(word, spec.training) for word in words], options, deadline)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def _progress(what: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that follows what it is told; elsewhere than on a terminal one line."""
    console = Console(stderr=True)
    if not console.is_terminal:
        say(what)
        yield lambda words: None
        return
    with console.status(what) as status:
        yield lambda words: status.update(f"{what}: {words}")


def _writable(out: Path) -> None:
    folder = out.absolute().parent
    if out.is_dir() or not os.access(out if out.exists() else folder, os.W_OK):
        raise BadInput(f"--report {out}: is no file that can be written; name one in a folder that you may write to")


def _about(simulate: bool) -> dict[str, str]:
    about = {
        "command": shlex.join(["psjob", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "when": time.strftime("%Y-%m-%d %H:%M %Z"),
        "psjob": version("psjob-operator"),
    }
    return about | ({"simulated": WHAT_IS_SIMULATED} if simulate else {})
