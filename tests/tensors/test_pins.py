"""Blocks held at a snapshot: what is written is what stood there, however long the writer takes and whatever updates do meanwhile."""

from __future__ import annotations

import threading
import time
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psjob import rules
from psjob.checkpoint.states import EMPTY, MAX_FILES, Base, Lies, staying
from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Push, Sync
from psjob.shard import snapshot
from psjob.shard.block import ParameterBlock
from psjob.shard.pending import Gradient, PendingPush, PushMetadata, Replies, Waiter
from psjob.shard.snapshot_memory import BackgroundThrottle, BlockSnapshot, SnapshotBuffer, Voided, room
from psjob.shard.store import Store

LAYOUT = Layout.of((TensorSpec("w", (300_000,), "float32", 0),))
INFO = PushMetadata(({**rules.named("adam").hyperparameters, "lr": 0.25},), frozenset())


def cell_of(rule: str = "adam") -> ParameterBlock:
    """A served block: every element moves alike, so that a torn copy would show two values."""
    block = LAYOUT.blocks[0]
    cell = ParameterBlock(block, 0, rules.named(rule), Sync())
    cell.put(cell.rule.init(torch.zeros(block.length)), 0)
    return cell


def push(cell: ParameterBlock, skip: bool = False, info: PushMetadata = INFO) -> None:
    grad = Gradient([], cell.block.nbytes, cell.block)
    grad.flat.fill_(1.0)
    with cell.lock:
        cell.pending[0, cell.n] = PendingPush(Push(0, cell.n, cell.n), grad, skip, info)
        cell.advance(lambda clock: frozenset([0]))


def held(cell: ParameterBlock, step: int, spare: SnapshotBuffer) -> list[BlockSnapshot]:
    pins: list[BlockSnapshot] = []

    def pin(at: ParameterBlock) -> BlockSnapshot:
        assert at.state is not None
        pins.append(BlockSnapshot(at.block.index, at.n, at.state, at.content, at.lock, spare))
        return pins[-1]

    with cell.lock:
        assert cell.order_snapshot(step, pin)
    return pins


def sizes(cell: ParameterBlock) -> dict[int, int]:
    return {cell.block.index: room(cell.tensors())}


@pytest.mark.parametrize("prepared", [True, False])
def test_a_slow_writer_gets_the_step_of_the_snapshot_whatever_updates_do(prepared: bool) -> None:
    cell, other = cell_of(), cell_of()
    for _ in range(3):
        push(other)  # what the block is at step 3
    push(cell)
    spare = SnapshotBuffer(sizes(cell) if prepared else {})
    spare.warm(sizes(cell) if prepared else [])
    pins = held(cell, 3, spare)
    stop = threading.Event()

    def hammer() -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            push(cell)

    thread = threading.Thread(target=hammer)
    thread.start()
    try:
        while not pins:
            time.sleep(0.001)
        for _ in range(20):
            for name, tensor in pins[0].take().items():
                assert other.state is not None
                expected = {"weights": other.state.weights, **other.state.slots}[name]
                assert torch.equal(tensor, expected), f"{name} is not that of the snapshot"
            time.sleep(0.002)
    finally:
        stop.set()
        thread.join()
    assert cell.n > 4 and pins[0].n == 3 and pins[0].counts == {"steps": 3, "segments": [[cell.block.length, 3]]}


def test_an_update_copies_a_held_block_once_and_nothing_else() -> None:
    cell = cell_of()
    push(cell)
    (pin,) = held(cell, -1, SnapshotBuffer(sizes(cell)))
    assert cell.state is not None
    with cell.lock:
        live = pin._tensors["weights"]
    assert live is cell.state.weights, "nothing is copied at the snapshot"
    push(cell)
    first = pin.take()["weights"]
    push(cell)
    assert pin.take()["weights"] is first and first is not cell.state.weights


def test_what_a_checkpoint_does_not_write_is_not_copied() -> None:
    cell = cell_of()
    push(cell)
    spare = SnapshotBuffer(sizes(cell))
    (pin,) = held(cell, -1, spare)
    pin.leave()
    push(cell)
    assert pin.take() == {}


@pytest.mark.parametrize("end", ["restore", "void"])
def test_a_snapshot_that_is_given_up_is_not_written(end: str) -> None:
    cell = cell_of()
    push(cell)
    (pin,) = held(cell, -1, SnapshotBuffer(sizes(cell)))
    with cell.lock:
        if end == "void":
            cell.void_snapshot()
        else:
            cell.put(cell.rule.init(torch.zeros(cell.block.length)), 0)
    with pytest.raises(Voided):
        pin.take()


def test_content_changes_with_the_bytes_and_only_then() -> None:
    cell = cell_of()
    marks = [cell.content]
    push(cell)
    marks.append(cell.content)
    push(cell, skip=True)
    assert cell.content is marks[-1] and cell.n == 2
    with cell.lock:
        cell.store(torch.ones(cell.block.length), 2)
    marks.append(cell.content)
    with cell.lock:
        cell.put(cell.rule.init(torch.ones(cell.block.length)), 2)
    marks.append(cell.content)
    assert len({id(mark) for mark in marks}) == 4


def test_a_copy_of_a_block_that_has_outgrown_its_place_is_whole() -> None:
    cell = cell_of()
    spare = SnapshotBuffer(sizes(cell))  # before the first update there are no moments
    push(cell)
    (pin,) = held(cell, -1, spare)
    push(cell)
    assert {name: tensor.numel() for name, tensor in pin.take().items()} == dict.fromkeys(
        ("weights", "exp_avg", "exp_avg_sq"), cell.block.length
    )


@pytest.mark.parametrize("busy", [True, False])
def test_work_beside_pushes_waits_for_a_gap_but_not_for_ever(busy: bool) -> None:
    asked: list[float] = []

    def pushed() -> float:
        asked.append(time.monotonic())
        return asked[-1] if busy else 0.0

    gaps = BackgroundThrottle(pushed)
    time.sleep(0.02)
    gaps.wait()
    assert len(asked) > 1 if busy else len(asked) == 1


FILES = st.lists(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=6), max_size=14)


@given(FILES)
def test_a_checkpoint_names_less_than_twice_what_it_needs(files: list[list[tuple[int, bool]]]) -> None:
    """Blocks lie in files, some have changed since: what stays is unchanged, in few files, each more than half needed."""
    blocks, sizes, contents = {}, {}, {}
    for number, lying in enumerate(files):
        for size, changed in lying:
            index = len(blocks)
            blocks[index] = Lies(f"f{number}", size, object())
            contents[index] = object() if changed else blocks[index].content
        sizes[f"f{number}"] = sum(size for size, _ in lying)
    stay = staying(Base(blocks, sizes), contents)
    assert all(contents[index] is blocks[index].content for index in stay)
    named = {blocks[index].file for index in stay}
    assert len(named) <= MAX_FILES
    for file in named:
        needed = sum(blocks[index].bytes for index in stay if blocks[index].file == file)
        assert 2 * needed > sizes[file]
    unchanged = {index for index in blocks if contents[index] is blocks[index].content}
    if unchanged == set(blocks) and len(files) <= MAX_FILES:
        assert stay == unchanged
    assert staying(EMPTY, contents) == frozenset()


def test_first_values_given_again_leave_the_snapshot_of_the_first() -> None:
    """After a broken stream rank 0 gives all values again, also to a shard that is saving them already."""
    store = Store(0, 1, 1, 1, Sync(), "run")
    store.set_up((TensorSpec("w", (256,), "float32"),), "sgd")
    for index, cell in store.cells.items():
        store.initialise(index, torch.full((cell.block.length,), 2.0))
    voided: list[bool] = []

    class Noting:
        def keep(self) -> None: ...

        def drop(self, void: bool = False) -> None:
            voided.append(void)

    assert snapshot.order_snapshot(store, 0, lambda cell: Noting(), lambda cell: None, lambda: None)  # type: ignore[arg-type,return-value]
    for index, cell in store.cells.items():
        assert store.initialise(index, torch.zeros(cell.block.length))
        assert cell.state is not None and torch.equal(cell.state.weights, torch.full((cell.block.length,), 2.0))
    assert not voided


def test_a_reply_that_is_noted_leaves_a_held_block_as_it_was() -> None:
    """What a worker is sent belongs to the block's state under such a rule: a snapshot has the note of its moment, the next one another."""
    cell = cell_of("dana-dc")
    told = PushMetadata((cell.rule.hyperparameters,), frozenset())
    waiter = Waiter(cast(Replies, None), 0, 0, 0, 0, 0.0, info=told)

    def reply() -> None:
        with cell.lock:
            cell.reply(waiter)

    reply()
    push(cell, info=told)
    assert cell.state is not None
    at_the_snapshot = cell.state.copy()
    (pin,) = held(cell, -1, SnapshotBuffer(sizes(cell)))
    before = cell.content
    reply()
    assert not torch.equal(cell.state.slots["sent@0"], at_the_snapshot.slots["sent@0"]), "the reply has noted other weights"
    assert cell.content is not before, "the next snapshot must not take this block for unchanged"
    push(cell, info=told)
    taken = pin.take()
    assert taken.keys() == {"weights", *at_the_snapshot.slots}
    assert all(torch.equal(taken[name], tensor) for name, tensor in at_the_snapshot.slots.items())
    assert torch.equal(taken["weights"], at_the_snapshot.weights)
