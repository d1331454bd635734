"""The API server over plain requests, so that its words and codes come back as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3

JOBS = "/apis/psjob.dev/v1alpha1/namespaces/{namespace}/pstrainingjobs"


class Api:
    """One connection to the API server of a kubeconfig."""

    def __init__(self, kubeconfig: str | Path) -> None:
        found = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=found)
        trust: dict[str, Any] = {"ca_certs": found.ssl_ca_cert} if found.verify_ssl else {"cert_reqs": "CERT_NONE"}
        self._pool = urllib3.PoolManager(cert_file=found.cert_file, key_file=found.key_file, **trust)
        self._host = found.host
        self._token = found.get_api_key_with_prefix("authorization") or found.get_api_key_with_prefix("BearerToken")

    def call(self, method: str, path: str, body: Any = None, content: str = "application/json") -> tuple[int, dict[str, Any]]:
        """Status code and answer; an error of the API server is an answer, not an exception."""
        headers = {"Accept": "application/json", "Content-Type": content}
        if self._token:
            headers["Authorization"] = self._token
        data = None if body is None else json.dumps(body).encode()
        answer = self._pool.request(method, self._host + path, body=data, headers=headers, timeout=30, retries=False)
        return answer.status, json.loads(answer.data)

    def create(self, namespace: str, job: dict[str, Any], *, dry: bool = False) -> tuple[int, dict[str, Any]]:
        """POST as kubectl does: unknown fields are refused."""
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry else "")
        return self.call("POST", JOBS.format(namespace=namespace) + query, job)

    def get(self, namespace: str, name: str) -> dict[str, Any]:
        """The job as it is stored."""
        return self.call("GET", f"{JOBS.format(namespace=namespace)}/{name}")[1]

    def merge(self, namespace: str, name: str, patch: dict[str, Any], *, status: bool = False) -> tuple[int, dict[str, Any]]:
        """JSON merge patch of the job, or of its status."""
        path = f"{JOBS.format(namespace=namespace)}/{name}{'/status' if status else ''}?fieldValidation=Strict"
        return self.call("PATCH", path, patch, "application/merge-patch+json")

    def change(self, namespace: str, patch: dict[str, Any], *, status: bool = False) -> str:
        """What the API server says to a merge patch of the job `digits` that it refuses as invalid; empty where it takes it."""
        code, answer = self.merge(namespace, "digits", patch, status=status)
        assert code in (200, 422), answer
        return str(answer["message"]) if code == 422 else ""

    def replace(self, namespace: str, job: dict[str, Any], *, status: bool = False) -> tuple[int, dict[str, Any]]:
        """PUT of the whole object."""
        path = f"{JOBS.format(namespace=namespace)}/{job['metadata']['name']}{'/status' if status else ''}"
        return self.call("PUT", path, job)
