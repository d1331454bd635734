"""Rights and audit events are compared resource by resource, subresources included."""

from __future__ import annotations

from tests.rights import Right, granted, unused, used

RULES = [
    {"apiGroups": ["psjob.dev"], "resources": ["pstrainingjobs/status", "pstrainingjobs/finalizers"], "verbs": ["patch", "update"]},
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
]
STATUS = {"verb": "patch", "objectRef": {"apiGroup": "psjob.dev", "resource": "pstrainingjobs", "subresource": "status", "name": "j"}}


def test_what_is_granted_and_never_used_is_named() -> None:
    assert used([STATUS, {"verb": "get", "requestURI": "/readyz"}]) == {Right("psjob.dev", "pstrainingjobs/status", "patch")}
    left = unused(RULES, [STATUS])
    assert left == {
        Right("psjob.dev", "pstrainingjobs/status", "update"),
        Right("psjob.dev", "pstrainingjobs/finalizers", "patch"),
        Right("", "pods", "get"),
    }, "update of finalizers is never called"
    assert len(granted(RULES)) == 5
