"""The NetworkPolicies of a run: whom they select, whom they let in, and when one is to be made anew."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator import render
from psjob_operator.__main__ import app
from psjob_operator.plan.actions import CreateProcess, EnsurePolicy
from psjob_operator.plan.observed_state import Objects, Refusal, Role
from psjob_operator.plan.plan import plan
from tests.support.typed import CliRunner
from tests.unit.plan_given import NOW, job, names, running

OPERATOR = {"namespaceSelector": {"matchLabels": {"a": "b"}}, "podSelector": {"matchLabels": {"c": "d"}}}
ADDRESS = {"ipBlock": {"cidr": "192.0.2.0/28"}}


def labels(role: Role, uid: str = "run-1") -> dict[str, str]:
    made: dict[str, str] = render.pod(replace(job(), uid=uid), CreateProcess(role, 0, 1, 1, "name"))["metadata"]["labels"]
    return made


def selects(document: dict[str, Any], pod: dict[str, str]) -> bool:
    return bool(document["spec"]["podSelector"]["matchLabels"].items() <= pod.items())


def test_shards_take_the_run_on_one_port_and_who_asks_on_the_other() -> None:
    made = render.policy(job(), "shard", (OPERATOR, ADDRESS))
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("job-shards", "ns")
    assert made["metadata"]["ownerReferences"][0]["uid"] == "run-1"
    assert selects(made, labels("shard")) and not selects(made, labels("worker")) and not selects(made, labels("shard", "run-2"))
    data, status = made["spec"]["ingress"]
    assert data["ports"] == [{"protocol": "TCP", "port": 7070}] and status["ports"] == [{"protocol": "TCP", "port": 7071}]
    assert status["from"] == [OPERATOR, ADDRESS]
    (run,) = data["from"]
    assert run["podSelector"]["matchLabels"].items() <= labels("worker").items()
    assert not run["podSelector"]["matchLabels"].items() <= labels("worker", "run-2").items()
    assert list(run) == ["podSelector"], "a selector of namespaces would let in pods of others"


def test_workers_take_their_run_alone_and_what_they_open_is_left_alone() -> None:
    made = render.policy(job(), "worker", (OPERATOR,))
    assert selects(made, labels("worker")) and not selects(made, labels("shard"))
    assert made["spec"]["policyTypes"] == ["Ingress"] and "egress" not in made["spec"]
    (only,) = made["spec"]["ingress"]
    assert list(only) == ["from"] and only["from"] == render.policy(job(), "shard", ())["spec"]["ingress"][0]["from"]


def test_workers_on_their_nodes_networks_are_let_in_whatever_their_address() -> None:
    workers = {"replicas": 3, "template": {"spec": {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "containers": []}}}
    data, status = render.policy(job(workers=workers), "shard", (OPERATOR,))["spec"]["ingress"]
    assert data == {"ports": [{"protocol": "TCP", "port": 7070}]} and status["from"] == [OPERATOR]


def test_a_policy_that_lets_in_something_else_is_told_from_a_harmless_change() -> None:
    spec = render.policy(job(), "shard", (OPERATOR,))["spec"]
    assert render.policy_rules({**spec, "egress": []}) == render.policy_rules(spec)
    for change in ({"ingress": [{}]}, {"podSelector": {}}, {"policyTypes": ["Egress"]}, {"ingress": spec["ingress"][:1]}):
        assert render.policy_rules({**copy.deepcopy(spec), **change}) != render.policy_rules(spec), change


def test_policies_are_made_before_pods_and_a_refused_one_holds_back_none() -> None:
    wanted: tuple[Role, ...] = ("shard", "worker")
    first = plan(job(objects=Objects(unguarded=wanted)), NOW)
    kinds = [type(action) for action in first.actions]
    assert [action.role for action in first.actions if isinstance(action, EnsurePolicy)] == ["shard", "worker"]
    assert kinds.index(EnsurePolicy) < kinds.index(CreateProcess)
    up = running()
    mended = plan(replace(up, objects=replace(up.objects, unguarded=("worker",))), NOW)
    assert mended.actions == (EnsurePolicy("worker"),) and not mended.intent
    refusal = Refusal("job-workers", 403, "NetworkPolicy/job-workers: forbidden", NOW, 1)
    refused = plan(job(objects=Objects(unguarded=wanted), refusals=(refusal,)), NOW)
    assert names(refused) == names(first) and refused.status == first.status


def test_a_peer_is_json_and_comes_as_the_api_server_would_store_it() -> None:
    assert render.peer_of('{"namespaceSelector": {}}') == {"namespaceSelector": {}}
    assert render.peer_of('{"podSelector": {"matchLabels": {}, "matchExpressions": []}}') == {"podSelector": {}}
    assert render.peer_of('{"ipBlock": {"cidr": "192.0.2.0/28", "except": []}}') == ADDRESS


@pytest.mark.parametrize("text", ["192.0.2.7", "{}", "[]", '{"cidr": "192.0.2.0/28"}', '{"ipBlock": "192.0.2.0/28"}', "nonsense"])
def test_another_peer_is_refused_by_the_option(text: str) -> None:
    with pytest.raises(ValueError, match=r"not JSON|must be an object"):
        render.peer_of(text)
    answer = CliRunner().invoke(app, ["run", f"--network-policy={text}"])
    assert answer.exit_code == 2 and f"--network-policy {text}: " in answer.output and "ipBlock" in answer.output
