"""How the processes of a worker sum: what nvidia-smi says is read, a way is chosen with its reason, and each way makes the same bits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from psjob.collectives.localsum import Given, LocalSum, TopoMatrix, choose_sum, exchange_seconds, parse_topology, shared_seconds
from psjob.layout.blocks import Layout, TensorSpec
from psjob.worker import localgroup, localreduce
from psjob.worker.exits import SessionEnd
from psjob.worker.localgroup import LocalFrame
from psjob.worker.localreduce import Lying, PodMemory, PodSum, made, make_group, meeting_place
from tests.live.live_shards import eventually
from tests.support.hardware import DEVICES
from tests.unit.topo_outputs import FOUR_GB200, FOUR_H100, FOUR_PCIE, ONE_H100, TWO_5090


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


def given(count: int, text: str = "", size: int = 400_000_000, devices: Sequence[str] = (), **rates: float) -> Given:
    matrix = parse_topology(text) if text else None
    return Given(devices or [f"gpu-{i}" for i in range(count)], size, matrix, list(range(count)), **rates)


@pytest.mark.parametrize(
    ("known", "asked", "way", "reason"),
    [
        (given(2, devices=["cpu", "cpu"]), "auto", "shared", "models are in host memory"),
        (given(2, devices=["gpu-0", "cpu"]), "auto", "shared", "models are in host memory"),
        (given(2, devices=["gpu-0", "gpu-0"]), "auto", "shared", "several processes share one GPU"),
        (given(2, TWO_5090), "auto", "nccl", "joined by PHB, nccl is "),
        (given(4, FOUR_H100), "auto", "nccl", "joined by NV6, nccl is "),
        (given(4, FOUR_GB200), "auto", "nccl", "joined by NV18, nccl is "),
        (given(4, FOUR_PCIE), "auto", "nccl", "joined by PHB and PIX, nccl is "),
        (given(4, FOUR_PCIE, size=4_000_000, add=1e12), "auto", "shared", "shared is "),  # both copy as much, one sends messages
        (given(2, FOUR_H100, size=1000), "auto", "shared", "shared is "),  # one message takes longer than the bytes
        (given(2), "auto", "nccl", "nvidia-smi does not say how the GPUs are joined"),
        (given(2, add=1e12), "auto", "shared", "so the slowest way is assumed"),
        (given(4, FOUR_H100), "shared", "shared", "the manifest asks for it"),
        (given(2, devices=["cpu", "cpu"]), "gloo", "gloo", "the manifest asks for it"),
        (given(2, size=1000), "nccl", "nccl", "the manifest asks for it"),
    ],
)
def test_a_way_is_chosen_and_says_why(known: Given, asked: str, way: str, reason: str) -> None:
    chosen = choose_sum(known, asked)
    assert chosen.way == way and reason in chosen.reason, chosen


@pytest.mark.parametrize(
    ("known", "asked", "says"),
    [
        (given(2, devices=["cpu", "cpu"]), "nccl", "nccl cannot sum here: models are in host memory"),
        (given(2, devices=["gpu-0", "gpu-0"]), "nccl", "several processes share one GPU, which NCCL refuses; take shared or auto"),
        (given(2), "gloo", "the models are on GPUs; take nccl, shared or auto"),
    ],
)
def test_a_way_that_cannot_be_taken_is_refused(known: Given, asked: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        choose_sum(known, asked)


def test_seconds_are_those_of_the_formulas() -> None:
    """400 MB, 12 GB/s to the host, 4 GB/s of additions; links of 18 GB/s a lane, 20 µs a message."""
    assert shared_seconds(given(4)) == pytest.approx(0.4 / 12 + 0.75 * 0.1)
    assert exchange_seconds(given(4, FOUR_H100)) == pytest.approx(0.1 / (6 * 18) + 3 * 20e-6 + 0.1 / 12), "each pair has links of its own"
    assert exchange_seconds(given(4, FOUR_GB200)) == pytest.approx(0.3 / (18 * 18) + 3 * 20e-6 + 0.1 / 12), "all pairs share the switch"
    assert exchange_seconds(given(4, FOUR_PCIE)) == pytest.approx(0.3 / 12 + 3 * 20e-6 + 0.1 / 12)
    assert exchange_seconds(given(2)) == pytest.approx(0.2 * 2 / 12 + 20e-6 + 0.2 / 12)
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
    of, fd, place = layout(), localreduce.make(layout(), processes), meeting_place()
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
    monkeypatch.setattr(localreduce, "MEET_SECONDS", 0.5)
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
    real = localreduce.made

    def short(way: str, of: Layout, memory: PodMemory, local: int, processes: int, device: torch.device, group: Any) -> PodSum:
        if way != "shared" and local == lacks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")
        return real(way, of, memory, local, processes, device, group)

    monkeypatch.setattr(localgroup, "made", short)
    monkeypatch.setattr(localgroup, "_chosen", lambda session, places: LocalSum("gloo", "it is quick"))
    fd = localreduce.make(layout(), 2)
    leader, follower = (Line(local, asked, PodMemory(layout(), 2, local, os.dup(fd))) for local in range(2))
    os.close(fd)
    leader.other, follower.other = follower, leader
    found: dict[int, object] = {}

    def work(local: int) -> None:
        try:
            act, line = (localgroup.follow_leader, follower) if local else (localgroup.lead, leader)
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
