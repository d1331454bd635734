"""A worker's start does not load torch's compiler, and torch is as it was once the compiler is there.

- `make test-unit` starts on macOS: nothing that its files import needs Linux to be imported.
- A test of `make test-unit` that starts a process, speaks to a socket or imports torch fails (tests/support/pure.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hack.cluster.paths import REPO
from tests.support import warm

STARTS = """
import sys, torch, psjob
"""
STARTS_AGAIN = """
import importlib, sys, torch, psjob
importlib.reload(psjob)
"""
STEPS = """
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
opt.zero_grad(); opt.state_dict()
print("torch._dynamo" in sys.modules)
"""
COMPILES = """
import torch._dynamo
opt.zero_grad()
print(torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__.startswith("torch."))
step = torch.compile(lambda x: x * 2, backend="eager")
print(step(torch.ones(1)).item())
"""


def test_a_worker_that_begins_loads_no_compiler(tmp_path: Path) -> None:
    """A fork of a process that has imported torch, in which psjob is imported again."""
    words = ("-c", STARTS_AGAIN + STEPS)
    process = warm.start_python(tmp_path, words, {"PSJOB_ROLE": "worker"}, tmp_path / "printed", tmp_path / "told")
    assert process.communicate(100) == ("False\n", "")


@pytest.mark.rotating
def test_the_compiler_is_loaded_only_when_it_is_asked_for() -> None:
    env = {**os.environ, "PSJOB_ROLE": "worker"}
    done = subprocess.run([sys.executable, "-c", STARTS + STEPS + COMPILES], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["False", "True", "2.0"], done.stdout + done.stderr


# It imports 150 files, which takes 10 s of a core.
MADE_UP = {
    "reads_proc": "open('/proc/self/status').read()",
    "lists_sys": "import os; os.listdir('/sys')",
    "asks_affinity": "import os; os.sched_getaffinity(0)",
    "loads_libc": "import ctypes; ctypes.CDLL('libc.so.6')",
    "sees_linux": "import sys; assert sys.platform == 'linux'",
}
FINE = "import os, sys, ctypes, multiprocessing, selectors\nassert sys.platform == 'darwin' and not hasattr(os, 'sched_getaffinity')\n"


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_what_unit_tests_import_needs_no_linux(tmp_path: Path) -> None:
    for name, text in MADE_UP.items():
        (tmp_path / f"{name}.py").write_text(f"{text}\n")
    (tmp_path / "fine.py").write_text(FINE)
    command = [sys.executable, "-m", "tests.support.macos", "fine", *MADE_UP, "tests.conftest", "tests/unit", "tests/simulation"]
    done = subprocess.run(command, cwd=REPO, env={**os.environ, "PYTHONPATH": f"{tmp_path}"}, capture_output=True, text=True, timeout=580)
    *failed, _ = done.stdout.splitlines() or [""]
    assert [line.partition(":")[0] for line in failed] == list(MADE_UP), done.stdout[-3000:] + done.stderr[-1000:]


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
    (folder / "conftest.py").write_text("from tests.support.pure import pure\n")
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
