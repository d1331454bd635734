"""What a shard leaves on its disk: whole files of snapshots that may be committed, and nothing of any other.

- A shard that goes back to the checkpoint that it wrote last has it in memory, and reads no block of it from the disk.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob.checkpoint import disk, files
from psjob.checkpoint.disk import CheckpointProblem, Damage
from psjob.checkpoint.files import FileFact
from psjob.checkpoint.states import _bits, _positions, read_admission, write_admission
from psjob.layout.blocks import TensorSpec
from psjob.shard import server as serving
from psjob.shard import snapshot
from psjob.shard import table as tables
from psjob.shard.deduplication import Admission
from psjob.tables import Partition, TableSpec
from tests.tensors import desk as desks
from tests.tensors.checkpoint_parts import save
from tests.tensors.desk import Desk, take_snapshot
from tests.tensors.lone_shard import LoneShard, did


def failing_fsync(monkeypatch: pytest.MonkeyPatch, of_folder: bool) -> None:
    """Every fsync of a folder, or of a file, fails with EIO."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}") == of_folder:
            raise OSError(errno.EIO, "injected")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("of_folder", [True, False], ids=["folder", "file"])
def test_a_file_that_could_not_be_made_durable_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_folder: bool) -> None:
    failing_fsync(monkeypatch, of_folder)
    with pytest.raises(CheckpointProblem, match=r"cannot write it in .*EIO"):
        disk.write_whole(tmp_path, "it", [b"bytes"])
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_could_not_be_made_durable_leaves_neither_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").write_bytes(b"bytes")
    failing_fsync(monkeypatch, True)
    with pytest.raises(CheckpointProblem):
        disk.rename_whole(tmp_path, "one", "two")
    assert list(tmp_path.iterdir()) == []


def test_a_rename_of_what_is_not_there_leaves_the_other_file(tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes(b"bytes")
    with pytest.raises(CheckpointProblem):
        disk.rename_whole(tmp_path, "one", "two")
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


def test_what_cannot_be_removed_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_fsync(monkeypatch, True)
    monkeypatch.setattr(os, "unlink", denied)
    with pytest.raises(CheckpointProblem, match="it could not be removed again and may be there"):
        disk.write_whole(tmp_path, "it", [b"bytes"])


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "injected")


# -- a real full disk --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    if os.geteuid() != 0:
        pytest.skip("a small file system needs root: mount -t tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system needs tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that takes all room except `leave` bytes."""
    facts = os.statvfs(folder)
    path = folder / "filler"
    path.write_bytes(bytes(facts.f_bavail * facts.f_frsize - leave))
    return path


def test_a_full_disk_costs_the_snapshot_alone_and_leaves_nothing_of_it(small: Path) -> None:
    shard = LoneShard(small).serving([{"name": "w", "shape": [1 << 16], "dtype": "float32", "group": 0}])
    filler = fill(shard.folder, 8192)
    answers = shard.snapshot(7)
    assert did(answers) == ["ready", "held", "unwritten"]
    unwritten = answers[-1]
    assert unwritten["full"] is True and unwritten["snapshot"] == 7
    needed = 4 * sum(cell.block.length for cell in shard.server.store.cells.values())
    assert "the volume is full" in unwritten["why"] and f"this snapshot needs {needed} bytes there, 8192 are free" in unwritten["why"]
    assert shard.files() == ["filler"]
    filler.unlink()
    assert did(shard.snapshot(8)) == ["ready", "held", "written"]
    assert len(shard.files()) == 2


def test_a_shard_whose_folder_cannot_be_made_waits_for_room_with_a_sentence(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder needs an inode, and all are taken."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", str(small)], check=True)
    taken = [small / "one", small / "two"]
    for path in taken:
        path.touch()
    server = LoneShard(small).server
    seen: list[str | None] = []

    def sleep(seconds: float) -> None:
        seen.append(server.problem)
        for path in taken:
            path.unlink(missing_ok=True)

    monkeypatch.setattr(serving.time, "sleep", sleep)
    server._settle_in()
    assert seen and seen[0] is not None and "the volume is full" in seen[0]
    assert server.problem is None and server.folder.is_dir()


# -- void snapshots, earlier lives -----------------------------------------------------------------------


def test_a_void_snapshot_leaves_no_file_and_the_ones_before_stay(tmp_path: Path) -> None:
    shard = LoneShard(tmp_path).serving()
    assert did(shard.snapshot(7)) == ["ready", "held", "written"]
    kept = shard.files()
    assert kept == ["v000001-c000007-shard001-a1-admission.json", "v000001-c000007-shard001-a1.safetensors"]
    (shard.folder / "v000001-c000008-shard000-a1.safetensors").touch()
    (shard.folder / "v000001-c000008-shard001-a1.safetensors.tmp").touch()
    for cell in shard.server.store.cells.values():
        cell.content = object()
    shard.snapshot(8, base=7)
    assert did(shard.order({"do": "void", "snapshot": 8})) == ["voided"]
    assert shard.files() == [*kept, "v000001-c000008-shard000-a1.safetensors"], "another shard's is not ours to delete"
    assert did(shard.order({"do": "void", "snapshot": 9})) == ["voided"], "nothing was written of it"


def test_a_snapshot_that_is_void_while_it_is_written_is_given_up_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = LoneShard(tmp_path).serving()
    real = os.write
    begun, goes = threading.Event(), threading.Event()

    def slow(fd: int, data: Any) -> int:
        begun.set()
        assert goes.wait(20)
        return real(fd, data)

    monkeypatch.setattr(os, "write", slow)
    shard.server.control.order({"do": "snapshot", "snapshot": 7, "step": -1, "marks": False, "base": None})
    assert begun.wait(20)
    shard.server.control.order({"do": "void", "snapshot": 7})
    assert did(shard.said)[-1] == "held", "the disk is busy with it"
    goes.set()
    shard.settle()
    assert did(shard.said)[-2:] == ["held", "voided"] and shard.files() == []
    monkeypatch.undo()
    assert did(shard.snapshot(8)) == ["ready", "held", "written"]


def test_temp_files_of_earlier_lives_of_this_very_shard_go_at_the_start(tmp_path: Path) -> None:
    server = LoneShard(tmp_path / "disk", attempt=3).server
    server.folder.mkdir(parents=True)
    mine = ["v000001-c000001-shard001-a1.safetensors.tmp", "v000002-c000009-shard001-a2-rows.safetensors.tmp",
            "v000002-c000009-shard001-a2-admission.json.tmp"]  # fmt: skip
    others = ["v000001-c000001-shard001-a3.safetensors.tmp", "v000001-c000001-shard001-a12.safetensors.tmp",
              "v000001-c000001-shard000-a1.safetensors.tmp", "v000001-c000001-shard001-a1.safetensors",
              "manifest-v000001-s000000000001.json.tmp", "notes-shard001-a1.tmp"]  # fmt: skip
    for name in mine + others:
        (server.folder / name).touch()
    server._settle_in()
    assert sorted(path.name for path in server.folder.iterdir()) == sorted(others)


# -- rows --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [True, False])
def test_rows_of_a_snapshot_not_written_are_still_to_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """They are as the snapshot before it left them, which the newest manifest holds."""
    spec = TableSpec("t", 4, "sgd", num_rows=400).to_json()
    shard = LoneShard(tmp_path)
    shard.folder.mkdir()
    shard.order({"do": "setup", "setup": 1, "term": 1, "mode": "sync", "rule": "sgd", "table": [], "tables": [spec]})
    store = shard.server.store
    assert store.initialised_one(store.row_cells[0].index)
    shard.server.initialised()
    shard.order({"do": "open", "term": 1, "restore_id": 1})
    cell = store.row_cells[0]
    ids = torch.arange(400)
    mine = ids[Partition.even(2).shard_of(ids) == 1]
    with cell.lock:
        cell.begin(mine, torch.zeros(len(mine), 4), [{"lr": 0.1}])
    assert did(shard.snapshot(1)) == ["ready", "held", "written"]
    with cell.lock:
        cell.begin(mine[:3], torch.ones(3, 4), [{"lr": 0.1}])
    if fails:
        monkeypatch.setattr(tables, "write_rows", refuse)
        assert did(shard.snapshot(2, base=1)) == ["ready", "held", "unwritten"]
        monkeypatch.undo()
    (written,) = shard.snapshot(3, base=1)[2:]
    last = shard.folder / written["rows"]["chain"][-1]
    with files.opened_checkpoint_file(last) as reader:
        assert sum(entry.shape[0] for name, entry in reader.entries.items() if ".rows." in name) == 3


def refuse(*_: object) -> None:
    raise CheckpointProblem("injected")


# -- the admission table -----------------------------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(
        st.integers(0, 1 << 40), st.sets(st.integers(0, 3)), st.none() | st.integers(0, 1 << 40),
        st.tuples(st.integers(0, 99), st.integers(0, 99)),
    ),
    max_size=8,
)  # fmt: skip


@given(ROWS)
def test_an_admission_table_comes_back_from_its_file(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("table")
    table = Admission(len(rows), 301)
    for rank, (complete, open_, left, incarnation) in enumerate(rows):
        row = table.rows[rank]
        row.complete, row.open, row.left_at, row.incarnation = complete, open_, left, incarnation
    fact = write_admission(folder, "v000001-c000002-shard001-a1-admission.json", table.save())
    again = FileFact.from_json(fact.to_json())
    made = _named(folder, again, len(rows))
    loaded = Admission(len(rows), 301)
    saved = read_admission(folder, made, 1)
    assert saved is not None
    loaded.load(saved, {})
    assert loaded.rows == table.rows
    files.check_file(folder / fact.name, again)


@given(st.sets(st.integers(0, 300)))
def test_open_blocks_come_back_from_their_bits(positions: set[int]) -> None:
    assert _positions(_bits(sorted(positions)), 301) == sorted(positions)


def _named(folder: Path, fact: FileFact, ranks: int | None = None) -> Any:
    """A checkpoint of shard 1's with that table; of so many workers, where it is told."""
    made = save(folder, 1)
    workers = made.workers if ranks is None else {str(rank): made.workers["0"] for rank in range(ranks)}
    return type(made)(**{**made.__dict__, "tables": {"1": fact}, "workers": workers})


def test_a_damaged_admission_table_is_named(tmp_path: Path) -> None:
    fact = write_admission(tmp_path, "v000001-c000002-shard001-a1-admission.json", Admission(2, 4).save())
    made = _named(tmp_path, fact)
    path = tmp_path / fact.name
    assert fact in made.listed()
    path.write_bytes(path.read_bytes().replace(b"0", b"1", 1))
    for read in (lambda: read_admission(tmp_path, made, 1), lambda: files.check_file(path, fact)):
        act: Callable[[], object] = read
        with pytest.raises(Damage, match=r"admission.json is damaged: expected .* crc"):
            act()


def damage(folder: Path) -> None:
    """Change a byte of every block that lies there."""
    for path in folder.glob("v*-shard*[0-9].safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


def test_survivors_go_back_to_the_bits_of_the_checkpoint_without_their_disk(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    clerks = desk.begun()
    take_snapshot(desk, clerks, [1, 1])
    (made,) = desk.manifests()[-1:]
    wanted = desk.weights(made)
    for clerk in clerks:
        desk.push(clerk, made.step, version=made.step)
    assert desk.versions() == {made.step + 1}
    damage(desk.folder)
    desk.relink(1, serving=False)
    desk.settle()
    values = {float(v) for server in desk.servers for cell in server.store.cells.values() for v in cell.state.weights.unique()}  # type: ignore[union-attr]
    assert values == wanted and desk.versions() == {made.step} and desk.c.open
    for clerk in [desk.hello(rank, start=2) for rank in range(2)]:
        desk.settle()
        desk.push(clerk, made.step, version=made.step)
    (again,) = {float(v) for server in desk.servers for cell in server.store.cells.values() for v in cell.state.weights.unique()}  # type: ignore[union-attr]
    assert again != wanted.pop(), "what was brought back is the blocks' own, no view of the copy"
    assert desk.servers[0].control.disk.moving() == (0, 0)


def memory(which: str) -> int:
    """Bytes of this process that lie in memory: VmRSS now, VmHWM at most since `reset`."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def reset() -> None:
    """VmHWM begins anew."""
    Path("/proc/self/clear_refs").write_text("5")


def test_going_back_takes_memory_for_the_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once from memory; once from the files, with copies that are of no use. The state is three times the weights."""
    size = 64 << 20
    monkeypatch.setattr(desks, "TABLE", [TensorSpec("w", (size // 4,), "float32", 0)])
    desk = Desk(tmp_path)
    desk.rule = "adam"
    clerks = desk.begun()
    take_snapshot(desk, clerks, [1, 1])
    (made,) = desk.manifests()[-1:]
    for turn in range(2):
        for clerk in clerks:
            desk.push(clerk, made.step, version=made.step)
        if turn:
            for server in desk.servers:
                server.control.snapshots.images.clear()
        damage(desk.folder)  # a second time heals it
        before = memory("VmRSS")
        reset()
        desk.relink(1, serving=False)
        desk.settle()
        assert desk.c.open and desk.versions() == {made.step}
        assert memory("VmHWM") - before < 1.25 * size
        clerks = [desk.hello(rank, start=2 + turn) for rank in range(2)]
        desk.settle()


def bytes_of(shard: LoneShard, number: int) -> dict[int, int | None]:
    """By block, a checksum of what memory has of it in the file of a snapshot."""
    name = f"v000001-c{number:06d}-shard001-a1.safetensors"
    found = {index: shard.server.control.snapshots.images.find(index, name) for index in shard.server.store.cells}
    return {index: None if image is None else zlib.crc32(image["weights"].numpy().tobytes()) for index, image in found.items()}


def push(shard: LoneShard, blocks: list[int]) -> None:
    """Change blocks."""
    for index in blocks:
        cell = shard.server.store.cells[index]
        with cell.lock:
            cell._changing()
            assert cell.state is not None
            cell.state.weights.add_(1.0)


def test_memory_has_each_block_as_it_was_last_written(tmp_path: Path) -> None:
    shard = LoneShard(tmp_path).serving([{"name": f"w{i}", "shape": [4096], "dtype": "float32", "group": i} for i in range(8)])
    one, *others = shard.server.store.cells
    shard.snapshot(1)
    first = bytes_of(shard, 1)
    assert None not in first.values() and len(others) >= 2
    push(shard, [one])
    shard.snapshot(2, base=1)
    push(shard, [one, *others])
    second = bytes_of(shard, 2)
    assert second[one] not in (None, first[one]) and {second[index] for index in others} == {None}
    assert bytes_of(shard, 1) == {**first, one: None}, "the second names the others where the first has put them"
    blocks = files.read_blocks(shard.folder / "v000001-c000002-shard001-a1.safetensors")
    assert zlib.crc32(blocks[f"{one}.weights"].numpy().tobytes()) == second[one]


@pytest.mark.parametrize("end", ["void", "failed"])
def test_after_a_snapshot_that_came_to_nothing_memory_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Its copies lie where those of the checkpoint before lay."""
    shard = LoneShard(tmp_path).serving()
    shard.snapshot(1)
    push(shard, list(shard.server.store.cells))
    if end == "failed":
        monkeypatch.setattr(snapshot, "write_admission", fail)
        shard.snapshot(2, base=1)
    else:
        shard.server.control.order({"do": "snapshot", "snapshot": 2, "step": 99, "marks": False, "base": 1})
        shard.order({"do": "void", "snapshot": 2})
    assert set(bytes_of(shard, 1).values()) == {None} == set(bytes_of(shard, 2).values())


def fail(*_: object) -> None:
    raise disk.CheckpointProblem("injected")


def test_who_has_read_the_checkpoint_goes_back_to_it_without_its_disk(tmp_path: Path) -> None:
    """Both shards come back from their files; then one is lost again, while updates have changed the other."""
    desk = Desk(tmp_path)
    clerks = desk.begun()
    take_snapshot(desk, clerks, [1, 1])
    (made,) = desk.manifests()[-1:]
    wanted = desk.weights(made)
    back = Desk(tmp_path, number=2)
    for clerk in [back.hello(rank, start=2) for rank in range(2)]:
        back.settle()
        back.push(clerk, made.step, version=made.step)
    back.settle()
    assert back.c.open and back.versions() == {made.step + 1}
    damage(back.folder)
    back.relink(1, serving=False)
    back.settle()
    assert back.c.open and back.versions() == {made.step}
    assert {float(v) for server in back.servers for cell in server.store.cells.values() for v in cell.state.weights.unique()} == wanted  # type: ignore[union-attr]
