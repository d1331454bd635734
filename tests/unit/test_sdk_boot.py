"""Where a script that travelled as text is written: a folder of this user alone, into which nobody else's link leads."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from psjob_client.sdk.boot import own_folder, written


def test_the_folder_is_the_same_each_time_and_this_users_alone(tmp_path: Path) -> None:
    made = own_folder(str(tmp_path))
    assert own_folder(str(tmp_path)) == made and stat.S_IMODE(os.stat(made).st_mode) == 0o700
    path = written("print(1)", made)
    assert written("print(1)", made) == path and Path(path).read_text() == "print(1)" and os.listdir(made) == [os.path.basename(path)]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def a_link(at: Path, elsewhere: Path) -> None:
    at.symlink_to(elsewhere)


def a_file(at: Path, elsewhere: Path) -> None:
    at.write_text("")


def for_all(at: Path, elsewhere: Path) -> None:
    at.mkdir()
    at.chmod(0o777)


@pytest.mark.parametrize("there", [a_link, a_file, for_all])
def test_what_another_user_has_put_there_is_left(tmp_path: Path, there: Callable[[Path, Path], None]) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o777)
    (tmp_path / "tmp").mkdir()
    there(tmp_path / "tmp" / f"psjob-scripts-{os.getuid()}", elsewhere)
    made = own_folder(str(tmp_path / "tmp"))
    written("print(1)", made)
    assert os.listdir(elsewhere) == [] and not os.path.islink(made) and os.path.dirname(made) == str(tmp_path / "tmp")


def test_a_link_in_the_place_of_the_script_is_replaced(tmp_path: Path) -> None:
    folder = own_folder(str(tmp_path))
    target = tmp_path / "target"
    target.write_text("kept")
    path = Path(written("print(1)", folder))
    path.unlink()
    path.symlink_to(target)
    written("print(1)", folder)
    assert target.read_text() == "kept" and not path.is_symlink() and path.read_text() == "print(1)"
