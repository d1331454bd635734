"""Rows of tables in checkpoints: full and changed rows, other shard counts, damage, pruning, the final file. Real files."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from psjob.checkpoint import files, manifest
from psjob.checkpoint.disk import Damage
from psjob.checkpoint.final import checkpoint_sha256, tensors_sha256, write_final
from psjob.checkpoint.manifest import MAX_CHAIN, Manifest, RowPlaces
from psjob.checkpoint.states import read_tables
from psjob.shard.table import Voided
from psjob.tables import Partition, RowTable
from psjob.tables.spec import initial_rows
from tests.support.soaking import rotating
from tests.tensors.checkpoint_parts import SPECS, World, together

torch.set_num_threads(1)


def restored(folder: Path, made: Manifest, shards: int) -> tuple[list[list[tuple[RowTable, int]]], list[dict[int, list[float]]]]:
    back = [read_tables(folder, made, shard, shards) for shard in range(shards)]
    return back, [together([of[number][0] for of in back]) for number in range(len(SPECS))]


@pytest.mark.parametrize("seed", [0, *map(rotating, range(1, 4))])
def test_a_chain_gives_back_what_was_snapshot(tmp_path: Path, seed: int) -> None:
    """Pushes continue while each snapshot is written; every manifest that stands gives its own moment, on any number of shards."""
    world = World(tmp_path, 2, seed)
    moments: list[tuple[Manifest, list[dict[int, list[float]]], int]] = []
    for turn in range(5):
        for _ in range(6):
            world.push(most=12 if turn else 250)
        world.hold()
        truth, step = world.truth(), world.clock
        busy = threading.Thread(target=lambda: [world.push() for _ in range(3)])
        busy.start()
        bodies = world.write()
        busy.join()
        if turn == 3:
            continue  # nobody commits it: its changes are in the next one
        clock, world.clock = world.clock, step
        moments.append((world.commit(bodies), truth, step))
        world.clock = clock
    assert any(len(chain) > 1 for made, _, _ in moments for chain in made.rows.chains if made.rows), "changed rows only were written"
    for made, truth, step in moments:
        for shards in (2, 1, 3):
            back, found = restored(tmp_path, manifest.read_manifest(tmp_path, made.name), shards)
            assert found == truth
            assert {n for of in back for _, n in of} == {step}
            for shard, of in enumerate(back):
                for table, _ in of:
                    assert bool((Partition.even(shards).shard_of(table.export()["ids"]) == shard).all())
                    assert table.changed_since_mark() == 0


def test_training_goes_on_alike_after_a_restore(tmp_path: Path) -> None:
    """First values, counts of admission, state and clocks come back, so that the next pushes give the same bits."""
    world = World(tmp_path, 2)
    for _ in range(5):
        world.push()
    made = world.checkpoint()
    other = World(tmp_path / "unused", 3)
    back, _ = restored(tmp_path, made, 3)
    for cells, tables in zip(other.shards, back, strict=True):
        for cell, (table, n) in zip(cells, tables, strict=True):
            cell.table, cell.n = table, n
    other.clock = world.clock
    other.chance.set_state(world.chance.get_state())
    for _ in range(5):
        world.push()
        other.push()
    assert other.truth() == world.truth()


def test_few_changes_make_a_small_file_and_chains_are_bounded(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    for _ in range(4):
        world.push(least=240, most=250)
    assert world.made is None
    full = world.checkpoint()
    lengths = []
    for _ in range(30):
        world.push(most=3)
        made = world.checkpoint()
        assert made.rows is not None
        lengths.append(len(made.rows.chains[0]))
        newest = made.fact(made.rows.chains[0][-1])
        if lengths[-1] > 1:
            assert newest.bytes < full.rows.files[0].bytes / 4 if full.rows else False
    assert max(lengths) == MAX_CHAIN and 1 in lengths, "then all rows are written anew"
    assert sum(fact.bytes for fact in made.rows.files) < 2 * full.rows.files[0].bytes if made.rows and full.rows else False


def test_a_snapshot_that_is_void_loses_no_change(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    for _ in range(4):
        world.push(least=100)
    world.checkpoint()
    world.push(most=5)
    world.hold()
    world.snapshots[0].void()
    with pytest.raises(Voided):
        world.snapshots[0]._held = {}
        held = World(tmp_path, 1)
        held.push(least=50)
        held.hold()
        kept = dict(held.snapshots[0]._held)
        held.snapshots[0].void()
        held.snapshots[0]._held = kept
        held.write()
    world.push(most=5)
    made = world.checkpoint()
    assert made.rows is not None and len(made.rows.chains[0]) == 2, "the chain before still holds"
    assert restored(tmp_path, made, 1)[1] == world.truth()


def test_a_table_that_came_back_is_written_whole(tmp_path: Path) -> None:
    """Its changes are of another moment than the files before."""
    world = World(tmp_path, 1)
    world.push(least=100)
    first = world.checkpoint()
    world.push()
    world.checkpoint()
    for cell, (table, n) in zip(world.shards[0], read_tables(tmp_path, first, 0, 1), strict=True):
        cell.table, cell.n = table, n
    world.push(most=3)
    made = world.checkpoint()
    assert made.rows is not None and len(made.rows.chains[0]) == 1
    assert restored(tmp_path, made, 1)[1] == world.truth()


def test_damage_anywhere_in_a_chain_means_the_manifest_before(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    for _ in range(4):
        world.push(least=100)
    first = world.checkpoint()
    world.push(most=5)
    second = world.checkpoint()
    assert second.rows is not None
    path = tmp_path / second.rows.chains[1][-1]
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    path.write_bytes(raw)
    found, problems = manifest.newest_manifest(tmp_path, "run-1")
    assert found is not None and found.step == first.step
    assert path.name in problems[0]
    with pytest.raises(Damage, match=path.name):
        restored(tmp_path, second, 2)
    (tmp_path / second.rows.chains[1][0]).unlink()
    assert manifest.newest_manifest(tmp_path, "run-1")[0] is None


def test_files_stay_as_long_as_a_kept_manifest_needs_them(tmp_path: Path) -> None:
    world = World(tmp_path, 1)
    for _ in range(4):
        world.push(least=200)
    for _ in range(MAX_CHAIN + 4):
        world.push(most=3)
        made = world.checkpoint()
        manifest.prune(tmp_path, 2, made)
        assert restored(tmp_path, made, 1)[1] == world.truth()
        found, problems = manifest.newest_manifest(tmp_path, "run-1")
        assert found == made and problems == []
    on_disk = {path.name for path in tmp_path.glob("*-rows.safetensors")}
    kept = [manifest.read_manifest(tmp_path, path.name) for path in tmp_path.glob("manifest-*")]
    assert on_disk == {fact.name for each in kept if each.rows for fact in each.rows.files}


def test_the_final_file_has_what_a_plain_model_has(tmp_path: Path) -> None:
    world = World(tmp_path, 2)
    for _ in range(6):
        world.push(most=60)
    world.checkpoint()
    world.push(most=5)
    made = world.checkpoint(final=True)
    write_final(tmp_path, made)
    found = files.read_blocks(tmp_path / "final.safetensors")
    users, words, counts = world.truth()
    assert found["users.ids"].tolist() == sorted(users)
    assert [row.tolist() for row in found["users.weight"]] == [users[i][1:5] for i in sorted(users)]
    expected = initial_rows(SPECS[1], torch.arange(300))
    for i, row in words.items():
        expected[i] = torch.tensor(row[1:4])
    assert torch.equal(found["words.weight"], expected)
    assert found["counts.ids"].tolist() == sorted(counts) and found["counts.weight"].dtype == torch.int32
    assert [row.tolist() for row in found["counts.weight"]] == [counts[i][1:3] for i in sorted(counts)]
    torch.nn.Embedding(300, 3).load_state_dict({"weight": found["words.weight"]})


def test_the_digest_of_a_checkpoint_tells_rows_apart_and_not_shards(tmp_path: Path) -> None:
    """Equal pushes on one, two and three shards, then one more; the parameters are the same in all."""
    found = []
    for shards in (1, 2, 3):
        (tmp_path / str(shards)).mkdir()
        world = World(tmp_path / str(shards), shards)
        for _ in range(4):
            world.push(most=60)
        found.append(world)
    digests = {checkpoint_sha256(world.folder, world.checkpoint()) for world in found}
    assert len(digests) == 1
    last = found[-1]
    last.clock -= 1  # the parameters stay those of that step
    last.push(most=5)
    made = last.checkpoint()
    write_final(last.folder, made)
    whole = files.read_blocks(last.folder / "final.safetensors")
    rows = ["users.ids", "users.weight", "words.weight", "counts.ids", "counts.weight"]
    assert checkpoint_sha256(last.folder, made) not in digests
    assert checkpoint_sha256(last.folder, made) == tensors_sha256(whole[name] for name in ["w", "b", "d", *rows])
    bare = replace(made, rows=None)
    assert checkpoint_sha256(last.folder, bare) == tensors_sha256(whole[name] for name in ["w", "b", "d"]), "as ever without tables"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chains": [["v000001-c000009-none.safetensors"]] * 2}, "rows of shard 0 are in 1 files"),
        ({"chains": [[], []]}, "rows of shard 0 are in 0 files"),
        ({"versions": [[1], [1, 1]]}, "rows of shard 0 have 1 versions"),
        ({"partition": Partition.even(5).to_json()}, "buckets are with shard 4, rows with 2 shards"),
        ({"specs": [{"name": "x"}]}, "missing"),
    ],
)
def test_places_that_are_not_whole_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    world = World(tmp_path, 2)
    world.push()
    made = world.checkpoint()
    assert made.rows is not None
    body = made.rows.to_json()
    assert RowPlaces.from_json(body) == made.rows
    with pytest.raises(ValueError, match=words):
        RowPlaces.from_json(body | change)
