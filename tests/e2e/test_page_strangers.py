"""The page of `psjob ui` is for who has its address: what others ask of its server."""

from __future__ import annotations

from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Page]:
    with Page((AsyncClient.local(tmp_path),), tmp_path) as page:
        yield page


def asked(served: Page, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, str]:
    """The path goes to the server as it stands here."""
    connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


@pytest.mark.parametrize("path", ["/", "/api/jobs", "/?token=wrong", "/page.js"])
def test_strangers_are_refused(served: Page, path: str) -> None:
    answer, text = asked(served, path)
    assert answer.status == 403 and "psjob ui" in text


def test_who_has_the_address_sees_the_page_and_nothing_beside_it(served: Page) -> None:
    path = served.address.removeprefix(f"http://127.0.0.1:{served.port}")
    assert asked(served, path, Host=f"evil.example:{served.port}")[0].status == 421
    assert asked(served, path, "POST")[0].status == 405
    answer, _ = asked(served, path)
    assert answer.status == 303 and answer.headers["location"] == "/", "the token goes from the address into a cookie"
    cookie = answer.headers["set-cookie"].partition(";")[0]
    answer, _ = asked(served, "/", Cookie=cookie)
    assert answer.status == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    assert asked(served, "/api/jobs", Cookie=cookie)[0].status == 200
    for beside in ("/../../etc/passwd", "/api/comparisons/..%2f..%2fsecret"):
        assert asked(served, beside, Cookie=cookie)[0].status == 404
