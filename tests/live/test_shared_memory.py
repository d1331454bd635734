"""Memory that workers and shards of one host lend each other: what a script sees, what a death leaves.

- Regions of shared memory and how they are handed over: what may be borrowed, what stays the lender's own.
"""

from __future__ import annotations

import copy
import fcntl
import io
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from psjob.checkpoint.final import tensors_sha256
from psjob.layout import memory
from psjob.layout.blocks import Layout, TensorSpec
from psjob.layout.memory import LentSpan
from psjob.wire import shared_memory
from psjob.wire.frame import Flag, Header, Kind, WireError, dump
from psjob.wire.shared_memory import PAGE, Offer, Region, SharedMemoryBroker
from psjob.worker.exits import SessionEnd
from psjob.worker.sharing import Arena, Sharing, is_alone
from tests.live.live_shards import SECONDS, Worker, all_well, aside, at_once, eventually, serving, severed
from tests.live.training import push_filled

pytestmark = pytest.mark.usefixtures("last_words")

Act = Callable[[Worker], None]


def build() -> nn.Module:
    """Two tensors that lie at whole pages, two that are packed behind others."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for number, p in enumerate(model.parameters()):
        torch.nn.init.constant_(p, float(number))
    return model


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def lives_shared(worker: Worker, p: torch.Tensor) -> bool:
    mirror = worker.session.exchange.sharing._mirror
    assert mirror is not None
    return mirror.window.address <= p.data_ptr() < mirror.window.address + mirror.window.size


# -- what a script sees ----------------------------------------------------------------------------


def test_weights_live_with_the_shard_and_a_scripts_writes_last_a_step(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=2) as shards:
        model = build()
        worker = Worker(shards, 0, model, sgd(model))

        def act(worker: Worker) -> None:
            weight = model[0].weight
            assert lives_shared(worker, weight) and [s.sessions[0].transport for s in shards.servers] == ["shared", "shared"]
            with torch.no_grad():
                weight.fill_(100.0)
                assert float(model(torch.ones(1, 64))[0, 0]) != 0.0
                weight.zero_()
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            worker.optimizer.step()
            for number, p in enumerate(model.parameters()):
                assert torch.equal(p, torch.full_like(p, number - 1.0)), number
            one, saved = copy.deepcopy(model), io.BytesIO()
            torch.save(model.state_dict(), saved)
            assert len(saved.getvalue()) < 3 * sum(p.numel() * 4 for p in model.parameters())
            worker.optimizer.step()
            assert float(one[0].weight[0, 0]) == -1.0 and float(weight[0, 0]) == -2.0
            saved.seek(0)
            assert float(torch.load(saved, weights_only=True)["0.weight"][0, 0]) == -1.0

        all_well([worker], act)
        shards.close()
    assert float(model[0].weight[5, 5]) == -2.0  # the job is over


def test_memory_that_others_see_too_stays_where_it_is(tmp_path: Path) -> None:
    """A view that the script holds, weights of two names, and a parameter that is not contiguous."""
    with serving(tmp_path, workers=1, shards=1) as shards:
        model = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(4)])
        model[1].weight = model[0].weight
        model[2].weight = nn.Parameter(torch.zeros(256, 256).t()[::1])
        model[2].weight.data = torch.zeros(256, 256).t()
        view = model[3].weight.detach()[0]
        worker = Worker(shards, 0, model, sgd(model))

        def act(worker: Worker) -> None:
            assert [lives_shared(worker, model[i].weight) for i in (0, 2, 3)] == [True, False, False]
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            before = view.clone()
            worker.optimizer.step()
            assert torch.equal(view, before - 1.0) and torch.equal(model[2].weight, torch.full((256, 256), -1.0))
            assert model[1].weight is model[0].weight

        all_well([worker], act)


def test_a_kept_gradient_comes_to_live_in_lent_memory_and_is_not_changed(tmp_path: Path) -> None:
    """Two workers, so that a sum is made; each sees its own gradient after every step."""
    with serving(tmp_path, workers=2, shards=1) as shards:
        workers = [Worker(shards, rank, model, sgd(model)) for rank, model in enumerate(build() for _ in range(2))]

        def act(worker: Worker) -> None:
            grads = [torch.full_like(p, worker.rank + 1.0) for p in worker.model.parameters()]
            for step in range(5):
                for p, grad in zip(worker.model.parameters(), grads, strict=True):
                    p.grad = grad
                worker.optimizer.step()
                assert all(torch.equal(grad, torch.full_like(grad, worker.rank + 1.0)) for grad in grads), step
            arena = worker.session.exchange.sharing._arena
            assert arena is not None and set(arena._kept) == {0, 2, 3} | ({1} if 1 in arena._homes else set())
            held = grads[0]
            for p in worker.model.parameters():
                p.grad = torch.zeros_like(p)  # the old ones are the script's still
            worker.optimizer.step()
            assert torch.equal(held, torch.full_like(held, worker.rank + 1.0)) and 0 not in arena._kept

        all_well(workers, act)
    for number, p in enumerate(workers[0].model.parameters()):
        assert torch.equal(p, torch.full_like(p, number - 5 * 1.5))


def test_a_scaled_gradient_stays_scaled_for_the_script(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        model = build()

        def act(worker: Worker) -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
            grads = [torch.full_like(p, 4.0) for p in model.parameters()]
            scaler.scale(torch.ones(()))  # it makes its scale at the first use
            for _ in range(3):
                for p, grad in zip(model.parameters(), grads, strict=True):
                    p.grad = grad
                worker.optimizer.grad_scale, worker.optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
                worker.optimizer.step()
                assert all(torch.equal(grad, torch.full_like(grad, 4.0)) for grad in grads)

        all_well([Worker(shards, 0, model, sgd(model))], act)
    assert float(model[0].weight[0, 0]) == -3.0


def test_a_fork_has_gradients_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        model = build()

        def act(worker: Worker) -> None:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            for _ in range(3):
                worker.optimizer.step()
            region = worker.session.exchange.sharing._arena.region  # type: ignore[union-attr]
            read, write = os.pipe()
            if (child := os.fork()) == 0:
                model[0].weight.grad.fill_(9.0)
                os.write(write, b"%d" % int(model[0].weight.grad[0, 0]))
                os._exit(0)
            os.waitpid(child, 0)
            assert os.read(read, 8) == b"9" and float(memory.lent(region, 0, 1, "float32")[0]) == 1.0
            os.close(read)
            os.close(write)
            worker.optimizer.step()

        all_well([Worker(shards, 0, model, sgd(model))], act)
    assert float(model[0].weight[0, 0]) == -4.0


# -- the other side --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_out_of_reach_means_tcp(tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Shard 1's counter is closed: its blocks go over the stream, the others' do not, and the log says so."""
    hashes = set()
    for reach in (True, False):
        folder = tmp_path / str(reach)
        with serving(folder, workers=1, shards=2, mode=mode) as shards:
            if not reach:
                shards.servers[1].context.broker.close()  # type: ignore[union-attr]
            model = build()

            def act(worker: Worker) -> None:
                for step in range(4):
                    push_filled(worker, 0.5 + step)

            all_well([Worker(shards, 0, model, sgd(model))], act)
            assert [s.sessions[0].transport for s in shards.servers] == ["shared", "shared" if reach else "tcp"]
            hashes.add(tensors_sha256(model.parameters()))
    assert len(hashes) == 1 and "its memory is out of reach" in caplog.text


ELSEWHERE = "127.0.0.2"
"""For shards whose workers have another address, as pods do."""


@pytest.fixture
def volume_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket: 107 bytes at most together."""
    with tempfile.TemporaryDirectory(prefix="psjob-") as name:
        yield Path(name)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_pods_that_mount_one_volume_share_memory(tmp_path: Path, volume_folder: Path, mode: str) -> None:
    """Worker and shard of one index do, all others use TCP. The socket's file goes with its shard."""
    hashes = set()
    for name in ("", "pair"):
        folder = tmp_path / f"of{name}"
        volumes = [volume_folder / name / str(index) for index in range(2)] if name else []
        for volume in volumes:
            volume.mkdir(parents=True)
            _leave_a_socket(volume)
        with serving(folder, workers=2, shards=2, mode=mode, host=ELSEWHERE, volumes=[*map(str, volumes)]) as shards:
            models = [build(), build()]

            def act(worker: Worker) -> None:
                for step in range(4):
                    push_filled(worker, 0.5 + step)

            all_well([Worker(shards, rank, model, sgd(model)) for rank, model in enumerate(models)], act)
            near, far = "shared" if name else "tcp", "tcp"
            assert [[s.sessions[rank].transport for rank in range(2)] for s in shards.servers] == [[near, far], [far, near]]
            hashes.add(tensors_sha256(models[1].parameters()) if mode == "sync" else "")
        assert not any(list(volume.iterdir()) for volume in volumes)
    assert len(hashes) == 1


def _leave_a_socket(folder: Path) -> None:
    """What a shard that was killed leaves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(folder / ("psjob-" + "0" * 32)))


def test_a_volume_that_the_other_pod_does_not_see_means_tcp(tmp_path: Path, volume_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of another node, or of an older pod: the worker finds no socket there."""
    for name in ("one", "other"):
        (volume_folder / name).mkdir()
    with serving(tmp_path, workers=1, shards=1, host=ELSEWHERE, volumes=[str(volume_folder / "one")]) as shards:
        shards.volumes = [str(volume_folder / "other")]
        model = build()
        all_well([Worker(shards, 0, model, sgd(model))], push_ones)
        assert shards.servers[0].sessions[0].transport == "tcp"
    assert "its memory is out of reach" in caplog.text


def test_a_volume_that_takes_no_socket_means_tcp(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = str(tmp_path / "missing")
    with serving(tmp_path, workers=1, shards=1, host=ELSEWHERE, volumes=[missing]) as shards:
        model = build()
        all_well([Worker(shards, 0, model, sgd(model))], push_ones)
        assert shards.servers[0].sessions[0].transport == "tcp" and shards.servers[0].context.broker is not None
    assert f"no memory is shared with worker 0: a socket cannot be made in {missing}" in caplog.text


def test_an_offer_that_is_out_of_shape_is_refused() -> None:
    good = {"name": "n", "token": "t", "bytes": 8}
    assert Offer.of(good, "/pair") == Offer("n", "t", 8, "") and Offer.of({**good, "inFolder": True}, "/pair").folder == "/pair"
    for bad in ({}, [], {**good, "bytes": "many"}, {"name": "n", "token": "t"}):
        with pytest.raises(WireError, match="an offer of memory is not in shape"):
            Offer.of(bad, "/pair")


def test_tcp_is_kept_to_where_the_job_says_so(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1, transport="tcp") as shards:
        model = build()
        all_well([Worker(shards, 0, model, sgd(model))], lambda worker: None)
        assert shards.servers[0].context.broker is None and shards.servers[0].sessions[0].transport == "tcp"


def test_lent_frames_without_or_outside_of_lent_memory_end_their_stream(tmp_path: Path) -> None:
    with serving(tmp_path, workers=1, shards=1) as shards:
        model = build()
        worker = Worker(shards, 0, model, sgd(model))

        def act(worker: Worker) -> None:
            block = worker.session.layout.blocks[0]
            (lane,) = worker.session.links[0].lanes
            worker.session.exchange.tell_hyperparameters([{"lr": 1.0}], [])
            bad = shards.servers[0].bad_connections
            lane.stream.send_lent(lane.link.dated(worker.session.header(Kind.PUSH, block=0, info=1)), 64, block.nbytes)
            for p in worker.model.parameters():
                p.grad = torch.ones_like(p)
            worker.optimizer.step()  # on a new stream
            assert shards.servers[0].bad_connections == bad + 1

        all_well([worker], act)
        assert float(model[0].weight[0, 0]) == -1.0
    raw = dump({})
    stray = Header(Kind.PARAM, flags=Flag.LENT, part=0, length=len(raw))
    from psjob.wire.tcp import Stream

    with pytest.raises(WireError, match="none was handed over"):
        Stream.lent(_Bare(), stray, 0, 2)  # type: ignore[arg-type]


class _Bare:
    borrowed = None


def test_who_returns_in_the_middle_of_a_clock_computes_on_the_weights_of_that_clock(tmp_path: Path) -> None:
    """A shard that has its predecessor's pushes continues without it; what it reads must not move before its own step."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        models = [build() for _ in range(3)]
        stays, dies = (Worker(shards, rank, models[rank], sgd(models[rank])) for rank in range(2))
        at_once(stays.attach, dies.attach)
        with severed(dies.session.links[1]):
            pushing = aside(lambda: push_ones(dies))
            assert eventually(lambda: shards.servers[0].store.clocks()[1] == 1)
            dies.session._end(SessionEnd("lost"))
            pushing.join(SECONDS)
            dies.die()
        again = Worker(shards, 1, models[2], sgd(models[2]), start=2)
        again.attach()
        begun = [p.detach().clone() for p in again.model.parameters()]
        assert again.session.clock == 0 and lives_shared(again, again.model[0].weight)
        waiting = aside(lambda: push_ones(stays))
        assert eventually(lambda: shards.servers[0].store.span() == (1, 1)) and shards.servers[1].store.span() == (0, 0)
        assert all(torch.equal(p, old) for p, old in zip(again.model.parameters(), begun, strict=True))
        push_ones(again)
        waiting.join(SECONDS)
        assert all(torch.equal(p, old - 1) for p, old in zip(again.model.parameters(), begun, strict=True))


def test_who_has_left_keeps_the_weights_of_its_last_step(tmp_path: Path) -> None:
    """The other worker continues in the memory in which the model lives."""
    with serving(tmp_path, workers=2, shards=2) as shards:
        models = [build() for _ in range(2)]
        held: list[torch.Tensor] = []

        def act(worker: Worker) -> None:
            assert lives_shared(worker, worker.model[0].weight)
            if worker.rank == 0:
                held.append(worker.model[0].weight.detach()[0])
            for _ in range(2 + 3 * worker.rank):
                push_ones(worker)

        all_well([Worker(shards, rank, model, sgd(model)) for rank, model in enumerate(models)], act)
        for model, steps in zip(models, (2, 5), strict=True):
            for number, p in enumerate(model.parameters()):
                assert torch.equal(p, torch.full_like(p, number - steps)), number
        assert torch.equal(held[0], torch.full_like(held[0], -2.0))


def push_ones(worker: Worker) -> None:
    push_filled(worker, 1.0)


def test_what_is_pushed_again_stays_as_a_shard_reads_it() -> None:
    layout = Layout.of((TensorSpec("weight", (8,), "float32", 0),))
    arena = Arena(LentSpan.of(layout, PAGE))
    grad = torch.ones(8)
    kept = arena.begin([grad], True)
    assert arena.stage(0, [grad], 0.5, kept) and arena.packs[0].flat.tolist() == [0.5] * 8
    assert arena.stage(0, [grad * 7], 0.5, kept) and arena.packs[0].flat.tolist() == [0.5] * 8, "it would be unscaled for a moment"
    kept = arena.begin([grad], True)
    assert arena.stage(0, [grad * 3], 0.5, kept) and arena.packs[0].flat.tolist() == [1.5] * 8


def test_what_is_withdrawn_takes_no_block_more() -> None:
    """A link may push again just then: what is there stays there, what is not is sent."""
    layout = Layout.of((TensorSpec("weight", (8,), "float32", 0), TensorSpec("bias", (8,), "float64", 1)))
    arena = Arena(LentSpan.of(layout, PAGE))
    grads = [torch.ones(8), torch.ones(8, dtype=torch.float64)]
    kept = arena.begin(grads, False)
    assert arena.stage(0, grads, 1.0, kept)
    arena.withdraw()
    assert arena.stage(0, grads, 1.0, kept) and not arena.stage(1, grads, 1.0, kept)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Shared memory has no name in any folder, so that the kernel frees it with its processes."""

    def regions() -> list[os.stat_result]:
        found = Path("/proc/self/fd").iterdir()
        return [fd.stat() for fd in found if os.path.lexists(fd) and "memfd:psjob" in os.readlink(fd)]

    def named() -> set[str]:
        return {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}

    before = named()
    with serving(tmp_path, workers=1, shards=2) as shards:
        model = build()
        all_well([Worker(shards, 0, model, sgd(model))], lambda worker: None)
        assert named() == before
        assert regions() and all(region.st_nlink == 0 for region in regions())


def test_a_region_is_seen_by_both_and_outlives_its_lender() -> None:
    lent = Region.lend(3 * PAGE)
    borrowed = Region.borrow(os.dup(lent.fd), 3 * PAGE)
    memory.lent(lent, PAGE, 8, "float32").fill_(2.5)
    seen = memory.lent(borrowed, PAGE, 8, "float32")
    del lent, borrowed
    assert seen.tolist() == [2.5] * 8


def test_what_could_be_taken_back_is_not_borrowed(tmp_path: Path) -> None:
    lent = Region.lend(PAGE)
    with pytest.raises(OSError):
        os.ftruncate(lent.fd, 0)
    with pytest.raises(WireError, match=f"has {PAGE} bytes, expected {2 * PAGE}"):
        Region.borrow(os.dup(lent.fd), 2 * PAGE)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, PAGE)
    with pytest.raises(WireError, match="not sealed"):
        Region.borrow(loose, PAGE)
    path = tmp_path / "file"
    path.write_bytes(b"\0" * PAGE)
    with pytest.raises(WireError, match="sealed"):
        Region.borrow(os.open(path, os.O_RDWR), PAGE)
    for offset, length in ((-1, 1), (0, PAGE + 1), (PAGE, 1), (1, -1)):
        with pytest.raises(WireError, match="outside of lent memory"):
            lent.buffer(offset, length)


def test_a_borrower_cannot_write() -> None:
    lent = Region.lend(PAGE)
    if not fcntl.fcntl(lent.fd, fcntl.F_GET_SEALS) & shared_memory._FUTURE_WRITE:
        pytest.skip("this kernel has no F_SEAL_FUTURE_WRITE")
    with pytest.raises(OSError):
        os.write(lent.fd, b"x")
    with pytest.raises(OSError):
        shared_memory._map(None, PAGE, 3, 1, lent.fd, 0)


def test_what_is_withdrawn_is_the_lenders_own() -> None:
    lent = Region.lend(PAGE)
    borrowed = memory.lent(Region.borrow(os.dup(lent.fd), PAGE), 0, 4, "float32")
    mine = memory.lent(lent, 0, 4, "float32")
    mine.fill_(1.0)
    lent.withdraw()
    assert mine.tolist() == [1.0] * 4
    mine.fill_(7.0)
    assert borrowed.tolist() == [1.0] * 4


def test_a_token_opens_one_handover() -> None:
    counter = SharedMemoryBroker("test")
    ours, theirs = Region.lend(PAGE), Region.lend(2 * PAGE)
    got: list[int] = []

    def give(fd: int) -> Region:
        got.append(os.fstat(fd).st_size)
        os.close(fd)
        return theirs

    token = counter.expect(give)
    with pytest.raises(OSError):
        shared_memory.fetch(counter.address, "0" * len(token), ours.fd)
    fd = shared_memory.fetch(counter.address, token, ours.fd)
    assert (got, os.fstat(fd).st_size) == ([PAGE], 2 * PAGE)
    os.close(fd)
    with pytest.raises(OSError):
        shared_memory.fetch(counter.address, token, ours.fd)
    for name, word in (("another-program", token), ("psjob-\0", token), (f"{counter.address}x", token), (counter.address, "short")):
        with pytest.raises(OSError, match="is not where memory is handed over"):
            shared_memory.fetch(name, word, ours.fd)
    counter.forget(counter.expect(give))
    assert not counter._expected
    counter.close()


def test_shards_that_offer_at_once_are_lent_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each link has a thread of its own; a worker that gathers into one region must not have lent another to a shard."""
    span = LentSpan.of(Layout.of((TensorSpec("weight", (8,), "float32", 0),)), PAGE)
    counter, theirs, got = SharedMemoryBroker("test"), Region.lend(span.size), set[int]()

    def slow(span: LentSpan) -> Arena:
        time.sleep(0.05)
        return Arena(span)

    def give(fd: int) -> Region:
        got.add(os.fstat(fd).st_ino)
        os.close(fd)
        return theirs

    monkeypatch.setattr("psjob.worker.sharing.Arena", slow)
    sharing = Sharing(span.layout, steady=True)

    def take(index: int) -> None:
        sharing.take(index, [0], Offer(counter.address, counter.expect(give), span.size))

    for taking in [aside(lambda index=index: take(index)) for index in range(4)]:
        taking.join(SECONDS)
    assert sharing._arena is not None and got == {os.fstat(sharing._arena.region.fd).st_ino}
    counter.close()


def test_what_is_not_alone_is_seen() -> None:
    like = torch.zeros(4)
    assert is_alone(torch.ones(4), like)
    whole = torch.ones(8)
    assert not is_alone(whole[:4], like) and not is_alone(torch.ones(4, dtype=torch.float64), like)
    other = torch.ones(4)
    view = other.view(2, 2)
    assert not is_alone(other, like)
    del view
    assert is_alone(other, like)


@pytest.mark.parametrize("populates", [True, False])
def test_pages_that_are_kept_stay_as_they_were(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populates:
        monkeypatch.setattr(shared_memory, "populate", lambda address, size: False)
    region = Region.lend(3 * PAGE)
    window = shared_memory.Window(3 * PAGE)
    window.show(region.fd, [(0, 3 * PAGE)])
    lender, seen = (memory.lent(at, 0, 3 * PAGE, "uint8") for at in (region, window))
    lender.fill_(5)
    window.keep(PAGE, 2 * PAGE)
    lender.fill_(6)
    assert seen[:PAGE].unique().tolist() == [6] and seen[PAGE:].unique().tolist() == [5]
