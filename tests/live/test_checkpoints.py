"""Checkpoints taken while training runs are whole: each block holds just the updates that the manifest says were made.

Every push adds 1 to every weight, so a block's weights tell how many pushes they contain.

- Blocks that have not changed are named where they lie, in files that stay as long as a manifest names them.
- Rows in the checkpoints of real shards: each is of one step, with the blocks; a run that continues from one ends with the same bits.
- A run that continues from a checkpoint whose parameters were cut in other blocks than this version would cut.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint import files, manifest
from psjob.checkpoint.manifest import Manifest, read_records
from psjob.checkpoint.states import read_admission, read_states, read_tables
from psjob.layout import blocks
from psjob.process.config import CheckpointConfig
from psjob.resume.record import unpack
from tests.live.checkpointing import OFTEN, counting, steps
from tests.live.embeddings import ROWS, Clicks, adagrad, loss_of, rows_of
from tests.live.live_shards import NEVER, Shards, Worker, all_well, eventually, serving, together, until_checkpoints
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


STEPS = 32
EVERY_5 = CheckpointConfig(interval_seconds=3600.0, every_steps=5, keep=1000, disabled=False, resume_from=None)


def manifests(folder: Path) -> list[tuple[Manifest, dict[int, float]]]:
    """Every manifest there with the one number that each block's weights hold."""
    found = []
    for path in sorted(folder.glob("manifest-*.json")):
        made = manifest.read_manifest(folder, path.name)
        states = read_states(folder, made, [block.index for block in made.layout.blocks])
        values: dict[int, float] = {}
        for index, (state, _) in states.items():
            assert len(set(state.weights.tolist())) == 1, "a block was copied while an update was made"
            values[index] = float(state.weights[0])
        found.append((made, values))
    return found


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
def test_a_sync_checkpoint_is_one_step(tmp_path: Path, breaks: float) -> None:
    with serving(tmp_path, workers=3, shards=2, checkpoint=OFTEN) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(STEPS, 1, breaks, shards))
        assert shards.wait_ended() == [0, 0]
        made = manifests(tmp_path / "run-1")
    assert len(made) > 3 and made[0][0].step == 0 and made[-1][0].final and made[-1][0].step == STEPS
    for one, values in made:
        assert set(values.values()) == {float(one.step)}
        assert {place.n for place in one.blocks} == {one.step}
        assert {int(worker["clock"]) for worker in one.workers.values()} == {one.step}
        records = read_records(tmp_path / "run-1", one)
        if 0 < one.step < STEPS:
            assert {rank: unpack(raw).step for rank, raw in records.items()} == dict.fromkeys(range(3), one.step)


@pytest.mark.parametrize("breaks", [rotating(0.0), 0.1])
def test_an_async_checkpoint_has_one_clock_a_worker_in_every_block(tmp_path: Path, breaks: float) -> None:
    """Marks hold the workers until all shards have copied: the sum of the clocks is what every block holds."""
    with serving(tmp_path, workers=3, shards=2, mode="async", checkpoint=OFTEN) as shards:
        all_well([counting(shards, rank) for rank in range(3)], steps(STEPS, 2, breaks, shards))
        assert shards.wait_ended() == [0, 0]
        made = manifests(tmp_path / "run-1")
    assert len(made) > 2 and made[-1][0].final
    for one, values in made:
        clocks = {rank: int(worker["clock"]) for rank, worker in one.workers.items()}
        assert set(values.values()) == {float(sum(clocks.values()))}, (one.name, clocks, values)
        assert one.step == min(clocks.values())
        for shard in range(one.shards):
            rows = read_admission(tmp_path / "run-1", one, shard)
            assert rows is not None
            assert {rank: row["complete"] for rank, row in rows.items()} == clocks and not any(row["open"] for row in rows.values())
        for rank, raw in read_records(tmp_path / "run-1", one).items():
            assert unpack(raw).step == clocks[str(rank)]
    assert set(made[-1][1].values()) == {3.0 * STEPS}


def test_checkpoints_by_steps_stand_at_multiples(tmp_path: Path) -> None:
    """Each is named two steps ahead, so workers wait there until it is ordered."""
    with serving(tmp_path, workers=2, shards=2, checkpoint=EVERY_5) as shards:

        def act(worker: Worker) -> None:
            for step in range(23):
                if step % 5 == 3 and step < 20:
                    until_checkpoints(worker, shards, 1 + step // 5)
                worker.edge(step)
                steps(1, step)(worker)

        all_well([counting(shards, rank) for rank in range(2)], act)
        made = [one.step for one, _ in manifests(tmp_path / "run-1")]
    assert made == [0, 5, 10, 15, 20, 23]


TURN, INCREMENT_STEPS = 12, 32
"""At step TURN the second parameter moves, once."""


def often(keep: int) -> CheckpointConfig:
    return CheckpointConfig(interval_seconds=0.02, every_steps=None, keep=keep, disabled=False, resume_from=None)


def worker_of(shards: Shards) -> Worker:
    model = nn.ParameterList([torch.zeros(3000), torch.zeros(3000)])
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0))


def train(worker: Worker, shards: Shards) -> None:
    """With at least three checkpoints on the way, of which two are behind TURN."""
    first, second = worker.model.parameters()
    for step in range(INCREMENT_STEPS):
        until_checkpoints(worker, shards, 4 * step // INCREMENT_STEPS)
        worker.edge(step)
        time.sleep(0.004)
        first.grad = torch.full_like(first, -1.0)
        second.grad = torch.full_like(second, -1.0) if step == TURN else None
        worker.optimizer.step()


def moved(step: int) -> float:
    return float(step > TURN)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_did_not_change_is_not_written_again(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path, workers=1, shards=2, mode=mode, checkpoint=often(1000)) as shards:
        all_well([worker_of(shards)], lambda worker: train(worker, shards))
        assert shards.wait_ended() == [0, 0]
    folder = shards.folder
    made = [manifest.read_manifest(folder, path.name) for path in sorted(folder.glob("manifest-*.json"))]
    assert len(made) > 4
    still = {block.index for block in made[0].layout.blocks if all(piece.tensor == 1 for piece in block.pieces)}
    assert still and len(still) < len(made[0].layout.blocks)
    older = set()
    for one in made:
        states = read_states(folder, one, [place.index for place in one.blocks])
        for place in one.blocks:
            assert place.n == one.step
            value = states[place.index][0].weights
            if place.index in still:
                assert set(value.tolist()) == {moved(one.step)}
                older |= {place.file} if f"-c{newest_cut(one)}-" not in place.file else set()
    assert older, "no manifest names an older file"
    before, after = [one for one in made if one.step <= TURN], [one for one in made if one.step > TURN]
    late = {place.file for one in after for place in one.blocks if place.index in still}
    assert not late & {fact.name for one in before for fact in one.files}, "a block that has changed lies in an older file"
    damaged = next(place.file for place in made[-1].blocks if place.index in still)
    damage(folder / damaged)
    whole = [one for one in made if damaged not in {fact.name for fact in one.files}]
    found, problems = manifest.newest_manifest(folder, None)
    assert found == whole[-1] and len(problems) == len(made) - made.index(whole[-1]) - 1, "the newest that is whole"


def test_old_files_stay_as_long_as_they_are_named(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, checkpoint=often(1)) as shards:
        all_well([worker_of(shards)], lambda worker: train(worker, shards))
        assert shards.wait_ended() == [0]
    folder = shards.folder
    made, problems = manifest.newest_manifest(folder, None)
    assert made is not None and made.final and not problems
    kept = [manifest.read_manifest(folder, path.name) for path in folder.glob("manifest-*.json")]
    named = {fact.name for one in kept for fact in one.listed()}
    assert {path.name for path in folder.glob("v*")} == named


def test_a_file_that_vanished_is_written_again(tmp_path: Path) -> None:
    """A manifest is committed only with files that the one before names: here the shard thinks of one that nobody has."""
    with serving(tmp_path, workers=1, shards=1, checkpoint=often(1000)) as shards:

        def act(worker: Worker) -> None:
            coordinator = shards.servers[0].coordinator
            assert coordinator is not None and eventually(lambda: coordinator.machine.state.tries.base is not None)
            coordinator.machine.state.tries.base = 1
            train(worker, shards)

        all_well([worker_of(shards)], act)
        assert shards.wait_ended() == [0]
    made, problems = manifest.newest_manifest(shards.folder, None)
    assert made is not None and made.final and not problems


def newest_cut(made: manifest.Manifest) -> str:
    return max(fact.name.split("-c")[1].split("-")[0] for fact in made.listed())


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


EVERY_2 = replace(NEVER, every_steps=2, keep=100)
TABLE_STEPS = 12


class Killed(Exception):
    """The script ends here without leaving."""


def training(
    end: int, after: Callable[[Worker, int], None] = lambda worker, step: None, cut_by: Shards | None = None
) -> Callable[[Worker], None]:
    """Steps up to `end`, from where the worker's record is. With `cut_by` a checkpoint is taken every four steps, by these shards."""

    def act(worker: Worker) -> None:
        for step in range(worker.session.clock - worker.job.replay, end):
            if cut_by is not None:
                until_checkpoints(worker, cut_by, step // 4)
            worker.edge(step)
            worker.optimizer.zero_grad()
            loss_of(worker.model, step, worker.rank).backward()
            worker.optimizer.step()
            after(worker, step + 1)

    return act


def on_disk(folder: Path, name: str, shards: int = 1) -> list[torch.Tensor]:
    """All rows of both tables of a manifest, in the order of their ids."""
    found = []
    made = manifest.read_manifest(folder, name)
    for number in range(2):
        parts = [read_tables(folder, made, shard, shards)[number][0].export() for shard in range(shards)]
        order = torch.cat([part["ids"] for part in parts]).argsort()
        found.append(torch.cat([part["weights"] for part in parts])[order])
    found[1] = found[1][1:]  # as rows_of, which leaves the padding out
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_checkpoint_has_rows_and_blocks_of_one_step(tmp_path: Path) -> None:
    held: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def look(worker: Worker, step: int) -> None:
        if worker.rank == 0:
            held[step] = rows_of(worker.model), worker.model.head.weight.detach().clone()

    with serving(tmp_path, workers=2, shards=2, checkpoint=EVERY_2) as shards:
        all_well([adagrad(shards, rank) for rank in range(2)], training(TABLE_STEPS, look, shards))
    steps = set()
    chains = set()
    for path in sorted(shards.folder.glob("manifest-*.json")):
        made = manifest.read_manifest(shards.folder, path.name)
        assert made.rows is not None and {n for of in made.rows.versions for n in of} == {made.step}
        chains |= {len(chain) for chain in made.rows.chains}
        if made.step == 0:
            continue
        steps.add(made.step)
        rows, head = held[made.step]
        assert same(on_disk(shards.folder, path.name, 1), rows) and same(on_disk(shards.folder, path.name, 3), rows)
        states = read_states(shards.folder, made, range(len(made.layout.blocks)))
        flat = torch.cat([states[index][0].weights for index in sorted(states)])
        assert bool(torch.isin(head.flatten(), flat).all()), "the blocks are of the same step"
    assert len(steps) >= 2 and max(steps) == TABLE_STEPS
    assert min(chains) == 1 and max(chains) > 1, "the first file has all rows, a later checkpoint adds a file of changed rows"
    final = files.read_blocks(shards.folder / "final.safetensors")
    assert final["user.weight"].shape[0] == final["pages.weight"].shape[0] == ROWS
    plain = Clicks()
    plain.load_state_dict(final)
    assert torch.equal(plain.user.weight, final["user.weight"])
    assert same([final["user.weight"], final["pages.weight"][1:]], held[TABLE_STEPS][0])


@pytest.mark.parametrize("others", [rotating(2), 3, rotating(1)])
def test_a_run_that_goes_on_elsewhere_ends_with_the_same_bits(tmp_path: Path, others: int) -> None:
    ends: list[list[torch.Tensor]] = []

    def end(worker: Worker, step: int) -> None:
        if worker.rank == 0 and step == TABLE_STEPS:
            ends.append(rows_of(worker.model))

    with serving(tmp_path, workers=2, shards=2, run="whole", checkpoint=EVERY_2, transport="tcp") as shards:
        all_well([adagrad(shards, rank) for rank in range(2)], training(TABLE_STEPS, end))

    def die(worker: Worker, step: int) -> None:
        if step == TABLE_STEPS - 3:
            worker.die()
            raise Killed

    with serving(tmp_path, workers=2, shards=2, run="first", checkpoint=EVERY_2) as shards:
        raised = together([adagrad(shards, rank) for rank in range(2)], training(TABLE_STEPS, die, shards))
        assert all(isinstance(error, Killed) for error in raised), raised
    again = replace(EVERY_2, resume_from=str(shards.folder))
    with serving(tmp_path, workers=2, shards=others, run="second", checkpoint=again) as shards:
        all_well([adagrad(shards, rank) for rank in range(2)], training(TABLE_STEPS, end))
    assert len(ends) == 2 and same(*ends)
    newest = sorted(path.name for path in shards.folder.glob("manifest-*.json"))[-1]
    assert same(on_disk(shards.folder, newest), ends[0])


def test_an_async_checkpoint_has_rows_too(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, shards=2, mode="async", checkpoint=replace(EVERY_2, every_steps=20)) as shards:
        held: list[list[torch.Tensor]] = []

        def act(worker: Worker) -> None:
            training(30)(worker)
            held.append(rows_of(worker.model))

        all_well([adagrad(shards, rank) for rank in range(2)], act)
    newest, problems = manifest.newest_manifest(shards.folder, "run-1")
    assert newest is not None and newest.final and not problems and newest.rows is not None
    assert {n for of in newest.rows.versions for n in of} == {60}
    assert any(same(on_disk(shards.folder, newest.name), rows) for rows in held), "the last to come saw the last rows"


KEEPS_3 = replace(EVERY_2, keep=3)
LAYOUT_STEPS = 8
OLDER_BYTES = 512
"""What a block has at most in the layout of the checkpoint."""


def worker_of_layout(shards: Shards, rank: int, overlap: bool) -> Worker:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), overlap=overlap)


def committed(shards: Shards) -> int:
    newest, _ = manifest.newest_manifest(shards.folder, "first")
    return -1 if newest is None else newest.step


def train_in_layout(worker: Worker, killed_in: Shards | None = None) -> None:
    for step in range(worker.session.clock, LAYOUT_STEPS):
        worker.edge(step)
        if step == LAYOUT_STEPS - 2 and killed_in is not None:
            eventually(lambda: committed(killed_in) >= 2)
            worker.die()
            raise Killed
        worker.optimizer.zero_grad()
        worker.model(torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + worker.rank))).square().mean().backward()
        worker.optimizer.step()
        worker.job.wait()


@pytest.mark.parametrize(("transport", "overlap"), [("auto", False), rotating("tcp", False), ("tcp", True)])
def test_workers_take_the_blocks_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, overlap: bool) -> None:
    ends: list[list[torch.Tensor]] = []

    def to_the_end(worker: Worker) -> None:
        train_in_layout(worker)
        if worker.rank == 0:
            ends.append([p.detach().clone() for p in worker.model.parameters()])

    with monkeypatch.context() as older:
        older.setattr(blocks, "_usual", lambda total: OLDER_BYTES)
        with serving(tmp_path, shards=2, run="whole", transport=transport) as shards:
            all_well([worker_of_layout(shards, rank, overlap) for rank in range(2)], to_the_end)
        with serving(tmp_path, shards=2, run="first", checkpoint=KEEPS_3, transport=transport) as shards:
            raised = together(
                [worker_of_layout(shards, rank, overlap) for rank in range(2)], lambda worker: train_in_layout(worker, shards)
            )
            assert all(isinstance(error, Killed) for error in raised), raised
            before, _ = manifest.newest_manifest(shards.folder, "first")
    assert before is not None and before.step >= 2
    with serving(
        tmp_path, shards=2, run="second", checkpoint=replace(KEEPS_3, resume_from=str(shards.folder)), transport=transport
    ) as again:
        workers = [worker_of_layout(again, rank, overlap) for rank in range(2)]
        assert workers[0].session.layout != before.layout
        all_well(workers, to_the_end)
        assert workers[0].session.layout == workers[1].session.layout == before.layout
        after, _ = manifest.newest_manifest(again.folder, "second")
    assert after is not None and after.layout == before.layout
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))
