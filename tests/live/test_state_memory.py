"""A block's memory after its process was killed between any two lines of an update: a whole version, and no answered one is missing."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import pytest
import torch

from psjob import rules
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.memory import LentSpan
from psjob.modes import Push, Sync
from psjob.rules.base import BlockState, Rule
from psjob.shard import state_memory
from psjob.shard.block import ParameterBlock
from psjob.shard.deduplication import taken_by
from psjob.shard.keeper import SERVES
from psjob.shard.pending import Gradient, PendingPush, PushMetadata
from psjob.shard.push_metrics import Counters
from psjob.shard.state_memory import RECORD, SLABS, StateMemory, Untaken
from psjob.wire.shared_memory import PAGE, Region
from tests.support.soaking import rotating

UPDATES = 2
LAYOUT = Layout.of((TensorSpec("a", (40, 20), "float32"), TensorSpec("b", (900,), "float64", 1)))
SPAN = LentSpan.of(LAYOUT, PAGE)
TOLD: Mapping[str, Any] = {"term": 1}
MOST_LINES = 1000
TRACED = (state_memory.__file__, __file__)
State = tuple[list[torch.Tensor], dict[str, Any], int, bool]


class Torn:
    """A rule whose update is seen half made: NaN stands in the weights and state for a moment."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def apply(self, state: BlockState, *args: Any, **more: Any) -> None:
        held = [tensor.clone() for tensor in (state.weights, *state.slots.values())]
        for tensor, whole in zip((state.weights, *state.slots.values()), held, strict=True):
            tensor[: len(tensor) // 2] = float("nan")
            tensor.copy_(whole)
        self._rule.apply(state, *args, **more)


def regions(name: str) -> tuple[Region, Region]:
    size = StateMemory.room(TOLD, SPAN, len(LAYOUT.blocks), 2, len(rules.named(name).slots))
    return Region.lend(SPAN.size), Region.lend(size)


def cells(name: str, memory: StateMemory) -> list[ParameterBlock]:
    made = [ParameterBlock(block, at, Torn(rules.named(name)), Sync()) for at, block in enumerate(LAYOUT.blocks)]
    for cell in made:
        cell.kept, cell.home = memory.blocks[cell.index], memory.blocks[cell.index].weights
    return made


def train(
    name: str, weights: Region, region: Region, answered: Callable[[int, int], None], note: Callable[[ParameterBlock], None],
    begins: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """The blocks' first values, then some updates of each."""
    memory = StateMemory.begin(weights, region, TOLD, SPAN, LAYOUT.blocks, 2, tuple(rules.named(name).slots))
    options = {**rules.named(name).hyperparameters, "lr": 0.1} | ({"momentum": 0.9} if name == "sgd" else {})
    made = cells(name, memory)
    for cell in made:
        values = torch.linspace(-1, 1, cell.block.length).to(getattr(torch, cell.block.dtype))
        cell.put(cell.rule.init(values), 0)
        note(cell)
    memory.serve(True)
    begins()
    for clock in range(UPDATES):
        for cell in made:
            grad = Gradient([], cell.block.nbytes, cell.block)
            grad.flat.copy_(torch.linspace(1, 2 + clock, cell.block.length))
            info = PushMetadata((options, options), frozenset())
            cell.pending[0, clock] = PendingPush(Push(0, clock, clock), grad, False, info)
            cell.advance(lambda _: frozenset({0}))
            answered(cell.index, cell.n)
            note(cell)


def seen(cell: ParameterBlock) -> State:
    assert cell.state is not None
    tensors = [cell.state.weights.clone(), *(cell.state.slots[name].clone() for name in sorted(cell.state.slots))]
    return tensors, cell.state.counts(), cell.n, cell.skipped


def same(one: State, other: State) -> bool:
    return one[1:] == other[1:] and len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0]))


def killed_at(line: int, name: str, weights: Region, region: Region, words: memoryview[int]) -> bool:
    """Train in a fork that is killed before it runs that line of TRACED; False where it ends before."""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in TRACED or frame.f_code.co_name in ("begins", "answered"):
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        def begins() -> None:
            sys.settrace(trace)

        def answered(block: int, version: int) -> None:
            words[block] = version

        try:
            train(name, weights, region, answered, lambda _: None, begins)
            sys.settrace(None)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize(("name", "every"), [("sgd", 8), rotating("sgd", 1), rotating("adamw", 1)])
def test_a_process_that_is_killed_at_any_line_leaves_whole_blocks(name: str, every: int) -> None:
    states: dict[tuple[int, int], State] = {}
    train(name, *regions(name), lambda *_: None, lambda cell: states.update({(cell.index, cell.n): seen(cell)}))
    assert len(states) == len(LAYOUT.blocks) * (UPDATES + 1)
    undone = 0
    for line in range(0, MOST_LINES, every):
        weights, region = regions(name)
        words = Region.lend(PAGE).words(0, len(LAYOUT.blocks))
        if not killed_at(line, name, weights, region, words):
            break
        memory = StateMemory(weights, region, SPAN, LAYOUT.blocks, tuple(rules.named(name).slots))
        undone += any(block._words[state_memory.BUSY] for block in memory.blocks.values())
        for cell in cells(name, memory):
            cell.take_up()
            assert words[cell.index] <= cell.n <= words[cell.index] + 1, "an answered version is missing"
            assert same(seen(cell), states[cell.index, cell.n]), f"killed before line {line}: block {cell.index} at {cell.n}"
    assert 80 < line < MOST_LINES - every and undone > 20 / every


def test_what_does_not_fit_is_not_gone_on_from() -> None:
    weights, region = regions("sgd")
    memory = StateMemory.begin(weights, region, TOLD, SPAN, LAYOUT.blocks, 2, ("momentum_buffer",))
    cell = cells("sgd", memory)[0]
    cell.put(cell.rule.init(torch.zeros(cell.block.length)), 0)
    memory.serve(True)
    assert cell.state is not None
    cell.state.segments = [(1, 1)] * RECORD
    memory.blocks[0].commit(cell.state, 1, False)
    assert not region.words(0, 1)[SERVES] and memory.blocks[0].version == 0
    memory.serve(True)
    assert not region.words(0, 1)[SERVES], "a block is missing"
    cell.state.segments = [(cell.block.length, 1)]
    memory.blocks[0].commit(cell.state, 2, False)
    assert region.words(0, 1)[SERVES] and memory.blocks[0].version == 2
    memory.blocks[0].commit(BlockState(torch.zeros(cell.block.length)), 3, False)  # in memory of its own
    assert not region.words(0, 1)[SERVES]


def test_a_thread_too_many_keeps_no_copy_and_says_so() -> None:
    weights, region = regions("sgd")
    memory = StateMemory.begin(weights, region, TOLD, SPAN, LAYOUT.blocks, 2, ("momentum_buffer",))
    cell = cells("sgd", memory)[0]
    cell.put(cell.rule.init(torch.zeros(cell.block.length)), 0)
    memory._taken = SLABS
    assert cell.state is not None
    memory.blocks[0].begin(cell.state)
    again = StateMemory(weights, region, SPAN, LAYOUT.blocks, ("momentum_buffer",))
    with pytest.raises(Untaken, match="one thread too many"):
        again.blocks[0].found()


def test_words_of_the_whole_are_found_again() -> None:
    weights, region = regions("sgd")
    memory = StateMemory.begin(weights, region, TOLD, SPAN, LAYOUT.blocks, 2, ("momentum_buffer",))
    for number in range(5):
        memory.tell({"term": number, "restore_id": 1 << 40})
    memory.note_rank(1, (3, 2), 7)
    memory.note_rank(0, (1, 0), None)
    assert memory.clip is None
    memory.note_clip(0, 0.25)
    memory.note_snapshot(9)
    memory.note_snapshot(4)
    memory.count(Counters(pushes=10, applied=6, first_applied=2.5), 6)
    again = StateMemory(weights, region, SPAN, LAYOUT.blocks, ("momentum_buffer",))
    assert state_memory.told(region) == {"term": 4, "restore_id": 1 << 40} and again.highest_snapshot == 9
    assert again.clip == (0, 0.25)
    assert again.rows() == taken_by([0, 0], {0: ((1, 0), None), 1: ((3, 2), 7)})
    counted = again.counted(4)
    assert (counted.pushes, counted.applied, counted.first_applied) == (10, 4, 2.5)
    assert [counted.crashes, again.counted(4).crashes, again.counted(4).crashes] == [1, 2, 3]
    with pytest.raises(ValueError, match="do not fit"):
        memory.tell({"term": "x" * 10_000})


def test_what_no_version_holds_comes_again() -> None:
    rows = taken_by([4, 5, 4], {0: ((1, 0), None), 1: ((1, 1), 4), 2: ((2, 0), 2)})
    assert rows == {
        "0": {"complete": 4, "open": [1], "leftAt": None, "incarnation": [1, 0]},
        "1": {"complete": 4, "open": [], "leftAt": 4, "incarnation": [1, 1]},
        "2": {"complete": 2, "open": [], "leftAt": 2, "incarnation": [2, 0]},
    }


def test_memory_that_was_given_up_goes_without_a_collector() -> None:
    weights, region = regions("sgd")
    memory = StateMemory.begin(weights, region, TOLD, SPAN, LAYOUT.blocks, 2, tuple(rules.named("sgd").slots))
    mapped = [weakref.ref(weights), weakref.ref(region)]
    made = cells("sgd", memory)
    for cell in made:
        cell.put(cell.rule.init(torch.zeros(cell.block.length, dtype=getattr(torch, cell.block.dtype))), 0)
    gc.disable()
    try:
        memory.give_up()
        del weights, region, memory, made, cell
        assert [ref() for ref in mapped] == [None, None], "a shard collects seldom, and each rewind would leave one behind"
    finally:
        gc.enable()
