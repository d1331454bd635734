"""`psjob plan-topology`: what each way of summing gradients takes on a machine, and which one to use.

The machine comes from exactly one of a file, a preset and a probe (`machines_of`, as for plan-stages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from psjob_client.cli.output import TextForm, TextOutput, echo, emit, ruled_table
from psjob_client.local.manifest import read_text
from psjob_client.local.measure import measure
from psjob_client.problems import BadInput
from psjob_client.topology import costs
from psjob_client.topology.choose import STRATEGIES, Choice, Estimate, choose_strategy
from psjob_client.topology.machine import (
    FIGURES,
    MOST_DEVICES,
    PRESETS,
    Figure,
    Machine,
    NoWay,
    parse_rate,
    parse_seconds,
    parse_size,
    read_machine,
    show_bytes,
    show_rate,
    show_seconds,
)
from psjob_operator.api.load import load_document

EXAMPLES = """Examples:

  psjob plan-topology --preset d2l

  psjob plan-topology --preset ethernet-10 --workers 8 --servers 2 --bytes 400MB

  psjob plan-topology machine.yaml --current ring

  psjob plan-topology --probe 4 -o json > machine.json; psjob plan-topology machine.json

  psjob plan-topology --preset ethernet-10 --measured ethernet-10=1.18GB/s,30us --measured w0:w2=80MB/s

A machine.yaml: {name: rack, hosts: [a, b, c], switches: [{name: tor, joins: [a, b, c], bandwidth: 10Gb/s, latency: 40us}]}"""
COLUMNS = ("strategy", "time", "of the pick", "bandwidth", "latency", "formula")
DEFAULT_WORKERS = 4


Preset = Annotated[str | None, typer.Option(help=f"A machine by name: {', '.join(PRESETS)}.")]
Hosts = Annotated[int | None, typer.Option(help=f"Hosts of an ethernet preset; {DEFAULT_WORKERS} by default.")]
Servers = Annotated[int | None, typer.Option(help="Servers of an ethernet preset, which hold shards; none by default.")]
Probe = Annotated[int | None, typer.Option(metavar="N", help="Measure between N processes of this machine, over loopback TCP.")]


def plan_topology(
    machine: Annotated[Path | None, typer.Argument(metavar="MACHINE.yaml", help="A machine, described (docs/topology.md).")] = None,
    preset: Preset = None,
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Bytes of one gradient.")] = "160MB",
    workers: Hosts = None,
    servers: Servers = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=RATE[,LATENCY]", help="Measured, in place of a figure (pcie3-x16) or between two ends (w0:w1). Repeatable."
        ),
    ] = None,
    probe: Probe = None,
    current: Annotated[str | None, typer.Option(metavar="STRATEGY", help="The strategy in use: changed only if it is worth it.")] = None,
    form: TextOutput = TextForm.text,
) -> None:
    """Compare ways of summing gradients on a machine and pick one, with the reason."""
    if current is not None and current not in STRATEGIES:
        raise BadInput(f"--current {current}: no strategy; known are {', '.join(STRATEGIES)}")
    figures, pairs = _measured(measured or [])
    machines = machines_of(machine, preset, workers, servers, probe, figures)
    plans = [(found, _choice(found, _size(size), current)) for found in _with(machines, pairs)]
    if form is TextForm.json:
        emit(json.dumps([_as_json(found, choice, _size(size)) for found, choice in plans], indent=2) + "\n")
        return
    for found, choice in plans:
        _show(found, choice, _size(size))
    if preset == "d2l":
        echo(_chapter([choice for _, choice in plans], _size(size)))


def _size(text: str) -> float:
    try:
        return parse_size(text)
    except ValueError as error:
        raise BadInput(f"--bytes {text}: {error}") from None


def _measured(given: Sequence[str]) -> tuple[Mapping[str, Figure], list[dict[str, Any]]]:
    """The figures with what was measured in their place, and what was measured between two ends."""
    figures, pairs = dict(FIGURES), []
    for text in given:
        what, _, value = text.partition("=")
        rate, _, late = value.partition(",")
        try:
            bandwidth, latency = parse_rate(rate), parse_seconds(late) if late else None
        except ValueError as error:
            raise BadInput(f"--measured {text}: {error}; write WHAT=RATE[,LATENCY], such as w0:w1=1.2GB/s,30us") from None
        one, colon, other = what.partition(":")
        if what in figures:
            old = figures[what]
            figures[what] = replace(old, bandwidth=bandwidth, latency=old.latency if latency is None else latency, source="measured")
        elif colon and one and other:
            pairs.append({"between": [one, other], "bandwidth": bandwidth, "latency": latency})
        else:
            raise BadInput(f"--measured {text}: {what or 'nothing'} is neither two ends, such as w0:w1, nor a figure: {', '.join(figures)}")
    return figures, pairs


def _with(machines: Sequence[Machine], pairs: Sequence[dict[str, Any]]) -> list[Machine]:
    """Each of `machines` with those of `pairs` measured that are its own; a pair that none has is refused."""
    found = []
    for machine in machines:
        mine = [pair for pair in pairs if len(machines) == 1 or set(pair["between"]) <= set(machine.nodes)]
        raw = machine.to_manifest()
        found.append(machine_from(raw | {"measured": [*raw["measured"], *mine]}, "--measured", FIGURES) if mine else machine)
    for pair in pairs:
        if not any(set(pair["between"]) <= set(machine.nodes) for machine in machines):
            raise BadInput(f"--measured {':'.join(pair['between'])}: no machine here has both ends")
    return found


def _choice(machine: Machine, size: float, current: str | None) -> Choice:
    try:
        return choose_strategy(machine, size, current)
    except NoWay as error:
        raise BadInput(f"{machine.name}: {error}") from None
    except ValueError as error:
        raise BadInput(f"--current {current}: {error}") from None


def _row(given: Estimate, pick: Estimate) -> tuple[str, ...]:
    times = "" if given is pick else f"{given.seconds / pick.seconds:.2f}×"
    formula = f"{given.formula}; {given.note}" if given.note else given.formula
    return (
        given.strategy,
        show_seconds(given.seconds),
        times,
        show_rate(given.bandwidth),
        show_seconds(given.latency),
        formula,
    )


def _show(machine: Machine, choice: Choice, size: float) -> None:
    rows = [_row(given, choice.pick) for given in choice.estimates]
    title = f"{machine.name}: {len(machine.devices)} devices, {show_bytes(size)}"
    ruled_table(COLUMNS, rows, range(1, 5), title=title, whole=range(5), best=choice.estimates.index(choice.pick))
    echo("formula: n devices, M bytes, bandwidth B, latency α of a message, c pieces")
    for strategy, why in choice.unfit.items():
        echo(f"not here: {strategy}: {why}")
    echo(f"pick: {choice.reason}\n")


def _chapter(choices: Sequence[Choice], size: float) -> str:
    """The founding text's four numbers, as it counts them."""
    pcie, nvlink = ({given.strategy: given for given in choice.estimates} for choice in choices)
    one, cpu, split = (pcie[name].seconds for name in ("ps-one-device", "ps-cpu", "ps-split"))
    rings = costs.ring_of_many(size, nvlink["double-ring"].bandwidth)
    numbers = ", ".join(
        f"{1e3 * value:.0f} ms {how}" for value, how in ((one, "on one GPU"), (cpu, "on the CPU"), (split, "split in four"))
    )
    rings_say = f"{1e3 * rings:.0f} ms by NVLink rings (2M/B; double-ring needs (n-1)/n of it)"
    return f"The example of Dive into Deep Learning, chapter Parameter Servers: {numbers}; {rings_say}."


def _as_json(machine: Machine, choice: Choice, size: float) -> dict[str, Any]:
    return {
        "machine": machine.to_manifest(),
        "bytes": size,
        "pick": choice.pick.strategy,
        "reason": choice.reason,
        "strategies": [{name: value for name, value in vars(given).items() if name != "flows"} for given in choice.estimates],
        "unfit": dict(choice.unfit),
    }


def machines_of(
    path: Path | None,
    preset: str | None,
    workers: int | None,
    servers: int | None,
    probe: int | None,
    figures: Mapping[str, Figure],
    file: str = "MACHINE.yaml",
) -> list[Machine]:
    """All that the one source describes. `file`: how the command calls a described machine. Raises BadInput."""
    given = [name for name, value in ((file, path), ("--preset", preset), ("--probe", probe)) if value is not None]
    if len(given) != 1:
        raise BadInput(
            f"{' and '.join(given) if given else 'no machine'} given: give one of {file}, --preset NAME and --probe N; "
            f"--probe measures processes of this machine, never hosts of {file}"
        )
    for name, value, least in (("--workers", workers, 2), ("--servers", servers, 0)):
        if value is not None and not (preset or "").startswith("ethernet-"):
            raise BadInput(f"{name} {value}: only the ethernet presets have a number of hosts to choose; describe a machine in {file}")
        if value is not None and not least <= value <= MOST_DEVICES:
            raise BadInput(f"{name} {value}: must be {least}..{MOST_DEVICES}")
    if preset is not None:
        if preset not in PRESETS:
            raise BadInput(f"--preset {preset}: no such machine; known are {', '.join(PRESETS)}")
        raws: Sequence[Any] = PRESETS[preset](workers or DEFAULT_WORKERS, servers or 0)
        return [machine_from(raw, f"--preset {preset}", figures) for raw in raws]
    if probe is not None:
        return [machine_from(_probed(probe), f"--probe {probe}", figures)]
    assert path is not None
    raw, problems = load_document(read_text(path, "a machine's description, see docs/topology.md"), "machine")
    if problems:
        raise BadInput(*(f"{path}: {problem}" for problem in problems))
    # What `-o json` printed is a list of plans, each with its machine.
    if isinstance(raw, list) and raw and all(isinstance(plan, dict) and "machine" in plan for plan in raw):
        return [machine_from(plan["machine"], str(path), figures) for plan in raw]
    return [machine_from(raw, str(path), figures)]


def _probed(count: int) -> dict[str, Any]:
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure(count, lambda _: None)
    with console.status("") as line:
        return measure(count, lambda what: line.update(f"measuring: {what}"))


def machine_from(raw: Any, where: str, figures: Mapping[str, Figure]) -> Machine:
    """The machine that `raw` describes. Raises BadInput, each line after `where`."""
    machine, problems = read_machine(raw, figures)
    if machine is None:
        raise BadInput(*(f"{where}: {problem}" for problem in problems))
    return machine
