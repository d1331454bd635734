"""Payloads between workers of neighbouring stages in memory that they lend each other: same bits, also after deaths and bad offsets."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from psjob.modes.stages import Stages
from psjob.wire import shared_memory
from psjob.wire.event_loop import NonBlockingStream
from psjob.wire.frame import Flag, Header, Kind
from psjob.wire.shared_memory import PAGE
from psjob.worker import stage_connections
from psjob.worker.stage_connections import StageConnections, StageSharing
from tests.live.live_shards import SECONDS, aside, eventually, serving
from tests.live.stage_workers import STEPS, Cluster, Kills, StageWorker, compare, trained
from tests.support.soaking import rotating

pytestmark = pytest.mark.usefixtures("last_words")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The payloads of these tests are small."""
    monkeypatch.setattr(stage_connections, "LEAST", 1)


def links_of(worker: StageWorker) -> StageConnections:
    links = worker.session.stage_links
    assert links is not None
    return links


def placed(cluster: Cluster) -> list[int]:
    return [links_of(worker).sharing.placed for _, worker in sorted(cluster.ended.items())]


def regions() -> int:
    """Of those that two workers lend each other, how many this process has mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        found += "memfd:psjob" in line and int(end, 16) - int(begin, 16) == stage_connections.BYTES
    return found


@pytest.mark.parametrize("encryption", ["none", "auto"])
def test_payloads_in_lent_memory_have_the_bits_of_one_process(tmp_path: Path, encryption: str) -> None:
    cluster = trained(tmp_path, (1, 1, 1), count=1, encryption=encryption)
    compare(cluster, 4)
    assert all(count > 4 for count in placed(cluster)), placed(cluster)


@pytest.mark.parametrize("setting", [{"transport": "tcp"}, {"sharing": "index"}], ids=str)
def test_a_job_that_says_so_lends_nothing_between_stages(tmp_path: Path, setting: dict[str, str]) -> None:
    cluster = trained(tmp_path, (1, 1), 2, 1, **setting)
    compare(cluster, 2)
    assert placed(cluster) == [0, 0]


@pytest.mark.parametrize("seed", [0, 1, rotating(2), rotating(3)])
def test_kills_change_no_bit_and_leave_no_memory(tmp_path: Path, seed: int) -> None:
    before, chance = regions(), random.Random(seed)
    stages, microbatches = chance.choice([2, 3]), chance.choice([2, 4])
    kills, lent_some = Kills(chance, stages, microbatches, STEPS), threading.Event()

    def before_each(worker: StageWorker, what: str, step: int, micro: int) -> None:
        if not lent_some.is_set() and regions() > before:
            lent_some.set()
        kills.before(worker, what, step, micro)

    with serving(tmp_path, workers=stages, shards=1, stages=Stages((1,) * stages), sharing="host") as shards:
        cluster = Cluster(shards, microbatches, before_each)
        cluster.run(STEPS)
        kills.check(cluster, seed)
        compare(cluster, microbatches, STEPS)
        assert lent_some.is_set()
        lent = [links_of(worker).sharing for worker in cluster.ended.values()]
        assert eventually(lambda: not any(sharing.open_streams for sharing in lent), SECONDS)
    assert eventually(lambda: regions() <= before), (before, regions())


def test_what_finds_no_room_goes_over_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_connections, "BYTES", PAGE // 8)
    cluster = trained(tmp_path, (1, 1), count=1)
    compare(cluster, 4)
    assert 0 < sum(placed(cluster)) < 8 * STEPS, placed(cluster)


def test_memory_out_of_reach_leaves_all_to_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(address: str, token: str, fd: int, folder: str = "") -> int:
        asked.append(address)
        raise OSError("another network namespace")

    monkeypatch.setattr(shared_memory, "fetch", fetch)
    cluster = trained(tmp_path, (1, 1), 2, 1, transport="auto")
    compare(cluster, 2)
    assert placed(cluster) == [0, 0] and len(asked) >= 1


def test_a_descriptor_is_open_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream may end meanwhile. Another thread could open a file of that number, and the neighbour would be given it."""
    monkeypatch.setattr(shared_memory, "SECONDS", SECONDS)
    gc.freeze()  # a collection of all that other tests have made may take seconds
    sharing, sent, send = StageSharing(0, True), list[int](), socket.send_fds
    sharing.open()

    def late(sock: socket.socket, raw: list[bytes], fds: list[int]) -> int:
        if raw == [b"+"]:
            sharing.drop(stream)
            gc.collect()
            sent.append(os.fstat(fds[0]).st_size)
        return send(sock, raw, fds)

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        stream = NonBlockingStream(sock)
        sharing.offer(stream, Header(Kind.LENDS), 1)
        address, token = sharing._counter.address if sharing._counter else "", sharing._offered[stream]
        monkeypatch.setattr(socket, "send_fds", late)
        lending = stage_connections.StageLending()
        os.close(shared_memory.fetch(address, token, lending.region.fd))
        assert sent == [stage_connections.BYTES] and not sharing.open_streams
    sharing.close()
    gc.unfreeze()


BAD: dict[str, Callable[[StageConnections], Header]] = {
    "beyond the end": lambda links: lent(links).lent(stage_connections.BYTES - 64, 4096),
    "an offset of 64 bits": lambda links: lent(links).lent((1 << 64) - 64, 128),
    "more than there is": lambda links: lent(links).lent(0, 1 << 40),
    "a head longer than the frame": lambda links: lent(links)._replace(request=1 << 19).lent(0, 128),
    "no structure": lambda links: lent(links).lent(stage_connections.BYTES - 4096, 4096),
    "copied what was not there": lambda links: links.state.header(Kind.COPIED, part=4096 * 7 + 1),
    "an offer from the one that dialled": lambda links: links.state.header(Kind.LENDS),
}


def lent(links: StageConnections) -> Header:
    return links.state.header(Kind.ACTIVATION, clock=2, block=1, request=64, flags=Flag.LENT)


@pytest.mark.parametrize("name", list(BAD))
def test_a_neighbour_that_names_other_memory_is_hung_up_on(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It has the key of the link. The stream is closed, the two are linked again, and no bit is another."""
    workers: dict[int, StageWorker] = {}
    reached, done = threading.Event(), threading.Event()

    def before(worker: StageWorker, what: str, step: int, micro: int) -> None:
        workers[worker.rank] = worker
        if (worker.rank, what, step, micro) == (0, "give ACTIVATION", 2, 1) and not reached.is_set():
            reached.set()
            assert done.wait(SECONDS)

    with serving(tmp_path, workers=2, shards=1, stages=Stages((1, 1))) as shards:
        cluster = Cluster(shards, 4, before)
        runner = aside(cluster.run)
        try:
            assert reached.wait(SECONDS)
            links = links_of(workers[0])
            stream = links._links[1][1]
            stream.write(BAD[name](links))
            assert eventually(lambda: 1 not in links._links or links._links[1][1] is not stream, SECONDS)
        finally:
            done.set()
        runner.join(SECONDS)
        assert not runner.is_alive() and len(cluster.ended) == 2 and not (cluster.died or cluster.rewound)
        compare(cluster, 4)
    assert "a stream to this worker from" in caplog.text
