"""The config of a run is read by the library that the run was begun with, whatever operator has written it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from psjob import contract
from psjob.process import config as reading
from psjob.wire import frame
from psjob_operator import contract as operators
from psjob_operator.plan import config
from tests.runkeys import key_file, write_certificates
from tests.unit.plan_given import job

FORMAT_1: dict[str, Any] = {
    "format": 1,
    "job": "job",
    "run": "run-1",
    "mode": "sync",
    "seed": 0,
    "updateAt": None,
    "updateRule": None,
    "ruleOptions": {},
    "backupWorkers": 0,
    "staleness": None,
    "splits": None,
    "local": None,
    "reduction": "mean",
    "lrScaling": "none",
    "warmupSteps": 0,
    "maxGradNorm": None,
    "nonFinite": "pass",
    "maxPushNorm": None,
    "transport": "auto",
    "streams": 1,
    "gradientBytes": 4096 << 20,
    "compression": {"push": "none", "pull": "none", "ratio": 0.01},
    "workers": 3,
    "shards": [{"host": f"job-ps-{index}.job-ps", "port": 7070, "statusPort": 7071} for index in range(2)],
    "checkpoint": {"intervalSeconds": 30.0, "everySteps": None, "keep": 3, "request": None, "disabled": False, "resumeFrom": None},
    "successPolicy": "AllWorkers",
    "shardTimeoutSeconds": 10.0,
    "stepTimeoutSeconds": None,
    "connectSeconds": 600.0,
}
"""What runs of format 1 are told where their job says nothing. It is never edited: what a library of that format does with it would change
under a run that an upgrade meets. Keys that such a library passes over may come beside these; all else is the next format."""


def holds(made: Any, known: Any) -> None:
    assert type(made) is type(known), (made, known)
    if isinstance(known, dict):
        for key, value in known.items():
            holds(made[key], value)
    else:
        assert made == known


def test_what_format_1_says_is_what_it_always_said() -> None:
    holds(config.cluster_config(job(), 1), FORMAT_1)


def test_every_format_that_is_served_can_be_written_and_the_newest_is_read() -> None:
    assert set(operators.CONFIG_FORMATS) == set(config.WRITERS) and max(operators.CONFIG_FORMATS) == operators.CONFIG_FORMAT
    assert len(operators.CONFIG_FORMATS) <= 2 and len(operators.WIRES) <= 2 and max(operators.WIRES) == operators.WIRE
    assert frame.VERSION == operators.WIRE == contract.WIRE
    assert reading._config(config.cluster_config(job())).workers == 3


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if isinstance(value, dict) else []
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(inner, (*at, key))
    return found


LOCAL = config.cluster_config(job(training={"mode": "local"}), 1)


@pytest.mark.parametrize("at", [at for at in places(LOCAL) if at != ("ruleOptions",)], ids=str)
def test_a_key_of_a_newer_operator_is_passed_over(at: tuple[Any, ...]) -> None:
    laid = copy.deepcopy(LOCAL)
    inner = laid
    for key in at:
        inner = inner[key]
    inner["keyOfTomorrow"] = {"x": 1}
    assert reading._config(laid) == reading._config(LOCAL)


def test_another_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path, problems = tmp_path / "config.json", list[str]()
    path.write_text(json.dumps({**FORMAT_1, "specHash": "", "format": 99}))
    assert reading._read(str(path), problems) is None
    assert "format 99" in problems[0] and "version that the run began with" in problems[0]


@pytest.mark.parametrize(
    ("role", "word", "refused"), [("worker", "none", True), ("shard", "none", True), ("worker", "auto", False), ("shard", "tls", False)]
)
def test_a_config_does_not_turn_encryption_off_for_a_run_that_has_an_authority(tmp_path: Path, role: str, word: str, refused: bool) -> None:
    """Whoever may change a ConfigMap would read the weights else: a worker that takes no TLS talks to whoever stands between."""
    write_certificates(tmp_path, 1)
    problems: list[str] = []
    made = reading._encryption(word, Path(key_file(tmp_path, role, 0)), role, 0, problems)
    assert bool(problems) == refused and made.word == ("none" if refused else word)
    assert not refused or "the config says that no stream is encrypted, but this run has an authority" in problems[0]
