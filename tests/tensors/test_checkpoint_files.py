"""Files of a checkpoint: plain safetensors, whole or not there, and no damage goes unseen."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psjob.checkpoint import disk, files
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.checkpoint.files import FileFact, PartedTensor
from tests.tensors.checkpoint_parts import HOWS, damage

TENSORS = [
    ("0.weights", torch.randn(1000)),
    ("0.half", torch.randn(33).to(torch.bfloat16)),
    ("1.double", torch.randn(3, 5, dtype=torch.float64)),
    ("1.empty", torch.zeros(0, 4)),
    ("2.bytes", torch.arange(77, dtype=torch.uint8)),
    ("2.flag", torch.tensor([True, False])),
    ("2.scalar", torch.tensor(3, dtype=torch.int64)),
]


def written(folder: Path) -> tuple[Path, FileFact]:
    fact = files.write_blocks(folder, "a.safetensors", TENSORS, {"run": "r"})
    return folder / "a.safetensors", fact


def test_the_library_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    path, fact = written(tmp_path)
    theirs = safetensors.torch.load_file(path)
    assert theirs.keys() == dict(TENSORS).keys()
    assert all(torch.equal(theirs[name], tensor) and theirs[name].dtype == tensor.dtype for name, tensor in TENSORS)
    with safetensors.safe_open(path, "pt") as opened:
        assert opened.metadata() == {"run": "r"}
    assert fact.bytes == path.stat().st_size
    safetensors.torch.save_file(dict(TENSORS), tmp_path / "b.safetensors", {"x": "y"})
    ours = files.read_blocks(tmp_path / "b.safetensors")
    assert all(torch.equal(ours[name], tensor) for name, tensor in TENSORS)


def test_what_is_wanted_is_read_and_checked(tmp_path: Path) -> None:
    path, fact = written(tmp_path)
    again = FileFact.from_json(json.loads(json.dumps(fact.to_json())))
    assert again == fact
    found = files.read_blocks(path, ["1.double"], again)
    assert list(found) == ["1.double"] and torch.equal(found["1.double"], dict(TENSORS)["1.double"])
    files.check_file(path, again)
    with pytest.raises(Damage, match=r"tensor 9\.weights"):
        files.read_blocks(path, ["9.weights"], again)


@pytest.mark.parametrize("refuses", ["nothing", "open", "write"])
def test_a_large_file_holds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """Past the page cache, or through it where the file system says no at `refuses`."""
    system, direct = os.write, disk._DIRECT
    opens = os.open

    def opened(path: Any, flags: int, *more: Any, **where: Any) -> int:
        if refuses == "open" and flags & direct:
            os.close(opens(path, flags & ~direct, *more, **where))
            raise OSError(errno.EINVAL, "no such flag here")
        return opens(path, flags, *more, **where)

    def wrote(fd: int, part: Any) -> int:
        if refuses == "write" and disk._is_direct(fd):
            raise OSError(errno.EINVAL, "not that size")
        return system(fd, part)

    monkeypatch.setattr(disk, "LARGE", 1)
    monkeypatch.setattr(disk, "SYNC_BYTES", 4096)
    monkeypatch.setattr(disk, "CHUNK", 16384)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "write", wrote)
    paged = torch.frombuffer(mmap.mmap(-1, 40960), dtype=torch.float32)
    tensors = [*TENSORS, ("3.paged", paged.uniform_()), ("4.askew", torch.randn(30001)[1:])]
    fact = files.write_blocks(tmp_path, "a.safetensors", tensors)
    found = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors)
    files.check_file(tmp_path / "a.safetensors", fact)
    assert fact.tensors["3.paged"].offset % 4096 == 0


@pytest.mark.parametrize("large", [False, True])
def test_a_tensor_in_parts_is_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    if large:
        monkeypatch.setattr(disk, "LARGE", 1)
    rows = torch.randn(9000, 3)
    others = [("a", torch.arange(5)), ("z", torch.zeros(0, 2))]
    whole = files.write_blocks(tmp_path, "whole", [*others, ("rows", rows)])
    made: list[int] = []

    def parts() -> Iterator[torch.Tensor]:
        for part in rows.split(2000):
            made.append(len(part))
            yield part.clone()

    parted = files.write_blocks(tmp_path, "parted", [*others, ("rows", PartedTensor("float32", (9000, 3), parts))])
    assert made == [2000, 2000, 2000, 2000, 1000] and (parted.tensors, parted.crc) == (whole.tensors, whole.crc)
    assert (tmp_path / "parted").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("parts", [[torch.zeros(3), torch.zeros(2)], [torch.zeros(3)], [torch.zeros(4, dtype=torch.int32)], []])
def test_parts_that_are_not_the_tensor_leave_no_file(tmp_path: Path, parts: list[torch.Tensor]) -> None:
    with pytest.raises(CheckpointProblem, match=r"tensor rows has .* its header says 16 of float32"):
        files.write_blocks(tmp_path, "made", [("rows", PartedTensor("float32", (4,), lambda: iter(parts)))])
    assert os.listdir(tmp_path) == []


def test_no_tensors_make_a_file_too(tmp_path: Path) -> None:
    fact = files.write_blocks(tmp_path, "e.safetensors", [])
    assert files.read_blocks(tmp_path / "e.safetensors", None, fact) == {}
    assert safetensors.torch.load_file(tmp_path / "e.safetensors") == {}


@given(position=st.integers(0, 10_000), change=st.integers(1, 255))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_flipped_byte_is_found(tmp_path: Path, position: int, change: int) -> None:
    path, fact = written(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] ^= change
    path.write_bytes(raw)
    with pytest.raises(Damage, match=r"a\.safetensors is damaged: expected .*, found "):
        files.check_file(path, fact)
    with pytest.raises(Damage):
        files.read_blocks(path, None, fact)
    try:
        files.read_blocks(path)
    except Damage:
        pass


@pytest.mark.parametrize("how", HOWS)
def test_every_damage_is_found(tmp_path: Path, how: str) -> None:
    path, fact = written(tmp_path)
    damage(path, how)
    for call in (lambda: files.check_file(path, fact), lambda: files.read_blocks(path, None, fact)):
        with pytest.raises(Damage, match="expected"):
            call()
    if how != "another":
        with pytest.raises(CheckpointProblem):
            files.read_blocks(path)


def with_header(body: Any, data: bytes = b"") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "raw",
    [
        with_header(b"not json"),
        with_header([]),
        with_header(b"[" * 100_000),
        with_header({"a": 1}),
        with_header({"a": entry(dtype="F99")}, b"1234"),
        with_header({"a": entry(shape=(-1,))}, b"1234"),
        with_header({"a": entry(shape="x")}, b"1234"),
        with_header({"a": entry(shape=(1 << 40, 1 << 40))}, b"1234"),
        with_header({"a": entry(shape=(1 << 46,), offsets=(0, 1 << 48))}, b"1234"),
        with_header({"a": entry(offsets=(4, 0))}, b"1234"),
        with_header({"a": entry(offsets=(0, 8))}, b"1234"),
        with_header({"a": entry(offsets=(1, 5))}, b"12345"),
        with_header({"a": entry(), "b": entry()}, b"1234"),
        with_header({"a": entry()}, b"12345"),
        with_header(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", b"1234"),
        with_header({"a": entry() | {"more": 1}}, b"1234"),
    ],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(Damage, match="x is damaged"):
        files.read_blocks(tmp_path / "x")


@pytest.mark.parametrize("call", ["_create", "_write", "_sync", "_rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_failed_write_leaves_the_old_file_and_no_temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    path, _ = written(tmp_path)
    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, call, fail)
    with pytest.raises(CheckpointProblem, match=errno.errorcode[number]) as caught:
        files.write_blocks(tmp_path, "a.safetensors", [("other", torch.zeros(5))])
    assert str(tmp_path) in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_failed_fsync_is_never_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []

    def fail(fd: int) -> None:
        synced.append(fd)
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(disk, "_sync", fail)
    with pytest.raises(CheckpointProblem, match="EIO, the disk reported an error"):
        written(tmp_path)
    assert len(synced) == 1


def test_a_leftover_temp_file_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors.tmp").write_bytes(b"half")
    path, fact = written(tmp_path)
    files.check_file(path, fact)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "", ".hidden", "a\n", "x" * 201])
def test_a_name_with_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointProblem, match="no file name"):
        files.write_blocks(tmp_path, name, TENSORS)
    with pytest.raises(ValueError, match="plain name"):
        FileFact.from_json({"name": name, "bytes": 1, "crc": 1, "tensors": {}})


def test_what_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointProblem, match=r"cannot open the folder in .*missing: ENOENT, the folder is gone"):
        files.write_blocks(tmp_path / "missing", "a", TENSORS)
    with pytest.raises(CheckpointProblem, match=r"cannot write a in .*: tensor x has dtype complex128"):
        files.write_blocks(tmp_path, "a", [("x", torch.zeros(1, dtype=torch.complex128))])
    with pytest.raises(CheckpointProblem, match="twice"):
        files.write_blocks(tmp_path, "a", [("x", torch.zeros(1)), ("x", torch.zeros(1))])
    assert not list(tmp_path.iterdir())
