"""A function or a script as text: what travels runs alone and does the same; what cannot travel is refused with a remedy.

- Where a script that travelled as text is written: a folder of only this user, into which nobody else's link leads.
- What a notebook is shown, with a stand-in for IPython: its shell, and a display that can be updated.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from psjob_client.jobs.view import HistoryView, JobView, notebook_board
from psjob_client.problems import JobProblem
from psjob_client.sdk import manifest
from psjob_client.sdk.boot import own_folder, write_script
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
    over = {"training": {"sync": {"maxGradNorm": 1.0}}, "checkpoint": {"everySteps": 5}}
    made = manifest.build(["python", "train.py"], name="n", workers=3, shards=2, mode="sync", resources={"gpu": 2}, spec=over)
    spec = made["spec"]
    assert spec["training"] == {"mode": "sync", "sync": {"maxGradNorm": 1.0}} and (spec["shards"], spec["checkpoint"]) == (
        {"replicas": 2},
        {"everySteps": 5},
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
    assert manifest.training_name(plain, unique=False) == "plain"
    assert manifest.training_name("My Train_v2.py", unique=False) == "my-train-v2"
    assert manifest.training_name(["torchrun", "a/b/fit.py"], unique=False) == "fit"
    assert manifest.training_name("2.py", unique=False) == "job-2"
    assert len(manifest.training_name("x" * 100 + ".py")) <= 40 and manifest.training_name(plain) != manifest.training_name(plain)


def test_the_folder_is_the_same_each_time_and_this_users_alone(tmp_path: Path) -> None:
    made = own_folder(str(tmp_path))
    assert own_folder(str(tmp_path)) == made and stat.S_IMODE(os.stat(made).st_mode) == 0o700
    path = write_script("print(1)", made)
    assert write_script("print(1)", made) == path and Path(path).read_text() == "print(1)" and os.listdir(made) == [os.path.basename(path)]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def a_link(at: Path, elsewhere: Path) -> None:
    at.symlink_to(elsewhere)


def a_file(at: Path, elsewhere: Path) -> None:
    at.write_text("")


def for_all(at: Path, elsewhere: Path) -> None:
    at.mkdir()
    at.chmod(0o777)


@pytest.mark.parametrize("there", [a_link, a_file, for_all])
def test_what_another_user_has_put_there_is_left(tmp_path: Path, there: Callable[[Path, Path], None]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    (tmp_path / "tmp").mkdir()
    there(tmp_path / "tmp" / f"psjob-scripts-{os.getuid()}", elsewhere)
    made = own_folder(str(tmp_path / "tmp"))
    write_script("print(1)", made)
    assert os.listdir(elsewhere) == [] and not os.path.islink(made) and os.path.dirname(made) == str(tmp_path / "tmp")


def test_a_link_in_the_place_of_the_script_is_replaced(tmp_path: Path) -> None:
    folder = own_folder(str(tmp_path))
    target = tmp_path / "target"
    target.write_text("kept")
    path = Path(write_script("print(1)", folder))
    path.unlink()
    path.symlink_to(target)
    write_script("print(1)", folder)
    assert target.read_text() == "kept" and not path.is_symlink() and path.read_text() == "print(1)"


JOB = JobView(id="digits", name="digits", where="local", place="/x", phase="Running")


def ipython(monkeypatch: pytest.MonkeyPatch, shell: Any) -> list[str]:
    """IPython with this shell; what it has displayed, the last update of each output."""
    shown: list[str] = []
    top, display = ModuleType("IPython"), ModuleType("IPython.display")
    top.get_ipython = lambda: shell  # type: ignore[attr-defined]
    display.HTML = str  # type: ignore[attr-defined]

    def show(html: str, display_id: bool) -> SimpleNamespace:
        assert display_id
        shown.append(html)
        return SimpleNamespace(update=lambda newer: shown.__setitem__(-1, newer))

    display.display = show  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", top)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_one_output_is_kept_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ipython(monkeypatch, SimpleNamespace(kernel=object(), execution_count=1))
    board = notebook_board()
    assert board is not None
    board(JOB, HistoryView())
    board(JOB.model_copy(update={"phase": "Complete", "end": "Complete"}), HistoryView())
    assert len(shown) == 1 and "Complete" in shown[0]


@pytest.mark.parametrize("shell", [None, SimpleNamespace()], ids=["no shell", "a terminal"])
def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch, shell: Any) -> None:
    ipython(monkeypatch, shell)
    assert notebook_board() is None


def test_without_ipython_there_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_board() is None
