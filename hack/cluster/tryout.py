"""psjob on this machine for somebody without a cluster: two real nodes, the operator by its chart, the digits example."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from hack.cluster import build, deps, lifecycle, nodes
from hack.cluster.options import Options, Ready
from hack.cluster.pack import make
from hack.cluster.paths import REPO, ClusterError, Unavailable
from hack.cluster.torchsite import TARGET, torch_site

TAG = "try"
NAMESPACE = "psjob-system"


def try_it(state: Path) -> None:
    """Bring all of it up and print how to look at it. Raises ClusterError with the reason of the first step that fails."""
    options = Options(state=state, nodes=2)
    nodes.check_rights(options)
    if lacking := deps.missing():
        raise Unavailable(
            f"real nodes need these Debian packages (or their like): {' '.join(lacking)}; install them with: python -m hack.cluster deps"
        )
    nodes.check(options)
    print("building what is missing (the first time takes a quarter of an hour)", flush=True)
    build.build()
    print("starting two nodes", flush=True)
    ready = lifecycle.up(Options(state=state, nodes=2, mounts=((str(torch_site()), TARGET),)))
    print("making and loading the images", flush=True)
    for archive in _images(state):
        nodes.load(state, ready.nodes, archive)
    print("installing the operator", flush=True)
    _install(ready)
    job = state / "digits.yaml"
    # A node asks a registry for `latest` every time, and there is none.
    job.write_text(re.sub(r"(psjob-example-\w+):latest", rf"\1:{TAG}", (REPO / "examples" / "digits" / "job.yaml").read_text()))
    _run(ready, "kubectl", "apply", "-f", str(job))
    print(f"""
The digits example is training. Look at it, kill a shard, take it away:
  export KUBECONFIG={ready.kubeconfig} PATH={Path(ready.kubectl).parent}:$PATH
  kubectl get psj -w
  kubectl get pods -w
  kubectl delete pod digits-shard-1-a1 --now
  python -m hack.cluster down --state {state}""")


def _images(state: Path) -> tuple[Path, ...]:
    workers = {
        f"psjob-example-{folder.name}:{TAG}": folder for folder in sorted((REPO / "examples").iterdir()) if (folder / "train.py").exists()
    }
    made = make(state / "images", runtime=f"psjob-runtime:{TAG}", operator=f"psjob-operator:{TAG}", workers=workers)
    if made.packed_because:
        print(made.packed_because)
    return made.archives


def _install(ready: Ready) -> None:
    settings = [f"--set-string={name}.tag={TAG}" for name in ("image", "runtimeImage")]
    chart = str(REPO / "charts" / "psjob")
    _run(
        ready,
        "helm",
        "upgrade",
        "--install",
        "psjob",
        chart,
        "--namespace",
        NAMESPACE,
        "--create-namespace",
        "--wait",
        "--timeout=180s",
        *settings,
    )


def _run(ready: Ready, program: str, *arguments: str) -> None:
    path = REPO / ".venv" / "bin" / program
    found = str(path) if path.exists() else shutil.which(program)
    if program == "kubectl":
        found = ready.kubectl
    if found is None:
        raise Unavailable(f"{program} is neither in .venv/bin nor on PATH; `make install` brings it")
    done = subprocess.run([found, f"--kubeconfig={ready.kubeconfig}", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterError(f"{program} {arguments[0]} failed: {done.stderr.strip()[-800:]}")
