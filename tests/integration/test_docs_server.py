"""Every manifest that README and docs show, and every part of one, as the API server judges it."""

from __future__ import annotations

import pytest
import yaml

from tests.docs.finding import ALL, Block, around
from tests.integration.api_client import Api

pytestmark = pytest.mark.cluster
SHOWN = [
    pytest.param(block, document, id=f"{block.place}-{number}")
    for block in ALL
    if block.kind == "yaml"
    for number, document in enumerate(yaml.safe_load_all(block.text))
    if document.get("kind") == "PSTrainingJob" or set(document) == {"spec"}
]


@pytest.fixture
def namespace(bare_namespace: str) -> str:
    return bare_namespace


@pytest.mark.parametrize(("block", "document"), SHOWN)
def test_the_api_server_takes_what_a_page_shows(job_api: Api, namespace: str, block: Block, document: dict[str, object]) -> None:
    """Unknown fields are refused too. A page may show a mistake, which it calls so."""
    spec = document["spec"]
    assert isinstance(spec, dict)
    job = document if "kind" in document else around(spec)
    code, answer = job_api.create(namespace, job, dry=True)
    assert code == (422 if block.text.startswith("# wrong.yaml\n") else 201), answer.get("message")


def test_there_are_such_pages() -> None:
    assert len(SHOWN) >= 20
