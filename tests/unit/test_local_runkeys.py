"""The keys of a run on a laptop: files of their owner alone, and a start that a full disk does not keep from happening."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from psjob.process.config import read_keys
from psjob_client.local import run_folder
from psjob_operator import keys


def test_each_seat_has_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    made = run_folder.make_keys(tmp_path / "keys", shards=2, workers=1)
    assert {path.name for path in made.folder.iterdir()} == {"run", "shard-0", "shard-1", "worker-0"}
    assert {path.stat().st_mode & 0o777 for path in made.folder.iterdir()} == {0o600} and made.folder.stat().st_mode & 0o777 == 0o700
    assert keys.read((made.folder / "run").read_text()) == dict(made.named)


def test_workers_that_listen_have_a_certificate_where_streams_are_encrypted(tmp_path: Path) -> None:
    plain = run_folder.make_keys(tmp_path / "plain", shards=1, workers=2, listening=2)
    assert not list(plain.folder.glob("*.pem"))
    made = run_folder.make_keys(tmp_path / "keys", shards=1, workers=2, encrypted=True, listening=2)
    assert {path.name for path in made.folder.glob("*.pem")} == {"ca.pem", "shard-0.pem", "worker-0.pem", "worker-1.pem"}
    assert made.hand("worker", 1, 2).with_name("worker-1.pem").exists()


@pytest.mark.parametrize(("role", "index"), [("shard", 0), ("shard", 1), ("worker", 0)])
def test_a_start_gets_its_own_keys_in_the_room_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, index: int
) -> None:
    made = run_folder.make_keys(tmp_path / "keys", shards=2, workers=1)
    first = read_keys(str(made.hand(role, index, 9)), role, index)

    def full(handle: int, offset: int, length: int) -> None:
        if os.fstat(handle).st_size < offset + length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    second = read_keys(str(made.hand(role, index, 10)), role, index)
    assert first.own != second.own and len(second.own) == keys.SIZE
    (made.folder / f"{role}-{index}").unlink()
    with pytest.raises(OSError, match="No space left"):
        made.hand(role, index, 11)
