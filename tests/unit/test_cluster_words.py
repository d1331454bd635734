"""What the API server's refusals mean, and what of a spec that cannot be read whole is read all the same."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from dataclasses import replace
from typing import Any

import pytest

from psjob_operator.cluster import observe
from psjob_operator.cluster.client import PODS, ApiError, Client, _event, _reply
from psjob_operator.cluster.observe import _lenient
from psjob_operator.plan.holds import OURS
from psjob_operator.plan.plan import plan
from tests.unit.plan_given import NOW, running

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

    monkeypatch.setattr(Client, "_call", refused)
    meant = Client.__new__(Client).delete(PODS, "ns", "x", "a")
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
    "ps": {"shards": 3},
    "workers": {"replicas": 5, "template": {"spec": {"containers": []}}},
}
STATUS: dict[str, Any] = {"shards": [{}, {}], "workers": {"desired": 4}}


@pytest.mark.parametrize(
    "broken",
    [
        {"training": {"mode": "of the future"}},
        {"training": {"mode": "sync", "newField": 1}},
        {"newSection": {"a": [1, 2]}},
        {"checkpoint": {"interval": {"no": "text"}}},
        {"runPolicy": {"activeDeadlineSeconds": 60, "cleanPodPolicy": "Half"}},
    ],
)
def test_what_cannot_be_read_hides_nothing_else(broken: dict[str, Any]) -> None:
    spec = _lenient({**SPEC, **broken}, STATUS)
    assert spec.suspend is True and spec.managed_by == "example.com/other"
    assert spec.run_policy.active_deadline_seconds == 60
    assert (spec.ps.shards, spec.workers.replicas) == (3, 5)


BROKEN_STAGES: dict[str, Any] = {"stages": [{"name": 7, "replicas": 3}, {"replicas": "x"}], "workers": {"template": {}}}


@pytest.mark.parametrize(
    "broken", [{"ps": {"shards": "many"}, "workers": {"replicas": []}}, {"ps": "two", "workers": None}, {"ps": 2, **BROKEN_STAGES}]
)
def test_a_job_whose_size_cannot_be_read_has_that_of_its_status(broken: dict[str, Any]) -> None:
    spec = _lenient({**SPEC, **broken}, STATUS)
    assert (spec.ps.shards, spec.workers.replicas, spec.suspend) == (2, 4, True)


@pytest.mark.parametrize(
    "broken", [{"ps": {"deep": []}}, {"managedBy": ["example.com/other"]}, {"managedBy": "example.com/other", "workers": [7]}]
)
def test_another_controllers_job_is_not_touched_whatever_its_spec_is_like(broken: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "PRUNINGS", 1)
    spec = _lenient({**SPEC, "a": {"b": 1}, "runPolicy": {"backoffLimit": "x"}, **broken}, STATUS)
    assert spec.managed_by not in (None, OURS) and spec.suspend is True
    decided = plan(replace(running(), spec=spec, spec_problems=("spec.ps: must be of type object",)), NOW)
    assert not (decided.intent or decided.actions or decided.events or decided.wake_at or decided.want_progress)


def test_a_spec_too_deep_to_read_still_names_its_controller() -> None:
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"a": deep}
    spec = _lenient({**SPEC, "training": {"ruleOptions": deep}}, STATUS)
    assert (spec.managed_by, spec.suspend) == ("example.com/other", True)
