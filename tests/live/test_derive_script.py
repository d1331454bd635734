"""The shell script that derives a process's key file from the Secret of its run, in a pod's own shell."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from psjob.process import derive as deriving
from psjob_operator import contract, keys, render
from psjob_operator.certificates import certificates
from psjob_operator.plan.observed_state import Role
from psjob_operator.render.pod import DERIVE
from tests.unit.plan_given import job

WORKERS, SHARDS, QUESTIONS = bytes(range(32)), bytes(range(32, 64)), bytes(range(200, 232))
RUN = {"workers": WORKERS, "shards": SHARDS, "questions": QUESTIONS}
ROLES: tuple[tuple[Role, int, int], ...] = (("shard", 0, 4), ("shard", 1, 12), ("worker", 3, 7))


def secret(encrypted: bool = False, workers: int = 0) -> dict[str, bytes]:
    made = render.key_secret(job(), 1, RUN, certificates(2, workers) if encrypted else {})
    return {name: base64.b64decode(value) for name, value in made["data"].items()}


SHIM = r"""#!/bin/bash
PATH=/usr/bin:/bin
case $1 in
  sh) shift; PATH=/none exec /bin/bash "$@" ;;
  xxd) while read -rn2 byte && [ "$byte" ]; do printf "\\x$byte"; done ;;
  *) exec "$@" ;;
esac
"""
"""The same programs where busybox is not installed. Bash reads the script then."""


def busybox(folder: Path) -> Path:
    """The program whose shell runs the script in a pod; without it, what does the same."""
    found = shutil.which("busybox")
    if found:
        return Path(found)
    shim = folder / "bin" / "busybox"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(SHIM)
    shim.chmod(0o755)
    return shim


def derive(folder: Path, environment: dict[str, str], data: dict[str, bytes], to: str = "keys") -> subprocess.CompletedProcess[str]:
    source = folder / "secret"
    source.mkdir()
    for name, value in data.items():
        (source / name).write_bytes(value)
    program = busybox(folder.parent)
    script = f"busybox={program} from={source} to={folder / to}\n{DERIVE}"
    # Nothing is on the PATH: the script may call no program except busybox.
    return subprocess.run([program, "sh", "-c", script], env={"PATH": "/none", **environment}, capture_output=True, text=True, timeout=60)


def of(role: Role, index: int, number: int) -> dict[str, str]:
    counter = contract.ENV_START if role == "worker" else contract.ENV_ATTEMPT
    return {contract.ENV_ROLE: role, contract.ENV_INDEX: str(index), counter: str(number)}


EXPECTED = {
    ("shard", 0, 4): {"shard": keys.shard_key(SHARDS, 0, 4), "workers": WORKERS, "shards": SHARDS, "questions": QUESTIONS},
    ("shard", 1, 12): {"shard": keys.shard_key(SHARDS, 1, 12), "workers": WORKERS, "questions": QUESTIONS},
    ("worker", 3, 7): {"worker": keys.worker_key(WORKERS, 3, 7)},
}


@pytest.mark.parametrize("who", ROLES, ids=str)
def test_the_script_derives_what_python_derives(tmp_path: Path, who: tuple[Role, int, int]) -> None:
    done = derive(tmp_path, of(*who), secret())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "keys").read_text() == "".join(f"{name} {key.hex()}\n" for name, key in EXPECTED[who].items())
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o444
    assert sorted(os.listdir(tmp_path)) == ["keys", "secret"], "nothing half written is left"


@pytest.mark.parametrize("who", ROLES, ids=str)
def test_an_encrypted_run_hands_on_the_authority_and_a_shard_its_own_certificate(tmp_path: Path, who: tuple[Role, int, int]) -> None:
    data = secret(encrypted=True)
    assert {"ca.pem", "shard-0.pem", "shard-1.pem"} < set(data) and all(word in contract.KEYS for word in ("AUTHORITY", "CERTIFICATE"))
    done = derive(tmp_path, of(*who), data)
    assert (done.returncode, done.stderr) == (0, "")
    own = {f"shard-{who[1]}.pem"} if who[0] == "shard" else set()
    assert set(os.listdir(tmp_path)) == {"keys", "secret", "ca.pem"} | own, "no other shard's private key"
    for name in {"ca.pem"} | own:
        assert (tmp_path / name).read_bytes() == data[name] and (tmp_path / name).stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("who", ROLES, ids=str)
@pytest.mark.parametrize("way", ["shell", "python"])
def test_a_worker_that_listens_gets_its_own_certificate_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: tuple[Role, int, int], way: str
) -> None:
    data = secret(encrypted=True, workers=5)
    if way == "shell":
        done = derive(tmp_path, of(*who), data)
        assert (done.returncode, done.stderr) == (0, "")
    else:
        (tmp_path / "secret").mkdir()
        for name, value in data.items():
            (tmp_path / "secret" / name).write_text(value.hex() if "." in name and "pem" not in name else value.decode())
        for name, value in of(*who).items():
            monkeypatch.setenv(name, value)
        assert deriving.main(["--from", str(tmp_path / "secret"), "--to", str(tmp_path / "keys")]) == 0
    own = f"{who[0]}-{who[1]}.pem"
    assert set(os.listdir(tmp_path)) == {"keys", "secret", "ca.pem", own}
    assert (tmp_path / own).read_bytes() == data[own] and (tmp_path / own).stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("name", sorted(secret()))
@pytest.mark.parametrize("there", [None, b""], ids=["missing", "empty"])
def test_a_secret_with_a_hole_ends_with_a_sentence_and_no_file(tmp_path: Path, name: str, there: bytes | None) -> None:
    data = {key: value for key, value in secret().items() if key != name} | ({} if there is None else {name: there})
    who = ("worker", 3, 7) if name.startswith("workers.") else ("shard", 0, 4)
    done = derive(tmp_path, of(*who), data)  # type: ignore[arg-type]
    assert done.returncode != 0 and not (tmp_path / "keys").exists()
    assert f"no entry {name};" in done.stderr and "suspend and resume the job" in done.stderr


@pytest.mark.parametrize("environment", [{}, {contract.ENV_ROLE: "cook"}, {contract.ENV_ROLE: "worker", contract.ENV_INDEX: "1"}], ids=str)
def test_a_process_without_a_name_gets_no_keys(tmp_path: Path, environment: dict[str, str]) -> None:
    done = derive(tmp_path, environment, secret())
    assert done.returncode != 0 and done.stderr and not (tmp_path / "keys").exists()


def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    done = derive(tmp_path, of("worker", 0, 1), secret(), to="nowhere/keys")
    assert done.returncode != 0 and "cannot be derived" in done.stderr
