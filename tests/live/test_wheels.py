"""What `make wheels` builds: it holds what the checkout holds, and pip installs it from an index by the names that people type."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack import wheels
from hack.index import serving
from hack.newcomer import environment
from tests.newcomer import third_party

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    assert wheels.main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def index(dist: Path) -> Iterator[str]:
    with serving(dist) as address:
        yield address


def test_every_distribution_is_there_with_licence_and_types(dist: Path) -> None:
    assert len(list(dist.iterdir())) == 6
    for package in ("psjob", "psjob_operator", "psjob_client"):
        (source,) = dist.glob(f"{package}-*.tar.gz")
        (wheel,) = dist.glob(f"{package}-*.whl")
        for archive in (source, wheel):
            assert "LICENSE" in wheels.held(archive)
        assert f"{package}/py.typed" in wheels.held(wheel)
        assert {name.partition("/")[0] for name in wheels.held(wheel)} == {package, "LICENSE"}


def test_what_is_missing_or_too_much_is_named(dist: Path, tmp_path: Path) -> None:
    (whole,) = dist.glob("psjob_client-*.whl")
    template = "psjob_client/templates/pytorch/train.py.tmpl"
    spoilt = tmp_path / whole.name
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(spoilt, "w") as new:
        for name in old.namelist():
            if name != template:
                new.writestr(name, old.read(name))
        new.writestr("psjob_client/key.pem", "")
    wanted = wheels.wanted(ROOT / "client", "psjob_client", spoilt)
    assert wheels.compare(wheels.held(spoilt), wanted) == [f"{template} is missing", "psjob_client/key.pem is too much"]


class Machine:
    """An empty environment and an empty folder."""

    def __init__(self, folder: Path, index: str) -> None:
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        self.env = environment(folder, index, {"PATH": str(self.bin), "PYTHONPATH": str(third_party(folder / "third-party"))})

    def type(self, *words: str, fails: bool = False) -> str:
        done = subprocess.run([self.bin / words[0], *words[1:]], cwd=self.work, env=self.env, capture_output=True, text=True, timeout=300)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_the_library_alone_installs_by_its_name(tmp_path: Path, index: str) -> None:
    machine = Machine(tmp_path, index)
    said = machine.type("pip", "install", "psjob")
    assert "Successfully installed psjob-" in said and "psjob-client" not in said
    told = machine.type("python", "-c", "import psjob, psjob.shard; print(psjob.__file__)")
    assert told.startswith(str(tmp_path / "venv"))
    assert not (machine.bin / "psjob").exists()
    machine.type("python", "-c", "import psjob_operator", fails=True)


def test_the_commands_install_by_their_names(tmp_path: Path, index: str) -> None:
    machine = Machine(tmp_path, index)
    said = machine.type("pip", "install", "psjob[client,plots]")
    assert "does not provide the extra" not in said
    assert "Usage: psjob" in machine.type("psjob", "--help")
    machine.type("psjob", "init", "first", "--template", "lightning")
    assert sorted(os.listdir(machine.work / "first")) == [".dockerignore", "Dockerfile", "job.yaml", "requirements.txt", "train.py"]
    machine.type("psjob", "validate", "--strict", "first/job.yaml")
    assert "psjob" in machine.type("kubectl-psjob", "--help")
