"""The page of `psjob ui` shows jobs of the real API server."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from psjob_client.sdk.blocking import Client
from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page as Served
from tests.integration.api_client import Api
from tests.support import pages
from tests.support.cluster_fixtures import Cluster
from tests.unit.api_manifest import GOOD

pytestmark = [pytest.mark.nodes, pytest.mark.rotating]


def test_a_job_of_a_cluster_comes_and_goes(control_plane: Cluster, job_api: Api, namespace: str) -> None:
    client = AsyncClient.kube(namespace=namespace, kubeconfig=control_plane.kubeconfig)
    nowhere = AsyncClient.kube(context="no-such-context", kubeconfig=control_plane.kubeconfig)
    with pages.browser() as chromium, Served((client, nowhere), control_plane.kubeconfig.parent) as served:
        page = chromium.new_page()
        errors = pages.complaints(page)
        page.goto(served.address)
        expect(page.get_by_text("No job yet")).to_be_visible(timeout=15_000)
        expect(page.locator("nav")).to_contain_text("no-such-context")
        job_api.create(namespace, GOOD)
        expect(page.get_by_role("heading", name="digits", exact=True)).to_be_visible(timeout=15_000)
        expect(page.locator("main")).to_contain_text("no psjob operator has seen this job yet")
        assert errors == []
        Client.kube(namespace=namespace, kubeconfig=control_plane.kubeconfig).delete("digits")
        expect(page.get_by_role("alert")).to_contain_text("digits", timeout=15_000)
