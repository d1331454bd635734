"""The volume that shards share, and a process's own disk thread: slow, full, failing, torn, and forgetful where nothing was synced.

It keeps what `checkpoint/disk.py` promises of a real one: bytes are safe after fsync of the file, names after fsync of the folder.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from psjob.checkpoint.disk import CheckpointProblem, Damage
from tests.simulation.protocol.kernel import Kernel, Process

Job = Generator[float, None, Any]
"""Disk work: it yields seconds that pass before its next operation, and returns what was asked for."""
TORN = object()
"""What a file holds whose bytes were lost."""
TEMP = ".tmp"
SLICE_SECONDS = 5.0


@dataclass
class File:
    """`content` is any object that nobody changes any more."""

    content: Any
    size: int
    writer: str
    synced: bool = False


class Volume:
    """`rate` bytes a second; `room` bytes in all (None: without end)."""

    def __init__(self, kernel: Kernel, rate: float, delay: float) -> None:
        self.kernel, self.rate, self.delay = kernel, rate, delay
        self.room: int | None = None
        self.files: dict[str, File] = {}
        self.ill: dict[str, set[str]] = {}
        """By pod (`*`: all): operations that fail with EIO, such as write, sync, rename, folder, read, list, unlink."""
        self.slow: dict[str, float] = {}
        """By pod (`*`: all): how much slower its disk is."""
        self.stays = False
        """Some file could not be removed, or a removal was lost."""
        self._undo: dict[str, list[Callable[[], None]]] = {}

    @property
    def used(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def slower(self, pod: str) -> float:
        """How many times slower its disk is now."""
        return max(self.slow.get(pod, 1.0), self.slow.get("*", 1.0))

    def seconds(self, pod: str) -> float:
        """How long an operation takes that moves no bytes."""
        return self.delay * (0.5 + self.kernel.random.random()) * self.slower(pod)

    def piece(self, pod: str, size: int, done: int) -> int:
        """How many of `size` bytes are moved next. Never more than SLICE_SECONDS' worth: a disk is slow only while it is."""
        return min(size - done, max(1, size // 4), max(1, int(self.rate / self.slower(pod) * SLICE_SECONDS)))

    def moving(self, pod: str, size: int) -> float:
        """How long it takes to move `size` bytes."""
        return self.seconds(pod) + size / self.rate * self.slower(pod)

    def check(self, pod: str, operation: str) -> None:
        """Raise where this operation fails now."""
        if self.ill and (operation in self.ill.get(pod, ()) or operation in self.ill.get("*", ())):
            raise CheckpointProblem(f"cannot {operation}: EIO, the disk reported an error")

    # -- what a driver asks for --------------------------------------------------------------------

    def write_whole(self, pod: str, name: str, content: Any, size: int, renamed: Callable[[], None] = lambda: None) -> Job:
        """Temp name, fsync, rename, fsync of the folder; what fails leaves nothing behind. `renamed()` is called at the rename."""
        temp = name + TEMP
        yield self.seconds(pod)
        file = self.create(pod, temp)
        try:
            done = 0
            while done < size:
                part = self.piece(pod, size, done)
                yield self.moving(pod, part)
                self.check(pod, "write")
                if self.room is not None and self.used + part > self.room:
                    raise CheckpointProblem("cannot write: ENOSPC, the volume is full: free space or ask for a larger one")
                done += part
                file.size = done
            file.content = content
            yield self.seconds(pod)
            self.check(pod, "sync")
            file.synced = True
            yield self.seconds(pod)
            self.check(pod, "rename")
            if self.files.get(temp) is not file:
                raise CheckpointProblem("cannot rename: ENOENT, somebody has removed the file")
            self.rename(pod, temp, name)
            renamed()
        except CheckpointProblem:
            self.unlink(pod, temp)
            raise
        try:
            yield from self.sync_folder(pod)
        except CheckpointProblem:
            self.unlink(pod, name)
            raise

    def sync_folder(self, pod: str) -> Job:
        """Make this pod's names durable."""
        yield self.seconds(pod)
        self.check(pod, "folder")
        self._undo.pop(pod, None)

    def read(self, pod: str, name: str) -> Job:
        """The content of a file, read whole. Raises Damage."""
        file = self.files.get(name)
        size = 0 if file is None else file.size
        done = 0
        while done < size:
            part = self.piece(pod, size, done)
            yield self.moving(pod, part)
            done += part
        self.check(pod, "read")
        file = self.files.get(name)
        if file is None:
            raise Damage(name, "a file", "nothing")
        if file.content is TORN:
            raise Damage(name, "its bytes", "others")
        return file.content

    def listing(self, pod: str) -> Job:
        """The names of all files."""
        yield self.seconds(pod)
        self.check(pod, "list")
        return sorted(self.files)

    # -- one operation each ------------------------------------------------------------------------

    def create(self, pod: str, name: str) -> File:
        """An empty file in place of whatever has the name."""
        self.check(pod, "create")
        old = self.files.get(name)
        if self.room is not None and self.used > self.room:
            raise CheckpointProblem("cannot create: ENOSPC, the volume is full: free space or ask for a larger one")
        self.files[name] = made = File(TORN, 0, pod)
        self._note(pod, lambda: self._put_back(name, made, old))
        return made

    def exclusive(self, pod: str, name: str, content: Any) -> bool:
        """Create a small file unless it is there; True where it is new. Its bytes are synced, its name is not."""
        if name in self.files:
            return False
        self.create(pod, name)
        self.files[name].content, self.files[name].synced = content, True
        return True

    def rename(self, pod: str, name: str, to: str) -> None:
        """Give a file another name, in place of whatever has it."""
        file, old = self.files.pop(name), self.files.get(to)
        self.files[to] = file

        def back() -> None:
            if self.files.get(to) is file:
                self._put_back(to, file, old)
                self.files[name] = file

        self._note(pod, back)

    def unlink(self, pod: str, name: str) -> None:
        """Remove a file where it is."""
        if "unlink" in self.ill.get(pod, ()) or "unlink" in self.ill.get("*", ()):
            self.stays = True
            return
        file = self.files.pop(name, None)
        if file is not None:
            self._note(pod, lambda: self.files.setdefault(name, file) and None)

    def power_cut(self, pod: str) -> None:
        """The host of a pod loses power: what it had not synced is lost, the newest names first; bytes are torn or whole."""
        undo = self._undo.pop(pod, [])
        self.stays = True
        for back in reversed(undo[len(undo) - self.kernel.random.randint(0, len(undo)) :]):
            back()
        for file in self.files.values():
            if file.writer == pod and not file.synced and self.kernel.random.random() < 0.8:
                file.content = TORN

    def _put_back(self, name: str, made: File, old: File | None) -> None:
        if self.files.get(name) is made:
            if old is None:
                del self.files[name]
            else:
                self.files[name] = old

    def _note(self, pod: str, undo: Callable[[], None]) -> None:
        self._undo.setdefault(pod, []).append(undo)


class DiskThread:
    """A process's disk work, one job after the other. What it has not done when the process dies is never done."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._jobs: deque[tuple[Job, Callable[[Any], None]]] = deque()
        self._busy = False

    def ask(self, job: Job, done: Callable[[Any], None]) -> None:
        """Run `job` after those before it, then call `done` with what it returned, or the exception that it raised."""
        self._jobs.append((job, done))
        if not self._busy:
            self._busy = True
            self.process.after(0.0, self._step)

    def _step(self) -> None:
        job, done = self._jobs[0]
        try:
            seconds = next(job)
        except StopIteration as end:
            self._over(done, end.value)
        except Exception as error:
            self._over(done, error)
        else:
            self.process.after(seconds, self._step)

    def _over(self, done: Callable[[Any], None], result: Any) -> None:
        self._jobs.popleft()
        if self._jobs:
            self.process.after(0.0, self._step)
        else:
            self._busy = False
        done(result)
