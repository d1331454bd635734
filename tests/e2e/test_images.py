"""The two images that jobs on real nodes start from: the Dockerfile's, and those packed where it cannot be built.

Archives are unpacked and their programs run in them, as the user and with the words that the image says.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.cluster import dockerfile, pack
from hack.cluster.paths import REPO, ClusterError, Unavailable
from hack.sbom.__main__ import Unowned, bills
from psjob_operator import __version__
from psjob_operator.render.pod import SOURCE
from tests.support.bills import assert_bill
from tests.support.soaking import rotating

NAMES = {"operator": "images.test/psjob-operator:1", "runtime": "images.test/psjob-runtime:1"}
NOBODY = 65532
pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class Unpacked:
    """An image on this disk, and its archive; `config` is what a container of it starts with."""

    root: Path
    config: dict[str, Any]
    digest: str
    archive: Path

    def run(self, *words: str) -> str:
        """The output of the image's entrypoint with those words."""
        return self.execute(*self.config["Entrypoint"], *words)

    def execute(self, *command: str) -> str:
        """The output of that command in the image, by its user and environment."""
        chroot = shutil.which("chroot", path="/usr/sbin:/usr/bin:/sbin:/bin")
        assert chroot is not None
        command = (chroot, f"--userspec={self.config['User']}", str(self.root), *command)
        environment = dict(pair.split("=", 1) for pair in self.config.get("Env") or [])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


Images = dict[str, Unpacked]


@pytest.fixture(scope="module")
def from_dockerfile(tmp_path_factory: pytest.TempPathFactory) -> Images:
    folder = tmp_path_factory.mktemp("dockerfile")
    try:
        archives = dockerfile.build(NAMES, folder)
    except Unavailable as error:
        pytest.skip(str(error))
    return {name: image for archive in archives for name, image in unpacked(archive, folder).items()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Images:
    if os.geteuid() != 0:
        pytest.skip("an unpacked image's programs run by chroot, which needs root")
    folder = tmp_path_factory.mktemp("packed")
    try:
        archive = pack.pack(folder / "images.tar", operator=NAMES["operator"], runtime=NAMES["runtime"])
    except Unavailable as error:
        pytest.skip(str(error))
    return dict(unpacked(archive, folder))


@pytest.fixture(params=["from_dockerfile", rotating("packed")])
def images(request: pytest.FixtureRequest) -> Images:
    return request.getfixturevalue(request.param)


def unpacked(archive: Path, folder: Path) -> Images:
    """The archive's images by name."""
    found = {}
    with tarfile.open(archive) as tar:
        for entry in json.loads(read(tar, "manifest.json")):
            root = folder / entry["Config"][:12]
            root.mkdir()
            for layer in entry["Layers"]:
                tar.extract(layer, folder / "layers", filter="data")
                subprocess.run(["tar", "-xf", str((folder / "layers" / layer).resolve()), "-C", str(root)], check=True)
            for gone in root.rglob(".wh.*"):
                subprocess.run(["rm", "-rf", str(gone), str(gone.with_name(gone.name.removeprefix(".wh.")))], check=True)
            (name,) = entry["RepoTags"]
            found[name] = Unpacked(root, json.loads(read(tar, entry["Config"]))["config"], entry["Config"], archive)
    return found


def read(tar: tarfile.TarFile, name: str) -> bytes:
    handle = tar.extractfile(name)
    assert handle is not None
    return handle.read()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


@pytest.mark.rotating
def test_the_operator_says_its_version(images: Images) -> None:
    assert images[NAMES["operator"]].run("--version") == f"psjob-operator {__version__}\n"


def test_the_operator_starts_and_is_compiled(images: Images) -> None:
    operator = images[NAMES["operator"]]
    assert "--runtime-image" in operator.run("run", "--help")
    home = operator.root / "operator"
    assert not (home / "psjob_client").exists() and not (home / "torch").exists() and not (home / "psjob").exists()
    hidden = [path for path in home.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o004 == 0]
    assert not hidden, hidden[:5]


@pytest.mark.rotating
def test_code_and_packages_are_compiled_for_the_image_s_python(from_dockerfile: Images) -> None:
    home = from_dockerfile[NAMES["operator"]].root / "operator"
    sources = [*(home / "psjob_operator").rglob("*.py"), *(home / "kopf").rglob("*.py")]
    assert sources and all((file.parent / "__pycache__" / f"{file.stem}.cpython-311.pyc").exists() for file in sources)


def test_an_init_container_copies_the_library(images: Images) -> None:
    runtime = images[NAMES["runtime"]]
    target = runtime.root / "psjob"
    target.mkdir()
    os.chown(target, NOBODY, NOBODY)
    runtime.run("cp", "-R", f"{SOURCE}/.", "/psjob")
    want = {name: text for name, text in files(REPO / "runtime" / "src" / "psjob").items() if "__pycache__" not in name}
    assert files(target / "lib" / "psjob") == want
    assert sorted(os.listdir(target / "bin")) == ["busybox", "sh"] and os.readlink(target / "bin" / "sh") == "busybox"
    assert set(os.listdir(runtime.root)) - {"usr"} == {"psjob", "psjob-runtime"}


@pytest.mark.rotating
@pytest.mark.parametrize("target", sorted(NAMES))
def test_packed_images_start_as_the_dockerfile_s(target: str, from_dockerfile: Images, packed: Images) -> None:
    built, twin = ({**image[NAMES[target]].config, "Labels": None} for image in (from_dockerfile, packed))
    for config in (built, twin):
        config["Env"] = sorted(pair for pair in config.get("Env") or [] if not pair.startswith("PATH="))
    assert {key: value for key, value in built.items() if value} == {key: value for key, value in twin.items() if value}
    assert built["User"] == f"{NOBODY}:{NOBODY}"


def programs(root: Path) -> set[str]:
    """What the kernel would run: files and links with a right to execute, apart from libraries and what a test above copied."""
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and os.stat(path).st_mode & 0o111}
    return {name for name in found if ".so" not in name and not name.startswith("psjob/")}


def test_the_operator_has_no_program_but_python(from_dockerfile: Images) -> None:
    root = from_dockerfile[NAMES["operator"]].root
    found = programs(root)
    python = {name for name in found if name.partition("/bin/")[2] in ("python", "python3", "python3.11")}
    scripts = {name for name in found - python if (root / name).suffix == ".py"}
    assert python and found == python | scripts, "no shell, no package manager"
    assert not [path for word in ("pip", "ensurepip", "setuptools", "apt", "dpkg") for path in root.rglob(word)]


def test_the_runtime_has_no_program_but_busybox(from_dockerfile: Images) -> None:
    assert programs(from_dockerfile[NAMES["runtime"]].root) == {"psjob-runtime/bin/busybox", "psjob-runtime/bin/sh"}


IMPORTS = """
import importlib, os, pathlib, socket, ssl, sys
loaded = [path for path in sys.path if path.endswith("lib-dynload")][0]
for file in pathlib.Path(loaded).glob("*.so"):
    importlib.import_module(file.name.partition(".")[0])
assert ssl.create_default_context().cert_store_stats()["x509_ca"] > 50
assert socket.getaddrinfo("127.0.0.1", 1) and os.access("/tmp", os.W_OK)
import encodings.idna, email, asyncio, sqlite3, zoneinfo
print(len(os.listdir(loaded)))
"""


@pytest.mark.rotating
def test_all_of_the_library_that_the_operator_has_loads(from_dockerfile: Images) -> None:
    assert int(from_dockerfile[NAMES["operator"]].execute("python3", "-c", IMPORTS)) > 20


@pytest.mark.rotating
@pytest.mark.parametrize("target", sorted(NAMES))
def test_a_bill_of_materials_lists_the_owner_of_every_file(target: str, from_dockerfile: Images) -> None:
    image = from_dockerfile[NAMES[target]]
    (told,) = bills(image.archive)
    there = {str(path.relative_to(image.root)) for path in image.root.rglob("*") if path.is_symlink() or not path.is_dir()}
    assert_bill(told, {name for name in there if not name.startswith("psjob/")})  # which a test above copies
    versions = {part["name"]: part["version"] for part in told["components"]}
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", (REPO / "requirements" / "operator.txt").read_text(), re.MULTILINE))
    expected = {"psjob-operator": __version__, "kopf": pins["kopf"]} if target == "operator" else {"psjob": __version__}
    assert versions.items() >= expected.items()
    assert ("libc6" if target == "operator" else "busybox-static") in versions
    unknown = [part["name"] for part in told["components"] if not part["licenses"]]
    assert len(unknown) <= len(versions) / 10, f"no licence is known of {unknown}"


@pytest.mark.rotating
def test_a_packed_image_has_no_bill_of_materials(packed: Images) -> None:
    with pytest.raises(Unowned, match="has no /usr/share/sbom"):
        bills(packed[NAMES["operator"]].archive)


@pytest.mark.soak
def test_images_built_anew_are_the_same_bytes(from_dockerfile: Images, tmp_path: Path) -> None:
    for archive in dockerfile.build(NAMES, tmp_path, anew=True):
        before = next(image.archive for image in from_dockerfile.values() if image.archive.name == archive.name)
        assert filecmp.cmp(archive, before, shallow=False), archive.name


@pytest.mark.rotating
def test_another_time_is_for_images_built_anew(from_dockerfile: Images, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="of the time 1 must be built anew"):
        dockerfile.build(NAMES, tmp_path, seconds=1)


@pytest.mark.rotating
def test_a_second_build_makes_no_layer(from_dockerfile: Images, tmp_path: Path) -> None:
    (archive,) = dockerfile.build({"runtime": NAMES["runtime"]}, tmp_path)
    with tarfile.open(archive) as tar:
        (entry,) = json.loads(read(tar, "manifest.json"))
    assert entry["Config"] == from_dockerfile[NAMES["runtime"]].digest


@pytest.mark.rotating
def test_a_dockerfile_that_fails_is_no_reason_to_pack(from_dockerfile: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = next(line for line in (REPO / "Dockerfile").read_text().splitlines() if line.startswith("ARG PYTHON="))
    (tmp_path / "Dockerfile").write_text(f"{base}\nFROM ${{PYTHON}} AS operator\nRUN echo its last words && false\n")
    monkeypatch.setattr(dockerfile, "REPO", tmp_path)
    with pytest.raises(ClusterError, match="its last words") as told:
        pack.make(tmp_path / "images", operator=NAMES["operator"], runtime=NAMES["runtime"], workers={})
    assert not isinstance(told.value, Unavailable)
