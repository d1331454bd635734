"""What the API server's refusals mean, and what of a spec that cannot be read whole is read all the same.

- `psjob-operator check` where the API server does not give what was asked for: the sentence names the right next step.
- A way to the API server that cannot be used is told in a sentence.
- Whose fault a refused pod is: the spec's own ends the job, what a LimitRange or a webhook put there is waited for, by name.
- How long the watches try on, and what an operator is told that cannot stand for election.
- Every row of the table, from both sides of its limit; and the table itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from psjob_operator import render
from psjob_operator.__main__ import app
from psjob_operator.api.claim_template import claim_spec, retained
from psjob_operator.api.crd import node, schema
from psjob_operator.api.immutability import MUTABLE, SWITCHABLE, immutability_rules
from psjob_operator.api.rules import rules
from psjob_operator.api.spec import UpdateRule
from psjob_operator.api.status import CheckpointStatus, Pinned
from psjob_operator.api.template import template_rules
from psjob_operator.api.validate import MOST_PROBLEMS, validate_job
from psjob_operator.cluster import client, observe
from psjob_operator.cluster.client import (
    JOBS,
    PODS,
    ApiError,
    Cause,
    ConnectError,
    KubernetesClient,
    _event,
    _reply,
    causes,
    limit_words,
    limited,
    load_configuration,
    of_the_pod,
    ranges,
)
from psjob_operator.cluster.client import Path as PatiencePath
from psjob_operator.cluster.main import answer_words
from psjob_operator.cluster.observe import _lenient
from psjob_operator.cluster.watch import Patience
from psjob_operator.contract import UPDATE_RULES
from psjob_operator.plan.actions import CreateProcess
from psjob_operator.plan.observed_state import Refusal
from psjob_operator.plan.plan import OURS, plan
from tests.support.typed import CliRunner
from tests.unit.api_cases import PASSED, REFUSED
from tests.unit.api_manifest import GOOD, Case, changed
from tests.unit.plan_given import NOW, job, running, with_internal

POLICY = "pods \"x\" is forbidden: ValidatingAdmissionPolicy 'frozen' with binding 'frozen' denied request: failed expression: false"
WEBHOOK = 'admission webhook "guard.example.com" denied the request: spec.containers[0].image: not from our registry'
AWAY = 'Internal error occurred: failed calling webhook "guard.example.com": failed to call webhook: Post "https://guard": EOF'
FIELD = 'Pod "x" is invalid: spec.containers[0].volumeMounts[0].name: Not found: "data"'
STRICT = 'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.containers[0].imagePullPolice"'


def refusal(code: int, reason: str, message: str, causes: list[dict[str, str]] | None = None) -> ApiError:
    body: dict[str, Any] = {"kind": "Status", "reason": reason, "message": message, "details": {"causes": causes} if causes else None}
    with pytest.raises(ApiError) as raised:
        _reply(code, json.dumps(body).encode(), None)
    return raised.value


@pytest.mark.parametrize(
    ("code", "reason", "message", "causes", "definite", "denied", "invalid"),
    [
        (422, "Invalid", FIELD, [{"field": "spec.containers[0].volumeMounts[0].name", "message": "Not found"}], True, False, True),
        (422, "Invalid", POLICY, [{"message": "failed expression: false"}], True, True, False),
        (400, "BadRequest", STRICT, None, True, False, True),
        (400, "", WEBHOOK, None, True, True, False),
        (422, "Invalid", WEBHOOK, [{"field": "spec.containers[0].image"}], True, True, False),
        (409, "Conflict", WEBHOOK, None, True, True, False),
        (500, "InternalError", AWAY, None, True, True, False),
        (500, "InternalError", "etcdserver: request timed out", None, False, False, False),
        (403, "Forbidden", 'pods "x" is forbidden: exceeded quota: gpus', None, True, False, False),
        (429, "TooManyRequests", "try again later", None, True, False, False),
    ],
)
def test_who_says_no_and_whether_for_good(
    code: int, reason: str, message: str, causes: list[dict[str, str]] | None, definite: bool, denied: bool, invalid: bool
) -> None:
    error = refusal(code, reason, message, causes)
    assert (error.definite, error.denied, error.invalid) == (definite, denied, invalid)


@pytest.mark.parametrize(
    ("code", "message", "gone"),
    [
        (404, 'pods "x" not found', True),
        (409, "Precondition failed: UID in precondition: a, UID in object meta: b", True),
        (409, 'Operation cannot be fulfilled on Pod "x": the UID in the precondition (a) does not match the UID in record (b).', True),
        (409, "the object has been modified; please apply your changes to the latest version and try again", False),
        (409, WEBHOOK, False),
        (429, "try again later", False),
    ],
)
def test_what_was_to_be_deleted_is_gone_only_where_that_is_said(
    monkeypatch: pytest.MonkeyPatch, code: int, message: str, gone: bool
) -> None:
    async def refused(*_: object) -> dict[str, Any]:
        raise refusal(code, "", message)

    monkeypatch.setattr(KubernetesClient, "_call", refused)
    meant = KubernetesClient.__new__(KubernetesClient).delete(PODS, "ns", "x", "a")
    with contextlib.nullcontext() if gone else pytest.raises(ApiError):
        asyncio.run(meant)


@pytest.mark.parametrize("raw", [b"<html>sign in</html>", b"[]", b'"ok"', b"{", gzip.compress(b'{"items": []}', mtime=0), b"{}"])
def test_an_answer_that_cannot_be_read_is_no_empty_list(raw: bytes) -> None:
    """A list that seemed empty would tell that all pods have gone."""
    with pytest.raises(ApiError, match="no JSON object") as raised:
        _reply(200, raw, None)
    assert (raised.value.code, raised.value.definite) == (0, False), "it may have been carried out"
    assert _reply(200, b"", None) == {}


@pytest.mark.parametrize("line", [b"", b"<html>", b"[]", b'{"type": "ADDED"}', gzip.compress(b"{}", mtime=0)])
def test_a_line_of_a_watch_that_is_no_event_ends_that_watch_alone(line: bytes) -> None:
    with pytest.raises(ApiError, match="is no event") as raised:
        _event(line, "/api/v1/pods")
    assert raised.value.code == 0


@pytest.mark.parametrize(
    ("code", "reason", "message", "taken"),
    [
        (409, "AlreadyExists", 'pods "x" already exists', True),
        (409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "gpus": the object has been modified', False),
        (409, "Conflict", WEBHOOK, False),
        (409, "AlreadyExists", WEBHOOK, False),
        (403, "Forbidden", "exceeded quota: gpus", False),
    ],
)
def test_a_name_is_taken_only_where_an_object_of_it_exists(code: int, reason: str, message: str, taken: bool) -> None:
    assert refusal(code, reason, message).taken is taken


SPEC: dict[str, Any] = {
    "suspend": True,
    "managedBy": "example.com/other",
    "runPolicy": {"activeDeadlineSeconds": 60},
    "training": {"mode": "sync"},
    "shards": {"replicas": 3},
    "workers": {"replicas": 5, "template": {"spec": {"containers": []}}},
}
STATUS: dict[str, Any] = {"shards": [{}, {}], "workers": {"desired": 4}}


@pytest.mark.parametrize(
    "broken",
    [
        {"training": {"mode": "of the future"}},
        {"training": {"mode": "sync", "newField": 1}},
        {"newSection": {"a": [1, 2]}},
        {"checkpoint": {"periodSeconds": {"no": "number"}}},
        {"runPolicy": {"activeDeadlineSeconds": 60, "cleanPodPolicy": "Half"}},
    ],
)
def test_what_cannot_be_read_hides_nothing_else(broken: dict[str, Any]) -> None:
    spec = _lenient({**SPEC, **broken}, STATUS)
    assert spec.suspend is True and spec.managed_by == "example.com/other"
    assert spec.run_policy.active_deadline_seconds == 60
    assert (spec.shards.replicas, spec.workers.replicas) == (3, 5)


BROKEN_STAGES: dict[str, Any] = {"stages": [{"name": 7, "replicas": 3}, {"replicas": "x"}], "workers": {"template": {}}}


@pytest.mark.parametrize(
    "broken",
    [{"shards": {"replicas": "many"}, "workers": {"replicas": []}}, {"shards": "two", "workers": None}, {"shards": 2, **BROKEN_STAGES}],
)
def test_a_job_whose_size_cannot_be_read_has_that_of_its_status(broken: dict[str, Any]) -> None:
    spec = _lenient({**SPEC, **broken}, STATUS)
    assert (spec.shards.replicas, spec.workers.replicas, spec.suspend) == (2, 4, True)


@pytest.mark.parametrize(
    "broken", [{"shards": {"deep": []}}, {"managedBy": ["example.com/other"]}, {"managedBy": "example.com/other", "workers": [7]}]
)
def test_another_controllers_job_is_not_touched_whatever_its_spec_is_like(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "PRUNINGS", 1)
    spec = _lenient({**SPEC, "a": {"b": 1}, "runPolicy": {"backoffLimit": "x"}, **broken}, STATUS)
    assert spec.managed_by not in (None, OURS) and spec.suspend is True
    decided = plan(replace(running(), spec=spec, spec_problems=("spec.shards: must be of type object",)), NOW)
    assert not (decided.intent or decided.actions or decided.events or decided.wake_at or decided.want_progress)


def test_a_spec_too_deep_to_read_still_names_its_controller() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    spec = _lenient({**SPEC, "training": {"ruleOptions": deep}}, STATUS)
    assert (spec.managed_by, spec.suspend) == ("example.com/other", True)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ApiError(403, "Forbidden", "no list"), "refuses: 403 Forbidden: no list; give the operator the rights"),
        (ApiError(401, "Unauthorized", "who?"), "rbac.create"),
        (ApiError(0, "Connection", "nobody there"), "cannot be asked: Connection: nobody there; look at the kubeconfig"),
        (ApiError(503, "ServiceUnavailable", "later"), "does not answer as expected: 503 ServiceUnavailable: later; read its log"),
    ],
)
def test_each_kind_of_failure_has_its_next_step(error: ApiError, says: str) -> None:
    assert says in answer_words(error)


BROKEN = {
    "empty": "",
    "not yaml": "not: [yaml",
    "a list": "- 1\n",
    "no context": "apiVersion: v1\nkind: Config\n",
    "context without cluster": (
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: none, user: none}}]\n"
    ),
    "certificate without file": (
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1', certificate-authority: /nowhere/ca.crt}}]\n"
        "users: [{name: u, user: {}}]\n"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_no_kubeconfig(tmp_path: Path, what: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(BROKEN[what])
    with pytest.raises(ConnectError) as told:
        asyncio.run(load_configuration(str(file)))
    assert str(file) in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match="there is no file"):
        asyncio.run(load_configuration(str(tmp_path / "none")))


SHARD = {"name": "shard", "image": "a", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}, "env": [{"name": "A", "value": "1"}]}
BODY = {
    "metadata": {"labels": {"team": "a b"}},
    "spec": {"containers": [SHARD], "initContainers": [{"name": "psjob-inject", "image": "r"}]},
}
BOTH = {"spec": {"containers": [{"name": "a", "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": 1, "nvidia.com/gpu": 1}}}]}}
ASKED = "spec.containers[0].resources.requests"
CPU = 'Invalid value: "500m": must be less than or equal to cpu limit of 250m'


@pytest.mark.parametrize(
    ("field", "message", "body", "own"),
    [
        (ASKED, CPU, BODY, False),
        (ASKED, 'Invalid value: "2": must be less than or equal to cpu limit of 1', BOTH, True),
        (ASKED, 'Invalid value: "2": must be equal to nvidia.com/gpu limit of 1', BOTH, True),
        ("spec.containers[0].resources.requests[cpu]", 'Invalid value: "500m": must be an integer', BODY, True),
        ("spec.containers[0].image", "Required value", BODY, False),
        ("spec.containers[0].command", "Required value", BODY, True),
        ("spec.containers[1].image", "Required value", BODY, False),
        ("spec.initContainers[0].image", 'Invalid value: " x": must not have leading or trailing whitespace', BODY, False),
        ("spec.containers[0].env[0].name", 'Invalid value: "A": must not be so', BODY, True),
        ("spec.containers[0].env[3].name", 'Invalid value: "=": must not be so', BODY, False),
        ("metadata.labels", 'Invalid value: "a b": a valid label must be an empty string or …', BODY, True),
        ("metadata.labels", 'Invalid value: "c d": a valid label must be an empty string or …', BODY, False),
        ("spec.containers[0]", "Forbidden: may not be so", BODY, True),
        ("spec.volumes[0].name", 'Not found: "data"', BODY, False),
    ],
)  # fmt: skip
def test_a_fault_of_what_was_sent_is_the_specs_and_no_other_is(field: str, message: str, body: dict[str, Any], own: bool) -> None:
    assert of_the_pod((Cause(field, message),), body) is own
    assert of_the_pod((Cause("spec.nowhere", "Forbidden: not there"), Cause(field, message)), body) is own


@pytest.mark.parametrize(
    ("told", "message", "resources"),
    [
        ((Cause(ASKED, CPU), Cause(ASKED, CPU.replace("cpu", "memory"))), "", ("cpu", "memory")),
        ((), 'pods "p" is forbidden: maximum memory usage per Container is 256Mi, but limit is 1Gi', ("memory",)),
        ((), 'pods "p" is forbidden: [minimum cpu usage per Pod is 1, minimum memory usage per Pod is 1Gi]', ("cpu", "memory")),
        ((), "cpu max limit to request ratio per Container is 2, but no limit is specified or limit is 0", ("cpu",)),
        ((), "exceeded quota: gpus, requested: pods=1, used: pods=1, limited: pods=1", ()),
        ((Cause("spec.containers[0].image", "Required value"),), "", ()),
    ],
)  # fmt: skip
def test_a_limit_range_is_known_by_what_it_refuses(told: tuple[Cause, ...], message: str, resources: tuple[str, ...]) -> None:
    assert limited(told, message, BODY) == resources


def test_the_limit_range_is_named_with_what_to_do() -> None:
    found = [
        {"metadata": {"name": name}, "spec": {"limits": limits}}
        for name, limits in (
            ("defaults", [{"type": "Container", "default": {"cpu": "250m"}}]),
            ("disks", [{"type": "PersistentVolumeClaim", "max": {"cpu": "1"}}]),
            ("memory", [{"type": "Pod", "max": {"memory": "1Gi"}}]),
        )
    ]
    assert ranges(found, ("cpu",)) == ("defaults",)
    words = limit_words((Cause(ASKED, CPU),), "a long one", ("cpu",), ("defaults",), "team")
    minded = 'limits cpu: "500m": must be less than or equal to cpu limit of 250m; change it, or the template\'s resources'
    assert words == f"LimitRange defaults of namespace team {minded}"
    words = limit_words((), 'pods "p" is forbidden: minimum cpu usage per Pod is 1', ("cpu",), (), "team")
    assert words.startswith("a LimitRange of namespace team limits cpu: minimum cpu usage per Pod is 1; ")


@pytest.mark.parametrize("details", [None, [], {"causes": None}, {"causes": [None, {"field": ""}, {"message": "x"}]}])
def test_details_that_name_no_field_are_no_causes(details: Any) -> None:
    assert causes(details) == ()


def _resources(asks_nothing: bool = False, **spec: Any) -> list[dict[str, Any]]:
    process = CreateProcess("shard", 0, 1, 1, "job-shard-0-a1", pinned=Pinned(runtime_image="r:1", container="worker", key=1))
    made = render.Pods(job(**spec), asks_nothing=asks_nothing).pod(process)["spec"]
    return [made["containers"][0].get("resources", {}), made["initContainers"][0]["resources"]]


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ({}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"cpu": "250m", "memory": "512Mi"}}, {"cpu": "250m", "memory": "512Mi"}),
        ({"limits": {"cpu": 0.25}}, {"cpu": 0.25, "memory": "1Gi"}),
        ({"limits": {"cpu": 4, "memory": "64Gi"}}, {"cpu": "500m", "memory": "1Gi"}),
        ({"limits": {"memory": "512Mi"}, "requests": {"memory": "256Mi"}}, {"cpu": "500m", "memory": "256Mi"}),
    ],
)
def test_a_shard_never_asks_for_more_than_its_limits(given: dict[str, Any], requests: dict[str, Any]) -> None:
    asked = _resources(shards={"template": {"spec": {"containers": [{"name": "shard", "resources": given}]}}})
    assert [it["requests"] for it in asked] == [requests, requests]


def test_a_template_that_speaks_of_the_whole_pod_has_no_requests_of_psjobs_beside_it() -> None:
    container, _ = _resources(shards={"template": {"spec": {"resources": {"limits": {"memory": "512Mi"}}}}})
    assert container == {}


def test_what_psjob_asks_for_by_itself_gives_way_and_what_a_template_says_does_not() -> None:
    assert _resources(asks_nothing=True) == [{}, {}]
    given = {"requests": {"cpu": "500m"}}
    assert _resources(True, shards={"template": {"spec": {"containers": [{"name": "shard", "resources": given}]}}}) == [given, given]
    process = CreateProcess("worker", 0, 1, 1, "job-worker-0-r1", pinned=Pinned(runtime_image="r:1", container="worker", key=1))
    inits = [render.Pods(job(), asks_nothing=asks).pod(process)["spec"]["initContainers"][0]["resources"] for asks in (False, True)]
    assert inits == [{"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "100m", "memory": "64Mi"}}, {}]


def test_a_template_of_which_a_checkpoint_was_made_ends_no_job_when_it_is_resumed() -> None:
    begun = running()
    assert begun.status is not None
    for step, phase in ((0, "Failed"), (7, "Pending")):
        kept = CheckpointStatus(step=step, time="2026-01-01T00:00:00Z") if step else None
        slept = with_internal(begun.status, ready_time=None, lost_time=None)
        status = slept.model_copy(update={"start_time": None, "conditions": (), "checkpoint": kept})
        resumed = plan(replace(begun, processes=(), status=status), NOW)
        name = next(iter(sorted(resumed.grants)))
        refusal = Refusal(name, 422, "spec.containers[0].image: Required value", NOW, 1, invalid=True)
        again = replace(begun, processes=(), status=resumed.status, granted=resumed.grants, refusals=(refusal,))
        assert plan(again, NOW + 1).status.phase == phase


def test_an_outage_is_waited_for_and_a_refusal_is_not() -> None:
    patience = Patience()
    pauses = list(itertools.islice(patience, 1000))
    assert pauses[:5] == [1, 2, 3, 5, 5] and max(pauses) == 5 and sum(pauses) > 600, "ten minutes and more, and soon back"
    assert list(itertools.islice(patience, 3)) == [1, 2, 3], "each request begins anew"
    patience.refused.add((PODS, ""))
    assert sum(patience) < 60


def test_one_namespace_of_two_that_refuses_us_ends_nothing() -> None:
    patience = Patience(2)
    patience.refused.add((JOBS, "a"))
    assert sum(itertools.islice(patience, 1000)) > 600
    patience.refused.add((JOBS, "b"))
    assert sum(patience) < 60


def test_a_lease_without_a_namespace_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(client, "NAMESPACE_FILE", PatiencePath(f"{tmp_path}/none"))
    done = CliRunner().invoke(app, ["run", "--lease=psjob"])
    assert done.exit_code == 2 and "--lease psjob: give --lease-namespace too" in done.output


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_refused_with_field_and_sentence(case: Case) -> None:
    job, problems = validate_job(case.manifest())
    assert job is None
    lines = [str(problem) for problem in problems]
    assert any(line.startswith(case.field) and case.sentence in line for line in lines), lines
    assert all("\n" not in line and "Traceback" not in line for line in lines)


@pytest.mark.parametrize("case", PASSED, ids=lambda case: case.name)
def test_passed(case: Case) -> None:
    job, problems = validate_job(case.manifest())
    assert [str(problem) for problem in problems] == []
    assert job is not None


def test_the_smallest_manifest_gets_the_defaults() -> None:
    job, _ = validate_job(GOOD)
    assert job is not None
    assert job.spec.training.mode == "sync"
    assert job.spec.training.seed == 0
    assert job.spec.training.update_at is None
    assert job.spec.checkpoint.period_seconds == 30
    assert (job.spec.checkpoint.keep, retained(job.spec.checkpoint)) == (3, True)
    assert claim_spec(job.spec.checkpoint.volume_claim_template) == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    }
    assert (job.spec.run_policy.backoff_limit, job.spec.run_policy.clean_pod_policy) == (6, "Running")
    assert (job.spec.suspend, job.spec.managed_by, job.spec.injection) == (None, None, "Auto")


def test_judging_changes_nothing() -> None:
    raw = copy.deepcopy(GOOD)
    validate_job(raw)
    assert raw == GOOD


def test_a_null_stands_for_the_default_as_on_the_api_server() -> None:
    job, problems = validate_job(changed(GOOD, {"spec.checkpoint": {"keep": None}, "spec.training": None, "spec.suspend": None}))
    assert problems == []
    assert job is not None
    assert job.spec.checkpoint.keep == 3


def test_every_row_has_a_place_in_the_schema_and_words() -> None:
    whole = schema()
    for rule in (*rules(), *template_rules(), *immutability_rules(whole)):
        if rule.cel:
            assert node(whole, rule.at)
        assert rule.limit
        assert rule.remedy
        assert "\n" not in rule.message
        if rule.about:
            assert node(whole, ".".join(part for part in (rule.at, rule.about) if part)) is not None


def test_every_row_with_a_check_is_broken_by_a_case() -> None:
    """A row that no case breaks is a row that nobody has seen work."""
    broken = set()
    for case in REFUSED:
        broken |= {problem.limit for problem in validate_job(case.manifest())[1]}
    missing = [rule.limit for rule in (*rules(), *template_rules()) if rule.limit not in broken]
    assert missing == []


def test_every_field_of_the_spec_is_fixed_or_named_as_changeable() -> None:
    whole = schema()
    fixed = {".".join(part for part in (rule.at, rule.about) if part) for rule in immutability_rules(whole)}
    changeable = {*MUTABLE, *SWITCHABLE}
    assert not fixed & set(MUTABLE)

    def leaves(at: str, part: dict[str, Any]) -> list[str]:
        inner = part.get("properties", {})
        if not inner or at in fixed or at in changeable:
            return [at]
        return [leaf for name, child in inner.items() for leaf in leaves(f"{at}.{name}", child)]

    assert set(leaves("spec", whole["properties"]["spec"])) <= fixed | changeable


def test_a_manifest_names_the_rules_that_the_runtime_serves() -> None:
    assert get_args(UpdateRule) == tuple(UPDATE_RULES)


def test_a_rule_that_the_api_server_does_not_say_names_the_obstacle() -> None:
    for rule in (*rules(), *template_rules()):
        assert bool(rule.obstacle) != rule.at_admission, (rule.at, rule.limit)
    outside = {rule.about or rule.at for rule in rules() if not rule.at_admission}
    assert outside == {"workers.processes"}, "all others the API server says"


@pytest.mark.parametrize("path_and_value", [
    ("spec", {f"x{number}": 1 for number in range(9000)}),
    ("spec.runPolicy", {"podFailurePolicy": {"rules": [{"action": 1}] * 7000}}),
    ("spec.workers.template.spec.containers", [{}] * 30_000),
], ids=["unknown fields", "rules", "containers"])  # fmt: skip
def test_of_many_problems_the_first_are_told(path_and_value: tuple[str, Any]) -> None:
    """Each takes time."""
    path, value = path_and_value
    job, problems = validate_job(changed(GOOD, {path: value}))
    assert job is None and MOST_PROBLEMS < len(problems) <= 2 * MOST_PROBLEMS + 10
    assert any("more problems" in str(problem) for problem in problems)
