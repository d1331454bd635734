"""A release's folder, a registry and a package index that serve it, and all ways of installing only from there, on real nodes.

PSJOB_RELEASE names a folder that `make release` made; without it the test makes one, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hack import release
from hack.cluster import build, nodes
from hack.cluster.images import write
from hack.cluster.options import BRIDGE_ADDRESS
from hack.cluster.pack import operator_image, runtime_image, version
from hack.cluster.paths import Unavailable
from hack.index import serving
from tests.e2e import digits
from tests.e2e.kube import Kube, install, own_namespace, wait_for
from tests.support import older, registry
from tests.support.cluster_fixtures import Cluster
from tests.support.helms import CRD, helm3, objects
from tests.support.newcomer import Machine

pytestmark = [pytest.mark.nodes, pytest.mark.serial, pytest.mark.soak, pytest.mark.timeout(3000)]
OLD_OPERATOR, OLD_RUNTIME = "psjob.local/psjob-operator:last", "psjob.local/psjob-runtime:last"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the release."""
    if named := os.environ.get("PSJOB_RELEASE"):
        return Path(named).resolve()
    folder = tmp_path_factory.mktemp("dist") / "release"
    try:
        release.make(folder, rehearse=True)
    except Unavailable as error:
        pytest.skip(str(error))
    return folder


@dataclass(frozen=True)
class Served:
    """Where the release is had from: a registry and a package index, and nowhere else."""

    address: str
    index: str

    @property
    def chart(self) -> str:
        return f"oci://{self.address}/charts/psjob"

    def words(self) -> list[str]:
        """helm's words for this registry."""
        images = (("image.registry", self.address), ("runtimeImage.registry", self.address))
        return [self.chart, f"--version={version()}", "--plain-http", *(f"--set-string={key}={value}" for key, value in images)]


@pytest.fixture
def served(made: Path, node_cluster: Cluster, tmp_path: Path) -> Iterator[Served]:
    try:
        build.build("release", quiet=True)
    except Unavailable as error:
        pytest.skip(str(error))
    with registry.serving(tmp_path / "registry", BRIDGE_ADDRESS) as address, serving(made) as index:
        nodes.allow_plain_registry(node_cluster.state, node_cluster.ready.nodes, address)
        for target in release.TARGETS:
            name = f"psjob-{target}:{version()}"
            digest = registry.push_image(made / f"psjob-{target}-{version()}.tar", name, address, tmp_path / target)
            assert digest.startswith("sha256:") and registry.tags(address, f"psjob-{target}") == [version()]
        chart = str(made / f"psjob-{version()}.tgz")
        words = ["helm", "push", chart, f"oci://{address}/charts", "--plain-http"]
        assert subprocess.run(words, timeout=60).returncode == 0 and registry.tags(address, "charts/psjob") == [version()]
        yield Served(address, index)


@pytest.fixture
def free(home: Kube) -> Iterator[Kube]:
    """The namespace psjob-system without an operator; after the test this checkout's is installed again."""
    home.helm("uninstall", "psjob", "--wait", "--ignore-not-found")
    yield home
    # What Helm 3 installed takes no --force-conflicts.
    home.helm("uninstall", "psjob", "--wait", "--ignore-not-found", timeout=240)
    install(home, "--take-ownership", "--force-conflicts")


def rolled_out(home: Kube, image: str) -> None:
    """Every pod of the operator runs that image, and is ready."""
    home.kubectl("rollout", "status", "deployment/psjob", "--timeout=240s", timeout=270)
    found = home.get("deployment", "psjob") or {}
    assert found["spec"]["template"]["spec"]["containers"][0]["image"] == image


def trains(kube: Kube, machine: Machine, name: str, runtime: str, *, suspended: bool = False) -> None:
    """A job that the installed client starts; its pods have the library from the registry's image."""
    file = machine.work / f"{name}.json"
    file.write_text(json.dumps(digits.job(name, args=[f"--epochs={digits.SHORT_EPOCHS}"], suspend=suspended)))
    machine.type("psjob", "submit", str(file), "--namespace", kube.namespace)
    if not suspended:
        digits.complete(kube, name, 600)
        assert digits.accuracy(digits.final_weights(kube, name)) >= 0.95
        assert images(kube, name) == {runtime}


def images(kube: Kube, name: str) -> set[str]:
    injected = (item for pod in digits.pods_of(kube, name) for item in pod["spec"]["initContainers"] if item["name"] == "psjob-inject")
    return {str(item["image"]) for item in injected}


def test_the_folder_holds_all_and_its_sums(made: Path) -> None:
    names = {file.name for file in made.iterdir()}
    of_wheels = {f"{name}-{version()}" for name in ("psjob", "psjob_operator", "psjob_client")}
    wheels = {f"{name}-py3-none-any.whl" for name in of_wheels}
    archives = {f"psjob-{target}-{version()}.tar" for target in release.TARGETS}
    told = {f"{name}.cdx.json" for name in wheels | archives}
    sources = {f"{name}.tar.gz" for name in of_wheels}
    assert names == wheels | archives | told | sources | {f"psjob-{version()}.tgz", "install.yaml", release.SUMS}
    assert (made / release.SUMS).read_text() == release.sums(made)


def test_it_installs_from_a_registry_and_an_index_alone(
    made: Path, served: Served, free: Kube, node_cluster: Cluster, tmp_path: Path
) -> None:
    operator, runtime = (f"{served.address}/psjob-{target}:{version()}" for target in release.TARGETS)
    kube = own_namespace(free, node_cluster, "release")
    machine = Machine(tmp_path / "machine", served.index)
    machine.env["KUBECONFIG"] = free.kubeconfig
    assert f"psjob-{version()}" in machine.type("pip", "install", "psjob[client]")

    # Helm 3: the release before, then this one.
    before = older.unpacked(tmp_path / "before", older.release_before())
    archive = write(tmp_path / "before.tar", runtime_image(OLD_RUNTIME, before.folder), operator_image(OLD_OPERATOR, source=before.folder))
    node_cluster.load(archive)
    old = [f"--set-string={key}={value}" for key, value in (
        ("image.repository", OLD_OPERATOR.rpartition(":")[0]), ("image.tag", "last"),
        ("runtimeImage.repository", OLD_RUNTIME.rpartition(":")[0]), ("runtimeImage.tag", "last"),
    )]  # fmt: skip
    helm3(free, "install", "psjob", str(before.chart), "--take-ownership", *old)
    rolled_out(free, OLD_OPERATOR)
    helm3(free, "upgrade", "psjob", *served.words(), "--reset-values")
    rolled_out(free, operator)
    said = helm3(free, "test", "psjob", "--timeout=180s")
    assert "Phase:          Succeeded" in said, said
    trains(kube, machine, "first", runtime)
    by_helm3 = objects(free)

    # Helm 4 takes over what Helm 3 installed.
    free.helm("upgrade", "psjob", *served.words())
    assert objects(free) == by_helm3
    free.helm("upgrade", "psjob", *served.words(), "--set=logLevel=debug")
    rolled_out(free, operator)
    free.helm("test", "psjob", "--timeout=180s", timeout=240)
    trains(kube, machine, "later", runtime, suspended=True)
    uid = (kube.get("pstrainingjob", "later") or {})["metadata"]["uid"]
    free.helm("uninstall", "psjob", "--wait", timeout=240)
    assert free.get("deployment", "psjob") is None
    assert free.get("crd", CRD) is not None
    assert {job["metadata"]["name"] for job in kube.list("pstrainingjob")} == {"first", "later"}

    # kustomize, without Helm; the job that was left trains.
    kustomization(tmp_path / "kustomize", made, served.address)
    free.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(tmp_path / "kustomize"))
    rolled_out(free, operator)
    machine.type("psjob", "resume", "later", "--namespace", kube.namespace)
    digits.complete(kube, "later", 600)
    assert images(kube, "later") == {runtime}
    assert (kube.get("pstrainingjob", "later") or {})["metadata"]["uid"] == uid

    # Helm 4 anew, from the registry.
    free.helm("upgrade", "--install", "psjob", *served.words(), "--take-ownership", "--force-conflicts")
    rolled_out(free, operator)
    assert objects(free) == by_helm3
    free.kubectl("delete", "namespace", kube.namespace, "--wait=false")
    wait_for("the job's pods to go", lambda: not replace(free, namespace=kube.namespace).list("pods"), 120)


def kustomization(folder: Path, made: Path, address: str) -> None:
    """That of docs/releasing.md, with this registry and version, beside install.yaml."""
    folder.mkdir()
    (block,) = re.findall(r"```yaml\n(resources:.*?)```", (release.ROOT / "docs" / "releasing.md").read_text(), re.DOTALL)
    assert "registry.example.com" in block
    (folder / "install.yaml").write_text((made / "install.yaml").read_text())
    (folder / "kustomization.yaml").write_text(block.replace("registry.example.com", address).replace(":0.1.0", f":{version()}"))
