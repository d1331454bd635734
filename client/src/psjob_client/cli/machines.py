"""The machine of a plan, from exactly one of a file, a preset and a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from psjob_client.local.manifest import read_text
from psjob_client.local.measure import measure
from psjob_client.problems import BadInput
from psjob_client.topology.machine import MOST_DEVICES, PRESETS, Figure, Machine, read_machine
from psjob_operator.api.load import load_document

DEFAULT_WORKERS = 4


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
        return [read(raw, f"--preset {preset}", figures) for raw in raws]
    if probe is not None:
        return [read(_probed(probe), f"--probe {probe}", figures)]
    assert path is not None
    raw, problems = load_document(read_text(path, "a machine's description, see docs/topology.md"), "machine")
    if problems:
        raise BadInput(*(f"{path}: {problem}" for problem in problems))
    # What `-o json` printed is a list of plans, each with its machine.
    if isinstance(raw, list) and raw and all(isinstance(plan, dict) and "machine" in plan for plan in raw):
        return [read(plan["machine"], str(path), figures) for plan in raw]
    return [read(raw, str(path), figures)]


def _probed(count: int) -> dict[str, Any]:
    console = Console(stderr=True)
    if not console.is_terminal:
        return measure(count, lambda _: None)
    with console.status("") as line:
        return measure(count, lambda what: line.update(f"measuring: {what}"))


def read(raw: Any, where: str, figures: Mapping[str, Figure]) -> Machine:
    """The machine that `raw` describes. Raises BadInput, each line after `where`."""
    machine, problems = read_machine(raw, figures)
    if machine is None:
        raise BadInput(*(f"{where}: {problem}" for problem in problems))
    return machine
