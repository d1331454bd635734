"""README as a stranger follows it, alone: from nothing to a first training step, on a laptop and on a cluster at hand.

Nothing of psjob is installed at first. The packages that it needs are there already, as with a warm cache.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hack import wheels
from hack.cluster.paths import cache
from hack.index import serving
from hack.newcomer import Typed, environment, first_step, follow
from hack.readme import commands
from tests.e2e.kube import ROOT, Kube, install, tool
from tests.support.cluster_fixtures import Cluster
from tests.support.newcomer import third_party

README = commands((ROOT / "README.md").read_text(), "Try it")
CLUSTER = commands((ROOT / "docs/install.md").read_text(), "On a cluster")
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()
TUTORIAL = (ROOT / "docs/tutorials/first-cluster.md").read_text()
OPERATIONS, FILES = (ROOT / "docs/operations.md").read_text(), "Files of a script, and its weights"
SECONDS = 480.0


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    dist = tmp_path_factory.mktemp("dist")
    assert wheels.main([str(dist)]) == 0
    with serving(dist) as address:
        yield address


def typed(page: list[str], tmp_path: Path, index: str, **more: str) -> tuple[Path, Typed]:
    """Those commands beside the project, in a folder with nothing else, on a machine without psjob; the folder, and what came of it."""
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "psjob").symlink_to(ROOT)
    # What builds wheels is there too; an index that has it is asked in `test_from_an_index`.
    offline = {"PYTHONPATH": str(third_party(tmp_path / "third-party")), "OMP_NUM_THREADS": "1", "PIP_NO_BUILD_ISOLATION": "false"}
    more = {**offline, **more}
    done = follow(page, folder, environment(tmp_path, index, more), SECONDS)
    for command, seconds in done.seconds():
        print(f"{seconds:7.1f} s  {command}")
    assert done.code == 0, f"{page[len(done.ended)]} failed:\n{done.output[-4000:]}"
    return folder, done


def test_three_commands_are_enough() -> None:
    """`psjob init`, `psjob run`, `psjob submit`: with nothing between them but the images and the operator."""
    ours = [shlex.split(command)[1] for command in (*README, *CLUSTER) if command.startswith("psjob ") and "--fault" not in command]
    assert ours[:4] == ["init", "run", "compare", "submit"]


@pytest.mark.rotating
@pytest.mark.timeout(900)
def test_a_laptop(tmp_path: Path, index: str) -> None:
    folder, done = typed(README, tmp_path, index)
    told_as_the_readme_says(folder, done)


def told_as_the_readme_says(folder: Path, done: Typed) -> None:
    installed = done.ended[next(number for number, command in enumerate(done.commands) if command.startswith("pip"))]
    print(f"the first step: {first_step(folder) - installed:.1f} s after pip's end")
    runs = re.findall(r"^Complete: 280 steps", done.output, re.MULTILINE)
    assert len(runs) == 2, done.output
    first = sorted(folder.glob(".psjob/hello-*/summary.json"))[:2]  # then come those of the comparison
    summaries = [json.loads(path.read_text()) for path in first]
    assert sorted(len(one["restarts"]) for one in summaries) == [0, 1]
    assert len({one["weights_sha256"] for one in summaries}) == 1, "a killed shard changes no bit"
    accuracies = [float(text) for text in re.findall(r"^accuracy (\S+)$", done.output, re.MULTILINE)]
    assert len(accuracies) == 2 and min(accuracies) > 0.85
    assert "the report is report.html" in done.output and (folder / "report.html").is_file()
    assert "Warning" not in done.output, "of torch, such as for numpy that is missing"


@pytest.mark.rotating
@pytest.mark.timeout(900)
def test_the_quickstart(tmp_path: Path, index: str) -> None:
    page = [*commands(QUICKSTART, "1. See it run"), *commands(QUICKSTART, "2. Kill something")]
    _, done = typed(page, tmp_path, index)
    assert sum(command.startswith("psjob run") for command in page) == len(re.findall("^Complete: ", done.output, re.MULTILINE)) == 5
    accuracies = [float(text) for text in re.findall(r"^accuracy (\S+)$", done.output, re.MULTILINE)]
    assert len(accuracies) == 5 and min(accuracies) > 0.7


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_from_an_index(tmp_path: Path) -> None:
    """With nothing of what this environment has: pip fetches all that the README's commands need."""
    at = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False)
    index = os.environ.get("PIP_INDEX_URL") or at.stdout.strip()
    if not index:
        pytest.skip("needs a package index: PIP_INDEX_URL, or pip's global.index-url")
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "psjob").symlink_to(ROOT)
    told_as_the_readme_says(folder, follow(README, folder, environment(tmp_path, index), 3000))


@pytest.fixture
def bare_cluster(home: Kube, node_cluster: Cluster) -> Iterator[Cluster]:
    """Real nodes without psjob; the operator of the other tests is put back at the end."""
    home.kubectl("delete", "crd", "pstrainingjobs.psjob.dev", "--timeout=60s")  # with all jobs, while an operator is there to end them
    home.helm("uninstall", "psjob", "--wait")
    yield node_cluster
    home.kubectl("delete", "psj", "--all", "--timeout=60s", "--ignore-not-found", namespace="default")
    home.helm("uninstall", "psjob", "--wait", "--ignore-not-found")
    install(home, "--take-ownership", "--force-conflicts")


@pytest.mark.nodes
@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(900)
def test_a_cluster_at_hand(tmp_path: Path, index: str, bare_cluster: Cluster) -> None:
    page = [command for command in (*README, *CLUSTER) if "--fault" not in command and "compare" not in command]
    done = typed_at(bare_cluster, page, tmp_path, index)
    times = dict(zip(page, [done.began, *done.ended[:-1]], strict=True))
    (installing,) = (at for command, at in times.items() if command.startswith("helm install"))
    print(f"the first epoch: {first_epoch(bare_cluster) - installing:.1f} s after helm install began")
    told = done.output.partition("psjob.dev/hello created")[2]
    assert "`psjob logs hello -f -n default` follows it" in told and "epoch 5 of 5: accuracy" in told
    assert "hello in namespace default is Complete at step 280" in told
    weights = fetched(bare_cluster, tmp_path)
    assert sum(tensor.numel() for tensor in weights.values()) > 1000 and all(bool(tensor.isfinite().all()) for tensor in weights.values())


def fetched(cluster: Cluster, tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of job hello, by the pod and the commands of docs/operations.md."""
    page = OPERATIONS.partition(f"## {FILES}")[2]
    (manifest,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "hello-reader" in block)
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "reader.yaml").write_text(manifest)
    environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(commands(OPERATIONS, FILES))], cwd=folder, env=environ, check=True, timeout=400)
    return load_file(folder / "hello.safetensors")


@pytest.mark.nodes
@pytest.mark.serial
@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_the_tutorial_of_a_first_cluster(tmp_path: Path, index: str, bare_cluster: Cluster) -> None:
    """After the commands of README that it begins with."""
    begun = [command for command in README if not command.startswith("psjob ")]
    ready = [command for command in CLUSTER if command.startswith(("docker", "helm")) and "hello" not in command]
    done = typed_at(bare_cluster, [*begun, *ready, *commands(TUTORIAL, "Tutorial: a first job on a cluster")], tmp_path, index)
    told = done.output.partition("psjob.dev/hello created")[2]
    for said in ("hello-shard-0-a1", "hello-worker-1-r1", "pod/hello-shard-0-a2 condition met", "Suspended"):
        assert said in told, told[-4000:]
    assert not bare_cluster.run_kubectl("get", "psj", "-n", "default", "-o", "name").stdout


def typed_at(cluster: Cluster, page: list[str], tmp_path: Path, index: str) -> Typed:
    """Those commands, with kubectl, helm and docker of this cluster, and the project beside the empty folder's files."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("helm", "kubectl"):
        (programs / name).symlink_to(tool(name))
    docker = ["env", f"PYTHONPATH={ROOT}", f"PSJOB_CACHE={cache()}", sys.executable, "-m", "tests.e2e.docker_here", str(cluster.state)]
    (programs / "docker").write_text(f'#!/bin/sh\nexec {shlex.join(docker)} "$@"\n')
    (programs / "docker").chmod(0o755)
    return typed(page, tmp_path, index, PATH=str(programs), KUBECONFIG=str(cluster.kubeconfig))[1]


def first_epoch(cluster: Cluster) -> float:
    """When the job told its first epoch, by the wall clock: 56 steps after its beginning."""
    lines = cluster.run_kubectl("logs", "hello-worker-0-r1", "-n", "default", "--timestamps").stdout.splitlines()
    (told,) = (line for line in lines if "epoch 1 of 5" in line)
    return datetime.fromisoformat(told.split()[0]).timestamp()
