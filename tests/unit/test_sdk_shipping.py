"""A function or a script as text: what travels runs alone and does the same; what cannot travel is refused with a remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from psjob_client.problems import JobProblem
from psjob_client.sdk import manifest
from psjob_client.sdk.manifest import LARGEST, CannotShip, script_of

SETTING = 3


def helper() -> int:
    return 1


def plain(a: int, b: str = "x") -> None:
    print(json.dumps([a, b, os.path.basename("/y/z"), Path("p").name]))


def asks_for_a_global() -> int:
    return SETTING


def calls_a_neighbour() -> int:
    return helper()


async def waits() -> None:
    return None


def closure() -> Callable[[], int]:
    around = 3

    def of_it() -> int:
        return around

    return of_it


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (lambda: 1, {}, "a lambda cannot be trained"),
        (closure(), {}, "uses around of the function around it"),
        (asks_for_a_global, {}, "asks_for_a_global needs SETTING"),
        (calls_a_neighbour, {}, "calls_a_neighbour needs helper"),
        (waits, {}, "is a coroutine or generator"),
        (Path("x").exists, {}, "is no plain function"),
        (print, {}, "is no plain function"),
        (plain, {"c": 1}, "do not fit plain"),
        (plain, {}, "do not fit plain"),
        (plain, {"a": {1, 2}}, "args: must be JSON"),
        (plain, {"a": float("nan")}, "args: must be JSON"),
        (plain, {"a": {1: 2}}, "comes back as another one"),
    ],
)
def test_what_cannot_travel_is_refused_with_a_remedy(function: Any, args: dict[str, Any], said: str) -> None:
    with pytest.raises(CannotShip) as told:
        script_of(function, args)
    assert said in str(told.value) and "\n" not in str(told.value)


def test_a_file_travels_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print('ü')\n", encoding="utf-8")
    assert script_of(file) == "print('ü')\n"
    with pytest.raises(CannotShip, match="args: are for a function"):
        script_of(str(file), {"a": 1})
    with pytest.raises(CannotShip, match="cannot be read"):
        script_of(tmp_path / "none.py")
    file.write_text("#" * (LARGEST + 1))
    with pytest.raises(CannotShip, match=f"at most {LARGEST}"):
        script_of(file)


def test_the_manifest_has_what_was_asked_for(tmp_path: Path) -> None:
    over = {"training": {"maxGradNorm": 1.0}, "checkpoint": {"everySteps": 5}}
    made = manifest.build(["python", "train.py"], name="n", workers=3, shards=2, mode="sync", resources={"gpu": 2}, spec=over)
    spec = made["spec"]
    assert (
        spec["training"] == {"mode": "sync", "maxGradNorm": 1.0} and spec["ps"] == {"shards": 2} and spec["checkpoint"] == {"everySteps": 5}
    )
    container = spec["workers"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["python", "train.py"] and container["resources"]["requests"] == {"nvidia.com/gpu": "2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"workers": 0}, "spec.workers.replicas: Invalid value: 0"),
        ({"mode": "fast"}, "spec.training.mode"),
        ({"name": "Ü"}, "metadata.name"),
        ({"packages": "numpy"}, "packages: 'numpy' is one text"),
        ({"spec": {"colour": 1}}, "spec.colour"),
    ],
)
def test_bad_values_name_their_field(tmp_path: Path, words: dict[str, Any], said: str) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(JobProblem) as told:
        manifest.build(tmp_path / "train.py", **words)
    assert said in str(told.value)


def test_a_name_is_made_from_what_is_trained() -> None:
    assert manifest.named(plain, unique=False) == "plain"
    assert manifest.named("My Train_v2.py", unique=False) == "my-train-v2"
    assert manifest.named(["torchrun", "a/b/fit.py"], unique=False) == "fit"
    assert manifest.named("2.py", unique=False) == "job-2"
    assert len(manifest.named("x" * 100 + ".py")) <= 40 and manifest.named(plain) != manifest.named(plain)
