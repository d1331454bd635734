"""What `make wheels` builds: it holds what the checkout holds, and pip installs it from an index by the names that people type."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack import wheels
from hack.epoch import epoch
from hack.index import serving
from hack.sbom.__main__ import Unowned, of_wheel
from tests.support.bills import assert_bill
from tests.support.newcomer import Machine

pytestmark = pytest.mark.rotating
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


def test_another_checkout_of_a_commit_gives_the_same_bytes(dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(epoch()))
    again = tmp_path / "dist"
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(ROOT / ".gitignore", tmp_path / "elsewhere")  # hatchling puts it into source archives
    for folder, package in wheels.PACKAGES.items():
        twin = tmp_path / "elsewhere" / folder
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT / folder, capture_output=True, check=True, text=True).stdout.split("\0")
        before = os.umask(0o077)  # another person's habits and another day
        try:
            for name in sorted(filter(None, names), reverse=True):
                (twin / name).parent.mkdir(parents=True, exist_ok=True)
                (twin / name).write_bytes((ROOT / folder / name).read_bytes())
                os.utime(twin / name, (1e9, 1e9))
            wheels.build(twin, package, again)
        finally:
            os.umask(before)
    assert {file.name: digest(file) for file in again.iterdir()} == {file.name: digest(file) for file in dist.iterdir()}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


ASKED = {"psjob": ("torch", "required"), "psjob_operator": ("kopf", "required"), "psjob_client": ("matplotlib", "optional")}


@pytest.mark.parametrize("package", sorted(ASKED))
def test_a_bill_of_materials_lists_the_owner_of_every_file(dist: Path, package: str) -> None:
    (wheel,) = dist.glob(f"{package}-*.whl")
    told = of_wheel(wheel)
    assert_bill(told, zipfile.ZipFile(wheel).namelist())
    own = told["metadata"]["component"]
    assert own["hashes"] == [{"alg": "SHA-256", "content": digest(wheel)}] and own["licenses"] == [{"expression": "Apache-2.0"}]
    asked = {part["name"]: part["scope"] for part in told["components"] if "scope" in part}
    assert ASKED[package] in asked.items()


def test_what_is_vendored_is_a_component_or_an_error(dist: Path, tmp_path: Path) -> None:
    (whole,) = dist.glob("psjob-*.whl")
    fat = tmp_path / whole.name
    described = {"shade/__init__.py": "", "shade-2.0.dist-info/METADATA": "Name: shade\nVersion: 2.0\nLicense: MIT\n"}
    described["shade-2.0.dist-info/RECORD"] = "shade/__init__.py,,\nshade-2.0.dist-info/METADATA,,\n"
    for files, fails in ((described, False), ({**described, "hat.py": ""}, True)):
        with zipfile.ZipFile(whole) as old, zipfile.ZipFile(fat, "w") as new:
            more = "".join(f"psjob/_vendor/{name},,\n" for name in files).encode()
            for name in old.namelist():
                new.writestr(name, old.read(name) + (more if name.endswith("/RECORD") else b""))
            for name, text in files.items():
                new.writestr(f"psjob/_vendor/{name}", text)
            names = new.namelist()
        if fails:
            with pytest.raises(Unowned, match=r"without a \.dist-info that lists it: psjob/_vendor/hat\.py$"):
                of_wheel(fat)
        else:
            told = of_wheel(fat)
            assert_bill(told, names)
            (shade,) = [part for part in told["components"] if part["name"] == "shade"]
            assert shade["version"] == "2.0" and shade["licenses"] == [{"license": {"name": "MIT"}}]


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
