"""The folder of all runs on this machine: nobody else may write to it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from psjob_client.local.run_folder import RUNS_FOLDER, new_folder
from psjob_client.problems import BadInput


def test_a_new_folder_is_its_owners_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_folder("digits", tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / RUNS_FOLDER).stat().st_mode) == 0o755
    new_folder("digits", tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir()
    runs.chmod(mode)
    with pytest.raises(BadInput) as caught:
        new_folder("digits", tmp_path)
    assert f"{runs}: others may write to it (mode {mode:o})" in str(caught.value) and f"chmod go-w {runs}" in str(caught.value)
    assert list(runs.iterdir()) == [], "nothing was written there"
    runs.chmod(0o755)
    new_folder("digits", tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir(mode=0o755)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(BadInput, match=f"belongs to user {me}, and this is user {me + 1}: .*; remove it, or start psjob run in a folder"):
        new_folder("digits", tmp_path)
    assert list(runs.iterdir()) == []


def test_a_group_of_several_users_may_not_write(tmp_path: Path) -> None:
    runs = tmp_path / RUNS_FOLDER
    runs.mkdir()
    others = next((group for group in os.getgroups() if group != os.geteuid()), os.geteuid() + 1)
    try:
        os.chown(runs, -1, others)
    except PermissionError:
        pytest.skip("this user is in no other group")
    runs.chmod(0o775)
    with pytest.raises(BadInput, match="mode 775"):
        new_folder("digits", tmp_path)
