"""The control plane as host processes: etcd, API server, controller-manager, scheduler."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.cluster.api import Api
from hack.cluster.options import SERVICE_RANGE, Options
from hack.cluster.paths import program
from hack.cluster.pki import Authority, Pair, kubeconfig
from hack.cluster.proc import Keeper, free_ports, wait_for

START_LIMIT = 240.0
"""Seconds: a machine that does much else beside needs minutes, a quiet one four seconds."""


@dataclass(frozen=True)
class Plane:
    """A started control plane."""

    url: str
    api: Api
    authority: Authority
    admin: Pair
    kubeconfig: Path


def start(options: Options, keeper: Keeper) -> Plane:
    """Start the four and return once pods can be created in `default`. Raises ClusterError with the log of what ended."""
    authority = Authority(options.state / "pki")
    authority.create()
    port, etcd_port, peer_port = _ports(options)
    url = f"https://{options.address}:{port}"
    etcd = _start_etcd(options, keeper, authority, etcd_port, peer_port)
    keeper.start("kube-apiserver", _api_server(options, authority, etcd, port))
    admin = authority.client("admin", "psjob-admin", ("system:masters",))
    config = kubeconfig(options.state / "kubeconfig", url, authority.ca.cert, admin)
    managers = {name: _component_config(options, authority, url, name) for name in ("kube-controller-manager", "kube-scheduler")}
    api = Api(url, authority.ca.cert, admin)
    wait_for("the API server", lambda: api.ok("/readyz"), START_LIMIT, keeper.check)
    keeper.start("kube-controller-manager", _controller_manager(options, authority, managers["kube-controller-manager"]))
    keeper.start("kube-scheduler", _scheduler(options, managers["kube-scheduler"]))
    # Pods are refused until the controller-manager has made the namespace's ServiceAccount.
    wait_for("ServiceAccount default", lambda: api.ok("/api/v1/namespaces/default/serviceaccounts/default"), START_LIMIT, keeper.check)
    return Plane(url, api, authority, admin, config)


def _ports(options: Options) -> tuple[int, int, int]:
    port, etcd, peer = free_ports(3, "127.0.0.1")
    return (options.port or (6443 if options.nodes else port)), etcd, peer


def _start_etcd(options: Options, keeper: Keeper, authority: Authority, port: int, peer_port: int) -> list[str]:
    """Start etcd behind client certificates (any user of the machine reaches loopback); the API server's flags for it."""
    pair = authority.server("etcd", "psjob-etcd", ("127.0.0.1",))
    url, peer = f"https://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    keeper.start(
        "etcd",
        [
            str(program("etcd")),
            f"--data-dir={options.state / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--cert-file={pair.cert}",
            f"--key-file={pair.key}",
            f"--trusted-ca-file={authority.ca.cert}",
            "--client-cert-auth",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
    )
    return [f"--etcd-servers={url}", f"--etcd-certfile={pair.cert}", f"--etcd-keyfile={pair.key}", f"--etcd-cafile={authority.ca.cert}"]


def _api_server(options: Options, authority: Authority, etcd: list[str], port: int) -> list[str]:
    names = (options.address, "127.0.0.1", "localhost", "10.96.0.1", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    serving = authority.server("apiserver", "kube-apiserver", names)
    plugins = ["NodeRestriction"] + (["PodNodeSelector"] if options.isolate else [])
    flags = [
        str(program("kube-apiserver")),
        *etcd,
        f"--bind-address={options.address}",
        f"--advertise-address={options.address}",
        f"--secure-port={port}",
        f"--tls-cert-file={serving.cert}",
        f"--tls-private-key-file={serving.key}",
        f"--client-ca-file={authority.ca.cert}",
        "--authorization-mode=Node,RBAC",
        f"--enable-admission-plugins={','.join(plugins)}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={authority.folder / 'sa.key'}",
        f"--service-account-signing-key-file={authority.folder / 'sa.key'}",
        "--allow-privileged=true",
        "--profiling=false",
        "--shutdown-delay-duration=0s",
    ]
    if options.nodes:
        kubelets = authority.client("apiserver-kubelet", "kube-apiserver-kubelet", ("system:masters",))
        flags += [
            f"--kubelet-client-certificate={kubelets.cert}",
            f"--kubelet-client-key={kubelets.key}",
            f"--kubelet-certificate-authority={authority.ca.cert}",
            "--kubelet-preferred-address-types=InternalIP",
        ]
    else:
        flags.append("--endpoint-reconciler-type=none")  # Endpoints refuse a loopback address
    if options.audit:
        policy = options.state / "audit-policy.json"
        policy.write_text(json.dumps(_audit_policy(options.audit_users)))
        flags += [f"--audit-policy-file={policy}", f"--audit-log-path={options.state / 'audit.log'}", "--audit-log-mode=blocking"]
    return flags


def _audit_policy(users: tuple[str, ...]) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [{"level": "Metadata", "users": list(users)}, {"level": "None"}] if users else [{"level": "Metadata"}]
    return {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}


def _component_config(options: Options, authority: Authority, url: str, name: str) -> Path:
    pair = authority.client(name, f"system:{name}")
    return kubeconfig(options.state / f"{name}.kubeconfig", url, authority.ca.cert, pair)


def _controller_manager(options: Options, authority: Authority, config: Path) -> list[str]:
    flags = [
        str(program("kube-controller-manager")),
        f"--kubeconfig={config}",
        "--secure-port=0",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={authority.folder / 'sa.key'}",
        f"--root-ca-file={authority.ca.cert}",
        # With the default of 20 a second the first ServiceAccount appears only after six seconds.
        f"--kube-api-qps={options.qps}",
        f"--kube-api-burst={2 * options.qps}",
    ]
    if options.grace is not None:
        flags += [f"--node-monitor-grace-period={options.grace}s", "--node-monitor-period=1s"]
    return flags


def _scheduler(options: Options, config: Path) -> list[str]:
    document = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(config), "qps": options.qps, "burst": 2 * options.qps},
        "leaderElection": {"leaderElect": False},
    }
    file = options.state / "scheduler.json"
    file.write_text(json.dumps(document))
    return [str(program("kube-scheduler")), f"--config={file}", "--secure-port=0"]
