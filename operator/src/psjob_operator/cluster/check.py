"""Asks an installed operator's cluster whether it works: what `helm test` runs as a pod, with the operator's own rights."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from psjob_operator.cluster import connect
from psjob_operator.cluster.client import ApiError, Client, Limits
from psjob_operator.cluster.kinds import JOBS, LEASES

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Asked:
    """What to look at. `namespaces` empty: all of them. `lease` is (namespace, name); None: one operator acts without a Lease."""

    kubeconfig: str | None
    namespaces: tuple[str, ...]
    lease: tuple[str, str] | None
    seconds: float
    """How long the Lease may stay without a renewal."""


async def check(asked: Asked) -> list[str]:
    """What was found, a sentence each. Raises ConnectError, and CheckFailed with the first thing that is wrong."""
    client = Client(await connect.configure(asked.kubeconfig), Limits(), f"{connect.AGENT}/check")
    try:
        async with asyncio.timeout(asked.seconds + 30):
            return [await _kind(client), await _jobs(client, asked.namespaces), await _lease(client, asked)]
    except TimeoutError as error:
        raise CheckFailed(f"the API server did not answer within {asked.seconds + 30:g} s; is it reachable from this pod?") from error
    except ApiError as error:
        raise CheckFailed(refused(error)) from error
    finally:
        await client.close()


class CheckFailed(Exception):
    """What is wrong, and the next step."""


def refused(error: ApiError) -> str:
    """What an answer of the API server, or none, means, and the next step."""
    if error.code in (401, 403):
        return f"the API server refuses: {error}; give the operator the rights of the chart's roles (rbac.create)"
    if error.code == 0:
        return f"the API server cannot be asked: {error}; look at the kubeconfig, and at what keeps this pod from the API server"
    return f"the API server does not answer as expected: {error}; read its log, and try again"


def holder(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Who renewed the Lease between two reads of it; None: nobody did."""
    spec = after.get("spec") or {}
    renewed = spec.get("renewTime")
    if not spec.get("holderIdentity") or not renewed or renewed == (before.get("spec") or {}).get("renewTime"):
        return None
    return str(spec["holderIdentity"])


async def _kind(client: Client) -> str:
    if not await client.served(JOBS):
        name = f"{JOBS.plural}.{JOBS.group}"
        raise CheckFailed(f"the CRD {name} is not served; install it with the chart (crds.enabled=true) or kubectl apply -f crds/")
    return f"{JOBS.kind} is served as {JOBS.group}/{JOBS.version}"


async def _jobs(client: Client, namespaces: tuple[str, ...]) -> str:
    count = 0
    for namespace in namespaces or ("",):
        async for page in client.pages(JOBS, namespace):
            count += len(page.items)
    return f"{count} jobs can be read in {', '.join(namespaces) or 'all namespaces'}"


async def _lease(client: Client, asked: Asked) -> str:
    if asked.lease is None:
        return "no Lease is asked for: leader election is off"
    namespace, name = asked.lease
    before: dict[str, Any] | None = None
    deadline = time.monotonic() + asked.seconds
    while time.monotonic() < deadline:
        try:
            found = await client.get(LEASES, namespace, name)
        except ApiError as error:
            if error.code != 404:
                raise
        else:
            before = before or found
            if who := holder(before, found):
                return f"Lease {namespace}/{name} is renewed by {who}"
        await asyncio.sleep(LOOK_SECONDS)
    state = "does not exist" if before is None else "was not renewed"
    raise CheckFailed(
        f"Lease {namespace}/{name} {state} within {asked.seconds:g} s, so no operator acts; read: kubectl -n {namespace} logs deploy/{name}"
    )
