"""NetworkPolicies as rules of nftables. A STAND-IN for the network plugin of a real cluster: only ingress, only IPv4, no named ports.

What it does not understand it refuses, and lets nothing in to the pods that the policy selects. No I/O: enforcer.py loads what this makes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TABLE = "psjob_policies_stand_in"
PROTOCOLS = ("TCP", "UDP", "SCTP")
Raw = Mapping[str, Any]


class NotUnderstood(Exception):
    """A policy says what this stand-in cannot do; the text names the field."""


@dataclass(frozen=True)
class Source:
    """Addresses that may come; None: all."""

    within: tuple[str, ...] | None
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """Connections from `source` to the pods at `to` are let in, on these ports: `tcp dport 80-90`; None: on all."""

    to: tuple[str, ...]
    source: Source
    ports: tuple[str, ...] | None


@dataclass(frozen=True)
class Compiled:
    """What all policies together say."""

    isolated: tuple[str, ...]
    """Addresses of pods that a policy selects: they take what a rule lets in."""
    rules: tuple[Rule, ...]
    refused: Mapping[tuple[str, str], str]
    """By namespace and name: why a policy is not understood."""


def compile_policies(policies: Iterable[Raw], pods: Iterable[Raw], namespaces: Iterable[Raw]) -> Compiled:
    """The rules of all these objects, as the API server lists them."""
    there = [pod for pod in pods if _has_address(pod)]
    labels = {namespace["metadata"]["name"]: namespace["metadata"].get("labels") or {} for namespace in namespaces}
    isolated: set[str] = set()
    rules: list[Rule] = []
    refused: dict[tuple[str, str], str] = {}
    for policy in sorted(policies, key=_place):
        mine = [pod for pod in there if _place(pod)[0] == _place(policy)[0]]
        try:
            isolated |= set(to := _addresses(_selected(policy, mine)))
            rules += _rules(policy, to, there, labels)
        except NotUnderstood as error:
            refused[_place(policy)] = str(error)
            isolated |= set(_addresses(_selected_or_all(policy, mine)))
    return Compiled(tuple(sorted(isolated)), tuple(rules), refused)


def ruleset(compiled: Compiled, passes: str) -> str:
    """A script for `nft -f` that replaces what the one before made. `passes`: the range of nodes and host, which policies do not hold."""
    lines = [f"table ip {TABLE} {{}}", f"delete table ip {TABLE}", f"table ip {TABLE} {{", *_set("isolated", compiled.isolated)]
    allowed = []
    for number, rule in enumerate(compiled.rules):
        lines += _set(f"to{number}", rule.to)
        words = f"ip daddr @to{number}"
        if rule.source.within is not None:
            lines += _set(f"from{number}", rule.source.within)
            words += f" ip saddr @from{number}"
        if rule.source.without:
            lines += _set(f"not{number}", rule.source.without)
            words += f" ip saddr != @not{number}"
        allowed += [f"{words} {port} accept" for port in rule.ports] if rule.ports is not None else [f"{words} accept"]
    chain = ["type filter hook forward priority filter; policy accept;", "ct state established,related accept", f"ip saddr {passes} accept"]
    chain += ["ip daddr != @isolated accept", *allowed, "counter drop"]
    return "\n".join([*lines, "chain forward {", *chain, "}", "}"]) + "\n"


def _rules(policy: Raw, to: Sequence[str], pods: Sequence[Raw], namespaces: Mapping[str, Raw]) -> list[Rule]:
    spec = policy["spec"]
    _only(spec, "spec", "podSelector", "policyTypes", "ingress", "egress")
    if "Egress" in (spec.get("policyTypes") or ()) or (spec.get("egress") and not spec.get("policyTypes")):
        raise NotUnderstood("spec.policyTypes: Egress; this stand-in knows only Ingress")
    made = []
    for number, entry in enumerate(spec.get("ingress") or ()):
        at = f"spec.ingress[{number}]"
        _only(entry, at, "from", "ports")
        ports = tuple(_port(port, f"{at}.ports") for port in entry["ports"]) if entry.get("ports") else None
        peers = [_peer(peer, f"{at}.from", policy, pods, namespaces) for peer in entry.get("from") or ()]
        made += [Rule(tuple(to), source, ports) for source in peers or [Source(None)]]
    return made


def _peer(peer: Raw, at: str, policy: Raw, pods: Sequence[Raw], namespaces: Mapping[str, Raw]) -> Source:
    _only(peer, at, "podSelector", "namespaceSelector", "ipBlock")
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        _only(block, f"{at}.ipBlock", "cidr", "except")
        return Source((_range(block["cidr"], at),), tuple(_range(cidr, at) for cidr in block.get("except") or ()))
    spaces = {_place(policy)[0]}
    if "namespaceSelector" in peer:
        spaces = {name for name, labels in namespaces.items() if _matches(peer["namespaceSelector"], labels, f"{at}.namespaceSelector")}
    among = [pod for pod in pods if _place(pod)[0] in spaces]
    return Source(_addresses(pod for pod in among if _matches(peer.get("podSelector") or {}, _labels(pod), f"{at}.podSelector")))


def _port(port: Raw, at: str) -> str:
    _only(port, at, "port", "protocol", "endPort")
    protocol, number = port.get("protocol", "TCP"), port.get("port")
    if protocol not in PROTOCOLS:
        raise NotUnderstood(f"{at}.protocol: {protocol}")
    if number is None:
        return f"ip protocol {protocol.lower()}"
    if not isinstance(number, int):
        raise NotUnderstood(f"{at}.port: {number}; this stand-in knows no named ports")
    return f"{protocol.lower()} dport {number}" + (f"-{port['endPort']}" if "endPort" in port else "")


def _range(cidr: str, at: str) -> str:
    network = ipaddress.ip_network(cidr, strict=False)
    if network.version != 4:
        raise NotUnderstood(f"{at}.ipBlock: {cidr}; this stand-in knows only IPv4")
    return str(network)


def _selected(policy: Raw, pods: Iterable[Raw]) -> list[Raw]:
    selector = policy["spec"].get("podSelector") or {}
    return [pod for pod in pods if _matches(selector, _labels(pod), "spec.podSelector")]


def _selected_or_all(policy: Raw, pods: Sequence[Raw]) -> list[Raw]:
    try:
        return _selected(policy, pods)
    except NotUnderstood:
        return list(pods)


def _matches(selector: Raw, labels: Mapping[str, str], at: str) -> bool:
    _only(selector, at, "matchLabels", "matchExpressions")
    return (selector.get("matchLabels") or {}).items() <= labels.items() and all(
        _expression(it, labels, at) for it in selector.get("matchExpressions") or ()
    )


def _expression(expression: Raw, labels: Mapping[str, str], at: str) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case other:
            raise NotUnderstood(f"{at}.matchExpressions: operator {other}")


def _only(raw: Raw, at: str, *known: str) -> None:
    if unknown := set(raw) - set(known):
        raise NotUnderstood(f"{at}: {', '.join(sorted(unknown))}; this stand-in knows {', '.join(known)}")


def _set(name: str, addresses: Sequence[str]) -> list[str]:
    elements = [f"elements = {{ {', '.join(addresses)} }}"] if addresses else []
    return [f"set {name} {{", "type ipv4_addr", "flags interval", "auto-merge", *elements, "}"]


def _has_address(pod: Raw) -> bool:
    """A pod that has ended has given its address back, and one on its node's network has the node's."""
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") not in ("Succeeded", "Failed") and not pod["spec"].get("hostNetwork")


def _addresses(pods: Iterable[Raw]) -> tuple[str, ...]:
    return tuple(sorted(pod["status"]["podIP"] for pod in pods))


def _labels(pod: Raw) -> Mapping[str, str]:
    return pod["metadata"].get("labels") or {}


def _place(raw: Raw) -> tuple[str, str]:
    return raw["metadata"].get("namespace", ""), raw["metadata"]["name"]
