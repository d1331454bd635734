"""How the processes of a worker sum: what nvidia-smi says is read, a way is chosen with its reason, and each way makes the same bits.

- What the processes of a worker bring to a step, their memory, and their records.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psjob.collectives.local_sum import Given, LocalSum, TopoMatrix, choose_sum, exchange_seconds, parse_topology, shared_seconds
from psjob.layout.blocks import Layout, TensorSpec
from psjob.modes import Push
from psjob.protocol.worker.local_group import SMALL, Part, RecordMaker, Records, Whole, join_records, owner, split_records, together
from psjob.shard.pending import PendingPush, PushMetadata, push_weights
from psjob.worker import local_group, local_reduce
from psjob.worker.exits import SessionEnd
from psjob.worker.local_group import LocalFrame
from psjob.worker.local_reduce import Lying, PodMemory, PodSum, made, make_group, meeting_place
from tests.live.live_shards import eventually
from tests.support.hardware import DEVICES
from tests.unit.topology_machines import FOUR_GB200, FOUR_H100, FOUR_PCIE, ONE_H100, TWO_5090


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (ONE_H100, [""]),
        (TWO_5090, [" PHB", "PHB "]),
        (FOUR_H100, [" NV6 NV6 NV6", "NV6  NV6 NV6", "NV6 NV6  NV6", "NV6 NV6 NV6 "]),
        (FOUR_GB200, [" NV18 NV18 NV18", "NV18  NV18 NV18", "NV18 NV18  NV18", "NV18 NV18 NV18 "]),
        (FOUR_PCIE, [" PIX PHB PHB", "PIX  PHB PHB", "PHB PHB  PIX", "PHB PHB PIX "]),
    ],
)
def test_what_nvidia_smi_prints_is_read(text: str, kinds: list[str]) -> None:
    found = parse_topology(text)
    assert found.gpus == tuple(range(len(kinds)))
    assert [" ".join("" if i == j else found.kinds[frozenset((i, j))] for j in found.gpus) for i in found.gpus] == kinds


def test_lanes_are_counted() -> None:
    assert (parse_topology(FOUR_H100).lanes(0, 3), parse_topology(FOUR_GB200).lanes(2, 1), parse_topology(TWO_5090).lanes(0, 1)) == (
        6,
        18,
        0,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no line with the names of GPUs"),
        ("No devices were found\n", "there is no line with the names of GPUs"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\n", "2 GPUs in its first line, 1 lines of GPUs"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tSYS\t X \n", "one way and by another the other way"),
        ("\tGPU0\tGPU1\nGPU0\t X \tWIDE\nGPU1\tWIDE\t X \n", "does not say how GPU0 is joined"),
        ("\tGPU0\tGPU1\nGPU0\tPHB\tPHB\nGPU1\tPHB\t X \n", "GPU0 and GPU0 are joined by PHB"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "does not say how GPU0 is joined to each of 2 GPUs"),
    ],
)
def test_other_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_topology(text)


def known(count: int, text: str = "", size: int = 400_000_000, devices: Sequence[str] = (), **rates: float) -> Given:
    matrix = parse_topology(text) if text else None
    return Given(devices or [f"gpu-{i}" for i in range(count)], size, matrix, list(range(count)), **rates)


@pytest.mark.parametrize(
    ("known", "asked", "way", "reason"),
    [
        (known(2, devices=["cpu", "cpu"]), "auto", "shared", "models are in host memory"),
        (known(2, devices=["gpu-0", "cpu"]), "auto", "shared", "models are in host memory"),
        (known(2, devices=["gpu-0", "gpu-0"]), "auto", "shared", "several processes share one GPU"),
        (known(2, TWO_5090), "auto", "nccl", "joined by PHB, nccl is "),
        (known(4, FOUR_H100), "auto", "nccl", "joined by NV6, nccl is "),
        (known(4, FOUR_GB200), "auto", "nccl", "joined by NV18, nccl is "),
        (known(4, FOUR_PCIE), "auto", "nccl", "joined by PHB and PIX, nccl is "),
        (known(4, FOUR_PCIE, size=4_000_000, add=1e12), "auto", "shared", "shared is "),  # both copy as much, one sends messages
        (known(2, FOUR_H100, size=1000), "auto", "shared", "shared is "),  # one message takes longer than the bytes
        (known(2), "auto", "nccl", "nvidia-smi does not say how the GPUs are joined"),
        (known(2, add=1e12), "auto", "shared", "so the slowest way is assumed"),
        (known(4, FOUR_H100), "shared", "shared", "the manifest asks for it"),
        (known(2, devices=["cpu", "cpu"]), "gloo", "gloo", "the manifest asks for it"),
        (known(2, size=1000), "nccl", "nccl", "the manifest asks for it"),
    ],
)
def test_a_way_is_chosen_and_says_why(known: Given, asked: str, way: str, reason: str) -> None:
    chosen = choose_sum(known, asked)
    assert chosen.way == way and reason in chosen.reason, chosen


@pytest.mark.parametrize(
    ("known", "asked", "says"),
    [
        (known(2, devices=["cpu", "cpu"]), "nccl", "nccl cannot sum here: models are in host memory"),
        (known(2, devices=["gpu-0", "gpu-0"]), "nccl", "several processes share one GPU, which NCCL refuses; take shared or auto"),
        (known(2), "gloo", "the models are on GPUs; take nccl, shared or auto"),
    ],
)
def test_a_way_that_cannot_be_taken_is_refused(known: Given, asked: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_sum(known, asked)


def test_seconds_are_those_of_the_formulas() -> None:
    """400 MB, 12 GB/s to the host, 4 GB/s of additions; links of 18 GB/s a lane, 20 µs a message."""
    assert shared_seconds(known(4)) == pytest.approx(0.4 / 12 + 0.75 * 0.1)
    assert exchange_seconds(known(4, FOUR_H100)) == pytest.approx(0.1 / (6 * 18) + 3 * 20e-6 + 0.1 / 12), "each pair has links of its own"
    assert exchange_seconds(known(4, FOUR_GB200)) == pytest.approx(0.3 / (18 * 18) + 3 * 20e-6 + 0.1 / 12), "all pairs share the switch"
    assert exchange_seconds(known(4, FOUR_PCIE)) == pytest.approx(0.3 / 12 + 3 * 20e-6 + 0.1 / 12)
    assert exchange_seconds(known(2)) == pytest.approx(0.2 * 2 / 12 + 20e-6 + 0.2 / 12)
    assert exchange_seconds(Given(["a", "b"], 400_000_000, TopoMatrix((3, 5), {frozenset((3, 5)): "NV4"}), [5, 3])) == pytest.approx(
        0.2 / (4 * 18) + 20e-6 + 0.2 / 12
    )


SHAPES = [((70, 90), "float32"), ((300,), "float32"), ((1000, 3), "bfloat16"), ((), "float32"), ((0,), "float32"), ((640,), "float64")]


def layout() -> Layout:
    return Layout.of([TensorSpec(f"t{i}", shape, dtype, 0) for i, (shape, dtype) in enumerate(SHAPES)], 4096)


def gradients(local: int, device: str) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(local)
    made = [torch.randn(shape, generator=draw).to(getattr(torch, dtype)).to(device) for shape, dtype in SHAPES]
    return [None if (local, row) == (1, 1) else tensor for row, tensor in enumerate(made)]


def summed(processes: int, present: Sequence[int], scale: float, device: str, make: Callable[..., PodSum]) -> list[torch.Tensor]:
    """A sum by threads that stand for processes; each maps the memory."""
    of, fd, place = layout(), local_reduce.make(layout(), processes), meeting_place()
    on = torch.device(device)
    memories = [PodMemory(of, processes, local, os.dup(fd), on) for local in range(processes)]
    os.close(fd)
    gathered = threading.Barrier(processes)
    failed: list[BaseException] = []

    def work(local: int) -> None:
        try:
            sums = make(of, memories[local], local, processes, on, os.dup(place))
            if local in present:
                sums.gather(gradients(local, device), scale)
            gathered.wait(60)
            sums.sum(present, list(range(processes)), True)
        except BaseException as error:
            failed.append(error)
            gathered.abort()

    threads = [threading.Thread(target=work, args=(local,)) for local in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    os.close(place)
    assert not failed, failed
    memories[0]._first = present[0]
    return [memories[0].summed(block.index).clone() for block in of.blocks]


def by_memory(of: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, place: int) -> PodSum:
    os.close(place)
    return made("shared", of, memory, local, processes, device, None)


def by_backend(of: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, place: int) -> PodSum:
    way = "nccl" if device.type == "cuda" else "gloo"
    return made(way, of, memory, local, processes, device, make_group(way, place, local, processes, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("processes", "present", "scale"), [(1, [0], 0.5), (3, [0, 1, 2], 1.0), (4, [1, 3], 0.25)])
def test_each_way_makes_the_same_bits(processes: int, present: list[int], scale: float, device: str) -> None:
    """NCCL with the one rank that one GPU bears, gloo with all."""
    shared = summed(processes, present, scale, device, by_memory)
    by_hand = summed(processes, present, scale, "cpu", by_memory) if device == "cuda" else shared
    exchanged = summed(processes, present, scale, device, by_backend) if device == "cpu" or processes == 1 else shared
    for one, other, third in zip(shared, exchanged, by_hand, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert any(bool(flat.any()) for flat in shared)


def test_a_process_that_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_reduce, "MEET_SECONDS", 0.5)
    with pytest.raises(RuntimeError) as told:
        make_group("gloo", meeting_place(), 0, 2, torch.device("cpu"))
    assert str(told.value)


class Line:
    """Of two processes: what one says to the other, and what each waits for. Stands for both kinds of session."""

    def __init__(self, local: int, way: str, memory: PodMemory) -> None:
        config = SimpleNamespace(processes=2, local_sum=way)
        self.place = SimpleNamespace(index=0, local=local, config=config)
        self.layout, self.memory, self.lying = layout(), memory, {1: Lying("cpu")}
        self.met: dict[int, str] = {}
        self.said: dict[str, LocalFrame] = {}
        self.other = self

    def tell_others(self, body: Mapping[str, Any], fd: int = -1) -> None:
        self.other.said[next(iter(body))] = LocalFrame(body, b"", os.dup(fd) if fd >= 0 else -1)

    def tell_first(self, body: Mapping[str, Any]) -> None:
        self.other.met[1] = str(body["met"])

    def heard(self, word: str) -> bool:
        return word in self.said

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert eventually(done, 60.0), what

    def next(self, word: str, what: str) -> LocalFrame:
        self.wait(lambda: word in self.said, what)
        return self.said.pop(word)


@pytest.mark.parametrize("lacks", [0, 1])
@pytest.mark.parametrize("asked", ["auto", "gloo"])
def test_a_process_that_lacks_the_memory_of_an_exchange_is_told(monkeypatch: pytest.MonkeyPatch, asked: str, lacks: int) -> None:
    """If psjob has chosen, all take shared memory; where the manifest asks for the way, a sentence says why not."""
    real = local_reduce.made

    def short(way: str, of: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, group: Any) -> PodSum:
        if way != "shared" and local == lacks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
        return real(way, of, memory, local, processes, device, group)

    monkeypatch.setattr(local_group, "made", short)
    monkeypatch.setattr(local_group, "_chosen", lambda session, places: LocalSum("gloo", "it is quick"))
    fd = local_reduce.make(layout(), 2)
    leader, follower = (Line(local, asked, PodMemory(layout(), 2, local, os.dup(fd))) for local in range(2))
    os.close(fd)
    leader.other, follower.other = follower, leader
    found: dict[int, object] = {}

    def work(local: int) -> None:
        try:
            act, line = (local_group.follow_leader, follower) if local else (local_group.lead, leader)
            found[local] = act(cast("Any", line), torch.device("cpu"))
        except SessionEnd as ending:
            found[local] = ending
            follower.said["sums"] = LocalFrame({"sums": "shared"}, b"", -1)  # the agent would end it

    threads = [threading.Thread(target=work, args=(local,)) for local in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert isinstance(found[1], PodMemory)
    if asked == "auto":
        assert isinstance(found[0], PodMemory)
    else:
        assert isinstance(found[0], SessionEnd) and "CUDA out of memory" in found[0].message and "localSum" in found[0].message


TABLE = tuple(TensorSpec(f"t{row}", (size, 3), "float32", 0) for row, size in enumerate((50, 400, 7, 260)))
LAYOUT = Layout.of(TABLE, limit_bytes=1024)


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ({0: Part(3), 1: Part(3)}, Whole((0, 1), False, False, frozenset(), None)),
        ({1: Part(3), 0: Part(3, absent=True)}, Whole((1,), False, False, frozenset(), None)),
        ({0: Part(3, absent=True), 1: Part(3, absent=True)}, Whole((), True, False, frozenset(), None)),
        ({0: Part(3), 1: Part(3, skip=True, bad=4)}, Whole((), False, True, frozenset(), 4)),
        ({0: Part(3, none=frozenset({1, 2})), 2: Part(3, none=frozenset({2, 5}))}, Whole((0, 2), False, False, frozenset({2}), None)),
        ({0: Part(3, none=frozenset({1})), 2: Part(3, absent=True)}, Whole((0,), False, False, frozenset({1}), None)),
    ],
)
def test_one_push_of_several_processes(parts: dict[int, Part], whole: Whole) -> None:
    assert together(parts) == whole


@given(st.builds(Part, st.integers(0), st.booleans(), st.booleans(), st.frozensets(st.integers(0, 99)), st.none() | st.integers(0, 99)))
def test_a_part_is_what_it_was_told_as(part: Part) -> None:
    assert Part.of(part.to_json()) == part


@given(st.lists(st.integers(0, 63), min_size=1, unique=True).map(sorted), st.integers(1, 200))
def test_each_block_has_one_owner_and_none_has_many_more_than_others(active: list[int], blocks: int) -> None:
    counts = [sum(owner(block, active) == local for block in range(blocks)) for local in active]
    assert sum(counts) == blocks and max(counts) - min(counts) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(0, 99), st.booleans(), st.data())
def test_the_sum_is_that_of_the_present_in_their_order(processes: int, seed: int, mean: bool, data: st.DataObject) -> None:
    present = data.draw(st.lists(st.integers(0, processes - 1), min_size=1, unique=True).map(sorted))
    torch.manual_seed(seed)
    gradients = [[torch.randn(spec.shape) if row != 2 else None for row, spec in enumerate(TABLE)] for _ in range(processes)]
    fd = local_reduce.make(LAYOUT, processes)
    memories = [PodMemory(LAYOUT, processes, local, os.dup(fd)) for local in range(processes)]
    os.close(fd)
    for local in present:
        memories[local].gather(gradients[local], 0.5)
    for memory in memories:
        memory.sum(present, list(range(processes)), mean)
    targets = [torch.empty(spec.shape) for spec in TABLE]
    for block in LAYOUT.blocks:
        memories[0].answer(block.index).copy_(memories[0].summed(block.index))
    memories[-1].scatter(targets)
    for row, target in enumerate(targets):
        total = torch.zeros(TABLE[row].shape)
        for number, local in enumerate(present):
            gradient = gradients[local][row]
            scaled = torch.zeros(TABLE[row].shape) if gradient is None else gradient * 0.5
            total = scaled if number == 0 else total + scaled
        assert torch.equal(target, total * (1.0 / len(present)) if mean and len(present) > 1 else total)


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=9))
def test_records_of_several_come_back_as_they_were(records: list[bytes]) -> None:
    assert split_records(join_records(records)) == records


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5), st.integers(0, 400))
def test_a_torn_composite_is_refused(records: list[bytes], cut: int) -> None:
    whole = join_records(records)
    for torn in (whole[: 4 + cut % (len(whole) - 4)], whole + b"x"):
        with pytest.raises(ValueError, match="record of"):
            split_records(torn)


def test_a_record_of_one_process_is_alone() -> None:
    assert split_records(b"PSJR") == [b"PSJR"]


def test_a_large_record_is_made_where_it_is_wanted() -> None:
    maker = RecordMaker()
    assert maker.make(lambda: b"a" * SMALL, large=False) == b"a" * SMALL
    assert maker.make(lambda: b"a" * (SMALL + 1), large=False) == b"a" * (SMALL + 1)
    assert maker.make(lambda: b"b", large=False) is None
    maker.wanted = True
    assert maker.make(lambda: b"c", large=True) == b"c"
    maker.wanted = False
    assert maker.make(lambda: b"d", large=True) is None and maker.make(lambda: b"e", large=False) == b"e"


def test_the_record_of_a_worker_is_of_one_clock() -> None:
    records = Records(3)
    records.add(0, 4, b"zero")
    records.add(2, 4, b"two")
    assert records.whole(4) is None
    records.add(1, 3, b"old")
    assert records.whole(4) is None
    records.add(1, 4, b"one")
    assert split_records(records.whole(4) or b"") == [b"zero", b"one", b"two"] and records.whole(5) is None
    records.add(1, None, b"through")
    records.add(0, 5, b"next")
    records.add(2, 5, b"next")
    assert split_records(records.whole(5) or b"") == [b"next", b"through", b"next"]


@pytest.mark.parametrize(
    ("counts", "shares"), [([2, 2, 2], None), ([None, 4], None), ([2, 1, None], [2 / 3, 1 / 3, 0.0]), ([1, 4], [0.2, 0.8])]
)
def test_a_push_counts_by_its_processes(counts: list[int | None], shares: list[float] | None) -> None:
    class Grad:
        def free(self) -> None:
            """As a gradient's buffer."""

    batch = [
        PendingPush(Push(rank, 3, None), None if count is None else Grad(), False, PushMetadata((), frozenset(), processes=count or 1))
        for rank, count in enumerate(counts)
    ]
    assert push_weights(batch) == shares
