"""`ps.export` of rows on real shards: what final.safetensors has, at one moment, whatever stream breaks and whatever a shard answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import psjob as ps
from psjob.checkpoint import files
from psjob.embeddings import lookup
from psjob.shard import row_frames
from psjob.shard.row_frames import RowFrames
from psjob.wire.frame import Flag, Header, Kind
from psjob.wire.reading import Wants
from psjob.worker import rows
from psjob.worker.exits import SessionEnd
from psjob.worker.rows import RowRequest
from tests.live.live_shards import Worker, all_well, eventually, serving, severed
from tests.support.covering import each_value

STEPS, PAGE = 4, 7

pytestmark = [pytest.mark.usefixtures("last_words"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of few ids, and parts of few rows."""
    for module in (row_frames, rows):
        monkeypatch.setattr(module, "ID_PAGE", PAGE)
    monkeypatch.setattr(lookup, "PART_BYTES", 4 * 4 * 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = ps.Embedding(None, 4, scale=0.1, seed=3)
        self.page = ps.EmbeddingBag(30, 3, mode="sum", seed=3)
        self.seen = ps.Table(None, 1, dtype=torch.int32)
        self.never = ps.Embedding(None, 2)
        self.head = nn.Linear(7, 1)
        nn.init.constant_(self.head.weight, 0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.user(ids - 10), self.page(ids[:, None])], 1))


def net(shards: Any, rank: int) -> Worker:
    model = Net()
    return Worker(shards, rank, model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(worker: Worker, begin: int = 0, end: int = STEPS) -> None:
    for step in range(begin, end):
        ids = torch.randint(0, 25, (20,), generator=torch.Generator().manual_seed(10 * step + worker.rank))
        worker.optimizer.zero_grad()
        worker.model(ids).square().sum().backward()
        worker.model.seen.push(ids, torch.ones(20, 1, dtype=torch.int32))
        worker.optimizer.step()


def equal(one: Path, other: Path) -> None:
    """The files hold the same names and bits."""
    found, wanted = files.read_blocks(one), files.read_blocks(other)
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in wanted.items())


@pytest.mark.parametrize(("mode", "shards"), each_value(["sync", "async"], [3, 1]))
def test_an_export_after_the_last_step_is_what_the_job_leaves(tmp_path: Path, mode: str, shards: int) -> None:
    path = tmp_path / "here.safetensors"

    def act(worker: Worker) -> None:
        train(worker)
        if worker.rank == 0:
            ps.export(path, worker.model)

    with serving(tmp_path, workers=2 if mode == "sync" else 1, shards=shards, mode=mode) as serve:
        all_well([net(serve, rank) for rank in range(2 if mode == "sync" else 1)], act)
        equal(path, serve.folder / "final.safetensors")
    found = files.read_blocks(path)
    assert not [name for name in found if "anchor" in name]
    assert len(found["user.ids"]) > 2 * PAGE and found["page.weight"].shape == (30, 3) and found["never.weight"].shape == (0, 2)


def test_an_export_in_sync_is_of_one_step_while_others_have_pushed_the_next(tmp_path: Path) -> None:
    """What a job of two steps leaves, from a longer one whose other worker waits for the third step."""
    path = tmp_path / "here.safetensors"

    def act(worker: Worker) -> None:
        train(worker, 0, 2)
        if worker.rank == 0:
            assert eventually(lambda: all(cell.pending.pushes for server in longer.servers for cell in server.store.row_cells.values()))
            ps.export(path, worker.model)
        train(worker, 2)

    with serving(tmp_path / "longer", workers=2, shards=2) as longer:
        all_well([net(longer, rank) for rank in range(2)], act)
    with serving(tmp_path / "short", workers=2, shards=2) as short:
        all_well([net(short, rank) for rank in range(2)], lambda worker: train(worker, 0, 2))
        equal(path, short.folder / "final.safetensors")


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_streams_that_break_meanwhile_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    path, asked = tmp_path / "here.safetensors", []
    which = RowFrames._which

    def broken(self: RowFrames, header: Header) -> Wants[None]:
        """Every other request ends its stream in place of an answer."""
        asked.append(header.length)
        if len(asked) % 2:
            self._session.hang_up()
        yield from which(self, header)

    def act(worker: Worker) -> None:
        train(worker)
        monkeypatch.setattr(RowFrames, "_which", broken)
        parts = worker.model.page.parts(None)
        first = next(parts)
        with severed(worker.session.links[1]):
            pass
        assert torch.equal(torch.cat([first, *parts]), files.read_blocks(saved(worker))["page.weight"])

    def saved(worker: Worker) -> Path:
        ps.export(path, worker.model)
        return path

    with serving(tmp_path, workers=1, shards=2, transport=transport) as serve:
        all_well([net(serve, 0)], act)
        equal(path, serve.folder / "final.safetensors")
    assert len(asked) > 6


Answer = Callable[[torch.Tensor], tuple[torch.Tensor, int]]
BAD: dict[str, Answer] = {
    "ids that descend": lambda ids: (ids.flip(0), 0),
    "ids that repeat": lambda ids: (ids[:1].repeat(2), 0),
    "too many ids": lambda ids: (torch.arange(PAGE + 1), 0),
    "ids of another shard": lambda ids: (torch.arange(PAGE), 0),
    "ids in lent memory": lambda ids: (ids, Flag.LENT),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_an_answer_that_cannot_be_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The first answer of a shard is bad; it is asked again on another stream."""
    path, put, told = tmp_path / "here.safetensors", RowFrames._put, []

    def bad(self: RowFrames, header: Header, body: torch.Tensor) -> None:
        if header.kind is Kind.ROW_IDS and not told:
            body, flags = BAD[name](body)
            told.append(header.version)
            header = header._replace(flags=header.flags | flags)
        put(self, header, body)

    def act(worker: Worker) -> None:
        train(worker)
        monkeypatch.setattr(RowFrames, "_put", bad)
        ps.export(path, worker.model)

    with serving(tmp_path, workers=1, shards=2) as serve, caplog.at_level("INFO", "psjob.worker"):
        all_well([net(serve, 0)], act)
        equal(path, serve.folder / "final.safetensors")
    assert told and "ROW_IDS" in caplog.text


def test_a_shard_that_never_tells_its_ids_ends_the_export_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.safetensors"

    def silent(self: RowFrames, header: Header) -> Iterator[Any]:
        yield from ()

    def act(worker: Worker) -> None:
        train(worker)
        monkeypatch.setattr(RowFrames, "_which", silent)
        monkeypatch.setattr(rows, "SECONDS", 0.5)
        with pytest.raises(SystemExit):
            ps.export(path, worker.model)
        worker.die()
        raise Gone

    with serving(tmp_path, workers=1, shards=2) as serve:
        worker = net(serve, 0)
        worker.attach()
        with pytest.raises(Gone):
            act(worker)
    assert "the ids of table user" in capsys.readouterr().err and not path.exists()


def test_a_rewind_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process would begin again by an exec, which cleans nothing up, the half-written file is gone already."""
    (tmp_path / "out").mkdir()
    seen: list[list[list[str]]] = []

    def listed() -> list[str]:
        return sorted(os.listdir(tmp_path / "out"))

    with serving(tmp_path / "job", workers=1, shards=2) as serve:
        worker = net(serve, 0)
        worker.attach()
        train(worker)
        collect, during = worker.session.rows.collect, []

        def ending(asked: RowRequest) -> torch.Tensor:
            during.append(listed())
            if len(during) == 2:
                raise SessionEnd("rewind")
            return collect(asked)

        def again(*_: Any) -> None:
            seen.append([*during, listed()])
            raise Gone

        monkeypatch.setattr(worker.session.rows, "collect", ending)
        monkeypatch.setattr(worker.session, "begin_again", again)
        with pytest.raises(Gone):
            ps.export(tmp_path / "out" / "here.safetensors", worker.model)
        worker.die()
    assert [len(names) for names in seen[0]] == [1, 1, 0]


class Gone(Exception):
    """The script ends here."""
