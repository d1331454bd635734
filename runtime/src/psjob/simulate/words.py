"""What people write on the command line for modes, speeds and problems, and the sentences for what they get wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from psjob.modes import MODES, Mode
from psjob.simulate.engine import Outage, Stall, WorkerSpeeds
from psjob.simulate.training import Digits, Fixed, Quadratic, TrainingProblem

MOST_PARAMETERS = 100_000_000
DELAY = "delay"
"""Field of the modes that have one."""


def mode_of(text: str, workers: int | None = None) -> Mode:
    """`sync`, `backup:2`, `local:50,quorum=6,grace=30`: a name, then its numbers; the first may go without its name.

    A delay is always named, behind `:` or `,`: `sync:delay=1`, `bounded:5:delay=2`.
    Raises ValueError with what there is, and for one that wants more than so many `workers`.
    """
    name, _, rest = text.partition(":")
    if name not in MODES:
        raise ValueError(f"--mode {text}: there is no mode {name!r}; there are {', '.join(map(_form, MODES))}")
    kind = MODES[name]
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given: dict[str, object] = {}
    for place, part in enumerate(rest.replace(f":{DELAY}=", f",{DELAY}=").split(",") if rest else ()):
        key, equals, value = part.partition("=")
        if not equals:
            key, value = (next((field for field in fields if field != DELAY), ""), part) if place == 0 else ("", part)
        if key not in fields or key in given:
            raise ValueError(f"--mode {text}: {part!r} is not a number of {name}; write {_form(name)}")
        given[key] = _typed(f"--mode {text}: {key}", value, str(fields[key].type))
    try:
        made = kind(**given)
    except ValueError as error:
        raise ValueError(f"--mode {text}: {error}") from None
    least = max(getattr(made, "backup_workers", 0) + 1, getattr(made, "quorum", 0))
    if workers is not None and workers < least:
        raise ValueError(f"--mode {text}: needs {least} workers or more, there are {workers}")
    return made


def label(mode: Mode) -> str:
    """How `mode` is written, without what it has by default (but its first number). A delay stands as `modes.format_mode` writes it."""
    fields = [field for field in dataclasses.fields(mode) if field.name != DELAY]  # type: ignore[arg-type]
    values = {field.name: getattr(mode, field.name) for field in fields}
    parts = [
        ("" if i == 0 else f"{field.name}=") + (str(value).lower() if isinstance(value, bool) else f"{value:.12g}")
        for i, (field, value) in enumerate(zip(fields, values.values(), strict=True))
        if i == 0 or value != field.default
    ]
    return mode.name + (":" + ",".join(parts) if parts else "") + (f":{DELAY}={mode.delay}" if mode.delay else "")


def speeds_of(
    kind: str, mean: float, shape: float, spread: float | None, slow: Sequence[str], stall: str | None, outages: Sequence[str],
    up: float, down: float,
) -> WorkerSpeeds:  # fmt: skip
    """Speeds as options give them; `kind` is homogeneous, heterogeneous, constant or a file of times. Raises ValueError, OSError."""
    measured: tuple[tuple[float, ...], ...] = ()
    if kind == "heterogeneous":
        spread = 0.6 if spread is None else spread
    elif kind == "constant":
        shape = math.inf
    elif kind != "homogeneous":
        measured = _measured(Path(kind))
    return WorkerSpeeds(
        mean, shape, spread or 0.0, dict(map(_slow, slow)), _stall(stall) if stall else None,
        tuple(map(_outage, outages)), up, down, measured,
    )  # fmt: skip


def problem_of(text: str, seed: int) -> TrainingProblem:
    """`digits`, `fixed:5000` or `quadratic:100` (so many parameters). Raises ValueError with what there is."""
    name, _, size = text.partition(":")
    if name == "digits" and not size:
        return Digits(seed)
    if name in ("fixed", "quadratic"):
        count = int(_number(f"--problem {text}: size", size or "5000", whole=True))
        if not 1 <= count <= MOST_PARAMETERS:
            raise ValueError(f"--problem {text}: must have 1 to {MOST_PARAMETERS} parameters")
        return Fixed(count, seed) if name == "fixed" else Quadratic(count)
    raise ValueError(f"--problem {text}: there are digits, fixed:PARAMETERS and quadratic:PARAMETERS")


def option_numbers(option: str, settings: Sequence[str]) -> dict[str, float | bool]:
    """`lr=0.1`, `nesterov=true`, as `option` has them. Raises ValueError naming the one that is not such."""
    given: dict[str, float | bool] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text}: write NAME=VALUE, as lr=0.1")
        given[name] = value == "true" if value in ("true", "false") else _number(f"{option} {name}", value)
    return given


def _form(name: str) -> str:
    fields = [field.name for field in dataclasses.fields(MODES[name])]  # type: ignore[arg-type]
    numbers = [field for field in fields if field != DELAY]
    form = name + "".join(f"{':' if i == 0 else ','}{'' if i == 0 else field + '='}{field.upper()}" for i, field in enumerate(numbers))
    return form + (f"[:{DELAY}=N]" if DELAY in fields else "")


def _typed(what: str, value: str, kind: str) -> object:
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(f"{what} is {value!r}, must be true or false")
        return value == "true"
    return int(_number(what, value, whole=True)) if kind == "int" else _number(what, value)


def _number(what: str, text: str, whole: bool = False) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, must be a {'whole ' if whole else ''}number") from None


def _slow(text: str) -> tuple[int, float]:
    worker, equals, factor = text.partition("=")
    if not equals:
        raise ValueError(f"--slow {text}: write WORKER=FACTOR, as 0=4: worker 0 takes 4 times as long as others")
    return int(_number(f"--slow {text}: worker", worker, whole=True)), _number(f"--slow {text}: factor", factor)


def _stall(text: str) -> Stall:
    for sign in "x+":
        chance, found, size = text.partition(sign)
        if found:
            many = _number(f"--stall {text}: size", size)
            odds = _number(f"--stall {text}: chance", chance)
            return Stall(odds, factor=many) if sign == "x" else Stall(odds, extra=many)
    raise ValueError(
        f"--stall {text}: write CHANCExFACTOR, as 0.05x5 (5 % of steps take 5 times as long). "
        "Or write CHANCE+MEAN, as 0.01+4 (1 % take longer by an exponential time of 4 mean steps)"
    )


def _outage(text: str) -> Outage:
    worker, at_sign, times = text.partition("@")
    if not at_sign:
        raise ValueError(f"--crash {text}: write WORKER@TIME, or WORKER@TIME+AWAY for one that comes back after so long")
    at, plus, away = times.partition("+")
    return Outage(
        int(_number(f"--crash {text}: worker", worker, whole=True)),
        _number(f"--crash {text}: time", at),
        _number(f"--crash {text}: time away", away) if plus else math.inf,
    )


def _measured(path: Path) -> tuple[tuple[float, ...], ...]:
    if not path.is_file():
        raise ValueError(
            f"--speeds {path}: is not homogeneous, heterogeneous or constant, and there is no such file of step times (a line per worker)"
        )
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--speeds {path}: is not text in UTF-8; write a line per worker, its times in one unit") from None
    for line, text in enumerate(lines, 1):
        if text.strip() and not text.startswith("#"):
            rows.append(tuple(_number(f"--speeds {path}: line {line}: time", word) for word in text.replace(",", " ").split()))
    if not rows:
        raise ValueError(f"--speeds {path}: has no step times; write a line per worker, its times in one unit")
    return tuple(rows)
