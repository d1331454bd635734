"""The simulator's own parts: streams keep their order and lose what a fault takes, the volume forgets what was not synced."""

from __future__ import annotations

from typing import Any

from psjob.checkpoint.disk import CheckpointProblem, Damage
from tests.simulation.protocol.kernel import Kernel, Process
from tests.simulation.protocol.network import End, Network
from tests.simulation.protocol.volume import DiskThread, Volume


def pair(kernel: Kernel, network: Network) -> tuple[End, End, list[Any]]:
    one, other = Process(kernel, "one"), Process(kernel, "other")
    ends = network.connect(one, other)
    assert ends is not None
    heard: list[Any] = []
    ends[1].heard = heard.append
    ends[1].ended = lambda: heard.append("end")
    return *ends, heard


def settle(kernel: Kernel, seconds: float = 60.0) -> None:
    kernel.run(lambda: False, kernel.now + seconds)


def test_a_stream_keeps_its_order_and_its_end_comes_last() -> None:
    kernel = Kernel(1)
    one, _, heard = pair(kernel, Network(kernel, 0.01, 1e6))
    for number in range(50):
        one.send(number, 100 * (number % 7))
    one.close()
    settle(kernel)
    assert heard == [*range(50), "end"]


def test_a_slow_link_takes_its_time() -> None:
    kernel = Kernel(1)
    network = Network(kernel, 0.01, 1e9)
    network.slow["one", "other"] = (0.01, 125_000.0)
    one, other, _ = pair(kernel, network)
    times: list[float] = []
    other.heard = lambda frame: times.append(kernel.now)
    one.send("large", 1_250_000)
    settle(kernel)
    assert 10.0 < times[0] < 10.2


def test_a_partition_holds_bytes_back_until_it_heals() -> None:
    kernel = Kernel(1)
    network = Network(kernel, 0.01, 1e6)
    one, _, heard = pair(kernel, network)
    network.walls[1] = lambda a, b: a == "one"
    one.send("first")
    settle(kernel)
    assert heard == []
    one.send("second")
    network.heal(1)
    settle(kernel)
    assert heard == ["first", "second"]


def test_a_break_loses_what_is_under_way_and_may_leave_a_half_open_end() -> None:
    kernel = Kernel(1)
    network = Network(kernel, 0.01, 1e6)
    one, other, heard = pair(kernel, network)
    one.send("lost")
    network.break_stream(one, told=False, lingers=0.0)
    settle(kernel, 1.0)
    assert heard == [] and one.closed and not other.closed
    other.send("into the void")
    settle(kernel, 1.0)
    assert heard == ["end"], "the reset that answers it ends the other half"


def test_a_process_that_stands_still_hears_of_everything_afterwards() -> None:
    kernel = Kernel(1)
    one, other, heard = pair(kernel, Network(kernel, 0.01, 1e6))
    other.owner.freeze()
    one.send("word")
    settle(kernel)
    assert heard == []
    other.owner.thaw()
    assert heard == ["word"]


def volume() -> tuple[Kernel, Volume, DiskThread, list[Any]]:
    kernel = Kernel(1)
    made = Volume(kernel, 1e6, 0.001)
    return kernel, made, DiskThread(Process(kernel, "pod")), []


def test_a_file_written_whole_outlives_a_power_cut_and_one_under_way_does_not() -> None:
    kernel, disk, thread, results = volume()
    thread.ask(disk.write_whole("pod", "a", "A", 1000), results.append)
    settle(kernel)
    thread.ask(disk.write_whole("pod", "b", "B", 1_000_000), results.append)
    settle(kernel, 0.5)
    disk.power_cut("pod")
    assert disk.files["a"].content == "A" and disk.files["a"].synced and "b" not in disk.files


def test_a_name_that_was_not_synced_may_be_lost() -> None:
    lost = 0
    for seed in range(40):
        kernel = Kernel(seed)
        disk = Volume(kernel, 1e6, 0.001)
        disk.ill["pod"] = {"folder"}
        results: list[Any] = []
        DiskThread(Process(kernel, "pod")).ask(disk.write_whole("pod", "a", "A", 1000), results.append)
        settle(kernel)
        assert isinstance(results[0], CheckpointProblem) and "a" not in disk.files, "a name that could not be made durable is taken back"
        disk.power_cut("pod")
        lost += "a" not in disk.files
    assert lost > 0


def test_a_full_volume_refuses_and_keeps_nothing() -> None:
    kernel, disk, thread, results = volume()
    disk.room = 500
    thread.ask(disk.write_whole("pod", "a", "A", 1000), results.append)
    thread.ask(disk.read("pod", "a"), results.append)
    settle(kernel)
    assert "ENOSPC" in str(results[0]) and isinstance(results[1], Damage) and not disk.files
