"""A CRD that is older than the operator, as after an upgrade by Helm, which leaves CRDs as they are: it lacks the rule of lrScaling."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from hack.cluster.api import ApiError
from tests.integration.operator_harness import World, manifest, until

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/pstrainingjobs.psjob.dev"
LIMIT = "must not be linear"
FAULT = {"mode": "async", "lrScaling": "linear"}


@contextlib.contextmanager
def without_the_rule(place: World) -> Iterator[None]:
    """While it lasts the API server takes lrScaling: linear in every mode; this operator does not."""
    api = place.cluster.api
    versions = api.get(CRD)["spec"]["versions"]
    older = copy.deepcopy(versions)
    (rules,) = (training["x-kubernetes-validations"] for training in _training(older))
    assert any(rule["message"].startswith(LIMIT) for rule in rules)
    rules[:] = [rule for rule in rules if not rule["message"].startswith(LIMIT)]
    api.merge(CRD, {"spec": {"versions": older}})
    try:
        until("the older CRD to hold", lambda: _takes(place))
        yield
    finally:
        api.merge(CRD, {"spec": {"versions": versions}})
        until("this version's CRD to hold", lambda: not _takes(place))


def _training(versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["training"] for version in versions]


def _takes(place: World) -> bool:
    path = f"/apis/psjob.dev/v1alpha1/namespaces/{place.namespace}/pstrainingjobs?dryRun=All"
    try:
        place.cluster.api.create(path, manifest("probe", training=FAULT))
    except ApiError as error:
        if error.status != 422:
            raise
        return False
    return True
