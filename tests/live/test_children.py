"""A process of multiprocessing begins again in place, with what its parent had sent; real processes of each kind."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.queues
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psjob.process.errors import Refused
from psjob.worker import rewind


def twice(folder: Path, words: list[str], out: Any, lock: Any) -> None:
    """Begin again once, in place; what the first start did to its arguments is not there in the second."""
    begun = rewind.sent_by_waiter()
    assert begun is not None
    words.append("late")
    with lock, open(folder / "starts", "a") as file:
        file.write(f"{os.getpid()}\n")
    if (folder / "starts").read_text().count("\n") < 3:
        command = begun.words()
        os.execv(command[0], command)
    parent = multiprocessing.parent_process()
    out.put((words, multiprocessing.current_process().name, parent is not None and parent.is_alive()))


def asked() -> str:
    """What `sent` says here."""
    try:
        return str(rewind.sent_by_waiter())
    except Refused as refused:
        return str(refused)


def answering(out: Any) -> None:
    out.put(asked())


def answer(how: str, target: Callable[[Any], None]) -> str:
    """What a process says that multiprocessing has started in this way."""
    context = multiprocessing.get_context(how)
    out: multiprocessing.queues.Queue[str] = context.Queue()
    child = context.Process(target=target, args=(out,))
    child.start()
    said = out.get(timeout=60)
    child.join(60)
    return said


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
@pytest.mark.parametrize("size", [1, 500_000])
def test_a_child_begins_again_as_it_began(tmp_path: Path, how: str, size: int) -> None:
    context = multiprocessing.get_context(how)
    out: multiprocessing.queues.Queue[Any] = context.Queue()
    lock = context.Lock()
    child = context.Process(target=twice, args=(tmp_path, ["given"] * size, out, lock), name="the trainer")
    child.start()
    words, name, has_parent = out.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert words == ["given"] * size + ["late"] and name == "the trainer" and has_parent
    assert (tmp_path / "starts").read_text() == f"{child.pid}\n" * 3


def place(folder: Path) -> Any:
    return SimpleNamespace(run="r", rank=0, index=0, number=1, config_path=str(folder), config=SimpleNamespace(shards=()))


def holding(folder: Path, out: Any) -> None:
    rewind.claim_place(place(folder))
    out.put("held")
    time.sleep(120)


def test_one_process_of_a_worker_holds_its_place_until_it_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    out: multiprocessing.queues.Queue[str] = context.Queue()
    child = context.Process(target=holding, args=(tmp_path, out))
    child.start()
    assert out.get(timeout=60) == "held"
    with pytest.raises(Refused, match="another process of worker 0 has attached"):
        rewind.claim_place(place(tmp_path))
    child.kill()
    rewind.claim_place(place(tmp_path))  # it is given the time that it takes to go
    rewind.claim_place(place(tmp_path))
    child.join(60)
    rewind._let_go()


def test_the_first_process_was_sent_nothing() -> None:
    assert rewind.sent_by_waiter() is None


def test_a_fork_that_answers_its_parent_is_refused() -> None:
    said = answer("fork", answering)
    assert "was forked and has a Queue of its parent" in said and "get_context('spawn').Process" in said


@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_a_process_of_a_pool_is_refused(how: str) -> None:
    context = multiprocessing.get_context(how)
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        assert "is a process of a pool" in executor.submit(asked).result(60)
    with context.Pool(1) as pool:
        assert "is a process of a pool" in pool.apply_async(asked).get(60)


def locked(out: Any) -> None:
    multiprocessing.current_process()._kwargs = {"lock": threading.Lock()}  # type: ignore[attr-defined]
    answering(out)


def test_what_cannot_be_sent_once_more_is_refused() -> None:
    assert "Its target and arguments cannot be sent once more (TypeError" in answer("spawn", locked)
