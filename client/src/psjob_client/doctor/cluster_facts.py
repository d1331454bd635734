"""Gathers what a user sees of a cluster: one question after the other, each with a deadline; what may not be seen stays None."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeVar

from psjob_client.doctor.findings import RIGHTS, ClaimFacts, ClusterFacts, Limit, NodeFacts, Operator, Quota, StorageClass
from psjob_operator.api.crd import schema
from psjob_operator.cluster.client import (
    JOBS,
    PODS,
    ApiError,
    ConnectError,
    KubernetesClient,
    Limits,
    limit_words,
    limited,
    load_configuration,
    ranges,
)
from psjob_operator.contract import GROUP, KIND, VERSION
from psjob_operator.render.objects import LABEL_JOB

SECONDS = 10.0
OURS = "app.kubernetes.io/part-of=psjob,app.kubernetes.io/component=operator"
DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Tried:
    """A pod as the operator makes it, and as it makes it where a LimitRange minds what psjob's own parts ask for."""

    pod: Mapping[str, Any]
    asking_nothing: Mapping[str, Any]


async def cluster(
    kubeconfig: str | None, context: str | None, namespace: str, manifest: Mapping[str, Any] | None, pods: Sequence[Tried]
) -> ClusterFacts:
    """Ask about `namespace` of a cluster; `manifest` and the `pods` of its job are tried, and nothing is created."""
    mine = version("psjob-client")
    try:
        configuration = await load_configuration(kubeconfig, context)
    except ConnectError as error:
        return ClusterFacts("kubeconfig", namespace, mine, unreachable=str(error))
    client = KubernetesClient(configuration, Limits(timeout=SECONDS), f"psjob-doctor/{mine}")
    try:
        about = await client.read("/version")
        return await _facts(client, str(configuration.host), namespace, mine, str(about.get("gitVersion") or ""), manifest, pods)
    except ApiError as error:
        return ClusterFacts(str(configuration.host), namespace, mine, unreachable=" ".join(str(error).split())[:300])
    finally:
        await client.close()


async def _facts(
    client: KubernetesClient,
    host: str,
    namespace: str,
    mine: str,
    kubernetes: str,
    manifest: Mapping[str, Any] | None,
    pods: Sequence[Tried],
) -> ClusterFacts:
    served = await client.served(JOBS)
    place = f"/api/v1/namespaces/{namespace}"
    claims = await _items(client, f"{place}/persistentvolumeclaims")
    limits = await _items(client, f"{place}/limitranges")
    refused, untried = await _tried(client, namespace, manifest, pods, limits or []) if served else ((), False)
    account = await _seen(client.read(f"{place}/serviceaccounts/default"))
    return ClusterFacts(
        server=host,
        namespace=namespace,
        client=mine,
        version=kubernetes,
        namespace_there=await _is_there(client, place),
        served=served,
        absent_fields=await _absent(client) if served else (),
        operators=_each(await _items(client, "/apis/apps/v1/deployments", OURS), _operator),
        rights=await _rights(client, namespace),
        classes=_each(await _items(client, "/apis/storage.k8s.io/v1/storageclasses"), _class),
        quotas=_flat(await _items(client, f"{place}/resourcequotas"), _quotas),
        limits=_flat(limits, _limits),
        nodes=_each(await _items(client, "/api/v1/nodes"), _node),
        pull_secrets=None if account is None else tuple(str(one.get("name")) for one in account.get("imagePullSecrets") or ()),
        claims=None if claims is None else {one["metadata"]["name"]: _claim(one) for one in claims},
        priorities=_each(await _items(client, "/apis/scheduling.k8s.io/v1/priorityclasses"), lambda one: str(one["metadata"]["name"])),
        refused=refused,
        untried=untried,
    )


async def _seen(call: Awaitable[Answer]) -> Answer | None:
    """The answer, or None where this user may not have it, or where there is nothing."""
    try:
        return await call
    except ApiError as error:
        if error.code in (401, 403, 404):
            return None
        raise


async def _is_there(client: KubernetesClient, place: str) -> bool | None:
    try:
        await client.read(place)
    except ApiError as error:
        if error.code in (403, 404):
            return False if error.code == 404 else None
        raise
    return True


async def _items(client: KubernetesClient, path: str, labels: str = "") -> list[dict[str, Any]] | None:
    """Up to some thousand objects, which no line of the doctor needs more of."""
    query = {"limit": 5000, **({"labelSelector": labels} if labels else {})}
    found = await _seen(client.read(path, query))
    return None if found is None else list(found.get("items") or [])


def _each(items: list[dict[str, Any]] | None, make: Any) -> Any:
    return None if items is None else tuple(make(item) for item in items)


def _flat(items: list[dict[str, Any]] | None, make: Any) -> Any:
    return None if items is None else tuple(part for item in items for part in make(item))


async def _rights(client: KubernetesClient, namespace: str) -> dict[tuple[str, str], bool]:
    found = {}
    for group, resource, verbs in RIGHTS:
        plural, _, sub = resource.partition("/")
        for verb in verbs:
            attributes = {"namespace": namespace, "group": group, "resource": plural, "subresource": sub, "verb": verb}
            body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {"resourceAttributes": attributes}}
            answer = await _seen(client.ask("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body))
            found[resource, verb] = bool(((answer or {}).get("status") or {}).get("allowed"))
    return found


async def _absent(client: KubernetesClient) -> tuple[str, ...]:
    """Fields of a job that this client writes and the cluster's CRD does not have."""
    told = await _seen(client.read(f"/openapi/v3/apis/{GROUP}/{VERSION}"))
    schemas = ((told or {}).get("components") or {}).get("schemas") or {}
    theirs = next((one for name, one in schemas.items() if name.endswith(f".{KIND}")), None)
    if theirs is None:
        return ()
    mine = schema()["properties"]["spec"]
    return tuple(_missing(mine, (theirs.get("properties") or {}).get("spec") or {}, "spec"))


def _missing(mine: Mapping[str, Any], theirs: Mapping[str, Any], at: str) -> list[str]:
    found = []
    known = theirs.get("properties") or {}
    for name, part in (mine.get("properties") or {}).items():
        if name not in known:
            found.append(f"{at}.{name}")
        elif not part.get("x-kubernetes-preserve-unknown-fields"):
            found += _missing(part, known[name], f"{at}.{name}")
    return found


async def _tried(
    client: KubernetesClient, namespace: str, manifest: Mapping[str, Any] | None, pods: Sequence[Tried], limits: Sequence[Mapping[str, Any]]
) -> tuple[tuple[tuple[str, str], ...], bool]:
    """What the API server, its admission included, says against the job and a pod of each role; whether it takes no pod of this user."""
    refused, untried = [], False
    if manifest is not None and (error := await _refusal(client, JOBS.path(namespace), manifest, namespace)) and _against(error):
        refused.append(("manifest", error.message[:800]))
    for tried in pods:
        body = tried.pod
        error = await _refusal(client, PODS.path(namespace), body, namespace)
        if error is not None and limited(error.causes, error.message, body):
            body = tried.asking_nothing
            error = await _refusal(client, PODS.path(namespace), body, namespace)
        untried = untried or (error is not None and _may_not(error))
        if error is not None and _against(error):
            resources = limited(error.causes, error.message, body)
            words = (
                limit_words(error.causes, error.message, resources, ranges(limits, resources), namespace) if resources else error.message
            )
            refused.append((body["metadata"]["name"], words[:800]))
    return tuple(refused), untried


async def _refusal(client: KubernetesClient, path: str, body: Mapping[str, Any], namespace: str) -> ApiError | None:
    metadata = {key: value for key, value in body["metadata"].items() if key != "ownerReferences"} | {"namespace": namespace}
    try:
        await client.ask(path, {**body, "metadata": metadata})
    except ApiError as error:
        return error
    return None


def _may_not(error: ApiError) -> bool:
    """This user makes no pods, which says nothing of them."""
    return error.code == 403 and "cannot create" in error.message


def _against(error: ApiError) -> bool:
    """An object of that name may be there, and quota is measured: neither says that it does not fit."""
    return error.code in (400, 422) or error.denied or (error.code == 403 and "exceeded quota" not in error.message and not _may_not(error))


def _operator(one: Mapping[str, Any]) -> Operator:
    metadata = one["metadata"]
    ready = int((one.get("status") or {}).get("readyReplicas") or 0)
    return Operator(
        metadata["namespace"], metadata["name"], ready, str((metadata.get("labels") or {}).get("app.kubernetes.io/version") or "")
    )


def _class(one: Mapping[str, Any]) -> StorageClass:
    metadata = one["metadata"]
    default = (metadata.get("annotations") or {}).get(DEFAULT_CLASS) == "true"
    return StorageClass(metadata["name"], str(one.get("provisioner")), default)


def _node(one: Mapping[str, Any]) -> NodeFacts:
    status = one.get("status") or {}
    ready = any(part.get("type") == "Ready" and part.get("status") == "True" for part in status.get("conditions") or ())
    usable = ready and not (one.get("spec") or {}).get("unschedulable")
    return NodeFacts(one["metadata"]["name"], usable, {str(name): str(value) for name, value in (status.get("allocatable") or {}).items()})


def _quotas(one: Mapping[str, Any]) -> list[Quota]:
    hard = (one.get("spec") or {}).get("hard") or {}
    used = (one.get("status") or {}).get("used") or {}
    return [Quota(one["metadata"]["name"], name, str(value), str(used.get(name, "0"))) for name, value in hard.items()]


def _limits(one: Mapping[str, Any]) -> list[Limit]:
    found = []
    for item in (one.get("spec") or {}).get("limits") or ():
        if item.get("type") == "Container":
            for bound in ("min", "max", "default", "defaultRequest"):
                found += [Limit(one["metadata"]["name"], bound, name, str(value)) for name, value in (item.get(bound) or {}).items()]
    return found


def _claim(one: Mapping[str, Any]) -> ClaimFacts:
    labels = one["metadata"].get("labels") or {}
    phase = str((one.get("status") or {}).get("phase") or "")
    modes = tuple((one.get("spec") or {}).get("accessModes") or ())
    return ClaimFacts(modes, phase, LABEL_JOB in labels, bool(one["metadata"].get("deletionTimestamp")))
