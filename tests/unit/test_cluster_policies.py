"""The stand-in enforcer of hack/cluster: who is selected, what is let in, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from hack.cluster.policies import Source, compile_policies, ruleset

NAMESPACES = [{"metadata": {"name": name, "labels": {"team": name, "kubernetes.io/metadata.name": name}}} for name in ("a", "b")]


def pod(name: str, address: str, namespace: str = "a", phase: str = "Running", spec: dict[str, Any] | None = None) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
    return {"metadata": metadata, "spec": spec or {}, "status": {"phase": phase, "podIP": address}}


PODS = [pod("web", "10.0.0.1"), pod("db", "10.0.0.2"), pod("web", "10.0.0.3", "b"), pod("job", "10.0.0.1", phase="Succeeded")]


def policy(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "a"}, "spec": {"podSelector": {"matchLabels": {"app": "db"}}, **spec}}


def sources(peer: dict[str, Any]) -> Source:
    made = compile_policies([policy(ingress=[{"from": [peer]}])], PODS, NAMESPACES)
    assert not made.refused and made.isolated == ("10.0.0.2",)
    (rule,) = made.rules
    assert rule.to == ("10.0.0.2",) and rule.ports is None
    return rule.source


@pytest.mark.parametrize(
    ("peer", "addresses"),
    [
        ({"podSelector": {"matchLabels": {"app": "web"}}}, ("10.0.0.1",)),
        ({"podSelector": {}}, ("10.0.0.1", "10.0.0.2")),
        ({"namespaceSelector": {"matchLabels": {"team": "b"}}}, ("10.0.0.3",)),
        ({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "web"}}}, ("10.0.0.1", "10.0.0.3")),
        ({"namespaceSelector": {"matchLabels": {"team": "c"}}}, ()),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["db"]}]}}, ("10.0.0.2",)),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}}, ("10.0.0.1",)),
        ({"podSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]}}, ()),
        ({"podSelector": {"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}}, ("10.0.0.1", "10.0.0.2")),
    ],
)
def test_a_peer_is_the_pods_that_it_selects(peer: dict[str, Any], addresses: tuple[str, ...]) -> None:
    assert sources(peer).within == addresses


def test_ranges_ports_and_the_policy_without_a_rule() -> None:
    assert sources({"ipBlock": {"cidr": "10.1.0.0/16", "except": ["10.1.2.0/24"]}}) == Source(("10.1.0.0/16",), ("10.1.2.0/24",))
    ports = [{"port": 80}, {"port": 90, "endPort": 95, "protocol": "UDP"}, {"protocol": "SCTP"}]
    (rule,) = compile_policies([policy(ingress=[{"ports": ports}])], PODS, NAMESPACES).rules
    assert rule.ports == ("tcp dport 80", "udp dport 90-95", "ip protocol sctp") and rule.source == Source(None)
    nothing = compile_policies([policy()], PODS, NAMESPACES)
    assert nothing.isolated == ("10.0.0.2",) and not nothing.rules
    assert not compile_policies([], PODS, NAMESPACES).isolated


def test_pods_that_have_ended_and_pods_of_the_nodes_network_have_no_address_of_their_own() -> None:
    pods = [pod("db", "10.0.0.9", phase="Failed"), pod("db", "10.243.0.11", spec={"hostNetwork": True}), pod("db", "")]
    assert not compile_policies([policy()], pods, NAMESPACES).isolated


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"policyTypes": ["Ingress", "Egress"]}, "Egress"),
        ({"egress": [{}]}, "Egress"),
        ({"ingress": [{"ports": [{"port": "http"}]}]}, "spec.ingress[0].ports.port: http"),
        ({"ingress": [{"from": [{"ipBlock": {"cidr": "fd00::/8"}}]}]}, "IPv4 alone"),
        ({"ingress": [{"from": [{"serviceSelector": {}}]}]}, "serviceSelector"),
        ({"priority": 7}, "spec: priority"),
        ({"podSelector": {"matchExpressions": [{"key": "app", "operator": "Like"}]}}, "operator Like"),
    ],
)
def test_what_it_does_not_understand_is_refused_by_its_field_and_lets_nothing_in(spec: dict[str, Any], field: str) -> None:
    made = compile_policies([policy(**spec)], PODS, NAMESPACES)
    assert field in made.refused["a", "p"]
    assert "10.0.0.2" in made.isolated and not made.rules


def test_the_rules_replace_those_before_and_say_that_they_are_a_stand_in() -> None:
    text = ruleset(
        compile_policies([policy(ingress=[{"from": [{"podSelector": {}}], "ports": [{"port": 80}]}])], PODS, NAMESPACES), "10.9.0.0/24"
    )
    assert text.startswith("table ip psjob_policies_stand_in {}\ndelete table ip psjob_policies_stand_in\n")
    chain = text.partition("chain forward {")[2]
    words = [
        "ip saddr 10.9.0.0/24 accept",
        "ip daddr != @isolated accept",
        "ip daddr @to0 ip saddr @from0 tcp dport 80 accept",
        "counter drop",
    ]
    assert [chain.index(word) for word in words] == sorted(chain.index(word) for word in words)
