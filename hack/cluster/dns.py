"""Cluster DNS: CoreDNS on the host's bridge behind the Service kube-dns, with the zone settings that kubeadm writes."""

from __future__ import annotations

from hack.cluster.options import BRIDGE_ADDRESS, DNS_SERVICE, Options
from hack.cluster.paths import program
from hack.cluster.pki import kubeconfig
from hack.cluster.plane import Plane
from hack.cluster.proc import Keeper

# Names of the cluster are not cached: they move as fast as endpoints do. Nothing is forwarded: pods have no way out.
COREFILE = """.:53 {{
    bind {address}
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {{
        kubeconfig {config}
        pods insecure
        ttl 30
    }}
    cache 30 {{
        disable success cluster.local
        disable denial cluster.local
    }}
    loadbalance
}}
"""
PORTS = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]


def start(options: Options, keeper: Keeper, plane: Plane) -> None:
    """Start CoreDNS and make the Service and its EndpointSlice."""
    pair = plane.authority.client("coredns", "psjob-coredns", ("system:masters",))
    config = kubeconfig(options.state / "coredns.kubeconfig", plane.url, plane.authority.ca.cert, pair)
    corefile = options.state / "Corefile"
    corefile.write_text(COREFILE.format(address=BRIDGE_ADDRESS, config=config))
    keeper.start("coredns", [str(program("coredns")), "-conf", str(corefile)])
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}},
        "spec": {"clusterIP": DNS_SERVICE, "ports": PORTS},
    }
    slices = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [BRIDGE_ADDRESS], "conditions": {"ready": True}}],
        "ports": PORTS,
    }
    plane.api.create("/api/v1/namespaces/kube-system/services", service)
    plane.api.create("/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices", slices)
