"""The page of `psjob ui` is for who has its address: what others ask of its server."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest

from psjob_client.sdk.client import AsyncClient
from psjob_client.ui.server import Page, browser_opened


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


def token(served: Page) -> str:
    return served.address.partition("#token=")[2]


@pytest.mark.parametrize("given", ["", "Bearer wrong", "Basic {token}", "cookie"])
def test_strangers_are_refused(served: Page, given: str) -> None:
    said = {"Cookie": f"psjob-{served.port}={token(served)}"} if given == "cookie" else {"Authorization": given.format(token=token(served))}
    for path in ("/api/jobs", "/api/jobs?token={token}", "/api/jobs/0/x/log", "/api/comparisons"):
        answer, text = asked(served, path.format(token=token(served)), **said)
        assert answer.status == 403 and "psjob ui" in text, path


def test_who_has_the_address_sees_the_page_and_nothing_beside_it(served: Page) -> None:
    right = {"Authorization": f"Bearer {token(served)}"}
    assert asked(served, "/", Host=f"evil.example:{served.port}", **right)[0].status == 421
    assert asked(served, "/", "POST", **right)[0].status == 405
    answer, text = asked(served, "/")
    assert answer.status == 200 and "default-src 'self'" in answer.headers["content-security-policy"]
    assert "set-cookie" not in answer.headers, "it would go to every port of this machine"
    assert token(served) not in text
    assert asked(served, "/api/jobs", **right)[0].status == 200
    for beside in ("/../../etc/passwd", "/api/comparisons/..%2f..%2fsecret"):
        assert asked(served, beside, **right)[0].status == 404


def test_no_command_line_has_the_token(served: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read the browser's."""
    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", seen.append)
    with browser_opened(served.address) as file:
        assert seen == [file.as_uri()] and token(served) not in seen[0]
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
        assert served.address in file.read_text()
    assert not file.parent.exists()
