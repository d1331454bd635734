"""Which Python and which uv hack/install.sh takes, on machines made of a PATH with stand-ins. Nothing is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hack.cluster.paths import REPO

TOOLS = ("bash", "dirname", "cat", "grep", "mkdir", "rm", "ls", "cksum")
PYTHON = """#!/bin/bash
case "$*" in
*version_info*) echo {version}; exit {unsupported};;
*sys.executable*) echo {path};;
"-m venv "*) exit {no_venv};;
*) echo "python was called with $*" >&2; exit 99;;
esac
"""
UV = """#!/bin/bash
case "$*" in
"pip install --help") echo "{flags}";;
"python find"*) [ -e "{folder}/brought" ] && echo {folder}/brought;;
"python install"*) {install};;
*) echo "uv was called with $*" >&2; exit 99;;
esac
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkout with only the script, and a PATH with what it calls."""
    (tmp_path / "checkout" / "hack").mkdir(parents=True)
    (tmp_path / "checkout" / "hack" / "install.sh").write_bytes((REPO / "hack" / "install.sh").read_bytes())
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(next(path for path in (Path("/bin") / tool, Path("/usr/bin") / tool) if path.exists()))
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def python(place: Path, name: str, version: str, no_venv: int = 0) -> Path:
    path = place / "bin" / name
    unsupported = int(not (3, 11) <= tuple(map(int, version.split(".")[:2])) <= (3, 14))
    program(path, PYTHON.format(version=version, unsupported=unsupported, path=path, no_venv=no_venv))
    return path


def uv(place: Path, install: str = "exit 1", flags: str = "--excludes") -> Path:
    program(place / "bin" / "uv", UV.format(folder=place, install=install, flags=flags))
    return place / "bin" / "uv"


def called(place: Path, function: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The function of the script, called on that machine."""
    env = {"PATH": str(place / "bin"), "HOME": str(place), "PSJOB_CACHE": str(place / "cache"), **environment}
    command = [str(place / "bin" / "bash"), "-c", f'. "{place}/checkout/hack/install.sh"; {function}']
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": "3.11.2"}, "python3"),
        ({"python3": "3.14.0", "python3.11": "3.11.9"}, "python3"),
        ({"python3": "3.10.12", "python3.11": "3.11.9", "python3.13": "3.13.1"}, "python3.13"),
        ({"python": "3.12.3"}, "python"),
    ],
)
def test_a_supported_python_is_taken(place: Path, there: dict[str, str], chosen: str) -> None:
    for name, version in there.items():
        python(place, name, version)
    assert called(place, "find_python").stdout.strip() == str(place / "bin" / chosen)


def test_the_python_of_venv_is_kept_and_the_named_one_goes_first(place: Path) -> None:
    python(place, "python3", "3.13.1")
    own = python(place, "../checkout/.venv/bin/python", "3.11.2")
    named = python(place, "python3.12", "3.12.1")
    assert called(place, "find_python").stdout.strip() == str(own)
    assert called(place, "find_python", PYTHON="python3.12").stdout.strip() == str(named)
    refused = called(place, "same_minor python3.12", PYTHON="python3.12")
    assert refused.returncode == 1
    assert ".venv has Python 3.11.2, and PYTHON=python3.12 is 3.12.1; to change it: make clean install PYTHON=python3.12" in refused.stderr
    assert called(place, "same_minor .venv/bin/python").returncode == 0


@pytest.mark.parametrize(
    ("there", "named", "said"),
    [
        ({"python3": "3.10.12"}, "", "found: python3 is 3.10.12. Install one of them, or put uv on PATH"),
        ({"python3": "3.9.1", "python": "3.15.0"}, "", "found: python3 is 3.9.1, python is 3.15.0. Install"),
        ({}, "", "found: none. Install one"),
        ({"python3": "3.12.1", "python3.10": "3.10.12"}, "python3.10", "PYTHON=python3.10: python3.10 is 3.10.12; psjob is developed on"),
        ({"python3": "3.12.1"}, "/gone", "PYTHON=/gone: it does not run"),
    ],
)
def test_a_refusal_names_what_was_found_and_the_next_step(place: Path, there: dict[str, str], named: str, said: str) -> None:
    for name, version in there.items():
        python(place, name, version)
    done = called(place, "find_python", **({"PYTHON": named} if named else {}))
    assert done.returncode == 1 and done.stdout == ""
    assert said in done.stderr and "Python 3.11, 3.12, 3.13 or 3.14" in done.stderr and "make install PYTHON=" in done.stderr


def test_uv_brings_a_python_where_none_is_supported(place: Path) -> None:
    python(place, "python3", "3.10.12")
    uv(place, install=f"/usr/bin/touch {place}/brought")
    done = called(place, "find_python")
    assert done.stdout.strip() == f"{place}/brought"
    assert "(python3 is 3.10.12); uv installs 3.11" in done.stderr


def test_a_python_that_uv_cannot_bring_is_refused(place: Path) -> None:
    python(place, "python3", "3.10.12")
    uv(place)
    done = called(place, "find_python")
    assert done.returncode == 1 and "found: python3 is 3.10.12" in done.stderr


def test_uv_of_the_path_is_taken_where_it_is_new_enough(place: Path) -> None:
    own = uv(place)
    assert called(place, "find_uv python3").stdout.strip() == str(own)
    uv(place, flags="--overrides")
    program(place / "cache" / "uv-0.11" / "bin" / "uv", "")
    assert called(place, "find_uv python3").stdout.strip() == f"{place}/cache/uv-0.11/bin/uv"


def test_a_python_without_venv_is_told_and_nothing_is_installed(place: Path) -> None:
    python(place, "python3", "3.12.3", no_venv=1)
    program(place / "bin" / "apt-get", "#!/bin/bash\necho apt-get was called >&2\n")
    done = called(place, "find_uv python3")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "python3 cannot make a virtual environment; install its venv module (Debian and Ubuntu: apt-get install python3-venv) "
        "or put uv on PATH"
    ]
