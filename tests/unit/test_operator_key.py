"""The file of the operator's own key: made once, whole, for its user alone; anything else in it is refused with a sentence."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from psjob_operator import keys
from psjob_operator.__main__ import app
from psjob_operator.cluster.operator_key import KeyFileError, KeySecret, OperatorKey, default_file
from tests.typed import CliRunner


def loaded(file: Path, secret: KeySecret | None = None) -> OperatorKey:
    made = OperatorKey(file, secret)
    made.load()
    return made


def test_a_missing_file_is_made_for_its_user_alone_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "state" / "psjob" / "key"
    first = loaded(file).questions("run-1")
    assert first is not None and first == loaded(file).questions("run-1") != loaded(file).questions("run-2")
    assert first == keys.mac(bytes.fromhex(file.read_text()), "questions:run-1")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o077 == 0
    assert os.listdir(file.parent) == ["key"], "nothing half written is left"


def test_operators_that_start_together_have_one_key(tmp_path: Path) -> None:
    file, found, gate = tmp_path / "key", list[bytes | None](), threading.Barrier(8)

    def start() -> None:
        gate.wait()
        found.append(loaded(file).questions("run"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and os.listdir(tmp_path) == ["key"]


@pytest.mark.parametrize("content", [b"", b"abc", b"00" * 31, b"00" * 33, b"zz" * 32, b"\xff" * 64], ids=repr)
def test_what_is_no_key_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"--key-file .*/key does not hold 64 hex digits; remove it"):
        loaded(file)
    assert file.read_bytes() == content


def test_a_place_that_takes_no_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "key", tmp_path):
        with pytest.raises(KeyFileError, match=f"--key-file {place} cannot be (made|read): "):
            loaded(place)


def test_a_file_that_is_mounted_from_a_secret_is_never_made(tmp_path: Path) -> None:
    waiting = loaded(tmp_path / "key", KeySecret("home", "own"))
    assert waiting.questions("run") is None and str(tmp_path / "key") in waiting.problem and not os.listdir(tmp_path)


def test_without_a_name_it_lies_among_the_users_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_file() == tmp_path / "psjob-operator" / "key"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_file() == Path("/home/me/.local/state/psjob-operator/key")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--key-secret=own", "--lease-namespace=home"], "--key-secret own: give --key-file too, where the Secret is mounted"),
        (["--key-secret=own", "--key-file=/k"], "--key-secret own: give --lease-namespace too;"),
    ],
    ids=["no file", "no namespace"],
)
def test_options_that_lack_another_are_refused(options: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["run", *options])
    assert done.exit_code == 2 and sentence in done.output
