"""What is shown of an error: the script's lines and torch's, and psjob's only if the error is psjob's own.

- Whose code it is: the script's, or a package's, wherever pip, the system or PYTHONPATH has put that.
- How a process leaves with a sentence.
"""

from __future__ import annotations

import importlib.util
import json
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psjob import contract
from psjob.process import errors
from psjob.process.errors import Refused, leave_message

SCRIPT, LOADER = "/home/me/train.py", "/venv/torch/utils/data/dataloader.py"
API, INNER = f"{errors.HERE}api/data.py", f"{errors.HERE}worker/connection.py"


def chain(*files: str, last: str) -> Callable[[], Any]:
    """Calls a function of each file in turn; that of the last one runs `last`."""
    call: Any = None
    for number, file in reversed(list(enumerate(files))):
        body = last if call is None else "return then()"
        names: dict[str, Any] = {"then": call, "Refused": Refused}
        exec(compile(f"def at_{number}():\n {body}", file, "exec"), names)  # noqa: S102
        call = names[f"at_{number}"]
    return call  # type: ignore[no-any-return]


def files_of(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]


@pytest.mark.parametrize(
    ("files", "last", "left"),
    [
        ([SCRIPT, API, LOADER, INNER, SCRIPT], "{}['no']", [SCRIPT, LOADER, SCRIPT]),
        ([SCRIPT, API, LOADER], "raise RuntimeError('of one size')", [SCRIPT, LOADER]),
        ([SCRIPT, API], "raise ValueError('takes a word')", [SCRIPT]),
        ([SCRIPT, INNER, API], "raise Refused('no')", [SCRIPT]),
        ([SCRIPT, API], "1 / 0", [SCRIPT, API]),
        ([SCRIPT, API, INNER], "raise ValueError('not in shape')", [SCRIPT, API, INNER]),
        ([SCRIPT, API], "raise AssertionError", [SCRIPT, API]),
        ([SCRIPT, API, SCRIPT, API], "1 / 0", [SCRIPT, SCRIPT, API]),
    ],
)
def test_lines_that_are_shown(files: list[str], last: str, left: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        chain(*files, last=last)()
    errors.shorten(caught.value)
    assert files_of(caught.value) == left


def test_errors_that_led_to_it_are_shown_so_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            chain(SCRIPT, API, last="raise ValueError('takes a word')")()
        except ValueError:
            chain(SCRIPT, API, SCRIPT, last="{}['no']")()
    errors.shorten(caught.value)
    assert caught.value.__context__ is not None and files_of(caught.value.__context__) == [SCRIPT]
    assert files_of(caught.value) == [SCRIPT, SCRIPT]


def test_the_text_of_a_loader_process_is_shown_so_too() -> None:
    text = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        f'  File "{LOADER}", line 1, in fetch\n    data = self.dataset[3]\n           ^^^^^^^^^\n'
        f'  File "{API}", line 2, in __getitem__\n    return self.theirs[3]\n           ^^^^^^^^^\n'
        f'  File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no'
    )
    error = RuntimeError(text)
    errors.shorten(error)
    assert errors.HERE not in str(error)
    assert str(error).endswith(f'File "{SCRIPT}", line 3, in __getitem__\n    return {{}}["no"]\nKeyError: no')
    assert "dataset[3]" in str(error) and "theirs" not in str(error)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a script that has begun there."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(folder / "train.py")))
    return folder


def places(torch: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Those found where torch lies in this folder."""
    spec = SimpleNamespace(origin=str(torch / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return errors.package_folders.__wrapped__()


def test_all_places_of_packages(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path / "third-party", monkeypatch)
    for place in (sysconfig.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages(), tmp_path / "third-party"):
        assert f"{place}/" in found
    assert not str(script / "train.py").startswith(found)


def test_a_folder_of_pythonpath_that_pip_has_filled(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "packages", tmp_path / "own", script):
        (folder / "tqdm-4.0.dist-info").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    (tmp_path / "own" / "tqdm-4.0.dist-info").rmdir()
    found = places(tmp_path / "third-party", monkeypatch)
    assert f"{tmp_path}/packages/" in found and f"{tmp_path}/own/" not in found and f"{script}/" not in found


def test_torch_in_the_folder_of_the_script(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(script, monkeypatch)
    assert str(script / "torch" / "utils" / "data.py").startswith(found)
    assert not str(script / "train.py").startswith(found)


def test_torch_in_a_folder_above_the_script(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = places(tmp_path, monkeypatch)
    assert not str(script / "train.py").startswith(found)


def test_a_shorter_message_replaces_a_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "end"
    monkeypatch.setenv(contract.ENV_TERMINATION_LOG, str(path))
    for body in ({"problem": "x" * 500}, {"problem": "y"}):
        leave_message(body)
        assert json.loads(path.read_text()) == body
    assert path.stat().st_size == len(json.dumps(body))
