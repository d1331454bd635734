"""Blocks that have not changed are named where they lie, in files that stay as long as a manifest names them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint import manifest
from psjob.checkpoint.states import read_states
from psjob.process.config import CheckpointConfig
from tests.live.live_shards import Shards, Worker, all_well, eventually, serving, until_checkpoints

TURN, STEPS = 12, 32
"""At step TURN the second parameter moves, once."""


pytestmark = pytest.mark.usefixtures("last_words")


def often(keep: int) -> CheckpointConfig:
    return CheckpointConfig(interval_seconds=0.02, every_steps=None, keep=keep, disabled=False, resume_from=None)


def worker_of(shards: Shards) -> Worker:
    model = nn.ParameterList([torch.zeros(3000), torch.zeros(3000)])
    return Worker(shards, 0, model, torch.optim.SGD(model.parameters(), lr=1.0))


def train(worker: Worker, shards: Shards) -> None:
    """With at least three checkpoints on the way, of which two are behind TURN."""
    first, second = worker.model.parameters()
    for step in range(STEPS):
        until_checkpoints(worker, shards, 4 * step // STEPS)
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
    made = [manifest.read(folder, path.name) for path in sorted(folder.glob("manifest-*.json"))]
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
    found, problems = manifest.newest(folder, None)
    assert found == whole[-1] and len(problems) == len(made) - made.index(whole[-1]) - 1, "the newest that is whole"


def test_old_files_stay_as_long_as_they_are_named(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, checkpoint=often(1)) as shards:
        all_well([worker_of(shards)], lambda worker: train(worker, shards))
        assert shards.wait_ended() == [0]
    folder = shards.folder
    made, problems = manifest.newest(folder, None)
    assert made is not None and made.final and not problems
    kept = [manifest.read(folder, path.name) for path in folder.glob("manifest-*.json")]
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
    made, problems = manifest.newest(shards.folder, None)
    assert made is not None and made.final and not problems


def newest_cut(made: manifest.Manifest) -> str:
    return max(fact.name.split("-c")[1].split("-")[0] for fact in made.listed())


def damage(path: Path) -> None:
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
