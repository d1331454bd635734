"""The Kubernetes API in a few verbs over raw dicts: the only file that knows the official client.

load_configuration finds the way to the API server. Client has the verbs, for the kinds that the operator reads and writes. An answer that
is no success is an ApiError; of_the_pod says whether a refused pod can never be, or may be later.
Every call has a deadline, passes a token bucket where one is wanted, and names us in its User-Agent.
Nothing is retried here: whether a write may be repeated is the caller's knowledge.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import yaml
from kubernetes.aio import config as kubeconfig
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.config_exception import ConfigException
from yarl import URL

from psjob_operator import __version__

MANAGER = "psjob-operator"
PAGE = 500
CONNECT_SECONDS, WATCH_SECONDS, WATCH_SILENCE = 15.0, 600, 150.0


class JobKey(NamedTuple):
    """One job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class ResourceKind:
    """One served resource."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str = "", name: str = "") -> str:
        """Path of one object, or of the collection; an empty namespace means all of them, or a kind without one."""
        place = f"/namespaces/{namespace}" if namespace else ""
        return f"{self.root}{place}/{self.plural}" + (f"/{name}" if name else "")


@dataclass(frozen=True)
class Listing:
    """Objects of a kind at one moment: all of them, or a page."""

    items: Sequence[dict[str, Any]]
    version: int
    """The resourceVersion of that moment."""


JOBS = ResourceKind("psjob.dev", "v1alpha1", "pstrainingjobs", "PSTrainingJob")
PODS = ResourceKind("", "v1", "pods", "Pod")
SERVICES = ResourceKind("", "v1", "services", "Service")
CONFIGS = ResourceKind("", "v1", "configmaps", "ConfigMap")
CLAIMS = ResourceKind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SECRETS = ResourceKind("", "v1", "secrets", "Secret")
NODES = ResourceKind("", "v1", "nodes", "Node")
LIMIT_RANGES = ResourceKind("", "v1", "limitranges", "LimitRange")
CORE_EVENTS = ResourceKind("", "v1", "events", "Event")
EVENTS = ResourceKind("events.k8s.io", "v1", "events", "Event")
POLICIES = ResourceKind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
LEASES = ResourceKind("coordination.k8s.io", "v1", "leases", "Lease")

WATCHED: tuple[ResourceKind, ...] = (JOBS, PODS, SERVICES, CONFIGS, CLAIMS, POLICIES)
CHILDREN: tuple[ResourceKind, ...] = (PODS, SERVICES, CONFIGS, CLAIMS, POLICIES)
OPTIONAL = frozenset({POLICIES})
"""Watched only if they are made, and done without where they may not be read."""
_COLLECTIONS = frozenset(kind.plural for kind in (*WATCHED, CORE_EVENTS))


ADMISSION = ('admission webhook "', "failed calling webhook ", "ValidatingAdmissionPolicy '")
"""Words of the API server where admission speaks; a webhook chooses its code itself."""
UNREADABLE = ("strict decoding error", "cannot be handled as a ")
"""Its words for what is no object of that kind."""
OTHER_UID = ("UID in", "precondition")
"""Its words where the object of that name is another one than was meant."""


class ApiError(Exception):
    """A call that did not succeed.

    `code` is the HTTP status, or 0 where no answer came that can be read (the call may or may not have been carried out).
    `reason` is the API server's word (AlreadyExists, Conflict, Invalid, …) or ours (Timeout, Connection, Unreadable).
    `message` is its sentence; `retry_after` seconds, where it named them; `causes`: the fields that it names as wrong.
    """

    def __init__(self, code: int, reason: str, message: str, retry_after: float = 0.0, causes: tuple[Cause, ...] = ()) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else f"{reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.causes = causes

    @property
    def definite(self) -> bool:
        """Whether the API server said that it did not carry the call out."""
        return 400 <= self.code < 500 or self.denied

    @property
    def denied(self) -> bool:
        """An admission policy or webhook said no, or is out of reach, whatever code came with it: it may pass."""
        return any(word in self.message for word in ADMISSION)

    @property
    def taken(self) -> bool:
        """An object of that name is there. A Conflict on the way, as quota has them, says nothing of the kind: nothing was made."""
        return self.code == 409 and self.reason == "AlreadyExists" and not self.denied

    @property
    def invalid(self) -> bool:
        """The API server's own validation refused the object as it was after admission: see `refusals` for whose fault that is."""
        if self.denied:
            return False
        return (self.code == 422 and bool(self.causes)) or (self.code == 400 and any(word in self.message for word in UNREADABLE))


@dataclass(frozen=True)
class Limits:
    """How much the client may ask of the API server."""

    qps: float | None = None
    """None: as many as it takes; the API server shares itself out (API priority and fairness), and says when it is too much."""
    burst: int = 400
    timeout: float = 15.0
    """Seconds for one call, its reply read."""


class Observer(Protocol):
    """Is called after every request."""

    def answered(self, verb: str, path: str, code: int, seconds: float) -> None:
        """The API server answered."""

    def unanswered(self, verb: str, path: str, seconds: float) -> None:
        """No answer came."""

    def failed(self, code: int, reason: str) -> None:
        """It came to this ApiError."""


class _Nobody:
    def answered(self, verb: str, path: str, code: int, seconds: float) -> None:
        return

    def unanswered(self, verb: str, path: str, seconds: float) -> None:
        return

    def failed(self, code: int, reason: str) -> None:
        return


class KubernetesClient:
    """Get, list, create, apply, patch status, delete, and read a path: all answer the object as a dict or raise ApiError."""

    def __init__(
        self, configuration: Configuration, limits: Limits, agent: str, manager: str = MANAGER, observer: Observer | None = None
    ) -> None:
        configuration.retries = None
        self._configuration = configuration
        self._api = ApiClient(configuration)
        self._session: aiohttp.ClientSession | None = None
        self._agent = agent
        self._proxy = configuration.proxy or _proxy(configuration.host)
        self._limits = limits
        self._manager = manager
        self._bucket = None if limits.qps is None else TokenBucket(limits.qps, limits.burst)
        self._observer = observer or _Nobody()
        self.before_write: Callable[[], None] = lambda: None
        """Called before each call that changes something; what it raises is raised, and nothing is sent."""

    async def get(self, kind: ResourceKind, namespace: str, name: str) -> dict[str, Any]:
        """One object; ApiError 404 where it is not."""
        return await self._call("GET", kind.path(namespace, name))

    async def list(self, kind: ResourceKind, namespace: str, labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        """All objects of a kind, an empty namespace meaning all of them."""
        return [item async for page in self.pages(kind, namespace, labels, fields) for item in page.items]

    async def pages(self, kind: ResourceKind, namespace: str, labels: str = "", fields: str = "") -> AsyncIterator[Listing]:
        """As `list`, a page of PAGE objects at a time, so that no more need be held. All are of one moment, read from etcd."""
        query: dict[str, Any] = {"limit": PAGE}
        if labels:
            query["labelSelector"] = labels
        if fields:
            query["fieldSelector"] = fields
        while True:
            page = await self._call("GET", kind.path(namespace), query)
            metadata = page.get("metadata") or {}
            yield Listing(page.get("items") or [], int(metadata.get("resourceVersion") or 0))
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def watch(
        self, kind: ResourceKind, namespace: str, version: str, labels: str = "", opened: Callable[[], None] = lambda: None
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """(type, object) of each change after `version`, until the API server ends it, which is no error. Raises ApiError, 410 if
        `version` is too old; an event of type ERROR may say so too. Silence that is longer than WATCH_SILENCE is a lost connection:
        bookmarks come about once a minute. `opened` is called when the API server has granted it."""
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        if labels:
            query["labelSelector"] = labels
        path, began = kind.path(namespace), time.monotonic()
        try:
            async with self._request("GET", path, query, None, "", silence=WATCH_SILENCE) as response:
                self._observer.answered("watch", path, response.status, time.monotonic() - began)
                if response.status != 200:
                    _reply(response.status, await response.read(), response.headers.get("Retry-After"))
                opened()
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield _event(line, path)
        except TimeoutError as error:
            raise ApiError(0, "Timeout", f"the watch of {path} has sent nothing for {WATCH_SILENCE:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "Connection", f"watch {path}: {error}") from error

    async def create(self, kind: ResourceKind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST, checked strictly: unknown and doubled fields are refused by the API server."""
        return await self._call("POST", kind.path(namespace), {"fieldValidation": "Strict", "fieldManager": self._manager}, body)

    async def apply(self, kind: ResourceKind, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Server-side apply of what we own whole. Carry metadata.uid to be sure that it is still the same object."""
        query = {"fieldManager": self._manager, "force": "true", "fieldValidation": "Strict"}
        path = kind.path(namespace, body["metadata"]["name"])
        return await self._call("PATCH", path, query, body, content="application/apply-patch+yaml")

    async def patch(self, kind: ResourceKind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge patch of an object; a metadata.resourceVersion in it makes it compare-and-swap (409)."""
        query = {"fieldManager": self._manager, "fieldValidation": "Strict"}
        return await self._call("PATCH", kind.path(namespace, name), query, body, content="application/merge-patch+json")

    async def patch_status(self, kind: ResourceKind, namespace: str, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Merge patch of the status subresource; a metadata.resourceVersion in it makes it compare-and-swap (409)."""
        path = kind.path(namespace, name) + "/status"
        return await self._call("PATCH", path, {"fieldManager": f"{self._manager}-status"}, body, content="application/merge-patch+json")

    async def delete(self, kind: ResourceKind, namespace: str, name: str, uid: str, grace: int | None = None) -> None:
        """Delete this very object. A missing object, or another one of that name, is no error: the one meant is gone.

        A conflict that does not speak of the uid is one: the object is still there.
        """
        options: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self._call("DELETE", kind.path(namespace, name), None, options)
        except ApiError as error:
            another = error.code == 409 and all(word in error.message for word in OTHER_UID)
            if error.denied or not (another or error.code == 404):
                raise

    async def served(self, kind: ResourceKind) -> bool:
        """Whether the API server serves this kind now."""
        try:
            found = await self._call("GET", kind.root)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        return any(resource.get("name") == kind.plural for resource in found.get("resources") or [])

    async def read(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the API server answers to a GET of `path`."""
        return await self._call("GET", path, query)

    async def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a review (such as a SelfSubjectAccessReview), or to a create that is tried and not done: nothing is stored."""
        return await self._call("POST", path, {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": MANAGER}, body)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
        await self._api.close()

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> dict[str, Any]:
        if self._bucket is not None:
            await self._bucket.take()
        if method != "GET":
            self.before_write()
        verb, began = _verb(method, path, content), time.monotonic()
        try:
            status, raw, retry_after = await self._exchange(method, path, query, body, content)
            self._observer.answered(verb, path, status, time.monotonic() - began)
            return _reply(status, raw, retry_after)
        except ApiError as error:
            if not error.code:
                self._observer.unanswered(verb, path, time.monotonic() - began)
            self._observer.failed(error.code, error.reason)
            raise

    async def _exchange(
        self, method: str, path: str, query: Mapping[str, Any] | None, body: Mapping[str, Any] | None, content: str
    ) -> tuple[int, bytes, str | None]:
        """(status, body, Retry-After)."""
        try:
            async with asyncio.timeout(self._limits.timeout):
                async with self._request(method, path, query, body, content) as response:
                    return response.status, await response.read(), response.headers.get("Retry-After")
        except TimeoutError as error:
            raise ApiError(0, "Timeout", f"no answer to {method} {path} in {self._limits.timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(0, "Connection", f"{method} {path}: {error}") from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        body: Mapping[str, Any] | None,
        content: str,
        silence: float | None = None,
        proof: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One exchange over the official client's connections and credentials; its own way would copy each body twice."""
        headers = {"Accept": "application/json", "User-Agent": self._agent, **(proof or {})}
        token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        if body is not None:
            headers["Content-Type"] = content
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=self._api.rest_client._create_connector(), read_bufsize=2**21)
        async with self._session.request(
            method,
            URL(self._configuration.host + path + (f"?{urlencode(query)}" if query else ""), encoded=True),
            data=None if body is None else json.dumps(body, separators=(",", ":")).encode(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence),
            proxy=self._proxy,
            proxy_headers=self._configuration.proxy_headers,
            server_hostname=self._configuration.tls_server_name,
        ) as response:
            yield response


def _verb(method: str, path: str, content: str) -> str:
    """The API server's own word for a request."""
    if method == "PATCH" and "apply" in content:
        return "apply"
    if method == "GET":
        return "list" if path.rsplit("/", 1)[-1] in _COLLECTIONS else "get"
    return {"POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for this server. Left to aiohttp it would be looked up, in a thread, for each request."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


def _event(line: bytes, path: str) -> tuple[str, dict[str, Any]]:
    try:
        event = json.loads(line)
        return event["type"], event["object"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ApiError(0, "Unreadable", f"watch {path}: a line is no event, as of a proxy on the way: {line[:80]!r}") from error


def _reply(status: int, raw: bytes, retry_after: str | None) -> dict[str, Any]:
    try:
        data = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        data = {}
    told = data if isinstance(data, dict) else {}
    if 200 <= status < 300:
        if raw and not told:  # taken for an empty list it would tell that all pods have gone
            raise ApiError(0, "Unreadable", f"the answer ({status}) is no JSON object, as of a proxy on the way: {raw[:80]!r}")
        return told
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else 0.0
    message = str(told.get("message") or raw[:200].decode("utf-8", "replace"))
    raise ApiError(status, str(told.get("reason") or "Unknown"), message, seconds, causes(told.get("details")))


PATH_STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")
ABOVE_LIMIT = re.compile(r"must be (?:less than or )?equal to (\S+) limit of")
"""The API server's words for a request above a limit."""
OUT_OF_RANGE = re.compile(
    r"(?:maximum|minimum) (\S+) usage per (?:Container|Pod) is |(\S+) max limit to request ratio per (?:Container|Pod) is "
)
"""Its words where a LimitRange says no by itself."""
NAMED_VALUE = re.compile(r'(?:Invalid|Unsupported|Duplicate) value: "((?:[^"\\]|\\.)*)"')
QUOTA = "must specify "
"""In the words of a quota: the pods of the namespace have to say what they ask for."""
_ABSENT = object()


@dataclass(frozen=True)
class Cause:
    """One field of which the API server says what is wrong with it."""

    field: str
    message: str


def causes(details: Any) -> tuple[Cause, ...]:
    """Those that name a field, of the details of a Status."""
    told = details.get("causes") if isinstance(details, Mapping) else None
    named = (it for it in told if isinstance(it, Mapping) and it.get("field")) if isinstance(told, list) else ()
    return tuple(Cause(str(it["field"]), str(it.get("message") or "")) for it in named)


def of_the_pod(told: Sequence[Cause], body: Mapping[str, Any]) -> bool:
    """Whether one of these faults is in what was sent. What a LimitRange or a webhook put there is continuedce they are."""
    return any(_sent(cause, body) for cause in told)


def limited(told: Sequence[Cause], message: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    """Resources for which a LimitRange keeps the pod from being made; none where it is something else."""
    found = [match[1] for cause in told if (match := ABOVE_LIMIT.search(cause.message)) and not _sent(cause, body)]
    return tuple(dict.fromkeys([*found, *(match[1] or match[2] for match in OUT_OF_RANGE.finditer(message))]))


def ranges(found: Iterable[Mapping[str, Any]], resources: Sequence[str]) -> tuple[str, ...]:
    """Names of the LimitRanges that speak of one of these resources for containers or pods."""
    return tuple(
        str(it["metadata"]["name"])
        for it in found
        if any(
            limit.get("type") in ("Container", "Pod") and resource in amounts
            for limit in (it.get("spec") or {}).get("limits") or []
            for amounts in limit.values()
            if isinstance(amounts, Mapping)
            for resource in resources
        )
    )


def limit_words(told: Sequence[Cause], message: str, resources: Sequence[str], names: Sequence[str], namespace: str) -> str:
    """The sentence that names the LimitRange, what it minds, and what people can do."""
    which = f"LimitRange {', '.join(names)}" if names else "a LimitRange"
    minded = [cause.message.removeprefix("Invalid value: ") for cause in told if ABOVE_LIMIT.search(cause.message)]
    said = ", ".join(dict.fromkeys(minded)) or message.rpartition(" is forbidden: ")[2]
    return f"{which} of namespace {namespace} limits {' and '.join(resources)}: {said}; change it, or the template's resources"


def _sent(cause: Cause, body: Mapping[str, Any]) -> bool:
    value, above = _at(body, cause.field)
    if match := ABOVE_LIMIT.search(cause.message):
        limits = above.get("limits") if isinstance(above, Mapping) else None
        return isinstance(limits, Mapping) and match[1] in limits
    if cause.message.startswith("Required value"):
        return value in (_ABSENT, None, "", [], {}) and above is not _ABSENT
    named = NAMED_VALUE.search(cause.message)
    if value is _ABSENT or named is None:
        return value is not _ABSENT
    return named[1] in json.dumps(value, ensure_ascii=False, default=str)


def _at(body: Any, path: str) -> tuple[Any, Any]:
    """(value at the path, what it stands in); _ABSENT for each that is not there."""
    value, above = body, _ABSENT
    for match in PATH_STEP.finditer(path):
        key = match[1] if match[1] is not None else match[2]
        above = value
        if isinstance(value, Mapping):
            value = value.get(key, _ABSENT)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else _ABSENT
        else:
            value = _ABSENT
    return value, above


class TokenBucket:
    """`take()` waits until a call may be made. Waiters are served in the order they came."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        if rate <= 0 or burst < 1:
            raise ValueError(f"a token bucket needs a rate above 0 and a burst of at least 1, not {rate} and {burst}")
        self._rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    async def take(self) -> None:
        """Take one token, sleeping until it is there."""
        delay = self.reserve()
        if delay > 0:
            await asyncio.sleep(delay)

    def reserve(self) -> float:
        """Take one token now, on credit if need be; answers the seconds to wait before using it."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self._rate)


AGENT = f"psjob-operator/{__version__}"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ConnectError(Exception):
    """There is no usable way to the API server; the text says what was looked for and what to do."""


async def load_configuration(path: str | None, context: str | None = None) -> Configuration:
    """Read the kubeconfig at `path` (or $KUBECONFIG, ~/.kube/config), or the service account in a pod.

    `context` names one of the kubeconfig; None: its current one.

    Raises ConnectError.
    """
    found = Configuration()
    if context is None and in_cluster(path):
        try:
            kubeconfig.load_incluster_config(client_configuration=found)
        except ConfigException as error:
            raise ConnectError(f"the pod's service account cannot be used: {error}; mount its token, or give --kubeconfig") from error
        return found
    file = kubeconfig_path(path)
    if not any(Path(one).expanduser().is_file() for one in file.split(os.pathsep)):
        raise ConnectError(f"--kubeconfig: there is no file {file}; give --kubeconfig FILE, or run in a cluster")
    try:
        await kubeconfig.load_kube_config(config_file=file, context=context, client_configuration=found, persist_config=False)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        # The client says what is wrong with a file in as many ways as there are files.
        raise ConnectError(f"--kubeconfig {file} cannot be used ({' '.join(str(error).split())[:200]}); is it a kubeconfig?") from error
    return found


def in_cluster(path: str | None) -> bool:
    """Is the service account of this pod the way, since no kubeconfig was named?"""
    return path is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ


def own_namespace() -> str:
    """The namespace of the pod that this process runs in; empty outside a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""


def kubeconfig_path(path: str | None) -> str:
    """The kubeconfig that is read for `path`; $KUBECONFIG may list several, which are merged."""
    return path or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")


async def watch_session(configuration: Configuration, trace: aiohttp.TraceConfig) -> aiohttp.ClientSession:
    """A session of its own for kopf's watches, with the same credentials; `trace` sees each of its requests."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    headers = {"User-Agent": AGENT}
    token = await configuration.get_api_key_with_prefix("BearerToken")
    if token:
        headers["Authorization"] = token
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=context), headers=headers, trace_configs=[trace], read_bufsize=2**21
    )


def risen_version(newest: int, version: int, what: str) -> int:
    """The higher of both, which is `version`, of a consistent read. Raises RuntimeError if it has gone back; `what` was read."""
    if version < newest:
        back = f"the resourceVersion of {what} is {version} and was {newest}"
        raise RuntimeError(f"the API server was restored from a backup: {back}; this process ends, to read all anew")
    return version
