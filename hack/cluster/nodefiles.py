"""The files one node starts from: certificates and the configuration of containerd, CNI, kubelet and kube-proxy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from hack.cluster import cgroups
from hack.cluster.images import PAUSE
from hack.cluster.options import BRIDGE_RANGE, DNS_SERVICE, POD_RANGE, SERVICE_RANGE, Options
from hack.cluster.paths import file_of, program
from hack.cluster.pki import kubeconfig
from hack.cluster.plane import Plane


def write(options: Options, index: int, plane: Plane, pause: Path) -> Path:
    """Write everything for node `index`; its folder. `node.json` in it is what nodeinit.py reads."""
    folder = options.state / f"node{index}"
    for name in ("kubelet", "containerd", "cni", "pods", "plugins", "registries"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "resolv.conf").write_text(f"nameserver {DNS_SERVICE}\n")
    (folder / "base-spec.json").write_text(_base_spec(options.mounts))
    (folder / "containerd.toml").write_text(_containerd(folder))
    (folder / "cni" / "10-psjob.conflist").write_text(json.dumps(_cni(options, index)))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(options, index, plane, folder)))
    (folder / "kube-proxy.json").write_text(json.dumps(_kube_proxy(options, index, plane, folder)))
    (folder / "node.json").write_text(json.dumps(_node(options, index, plane, folder, pause)))
    return folder


def _node(options: Options, index: int, plane: Plane, folder: Path, pause: Path) -> dict[str, Any]:
    kubelet_config = kubeconfig(folder / "kubelet.kubeconfig", plane.url, plane.authority.ca.cert, _kubelet_client(index, plane))
    kubelet = [
        str(program("kubelet")),
        f"--config={folder / 'kubelet.json'}",
        f"--kubeconfig={kubelet_config}",
        f"--root-dir={folder / 'kubelet'}",
    ]
    kubelet += [f"--hostname-override=node{index}", f"--node-ip={options.node_address(index)}", f"--cert-dir={folder}"]
    socket = folder / "containerd.sock"
    others = [at for at in range(1, options.nodes + 1) if at != index]
    return {
        "folder": str(folder),
        "path": str(program("containerd").parent),
        "tmpfs": ["/run", "/var/lib", "/var/log"],
        "shared": str(folder / "kubelet"),
        "socket": str(socket),
        "ip": [
            "link set lo up",
            f"address add {options.node_address(index)}/24 dev eth0",
            "link set eth0 up",
            *(f"route add {options.pod_range(at)} via {options.node_address(at)}" for at in others),
        ],
        "import": [str(program("ctr")), f"--address={socket}", "--namespace=k8s.io", "images", "import", str(pause)],
        "containerd": [str(program("containerd")), f"--config={folder / 'containerd.toml'}"],
        "kubelet": kubelet,
        "kube-proxy": [str(program("kube-proxy")), f"--config={folder / 'kube-proxy.json'}"],
    }


def _kubelet_client(index: int, plane: Plane) -> Any:
    return plane.authority.client(f"kubelet{index}", f"system:node:node{index}", ("system:nodes",))


def _base_spec(mounts: tuple[tuple[str, str], ...]) -> str:
    """The specification that every container starts from, with our mounts in it, so that no pod has to name them."""
    made = subprocess.run([str(program("ctr")), "oci", "spec"], capture_output=True, text=True, check=True)
    spec = json.loads(made.stdout)
    spec["process"].pop("rlimits", None)
    spec["mounts"] += [{"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro"]} for source, target in mounts]
    return json.dumps(spec)


def _containerd(folder: Path) -> str:
    runtime = "io.containerd.cri.v1.runtime"
    return f"""version = 3
root = "{folder}/containerd"
state = "/run/containerd"

[grpc]
address = "{folder}/containerd.sock"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"

[plugins."io.containerd.cri.v1.images".registry]
config_path = "{folder}/registries"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."{runtime}"]
# Without CAP_SYS_RESOURCE a container's score may not go below our own, and every pod would fail.
restrict_oom_score_adj = true

[plugins."{runtime}".cni]
bin_dirs = ["{file_of("cni", "").as_posix()}"]
conf_dir = "{folder}/cni"

[plugins."{runtime}".containerd]
default_runtime_name = "runc"

[plugins."{runtime}".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
base_runtime_spec = "{folder}/base-spec.json"

[plugins."{runtime}".containerd.runtimes.runc.options]
BinaryName = "{program("runc")}"
SystemdCgroup = false
"""


def _cni(options: Options, index: int) -> dict[str, Any]:
    """Point to point: every pod is routed, so that answers pass the node's address translation without br_netfilter. No default route."""
    ipam = {
        "type": "host-local",
        "dataDir": "/run/cni",
        "ranges": [[{"subnet": options.pod_range(index)}]],
        "routes": [{"dst": POD_RANGE}, {"dst": SERVICE_RANGE}, {"dst": BRIDGE_RANGE}],
    }
    return {"cniVersion": "1.0.0", "name": "psjob", "plugins": [{"type": "ptp", "mtu": 1500, "ipam": ipam}]}


def _kubelet(options: Options, index: int, plane: Plane, folder: Path) -> dict[str, Any]:
    serving = plane.authority.server(f"kubelet{index}-serving", f"system:node:node{index}", (options.node_address(index), f"node{index}"))
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": options.node_address(index),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plane.authority.ca.cert)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.cert),
        "tlsPrivateKeyFile": str(serving.key),
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "podLogsDir": str(folder / "pods"),
        "volumePluginDir": str(folder / "plugins"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"{cgroups.root()}/node{index}",
        "enforceNodeAllocatable": ["pods"],
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "serializeImagePulls": False,
        # So soon a change of a ConfigMap is in the pods that mount it; a minute where nobody says.
        "syncFrequency": "3s",
        # A developer's disk is often nearly full, and an evicted pod is not what a test asks about.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    if options.grace is not None:
        beat = max(1.0, options.grace / 3)
        config |= {"nodeStatusUpdateFrequency": f"{beat:g}s", "nodeLeaseDurationSeconds": max(1, round(options.grace * 2 / 3))}
    return config


def _kube_proxy(options: Options, index: int, plane: Plane, folder: Path) -> dict[str, Any]:
    pair = plane.authority.client(f"kube-proxy{index}", "system:kube-proxy")
    config = kubeconfig(folder / "kube-proxy.kubeconfig", plane.url, plane.authority.ca.cert, pair)
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(config)},
        "mode": "nftables",
        "clusterCIDR": POD_RANGE,
        "detectLocalMode": "ClusterCIDR",
        "hostnameOverride": f"node{index}",
        "bindAddress": options.node_address(index),
        "healthzBindAddress": f"{options.node_address(index)}:10256",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
