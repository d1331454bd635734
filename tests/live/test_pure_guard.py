"""A test of `make test-unit` that starts a process, speaks to a socket or imports torch fails (tests/pure.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BREAKERS = """
import asyncio
import os
import socket
import subprocess
import sys

import pytest


def test_process():
    subprocess.run([sys.executable, "-c", ""])


def test_fork():
    if os.fork() == 0:
        os._exit(0)


def test_system():
    os.system("true")


def test_listener():
    socket.create_server(("127.0.0.1", 0)).close()


def test_connection():
    with socket.socket() as end:
        end.settimeout(5)
        end.connect(("127.0.0.1", 9))


def test_datagram():
    with socket.socket(type=socket.SOCK_DGRAM) as end:
        end.sendto(b"x", ("127.0.0.1", 9))


def test_torch():
    import torch.nn


def test_caught():
    try:
        os.fork()
    except Exception:
        pass


def test_computes():
    asyncio.run(asyncio.sleep(0))
    ends = socket.socketpair()
    ends[0].close(), ends[1].close()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pure")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text("from tests.pure import pure\n")
    (folder / "test_breakers.py").write_text(BREAKERS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=110).stdout


@pytest.mark.parametrize(
    ("test", "reason"),
    [
        ("process", "starts a process"),
        ("fork", "forks"),
        ("system", "starts a process"),
        ("listener", "listens on a socket"),
        ("connection", "connects to a socket"),
        ("datagram", "sends to a socket"),
        ("torch", "imports torch"),
        ("caught", "forks"),
    ],
)
def test_more_than_to_compute_is_refused(told: str, test: str, reason: str) -> None:
    (line,) = re.findall(rf"^FAILED \S+::test_{test} - (.*)$", told, re.MULTILINE)
    assert f"a test of `make test-unit` {reason}" in line


def test_what_computes_passes(told: str) -> None:
    assert re.search(r"^PASSED \S+::test_computes$", told, re.MULTILINE)
