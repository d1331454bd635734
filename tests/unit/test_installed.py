"""Whose code it is: the script's, or a package's, wherever pip, the system or PYTHONPATH has put that."""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from psjob.process import tracebacks


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
    return tracebacks.places.__wrapped__()


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
