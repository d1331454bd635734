"""What keeps objects of some jobs from being stored, by the API server's own means: policy, webhook (one that is away too), quota,
limit range, pod security."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hack.cluster.api import ApiError
from hack.cluster.pki import Authority
from tests.integration.operator_harness import World, until

REGISTRATION = "/apis/admissionregistration.k8s.io/v1"
LABEL = "psjob.dev/job-name"
PODS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
STATUS = {"apiGroups": ["psjob.dev"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["pstrainingjobs/status"]}
SPECS: dict[str, dict[str, Any]] = {
    "pods": {"kind": "Pod", "spec": {"containers": [{"name": "worker", "image": "none"}]}},
    "services": {"kind": "Service", "spec": {"clusterIP": "None", "selector": {"a": "b"}}},
    "configmaps": {"kind": "ConfigMap"},
    "persistentvolumeclaims": {
        "kind": "PersistentVolumeClaim",
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    },
}
"""A small object of each kind, to ask whether its creation is denied yet."""


def of_core(kind: str, *operations: str) -> dict[str, Any]:
    """The rule for these operations on a core kind."""
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": list(operations), "resources": [kind]}


def chosen(place: World, jobs: Sequence[str]) -> dict[str, Any]:
    """What is labelled as of only these jobs."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place.namespace}},
        "objectSelector": {"matchExpressions": [{"key": LABEL, "operator": "In", "values": list(jobs)}]},
    }


@contextlib.contextmanager
def policy(place: World, jobs: Sequence[str], rule: dict[str, Any] = PODS, probe: Callable[[], Any] | None = None) -> Iterator[None]:
    """A ValidatingAdmissionPolicy: 422, reason Invalid. `probe` does a dry run of what is to be denied."""
    name = f"{place.namespace}-{jobs[0]}"
    api = "admissionregistration.k8s.io/v1"
    validation = {"expression": "false", "message": "nothing new today"}
    spec = {"matchConstraints": {"resourceRules": [rule]}, "validations": [validation], "failurePolicy": "Fail"}
    bound = {"policyName": name, "validationActions": ["Deny"], "matchResources": chosen(place, jobs)}
    place.cluster.api.create(
        f"{REGISTRATION}/validatingadmissionpolicies",
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec},
    )
    place.cluster.api.create(
        f"{REGISTRATION}/validatingadmissionpolicybindings",
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": bound},
    )
    try:
        _until_denied(probe or creation(place, jobs[0], rule["resources"][0]))
        yield
    finally:
        for kind in ("validatingadmissionpolicybindings", "validatingadmissionpolicies"):
            place.cluster.api.delete(f"{REGISTRATION}/{kind}/{name}")


@contextlib.contextmanager
def webhook(place: World, jobs: Sequence[str], folder: Path, code: int | None) -> Iterator[None]:
    """A webhook that denies with this code (0: with none); None: nobody answers at its address, and its failurePolicy is Fail."""
    name = f"{place.namespace}-{jobs[0]}"
    authority = Authority(folder / f"pki-{jobs[0]}")
    authority.create()
    pair = authority.server("webhook", "webhook", ("127.0.0.1",))
    with _answering(pair.cert, pair.key, code) as address:
        hook = {
            "name": "guard.example.com",
            "clientConfig": {"url": address, "caBundle": base64.b64encode(authority.ca.cert.read_bytes()).decode()},
            "rules": [PODS],
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
            "failurePolicy": "Fail",
            "timeoutSeconds": 1,
            **chosen(place, jobs),
        }
        body = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": name},
            "webhooks": [hook],
        }
        place.cluster.api.create(f"{REGISTRATION}/validatingwebhookconfigurations", body)
        try:
            _until_denied(creation(place, jobs[0], "pods"))
            yield
        finally:
            place.cluster.api.delete(f"{REGISTRATION}/validatingwebhookconfigurations/{name}")


@contextlib.contextmanager
def _answering(cert: Path, key: Path, code: int | None) -> Iterator[str]:
    class Deny(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if code is None:
                over.wait(30)
                return
            status = {"message": "not from our registry", **({"code": code} if code else {})}
            answer = {"uid": review["request"]["uid"], "allowed": False, "status": status}
            body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *words: object) -> None:
            """Nothing."""

    over = threading.Event()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Deny) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}/"
        finally:
            over.set()
            server.shutdown()


@contextlib.contextmanager
def pod_security(place: World, jobs: Sequence[str]) -> Iterator[None]:
    """The namespace takes only restricted pods, from now on."""
    path, key = f"/api/v1/namespaces/{place.namespace}", "pod-security.kubernetes.io/enforce"
    place.cluster.api.merge(path, {"metadata": {"labels": {key: "restricted"}}})
    try:
        _until_denied(creation(place, jobs[0], "pods"))
        yield
    finally:
        place.cluster.api.merge(path, {"metadata": {"labels": {key: None}}})


@contextlib.contextmanager
def inside(place: World, jobs: Sequence[str], kind: str, spec: dict[str, Any]) -> Iterator[None]:
    """A ResourceQuota or LimitRange, which holds for all of the namespace."""
    name = f"full-{jobs[0]}"
    place.make(kind, name, spec=spec)
    try:
        _until_denied(creation(place, jobs[0], "pods"))
        yield
    finally:
        place.cluster.api.delete(place.path(f"{kind.lower()}s", name))


def creation(place: World, job: str, kind: str) -> Callable[[], Any]:
    """A dry run of the creation of an object of that kind, as of that job."""
    body = {"apiVersion": "v1", "metadata": {"generateName": "probe-", "labels": {LABEL: job}}, **SPECS[kind]}
    return lambda: place.cluster.api.create(f"{place.path(kind)}?dryRun=All", body, or_exists=False)


def _until_denied(probe: Callable[[], Any]) -> None:
    """The API server learns of policies and webhooks a moment after they are stored."""

    def denied() -> bool:
        try:
            probe()
        except ApiError:
            return True
        return False

    until("the denial to hold", denied, 20)
