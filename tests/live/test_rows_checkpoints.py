"""Rows in the checkpoints of real shards: each is of one step, with the blocks; a run that goes on from one ends with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psjob.checkpoint import files, manifest
from psjob.checkpoint.states import read_states, read_tables
from tests.live.live_shards import NEVER, Shards, Worker, all_well, serving, together, until_checkpoints
from tests.live.test_rows_training import ROWS, Clicks, loss_of, offloaded, rows_of
from tests.soaking import rotating

EVERY_2 = replace(NEVER, every_steps=2, keep=100)
STEPS = 12


pytestmark = pytest.mark.usefixtures("last_words")


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


def adagrad(shards: object, rank: int, start: int = 1) -> Worker:
    model = offloaded()
    return Worker(shards, rank, model, torch.optim.Adagrad(model.parameters(), lr=0.1), start=start)  # type: ignore[arg-type]


def on_disk(folder: Path, name: str, shards: int = 1) -> list[torch.Tensor]:
    """All rows of both tables of a manifest, in the order of their ids."""
    found = []
    made = manifest.read(folder, name)
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
        all_well([adagrad(shards, rank) for rank in range(2)], training(STEPS, look, shards))
    steps = set()
    chains = set()
    for path in sorted(shards.folder.glob("manifest-*.json")):
        made = manifest.read(shards.folder, path.name)
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
    assert len(steps) >= 2 and max(steps) == STEPS
    assert min(chains) == 1 and max(chains) > 1, "the first file has all rows, a later checkpoint adds a file of changed rows"
    final = files.read_blocks(shards.folder / "final.safetensors")
    assert final["user.weight"].shape[0] == final["pages.weight"].shape[0] == ROWS
    plain = Clicks()
    plain.load_state_dict(final)
    assert torch.equal(plain.user.weight, final["user.weight"])
    assert same([final["user.weight"], final["pages.weight"][1:]], held[STEPS][0])


@pytest.mark.parametrize("others", [rotating(2), 3, rotating(1)])
def test_a_run_that_goes_on_elsewhere_ends_with_the_same_bits(tmp_path: Path, others: int) -> None:
    ends: list[list[torch.Tensor]] = []

    def end(worker: Worker, step: int) -> None:
        if worker.rank == 0 and step == STEPS:
            ends.append(rows_of(worker.model))

    with serving(tmp_path, workers=2, shards=2, run="whole", checkpoint=EVERY_2, transport="tcp") as shards:
        all_well([adagrad(shards, rank) for rank in range(2)], training(STEPS, end))

    def die(worker: Worker, step: int) -> None:
        if step == STEPS - 3:
            worker.die()
            raise Killed

    with serving(tmp_path, workers=2, shards=2, run="first", checkpoint=EVERY_2) as shards:
        raised = together([adagrad(shards, rank) for rank in range(2)], training(STEPS, die, shards))
        assert all(isinstance(error, Killed) for error in raised), raised
    again = replace(EVERY_2, resume_from=str(shards.folder))
    with serving(tmp_path, workers=2, shards=others, run="second", checkpoint=again) as shards:
        all_well([adagrad(shards, rank) for rank in range(2)], training(STEPS, end))
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
    newest, problems = manifest.newest(shards.folder, "run-1")
    assert newest is not None and newest.final and not problems and newest.rows is not None
    assert {n for of in newest.rows.versions for n in of} == {60}
    assert any(same(on_disk(shards.folder, newest.name), rows) for rows in held), "the last to come saw the last rows"
