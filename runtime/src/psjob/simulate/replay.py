"""Is what jobs run what was simulated? The pushes of a trace file, made by workers of real shards, in the file's order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psjob import rules
from psjob.checkpoint.final import tensors_sha256
from psjob.modes import Mode, Push
from psjob.rules.base import Hyperparameters, check_hyperparameters
from psjob.simulate import recording, served, words
from psjob.simulate.engine import SimulationOutcome, Work
from psjob.simulate.speeds import Speeds
from psjob.simulate.training import Inner, TrainingProblem

MOST_WORKERS = 64
"""Each has threads of its own."""


@dataclass(frozen=True)
class Replayed:
    """SHA-256 of the weights at the end, as the file has it and as the shards end; they are equal where every bit is."""

    simulated: str
    served: str

    @property
    def same(self) -> bool:
        return self.simulated == self.served


def replay(path: Path, shards: int) -> Replayed:
    """Play a file that `psjob simulate train --replayable --trace` wrote.

    Raises ValueError where it is not whole, where no job has its mode, and where the shards do not do what it says.
    """
    told = Told.of(path, recording.opened(path))
    happened = list(recording.events(path))
    with (
        tempfile.TemporaryDirectory(prefix="psjob-replay-") as folder,
        served.running(Path(folder), told.workers, shards, told.mode, told.hyperparameters) as job,
        served.ServedRun(job, told.problem, told.rule, told.hyperparameters, told.inner) as twin,
    ):
        play(happened, twin)
        return Replayed(told.weights, tensors_sha256([twin.end()]))


def play(happened: Iterable[Push | int], work: Work) -> None:
    """Let it happen again; what is decided on is for `work` to know."""
    for event in happened:
        if isinstance(event, Push):
            work.push(event)
        else:
            work.begin(event)


def check(mode: Mode, workers: int, speeds: Speeds, interrupt: bool) -> None:
    """Raises ValueError for a training that real workers cannot make again."""
    served.settings(mode, {})
    if workers > MOST_WORKERS:
        raise ValueError(f"--workers {workers}: a replay has {MOST_WORKERS} at most, each with threads of its own")
    if speeds.outages:
        raise ValueError("--crash: the workers of a replay all stay; leave it out")
    if interrupt:
        raise ValueError("--interrupt: a job's workers finish each step; leave it out")


def decided(outcome: SimulationOutcome) -> None:
    """Raises ValueError where pushes are left, of which a job would know more."""
    undecided = outcome.pushes - outcome.kept - outcome.dropped
    if undecided:
        raise ValueError(f"--pushes {outcome.pushes}: {undecided} of them are not decided on at the end; take {outcome.pushes - undecided}")


@dataclass(frozen=True)
class Told:
    """How the training of a file was made."""

    mode: Mode
    workers: int
    problem: TrainingProblem
    rule: str
    hyperparameters: Hyperparameters
    inner: Inner | None
    weights: str
    """SHA-256."""

    @classmethod
    def of(cls, path: Path, facts: dict[str, Any]) -> Told:
        """From the facts of `facts_of`. Raises ValueError for others."""
        try:
            mode, rule, inner = words.mode_of(facts["mode"]), rules.named(facts["rule"]), facts["inner"]
            own = inner and rules.named(inner["rule"])
            return cls(
                mode, int(facts["workers"]), words.problem_of(facts["problem"], facts["seed"]), rule.name,
                check_hyperparameters(rule, facts["numbers"]),
                Inner(own, check_hyperparameters(own, inner["numbers"]), mode.inner_steps) if own else None, str(facts["weights_sha256"]),
            )  # fmt: skip
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: is of another version of psjob ({error!r}); write it again with this one") from None


def facts_of(
    mode: Mode,
    workers: int,
    problem: str,
    seed: int,
    rule: str,
    hyperparameters: Hyperparameters,
    inner: Inner | None,
    weights: torch.Tensor,
) -> dict[str, Any]:
    """What a file holds of its training."""
    own = inner and {"rule": inner.rule.name, "numbers": dict(inner.hyperparameters)}
    return {
        "mode": words.label(mode), "workers": workers, "problem": problem, "seed": seed, "rule": rule, "numbers": dict(hyperparameters),
        "inner": own, "weights_sha256": tensors_sha256([weights]),
    }  # fmt: skip
