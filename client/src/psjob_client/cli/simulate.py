"""`psjob simulate`: the options of the runtime's simulator, which has the modes and rules, and is a process of its own."""

from __future__ import annotations

import enum
import json
import os
import sys
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from psjob_client import problems
from psjob_client.cli.options import HelpedGroup, with_option_groups
from psjob_client.cli.output import TextForm, TextOutput

MODES = "sync, sync:delay=1, backup:1, bounded:3, softsync:2, async:delay=4, threshold:16, local:50, local-async:50"
HEAD = "Compare modes and rules on a virtual clock."
cli = typer.Typer(cls=HelpedGroup, help=HEAD, no_args_is_help=True, rich_markup_mode=None)


class Library(enum.StrEnum):
    """Whose arrays a rule runs on."""

    numpy = "numpy"
    torch = "torch"


Interrupt = Annotated[bool, typer.Option("--interrupt", help="Workers give up a step whose push would be dropped.")]
Trace = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every push: CSV by its suffix, else JSON lines.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")]


@dataclass(frozen=True)
class PushOptions:
    """Who pushes, in which modes, and how often."""

    workers: Annotated[int, typer.Option("--workers", metavar="N", help="How many.")] = 8
    mode: Annotated[list[str] | None, typer.Option("--mode", metavar="MODE", help=f"Such as {MODES}. Repeatable.")] = None
    pushes: Annotated[int | None, typer.Option(metavar="N", help="How many pushes to simulate.")] = None
    time_seed: Annotated[int, typer.Option(metavar="N", help="Seed of the step times.")] = 0


@dataclass(frozen=True)
class RuleOptions:
    """What is trained, and by which rule."""

    problem: Annotated[str, typer.Option(metavar="WHAT", help="digits (numbers as in digits-64), fixed:N or quadratic:N.")] = "digits"
    rule: Annotated[str, typer.Option("--rule", metavar="RULE", help="A rule of docs/rules/index.md, such as nag or dana-zero.")] = "plain"
    set: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A number of the rule, as lr=0.05. Repeatable.")] = (
        None
    )
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of first weights and batches.")] = 0


@dataclass(frozen=True)
class SpeedOptions:
    """Step times."""

    speeds: Annotated[
        str, typer.Option(metavar="HOW", help="homogeneous, heterogeneous, constant, or a file: a line per worker, its times.")
    ] = "homogeneous"
    mean: Annotated[float, typer.Option(metavar="T", help="Mean time of a step, in any unit.")] = 128.0
    shape: Annotated[float, typer.Option(metavar="K", help="Shape of the gamma distribution; 100 is a spread of 10 %.")] = 100.0
    spread: Annotated[
        float | None, typer.Option(metavar="V", help="Coefficient of variation between machines; 0.6 when heterogeneous.")
    ] = None
    slow: Annotated[list[str] | None, typer.Option(metavar="W=F", help="Worker W takes F times as long. Repeatable.")] = None
    stall: Annotated[
        str | None, typer.Option(metavar="PxF", help="Of all steps the part P takes F times as long; P+M: M mean steps longer.")
    ] = None
    crash: Annotated[
        list[str] | None, typer.Option(metavar="W@T+A", help="Worker W is lost at T for A (without +A: for good). Repeatable.")
    ] = None
    up: Annotated[float, typer.Option(metavar="T", help="Time that a push takes to the server.")] = 0.0
    down: Annotated[float, typer.Option(metavar="T", help="Time that weights take to a worker.")] = 0.0


PUSHES, SPEEDS, PLAIN, NAG = PushOptions(), SpeedOptions(), RuleOptions(), RuleOptions(rule="nag")
"""What an option means that is absent."""


@cli.command(epilog="Example: psjob simulate schedule --workers 8 --slow 0=4 --up 40 --down 40 --mode sync --mode sync:delay=1")
@with_option_groups
def schedule(
    pushing: PushOptions = PUSHES,
    interrupt: Interrupt = False,
    trace: Trace = None,
    times: SpeedOptions = SPEEDS,
    form: TextOutput = TextForm.text,
) -> None:
    """Compare modes on the same step times, without gradients."""
    become_simulator("schedule", locals())


@cli.command(epilog="Example: psjob simulate train --workers 32 --rule dana-zero --set lr=0.05 --trace trace.csv")
@with_option_groups
def train(
    pushing: PushOptions = PUSHES,
    interrupt: Interrupt = False,
    trace: Trace = None,
    trained: RuleOptions = PLAIN,
    inner: Annotated[str, typer.Option(metavar="RULE", help="The workers' own rule in local mode.")] = "plain",
    inner_set: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A number of that rule. Repeatable.")] = None,
    replayable: Annotated[
        bool, typer.Option("--replayable", help="On torch, with constant hyperparameters, and a --trace that replay can play.")
    ] = False,
    library: Annotated[Library, typer.Option(help="The arrays that the rule runs on.")] = Library.numpy,
    times: SpeedOptions = SPEEDS,
    form: TextOutput = TextForm.text,
) -> None:
    """Train once on a simulated schedule."""
    become_simulator("train", locals())


@cli.command(epilog="Example: psjob simulate compare --slow 0=4 -o json")
@with_option_groups
def compare(
    pushing: PushOptions = PUSHES,
    trained: RuleOptions = NAG,
    times: SpeedOptions = SPEEDS,
    form: TextOutput = TextForm.text,
) -> None:
    """Train in several modes on the same step times; the curves with -o json."""
    become_simulator("compare", {**locals(), "library": "numpy"})


@cli.command("digits-64", epilog="Example: psjob simulate digits-64 --quick")
@with_option_groups
def digits_64(
    quick: Annotated[bool, typer.Option("--quick", help="4 rules, 1, 16 and 32 workers, 2 seeds: seconds.")] = False,
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Some of the table's entries.")] = None,
    workers: Annotated[str | None, typer.Option(metavar="1,16", help="Numbers of workers.")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="How many, from 0.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 0.05,
    processes: Annotated[int | None, typer.Option(metavar="N", help="Default: one a core.")] = None,
    times: SpeedOptions = SPEEDS,
    form: TextOutput = TextForm.text,
) -> None:
    """Make the table of ten rules with 1 to 64 workers, and check its gate."""
    become_simulator("digits-64", locals())


@cli.command(epilog="Example: psjob simulate trace trace.csv")
@with_option_groups
def trace(file: File, form: TextOutput = TextForm.text) -> None:
    """Print mean staleness, histogram and SHA-256 of a trace file."""
    become_simulator("trace", locals())


@cli.command(epilog="Example: psjob simulate replay trace.csv --shards 2")
@with_option_groups
def replay(
    file: File,
    shards: Annotated[int, typer.Option(metavar="N", help="Processes on this machine.")] = 2,
    form: TextOutput = TextForm.text,
) -> None:
    """Play a trace of train --replayable by real shards, and compare the weights."""
    become_simulator("replay", locals())


def request(does: str, given: dict[str, Any]) -> str:
    """What was asked for, in the words that `python -m psjob.simulate` takes."""
    repeatable = ("mode", "set", "slow", "crash", "inner_set")
    flat: dict[str, Any] = {}
    for name, value in given.items():
        flat |= asdict(value) if is_dataclass(value) and not isinstance(value, type) else {name: value}
    plain = {name: [] if value is None and name in repeatable else value for name, value in flat.items()}
    plain["json"] = plain.pop("form") is TextForm.json
    return json.dumps({"does": does, **plain}, default=str)


def become_simulator(does: str, given: dict[str, Any]) -> None:
    """Become the simulator."""
    problems.must_be_installed("psjob simulate")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "psjob.simulate", request(does, given)])
