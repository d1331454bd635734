"""A script that trains in a process of multiprocessing begins again there, in place, with what its parent had sent.

A process that was spawned, or forked by multiprocessing's own server, has read its target and arguments from its parent. When it attaches
they are written once more, for itself, as multiprocessing writes them. A rewind execs Python, which reads them as it did at first: to the
parent it is the same process, and its exit code is the script's.

A forked process has nothing that was sent. It runs the whole script again, so what it hands to its parent would be lost.

Of several processes of one worker only one may attach: to the job the others would be that worker too.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing import context, queues, reduction, resource_tracker, spawn, util
from multiprocessing.connection import Connection
from typing import Any

from psjob.process.config import Place
from psjob.process.errors import Refused

POOLS = ("concurrent.futures.process", "multiprocessing.pool")
"""Their processes take one task after the other."""
BEGIN = (
    "import sys; from multiprocessing import resource_tracker as t, spawn; "
    "t._resource_tracker._fd = {tracker}; sys.exit(spawn._main({sent}, {parent}))"
)
"""What `multiprocessing.spawn.spawn_main` does, but for one file where that has two."""


@dataclass(frozen=True)
class Sent:
    """What this process began with: `file` has it, `inherited` are the other files that it names."""

    file: int
    inherited: tuple[int, ...]

    def words(self) -> list[str]:
        """The command that begins again as this process began; its files are left open over an exec."""
        os.lseek(self.file, 0, os.SEEK_SET)
        parent = multiprocessing.parent_process()
        sentinel: int = parent._sentinel  # type: ignore[union-attr]
        tracker: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
        for file in (self.file, sentinel, *self.inherited, *(() if tracker is None else (tracker,))):
            os.set_inheritable(file, True)
        begin = BEGIN.format(tracker=tracker, sent=self.file, parent=sentinel)
        flags: list[str] = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        return [sys.executable, *flags, "-c", begin, "--multiprocessing-fork"]


class _Sending:
    """What multiprocessing asks about the process for which it writes."""

    def __init__(self) -> None:
        self.files: list[int] = []

    def duplicate_for_child(self, file: int) -> int:
        """A copy, which stays open when the script closes its own."""
        self.files.append(os.dup(file))
        return self.files[-1]

    class DupFd:
        """A file that the process inherits."""

        def __init__(self, file: int) -> None:
            self.file = file

        def detach(self) -> int:
            return self.file


_claims: dict[str, socket.socket] = {}


def claim(place: Place) -> None:
    """Hold this place in the job until this process ends or begins again.

    Nothing is held where sockets have no abstract names, as on macOS, and for a place that no file describes.

    Raises:
        Refused: another process of this worker holds it.
    """
    job = (place.run, place.rank, place.number, place.config_path, place.config.shards)
    name = f"\0psjob-{hashlib.sha256(repr(job).encode()).hexdigest()[:32]}"
    if sys.platform != "linux" or not place.config_path or name in _claims:
        return
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(name)
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            return
        raise Refused(
            f"another process of worker {place.index} has attached. Processes that train side by side are those of "
            "spec.workers.processes; leave multiprocessing out, or let it start one process"
        ) from None
    _claims[name] = held


def _drop_claims() -> None:
    """In a fork, which may outlive the process that trains."""
    for held in _claims.values():
        held.close()
    _claims.clear()


os.register_at_fork(after_in_child=_drop_claims)


def sent() -> Sent | None:
    """What this process was sent, None if it is the script's first process or a fork of that.

    Raises:
        Refused: this process could not be started again, or what it makes would be lost.
    """
    if multiprocessing.parent_process() is None:
        return None
    this = multiprocessing.current_process()
    target = getattr(this, "_target", None)
    if getattr(target, "__module__", None) in POOLS:
        raise Refused(
            f"{this.name} is a process of a pool. After a restart its task would not be given to it again; "
            "train in the script itself or in a multiprocessing.Process"
        )
    if (getattr(this, "_start_method", None) or multiprocessing.get_start_method()) == "fork":
        _check_fork(this)
        return None
    return _written(this)


def _check_fork(this: Any) -> None:
    for held in (*getattr(this, "_args", ()), *getattr(this, "_kwargs", {}).values()):
        if isinstance(held, (queues.Queue, queues.SimpleQueue, Connection)):
            raise Refused(
                f"{this.name} was forked and has a {type(held).__name__} of its parent. After a restart the whole script runs in it "
                "again, and nothing would come out of that; start it by multiprocessing.get_context('spawn').Process"
            )


def _written(this: Any) -> Sent:
    sending = _Sending()
    file = os.memfd_create("psjob-sent") if sys.platform == "linux" else os.dup(tempfile.TemporaryFile().fileno())  # noqa: SIM115
    context.set_spawning_popen(sending)  # type: ignore[arg-type]
    try:
        with os.fdopen(os.dup(file), "wb") as writing:
            reduction.dump(spawn.get_preparation_data(this.name), writing)
            reduction.dump(this, writing)
    except Exception as error:  # whatever the script's objects raise
        os.close(file)
        raise Refused(
            f"{this.name} could not be started again after a failure: its target and arguments cannot be sent once more "
            f"({type(error).__name__}: {str(error)[:200]}); train in the script itself, or pass what can be pickled"
        ) from None
    finally:
        context.set_spawning_popen(None)
    return Sent(file, tuple(sending.files))
