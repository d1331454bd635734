"""What each command of the cluster tool reads and prints."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from hack.cluster.options import Options, Ready
from hack.cluster.paths import ClusterError

EXAMPLES = """examples:
  python -m hack.cluster build --wait                    build everything that is missing (minutes, once)
  python -m hack.cluster up --state /tmp/c               a control plane alone; no root needed, several side by side
  export KUBECONFIG=$(python -m hack.cluster kubeconfig --state /tmp/c)
  sudo python -m hack.cluster up --state /tmp/c --nodes 1 --mount /path/to/site:/torch
  python -m hack.cluster down --state /tmp/c
"""


def main(arguments: list[str]) -> int:
    """Run one command; the exit status. What goes wrong is one sentence on stderr, never a traceback."""
    asked = _parser().parse_args(arguments)
    if getattr(asked, "kubernetes", None):
        os.environ["PSJOB_KUBERNETES"] = asked.kubernetes  # what is started inherits it
    try:
        return int(asked.run(asked) or 0)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hack.cluster",
        description="A real Kubernetes on one machine, without a registry.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    deps = commands.add_parser("deps", help="install the system packages needed (root on Debian), or name what is missing")
    deps.add_argument("--check", action="store_true", help="only name what is missing")
    deps.set_defaults(run=_deps)

    build = commands.add_parser("build", help="build the pinned programs that are missing")
    build.add_argument(
        "--only",
        choices=["integration", "e2e", "kwok", "gitops", "release"],
        help="integration: control plane and kwok; e2e: real nodes too; gitops: the engines of Argo CD and Flux; release: a registry and "
        "Helm 3 (default: everything but the last)",
    )
    _version(build)
    build.add_argument("--wait", action="store_true", help="wait until everything is there (the default)")
    build.add_argument("--background", action="store_true", help="start the build with low priority and return; `build --wait` joins it")
    build.set_defaults(run=_build)

    up = commands.add_parser(
        "up", help="start a cluster and print its kubeconfig", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _state(up)
    _version(up)
    up.add_argument("--nodes", type=int, default=0, choices=[0, 1, 2], help="real nodes (root and Linux; one such cluster a machine)")
    up.add_argument("--kwok", type=int, default=0, metavar="N", help="nodes that only pretend")
    up.add_argument(
        "--mount", action="append", default=[], metavar="SRC:DST", help="a folder that every container of a real node sees, read-only"
    )
    up.add_argument("--port", type=int, help="the API server's port (default: a free one; 6443 with nodes)")
    up.add_argument("--audit", action="store_true", help="write audit.log into the state folder")
    up.add_argument(
        "--isolate", action="store_true", help="let a namespace's annotation choose its nodes (admission plugin PodNodeSelector)"
    )
    up.add_argument(
        "--node-monitor-grace",
        type=float,
        metavar="SECONDS",
        help="call a silent node Unknown after this (default 50; kubelets beat faster too)",
    )
    up.add_argument("--wait", type=float, default=0, metavar="SECONDS", help="let another cluster with real nodes end first")
    up.add_argument("--owner", type=int, metavar="PID", help="end the cluster when this process is gone")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="end a cluster and everything it started")
    _state(down)
    down.set_defaults(run=_down)

    config = commands.add_parser("kubeconfig", help="print the path of a running cluster's kubeconfig")
    _state(config)
    config.set_defaults(run=_kubeconfig)

    load = commands.add_parser("load", help="import an image archive into every real node")
    _state(load)
    load.add_argument("archive", type=Path, metavar="IMAGE.tar")
    load.set_defaults(run=_load)

    pack = commands.add_parser("pack-image", help="write the project's images into one archive, without a registry or a build daemon")
    pack.add_argument("--runtime", metavar="NAME", help="the image whose init container carries the library into a pod")
    pack.add_argument("--operator", metavar="NAME", help="the operator's image")
    pack.add_argument("--worker", action="append", default=[], metavar="NAME=FOLDER", help="Python, torch by mount, and FOLDER as WORKDIR")
    pack.add_argument("-o", "--output", type=Path, required=True, metavar="IMAGE.tar")
    pack.set_defaults(run=_pack)

    images = commands.add_parser("build-images", help="build the Dockerfile's two images by buildah, on a base made from Debian (root)")
    images.add_argument("--operator", metavar="NAME", default="psjob.local/psjob-operator:dev", help="(default: %(default)s)")
    images.add_argument("--runtime", metavar="NAME", default="psjob.local/psjob-runtime:dev", help="(default: %(default)s)")
    images.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="where operator.tar and runtime.tar go; none: only fill the cache"
    )
    images.set_defaults(run=_images)

    tryout = commands.add_parser("try", help="everything at once: two real nodes, the operator, the digits example (root and Linux)")
    _state(tryout)
    tryout.set_defaults(run=_try)

    site = commands.add_parser("torch-site", help="make the folder with torch for --mount FOLDER:/torch, and print it")
    site.set_defaults(run=_torch_site)

    pid = commands.add_parser("pid", help="print the process id of a component, for instance kube-apiserver or node1/kubelet")
    _state(pid)
    pid.add_argument("name")
    pid.set_defaults(run=_pid)

    for name, run in (("hold", _hold), ("storage", _storage), ("policies", _policies)):
        inner = commands.add_parser(name)  # what `up` starts; not for people
        _state(inner)
        inner.set_defaults(run=run)
    return parser


def _state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", type=lambda text: Path(text).resolve(), required=True, metavar="DIR", help="the cluster's folder, empty or new"
    )


def _version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubernetes", metavar="VERSION", help="another pinned version, for instance 1.33.13 (default: PSJOB_KUBERNETES, or the newest)"
    )


def _deps(asked: argparse.Namespace) -> int:
    from hack.cluster import deps

    return deps.install(check_only=asked.check)


def _build(asked: argparse.Namespace) -> int:
    from hack.cluster import build

    if asked.wait or not asked.background:
        build.build(asked.only)
        return 0
    pid = build.build_in_background(asked.only)
    print("everything is built" if pid is None else f"building in the background (process {pid}); `build --wait` waits for it")
    return 0


def _up(asked: argparse.Namespace) -> int:
    from hack.cluster import lifecycle
    from hack.cluster.proc import started_at

    mounts = []
    for text in asked.mount:
        source, _, target = text.rpartition(":")
        if not source or not target.startswith("/") or not Path(source).is_dir():
            raise ClusterError(f"--mount {text}: expected SRC:DST, an existing folder and an absolute path in the container")
        mounts.append((str(Path(source).resolve()), target))
    options = Options(
        state=asked.state,
        nodes=asked.nodes,
        kwok=asked.kwok,
        mounts=tuple(mounts),
        port=asked.port,
        audit=asked.audit,
        isolate=asked.isolate,
        grace=asked.node_monitor_grace,
        wait=asked.wait,
        owner=asked.owner,
        owner_started=started_at(asked.owner) if asked.owner else None,
    )
    ready = lifecycle.up(options)
    print(f"export KUBECONFIG={ready.kubeconfig}")
    print(f"# up in {ready.seconds} s; kubectl is {ready.kubectl}", file=sys.stderr)
    return 0


def _down(asked: argparse.Namespace) -> int:
    from hack.cluster import lifecycle

    print("the cluster is down" if lifecycle.down(asked.state) else f"no cluster runs from {asked.state}")
    return 0


def _kubeconfig(asked: argparse.Namespace) -> int:
    ready = Ready.load(asked.state)
    if ready is None:
        raise ClusterError(f"no cluster runs from {asked.state}; start one with: python -m hack.cluster up --state {asked.state}")
    print(ready.kubeconfig)
    return 0


def _load(asked: argparse.Namespace) -> int:
    from hack.cluster import nodes

    ready = Ready.load(asked.state)
    if ready is None or not ready.nodes:
        raise ClusterError(
            f"no cluster with real nodes runs from {asked.state}; start one with: python -m hack.cluster up --nodes 1 --state DIR"
        )
    print("\n".join(nodes.load(asked.state, ready.nodes, asked.archive)))
    return 0


def _pack(asked: argparse.Namespace) -> int:
    from hack.cluster.pack import pack

    workers = {}
    for text in asked.worker:
        name, _, folder = text.partition("=")
        if not folder:
            raise ClusterError(f"--worker {text}: expected NAME=FOLDER")
        workers[name] = Path(folder)
    print(pack(asked.output.resolve(), runtime=asked.runtime, operator=asked.operator, workers=workers))
    return 0


def _images(asked: argparse.Namespace) -> int:
    from hack.cluster import dockerfile

    with tempfile.TemporaryDirectory() as scratch:
        archives = dockerfile.build({"operator": asked.operator, "runtime": asked.runtime}, (asked.output or Path(scratch)).resolve())
        if asked.output:
            print("\n".join(map(str, archives)))
    return 0


def _try(asked: argparse.Namespace) -> int:
    from hack.cluster.tryout import try_it

    try_it(asked.state)
    return 0


def _torch_site(asked: argparse.Namespace) -> int:
    from hack.cluster.torchsite import torch_site

    print(torch_site())
    return 0


def _pid(asked: argparse.Namespace) -> int:
    from hack.cluster import nodes

    print(nodes.component(asked.state, asked.name))
    return 0


def _hold(asked: argparse.Namespace) -> int:
    from hack.cluster.holder import detach, hold

    detach(asked.state)
    return hold(Options.from_json((asked.state / "options.json").read_text()))


def _storage(asked: argparse.Namespace) -> int:
    from hack.cluster.storage import provision

    provision(asked.state)
    return 0


def _policies(asked: argparse.Namespace) -> int:
    from hack.cluster.enforcer import enforce

    enforce(asked.state)
    return 0
