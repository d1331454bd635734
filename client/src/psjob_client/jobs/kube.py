"""The way of a person to a cluster: the operator's client with a user's kubeconfig, and what only people ask for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.config.config_exception import ConfigException

from psjob_client.local.status import shaped
from psjob_client.problems import Conflict, JobProblem, NotAllowed, NotServed, Step, Unreachable
from psjob_operator import __version__, keys
from psjob_operator.cluster.client import (
    JOBS,
    ApiError,
    Client,
    ConnectError,
    Limits,
    ResourceKind,
    in_cluster,
    kubeconfig_path,
    load_configuration,
)
from psjob_operator.cluster.progress import answers, bounded, nonce_of, parse
from psjob_operator.contract import ANSWER_HEADER, CHALLENGE_PATH, PROOF_HEADER, STATUS_PORT

MANAGER = "psjob"
SECONDS = 15.0
"""For one call."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CRD_MISSING = (
    "the cluster has no PSTrainingJob: install the operator as docs/install.md says, On a cluster, "
    "or only the CRD with `psjob crd | kubectl apply -f -`"
)


@dataclass(frozen=True)
class Reach:
    """Which cluster, and where in it."""

    context: str
    """Of the kubeconfig; in-cluster in a pod."""
    namespace: str
    host: str

    def __str__(self) -> str:
        """`kind/team-a`."""
        return f"{self.context}/{self.namespace}"


class KubeClient(Client):
    """With the verbs that the operator never needs."""

    async def merge(self, kind: ResourceKind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge patch of an object, checked strictly."""
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        return await self._call("PATCH", kind.path(namespace, name), query, body, content="application/merge-patch+json")

    async def told_by(self, pod: str, path: str, questions: bytes, seconds: float) -> dict[str, Any] | None:
        """The JSON object that the status port of this pod proves to be its answer to `path`, read as a stranger's.

        None where there is none, or no answer in so many seconds."""
        base = f"{pod}:{STATUS_PORT}/proxy"
        try:
            async with asyncio.timeout(seconds):
                async with self._request("GET", base + CHALLENGE_PATH, None, None, "") as reply:
                    nonce = nonce_of(await bounded(reply.content)) if reply.status == 200 else ""
                proof = {PROOF_HEADER: f"{nonce} {keys.question(questions, nonce, path)}"}
                async with self._request("GET", base + path, None, None, "", proof=proof) as reply:
                    raw = await bounded(reply.content) if nonce and reply.status == 200 else None
                    if raw is None or not answers(questions, nonce, path, raw, reply.headers.get(ANSWER_HEADER)):
                        return None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None
        clean = parse(raw)
        return None if clean is None else shaped(clean)

    async def lines(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[str]:
        """The text at `path`, a line at a time, until the API server ends it. Raises ApiError."""
        try:
            request = await self._api.param_serialize(
                "GET", path, query_params=list(query.items()), header_params={"Accept": "*/*"}, auth_settings=["BearerToken"]
            )
            # No deadline for the whole: a log that is followed is quiet for as long as its process is.
            response = await self._api.call_api(*request, _request_timeout=aiohttp.ClientTimeout(total=None, sock_connect=SECONDS))
            if response.status >= 400:
                raise ApiError(response.status, "Unknown", (await response.read())[:500].decode("utf-8", "replace"))
            rest = b""
            async for chunk in response.response.content.iter_any():
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield line.decode("utf-8", "replace")
            if rest:
                yield rest.decode("utf-8", "replace")
        except (aiohttp.ClientError, ApiException, OSError, TimeoutError) as error:
            raise ApiError(0, "Connection", str(error)) from error


async def reach(context: str | None, namespace: str | None, config: str | None = None) -> tuple[KubeClient, Reach]:
    """A client for `context` (the current one) and the place that it means; `namespace` absent: that of the context.

    Raises:
        Unreachable: there is no kubeconfig, or it cannot be used.
    """
    try:
        configuration = await load_configuration(config, context)
    except ConnectError as error:
        why = str(error)
        why_here = Step(why.replace("--kubeconfig FILE", "kubeconfig=FILE").replace("--kubeconfig", "kubeconfig"), why)
        local = Step("`psjob.Client.local()`", "add --local")
        raise Unreachable("no cluster can be reached: ", why_here, "; runs of this machine: ", local) from None
    name, own = ("in-cluster", _own_namespace()) if in_cluster(config) else _context(kubeconfig_path(config), context)
    client = KubeClient(configuration, Limits(qps=50.0, burst=100, timeout=SECONDS), f"psjob/{__version__}", MANAGER)
    return client, Reach(name, (own or "default") if namespace is None else namespace, str(configuration.host))


def said(error: ApiError, where: Reach) -> JobProblem:
    """What the API server, or nobody, answered, as one sentence with the next step."""
    message = " ".join(error.message.split())
    if error.code == 0:
        return Unreachable(
            f"the cluster of context {where.context} at {where.host} gives no answer ({message[:200]}); "
            f"check it with `kubectl --context {where.context} version`, or name another ",
            Step("context: `psjob.Client.kube(context=…)`", "--context"),
        )
    if error.code == 401:
        return NotAllowed(f"the cluster does not accept the credentials of context {where.context}: {message}; log in again")
    if error.code == 403:
        return NotAllowed(
            f"the cluster refuses: {message}; ask for the right, `kubectl auth can-i --list -n {where.namespace}` shows yours"
        )
    if error.code == 404 and "could not find the requested resource" in message:
        return NotServed(CRD_MISSING)
    if error.code in (409, 422):
        return Conflict(f"the cluster refuses: {message}")
    return JobProblem(f"the cluster answers {error.code} {error.reason}: {message}; try again, or look at `kubectl get pstrainingjobs`")


async def served(client: KubeClient) -> bool:
    """Does the cluster know PSTrainingJob? True where that cannot be asked."""
    try:
        return await client.served(JOBS)
    except ApiError:
        return True


def _context(path: str, name: str | None) -> tuple[str, str]:
    try:
        contexts, current = kubeconfig.list_kube_config_contexts(path)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError):
        return name or "current", ""
    found = next((one for one in contexts if one.get("name") == name), current) if name else current
    return str(found.get("name") or "current"), str((found.get("context") or {}).get("namespace") or "")


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return os.environ.get("POD_NAMESPACE", "")
