"""Where things lie: the cache outside the checkout, one folder per built part, and what each part is built from."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
MODULES = HERE / "modules"
NEWEST = "v1.37.1"
ASSETS = ("kube-apiserver", "etcd", "kubectl")
"""What envtest has."""


class ClusterError(Exception):
    """A sentence for the person at the terminal: what is wrong, with which value, and what to do."""


class Unavailable(ClusterError):
    """This machine lacks something that the asked-for cluster needs; tests that need it are named as not run."""


def cache() -> Path:
    """The folder for everything that outlives a checkout; PSJOB_CACHE or XDG_CACHE_HOME move it."""
    base = os.environ.get("PSJOB_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "psjob-dev"


def kubernetes() -> str:
    """The version of Kubernetes that is built and started: the newest, or the one that PSJOB_KUBERNETES names (`v1.33.13`, `1.33.13`)."""
    asked = f"v{os.environ.get('PSJOB_KUBERNETES', '').removeprefix('v') or NEWEST.removeprefix('v')}"
    if asked not in pinned():
        raise ClusterError(f"Kubernetes {asked} is not pinned in hack/cluster/modules; known: {', '.join(pinned())}")
    return asked


def pinned() -> list[str]:
    """The versions of Kubernetes that can be built, from the oldest to the newest."""
    older = (folder.name.removeprefix("kubernetes-") for folder in MODULES.glob("kubernetes-v*"))
    return sorted([*older, NEWEST], key=lambda version: [int(number) for number in version.removeprefix("v").split(".")])


def assets() -> Path | None:
    """The folder with the programs of ASSETS that KUBEBUILDER_ASSETS names, as envtest lays it out; None: they are built like the others.

    PSJOB_KUBERNETES names a version that is built, so that the folder is not used.
    """
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder or os.environ.get("PSJOB_KUBERNETES"):
        return None
    lacking = [name for name in ASSETS if not (Path(folder) / name).exists()]
    if lacking:
        raise ClusterError(
            f"KUBEBUILDER_ASSETS={folder} lacks {', '.join(lacking)}; name a folder with {', '.join(ASSETS)}, "
            "for instance the one that `setup-envtest use -p path` prints, or unset it"
        )
    return Path(folder)


@dataclass(frozen=True)
class Part:
    """One pinned module and the commands built from it. `programs` maps the file's name to its Go package."""

    name: str
    module: str
    programs: dict[str, str]
    tags: str = ""
    cgo: bool = False
    ldflags: str = "-s -w"
    group: str = "integration"

    @property
    def folder(self) -> Path:
        """If the programs are, or will be: the name holds a hash of everything that decides what is built."""
        return cache() / "bin" / f"{self.name}-{self.fingerprint()}"

    def fingerprint(self) -> str:
        seen = hashlib.sha256(repr((self.programs, self.tags, self.cgo, self.ldflags)).encode())
        for file in sorted((MODULES / self.module).iterdir()):
            seen.update(file.name.encode() + b"\0" + file.read_bytes())
        return seen.hexdigest()[:12]


def _kubernetes(name: str, *programs: str, group: str = "integration") -> Part:
    """Programs of the chosen version."""
    version = kubernetes()
    module = "kubernetes" if version == NEWEST else f"kubernetes-{version}"
    return Part(name, module, _commands("k8s.io/kubernetes/cmd", *programs), ldflags=_kubernetes_ldflags(version), group=group)


def _kubernetes_ldflags(version: str) -> str:
    major, minor = version.removeprefix("v").split(".")[:2]
    flags = ["-s -w"]
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        # Without these everything reports v0.0.0-master and `kubectl version` ends with an error.
        flags.append(f"-X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}")
    return " ".join(flags)


def _commands(prefix: str, *names: str) -> dict[str, str]:
    return {name: f"{prefix}/{name}" for name in names}


_CONTAINERD_TAGS = "no_btrfs,no_devmapper,no_zfs,no_aufs"  # not no_grpc: that one is for only the shim and does not compile

_OF_EVERY_VERSION = (
    Part("etcd", "etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Part("kwok", "kwok", {"kwok": "sigs.k8s.io/kwok/cmd/kwok"}),
    Part(
        "containerd",
        "containerd",
        _commands("github.com/containerd/containerd/v2/cmd", "containerd", "containerd-shim-runc-v2", "ctr"),
        tags=_CONTAINERD_TAGS,
        group="e2e",
    ),
    Part("runc", "runc", {"runc": "github.com/opencontainers/runc"}, tags="seccomp", cgo=True, group="e2e"),
    Part(
        "cni",
        "cni",
        {
            "ptp": "github.com/containernetworking/plugins/plugins/main/ptp",
            "loopback": "github.com/containernetworking/plugins/plugins/main/loopback",
            "host-local": "github.com/containernetworking/plugins/plugins/ipam/host-local",
        },
        group="e2e",
    ),
    Part("coredns", "coredns", {"coredns": "github.com/coredns/coredns"}, group="e2e"),
    Part("pause", "pause", {"pause": "psjob.dev/hack/cluster/pause"}, group="e2e"),
    Part("gitops", "gitops", {"gitops": "psjob.dev/hack/cluster/gitops"}, group="gitops"),
)
_RELEASE = (
    Part("registry", "registry", {"registry": "psjob.dev/hack/cluster/registry"}, group="release"),
    Part("helm3", "helm3", {"helm3": "helm.sh/helm/v3/cmd/helm"}, group="release"),
)
"""What the test of a release needs beside a cluster."""


def parts(only: str | None = None) -> tuple[Part, ...]:
    """The parts for `integration` (no root needed), `kwok` or `gitops` alone, all but the last for `e2e`, or all (None), in build order.

    `release` are those that test a release: a registry and Helm 3. Nothing else needs them. What `assets` brings is in no part.
    """
    chosen = _parts(only)
    if assets() is None:
        return chosen
    return tuple(made for part in chosen if (made := _beside_assets(part)).programs)


def _beside_assets(part: Part) -> Part:
    """The part without the programs of ASSETS, unless all of it is built already."""
    return part if part.folder.exists() else replace(part, programs={k: v for k, v in part.programs.items() if k not in ASSETS})


def _parts(only: str | None) -> tuple[Part, ...]:
    if only == "release":
        return _RELEASE
    etcd, kwok, *rest, gitops = _OF_EVERY_VERSION
    plane = _kubernetes("control-plane", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
    if only == "kwok":
        return (kwok,)
    if only == "integration":
        return etcd, plane, kwok
    if only == "gitops":
        return (gitops,)
    nodes = (etcd, plane, kwok, _kubernetes("node", "kubelet", "kube-proxy", group="e2e"), *rest)
    return nodes if only == "e2e" else (*nodes, gitops)


def program(name: str) -> Path:
    """The program of that name, of `assets` or built. Raises ClusterError, with the command that builds it, while it is not built."""
    given = assets()
    if given is not None and name in ASSETS:
        return given / name
    known = (*parts(), *_RELEASE)
    for part in known:
        if name in part.programs:
            path = part.folder / name
            if path.exists():
                return path
            raise ClusterError(
                f"{name} is not built yet; build it with: {_chosen()}python -m hack.cluster build --only {part.group} --wait"
            )
    raise ClusterError(f"{name} is not a program of this cluster; known: {', '.join(sorted(p for part in known for p in part.programs))}")


def _chosen() -> str:
    return "" if kubernetes() == NEWEST else f"PSJOB_KUBERNETES={kubernetes()} "


def file_of(part_name: str, file: str) -> Path:
    """A file that a part's build left beside its programs, such as kwok's stages."""
    part = next(part for part in parts() if part.name == part_name)
    return part.folder / file
