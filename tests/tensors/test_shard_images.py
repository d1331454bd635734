"""A shard that goes back to the checkpoint that it wrote last has it in memory, and reads no block of it from the disk."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import pytest

from psjob.checkpoint import disk, files
from psjob.layout.blocks import TensorSpec
from psjob.shard import snapshot
from tests.tensors import desk as desks
from tests.tensors.desk import Desk, take_snapshot
from tests.tensors.lone_shard import LoneShard


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
