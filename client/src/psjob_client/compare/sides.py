"""What is compared, and its sides carried out: a manifest in several modes, or several manifests as they are.

`train` makes a side a real job of this machine, one after another: each is one `psjob run`. `simulate` runs sides on the simulator's
virtual clock: `psjob simulate compare`, with the words of this machine's runtime.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psjob_client.compare.outcome import LOSS, SideOutcome
from psjob_client.local.backend import GRACE
from psjob_client.local.manifest import read_job
from psjob_client.local.process import die_with
from psjob_client.problems import BadInput
from psjob_operator.api.spec import Training
from psjob_operator.contract import ASYNC_OUTER_RULE, MODES

DELAY = "delay"
"""A number that is always named, as in sync:delay=1 and bounded:5:delay=2. Of the manifest it is not one mode's."""
FIELDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sync": ("sync", {}),
    "backup": ("sync", {"backup_workers": "sync.backupWorkers"}),
    **{mode: (mode, {field: f"{mode}.{field}" for field in fields}) for mode, fields in MODES.items() if mode != "sync"},
    "local": ("local", {"inner_steps": "local.innerSteps", "quorum": "local.quorum", "grace": "local.graceSeconds"}),
    "local-async": ("local", {"inner_steps": "local.innerSteps"}),
}
"""By the simulator's word: the manifest's mode, and the manifest's field of each number of the word, the first one first."""


@dataclass(frozen=True)
class Side:
    """One of those that are compared."""

    title: str
    manifest: Path
    settings: tuple[str, ...] = ()
    """Each `path=value`, laid over the manifest."""


def words(text: str) -> list[str]:
    """The modes of `sync:delay=1,local:50,quorum=6`: a number with its name belongs to the mode before it. Raises BadInput."""
    found: list[str] = []
    for part in text.split(","):
        if "=" in part and ":" in (found or [""])[-1] and ":" not in part:
            found[-1] += f",{part}"
        elif part.partition(":")[0] in FIELDS and not part.endswith(":"):
            found.append(part)
        else:
            raise BadInput(
                f"--modes {text}: {part!r} is no mode; there are {', '.join(FIELDS)}, "
                "with numbers as backup:1, sync:delay=1 or local:50,quorum=6"
            )
    return list(dict.fromkeys(found))


def side_of(word: str, manifest: Path, training: Training) -> Side:
    """The job of `manifest`, whose training is given, in the mode of `word`. Fields of other modes are taken out. Raises BadInput.

    A side has the delay that its word names, and no other.
    """
    name, rest, delay = _apart(word)
    mode, fields = FIELDS[name]
    given = training.model_dump(by_alias=True, exclude_unset=True)
    settings = [f"spec.training.mode={mode}"]
    settings += [f"spec.training.{field}={value}" for field, value in _numbers(word, rest, fields).items()]
    settings += [f"spec.training.delay={delay}"] if delay else _given(given, "0", "delay")
    settings += [f"spec.training.{other}=null" for other in MODES if given.get(other) and other != mode]
    if name == "sync":
        settings += _given(given, "0", "sync.backupWorkers")
    if name == "backup" and not rest and not _at(given, "sync.backupWorkers"):
        settings.append("spec.training.sync.backupWorkers=1")
    if name == "local-async":
        settings += [f"spec.training.updateRule={ASYNC_OUTER_RULE}", *_given(given, "0", "local.quorum", "local.graceSeconds")]
    elif training.mode == "local":
        settings += _given(given, "null", "updateRule", "ruleOptions")
    return Side(word, manifest, tuple(settings))


def simulated(word: str, training: Training) -> str:
    """`word` with the manifest's numbers, where it names but its delay and the manifest is of that mode. Seconds mean nothing there."""
    name, rest, delay = _apart(word)
    mode, fields = FIELDS[name]
    given = training.model_dump(by_alias=True, exclude_unset=True)
    if rest or mode != training.mode:
        return word
    found = {number: value for number, field in fields.items() if number != "grace" and (value := _at(given, field))}
    if not found:
        return word
    return f"{name}:" + ",".join(f"{number}={value:g}" for number, value in found.items()) + (f":{DELAY}={delay}" if delay else "")


def _apart(word: str) -> tuple[str, str, str]:
    """A mode's name, its numbers but the delay, and the delay; the last two may be empty."""
    name, _, rest = word.partition(":")
    parts = rest.replace(f":{DELAY}=", f",{DELAY}=").split(",")
    delays = [part.removeprefix(f"{DELAY}=") for part in parts if part.startswith(f"{DELAY}=")]
    if not delays:
        return name, rest, ""
    if len(delays) > 1 or not delays[0].isdecimal():
        raise BadInput(f"--modes {word}: a delay is one whole number, as in sync:delay=1")
    return name, ",".join(part for part in parts if not part.startswith(f"{DELAY}=")), delays[0]


def _numbers(word: str, rest: str, fields: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for place, part in enumerate(rest.split(",") if rest else ()):
        number, equals, value = part.rpartition("=")
        if not equals and place == 0:
            number = next(iter(fields), "")
        if number not in fields or not value:
            names = ", ".join(fields) or "no numbers"
            raise BadInput(f"--modes {word}: {part!r} is no hyperparameter that a job in this mode takes; it has {names}")
        found[fields[number]] = value
    return found


def _given(given: Mapping[str, object], none: str, *fields: str) -> list[str]:
    """What takes those of `fields` out that are given."""
    return [f"spec.training.{field}={none}" for field in fields if _found(given, field) is not None]


def _at(given: Mapping[str, object], path: str) -> float | None:
    value = _found(given, path)
    return value if isinstance(value, int | float) else None


def _found(given: Mapping[str, object], path: str) -> object:
    value: object = given
    for step in path.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def titled(manifests: Sequence[Path]) -> list[Side]:
    """Manifests as they are, named after their files. Raises BadInput if two would have one name."""
    titles = [path.stem if len({other.stem for other in manifests}) == len(manifests) else str(path) for path in manifests]
    if len(set(titles)) < len(titles):
        raise BadInput("the same manifest is given twice; name it once, and its modes by --modes sync,async")
    return [Side(title, path) for title, path in zip(titles, manifests, strict=True)]


LOOK = 0.2
"""Seconds between two looks at a run."""
Told = Callable[[str], None]


def train_side(side: Side, deadline: float, told: Told) -> SideOutcome:
    """Run a side to its end; `told` hears how far it is. After `deadline` seconds it is stopped, and counts as far as it came.

    Ends the job also where the caller is interrupted. A job that failed is an outcome with the reason.
    """
    words = ["psjob", "run", str(side.manifest), *(word for setting in side.settings for word in ("--set", setting))]
    with tempfile.TemporaryDirectory(prefix="psjob-compare-") as folder:
        history, summary, said = (Path(folder) / name for name in ("history", "summary", "said"))
        argv: list[str | Path] = [
            sys.executable,
            "-m",
            "psjob_client.cli.main",
            *words[1:],
            "--no-progress",
            "--history",
            history,
            "--summary",
            summary,
        ]
        with said.open("wb") as output:
            stop = _watched(argv, output, history, time.monotonic() + deadline, told)
        lines, ended = _lines(history), _json(summary)
        last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    result = f"stopped after {deadline:g} s" if stop else str(ended.get("result") or "Failed")
    if result == "Failed":
        result = f"Failed: {ended.get('failure') or last}"
    training = read_job(side.manifest, side.settings).spec.training
    return outcome(side.title, shlex.join(words), result, lines, ended, training.delay if training.mode == "sync" else 0)


def outcome(
    title: str, command: str, result: str, lines: Iterable[Mapping[str, Any]], ended: Mapping[str, Any], late: int = 0
) -> SideOutcome:  # fmt: skip
    """What a run came to, by the lines of its `--history` and its `--summary`. Time begins when the first worker trains.

    `late`: the delay of a sync job, which is the staleness of all its pushes but a worker's first. Shards count it in other modes only.
    """
    lines = list(lines)
    passed = [(float(at), float(step)) for line in lines for step, at in line["passed"]]
    began = next((float(line["began"]) for line in lines if line.get("began") is not None), passed[0][0] if passed else 0.0)
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            curve = curves.setdefault(name, [])
            if not curve or curve[-1][2] != value:
                curve.append((max(0.0, line["time"] - began), float(line["step"]), float(value)))
    elapsed, steps = (passed[-1][0] - began, passed[-1][1] - min(float(lines[0]["step"]), passed[0][1])) if passed else (0.0, 0.0)
    # A summary without staleness is that of a sync job: no push comes later than its delay says.
    mean = float((ended.get("staleness") or {"mean": float(late)})["mean"]) if steps and ended else None
    last, applied = lines[-1] if lines else {}, float(ended.get("applied") or 0)
    staleness, gaps = _buckets(last.get("staleness"), applied, late), _buckets(last.get("gap"), 0 if late else applied)
    idle = last.get("idle") or ()
    told = ("warning", "non_finite", "large_push", "diverged", "drift", "data_problem")
    warnings = [str(ended[what]) for what in told if ended.get(what)]
    return SideOutcome(
        title, command, result, elapsed, steps, curves, dict(ended.get("metrics") or {}), staleness, gaps,
        () if None in idle else idle, mean_staleness=mean, warnings=warnings, diverged=bool(ended.get("diverged")),
    )  # fmt: skip


def _buckets(told: Mapping[str, Any] | None, applied: float, late: float = 0) -> list[tuple[float | None, float]]:
    """(upper bound, pushes) of a histogram of contract.STATUS_KEYS; that of a sync job is empty, and all `applied` ones are at `late`."""
    if not told or not told["count"]:
        return [(float(late), applied)] if told and applied else []
    edges, below = zip(*told["buckets"], strict=True)
    counts = [here - before for here, before in zip((*below, told["count"]), (0, *below), strict=True)]
    return list(zip((*edges, None), counts, strict=True))


def _watched(argv: list[str | Path], output: Any, history: Path, until: float, told: Told) -> bool:
    """Whether it was stopped for its deadline."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with(os.getpid())
    )
    try:
        while time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK)
                return False
            last = _whole(history)[-1:]
            told(f"step {json.loads(last[0])['step']}" if last else "starting")
        return True
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a user does: Ctrl-C, which makes a last checkpoint; once more, which kills."""
    for patience in (GRACE, GRACE):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    if process.poll() is None:
        process.kill()
        process.wait()


def _lines(history: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _whole(history)]


def _whole(history: Path) -> list[str]:
    """The whole lines of a history that may still grow."""
    text = history.read_text() if history.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


ACCURACY = "accuracy"


def simulate_sides(modes: Sequence[str], options: Sequence[str], deadline: float) -> list[SideOutcome]:
    """An outcome for each of `modes`, in the simulator's words. Raises BadInput with its sentence, or when it takes too long."""
    asked = ["simulate", "compare", "-o", "json", *options, *(word for mode in modes for word in ("--mode", mode))]
    argv = [sys.executable, "-m", "psjob_client.cli.main", *asked]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=die_with(os.getpid()), text=True) as process:
        try:
            said, _ = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise BadInput(f"--deadline {deadline:g}: the simulator did not finish; give it more seconds, or fewer --pushes") from None
        finally:
            process.kill()
    if process.returncode:
        raise BadInput("the simulator made no comparison; its own message is above")
    return [_outcome(found, options) for found in json.loads(said)]


def _outcome(found: Mapping[str, Any], options: Sequence[str]) -> SideOutcome:
    curves: dict[str, list[tuple[float, float, float]]] = {LOSS: [], ACCURACY: []}
    for at, step, loss, score in found["points"]:
        for name, value in ((LOSS, loss), (ACCURACY, score)):
            if value is not None and math.isfinite(value):
                curves[name].append((at, step, value))
    final = {name: curve[-1][2] for name, curve in curves.items() if curve} | {ACCURACY: found["score"]}
    command = shlex.join(["psjob", "simulate", "compare", *options, "--mode", found["mode"]])
    return SideOutcome(
        found["mode"], command, "Complete", found["elapsed"], found["steps"], curves, final,
        [tuple(entry) for entry in found["staleness_histogram"]], [tuple(entry) for entry in found["gaps"]],
        found["idle"], found["dropped"] / found["pushes"],
    )  # fmt: skip
