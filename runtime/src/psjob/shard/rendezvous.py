"""What workers agree on by way of shard 0 before they train: points of their scripts where all meet, and how the model is partitioned.

At a point each worker says something, and hears what all have said. A point has a name, which is the same on every worker. Each stream
asks one question, and is answered once all are there, or after a while with who is missing. Answers are kept for workers that begin again,
and come to their points once more.

The partition into stages of a job that leaves it to psjob is the first one that worker 0 tells. It is durable before anybody hears it,
and lies beside the run's checkpoints, whose blocks break at it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from psjob.checkpoint import claim, disk
from psjob.checkpoint.disk import CheckpointProblem, explain_os_error
from psjob.modes.stages import ChosenCuts
from psjob.process.config import ProcessContext
from psjob.process.errors import Fenced
from psjob.protocol.records import MOST_NAME
from psjob.wire.event_loop import InOwnThread, NonBlockingStream
from psjob.wire.frame import Header, Kind, WireError, run_digest

HOLD_SECONDS: Final = 5.0
"""A question is answered after so many, though workers are missing."""
MOST_POINTS: Final = 256
MOST_BYTES: Final = 64 << 20
"""Of all that is kept. Points that were left long ago go first."""
MOST_ASKING: Final = 16
"""Questions of a worker at a time beside one of each of its processes: on streams that broke."""
MOST_OPEN: Final = 4096
"""Points at which a worker waits for others, or says something without a wait."""


class Rendezvous:
    """Of one run. `meet` may be called from any thread. `gone` tells which workers have left, `begun` whether rank 0 has attached."""

    def __init__(self, place: ProcessContext, gone: Callable[[], list[int]], begun: Callable[[], bool]) -> None:
        self._place, self._gone, self._begun = place, gone, begun
        self._there = threading.Condition()
        self._points: dict[str, dict[int, str]] = {}
        """By name, what each worker has said; the newest last."""
        self._asking: dict[int, dict[NonBlockingStream, None]] = {}
        """By worker, the streams on which it waits, the oldest first."""

    def meet(self, stream: NonBlockingStream, header: Header, hello: Mapping[str, Any]) -> InOwnThread:
        """A worker has come to a point. Raises WireError for a question out of shape. What is returned waits."""
        name, said = hello.get("point"), hello.get("said")
        if hello.get("role") != "worker" or not 0 <= header.worker < self._place.config.workers:
            raise WireError(f"a {str(hello.get('role'))[:40]} {header.worker} comes to a point, where this job's workers meet")
        if not isinstance(name, str) or len(name) > MOST_NAME or not isinstance(said, str):
            raise WireError(f"worker {header.worker}: a point has a name of at most {MOST_NAME} characters, and something is said there")
        self._check_open(header.worker, name, len(said))
        self._begin(header.worker, stream)
        waits, needs = bool(hello.get("waits")), 1 if hello.get("first") else self._place.config.workers
        return partial(self._answer, stream, header.worker, name, said, waits, needs)

    def _begin(self, rank: int, stream: NonBlockingStream) -> None:
        """Each question takes a thread. Of a worker with more than its processes can ask at a time the newest are answered."""
        with self._there:
            asking = self._asking.setdefault(rank, {})
            asking[stream] = None
            oldest = next(iter(asking)) if len(asking) > MOST_ASKING + self._place.config.processes else None
            if oldest is not None:
                del asking[oldest]
                self._there.notify_all()
        if oldest is not None:
            oldest.close()

    def _check_open(self, rank: int, name: str, size: int) -> None:
        """Raise WireError if a worker has more at points that others have not come to than a script can have."""
        with self._there:
            there = [points for point, points in self._points.items() if point != name and rank in points]
            opened = [len(points[rank]) for points in there if len(points) < self._place.config.workers]
        if len(opened) >= MOST_OPEN or (opened and sum(opened) + size > MOST_BYTES):
            raise WireError(f"worker {rank} waits at {len(opened)} points with {sum(opened)} bytes, and no other worker comes there")

    def _answer(self, stream: NonBlockingStream, rank: int, name: str, said: str, waits: bool, needs: int) -> None:
        """`needs`: the first so many ranks."""
        try:
            self._answered(stream, rank, name, said, waits, needs)
        finally:
            with self._there:
                self._asking[rank].pop(stream, None)

    def _answered(self, stream: NonBlockingStream, rank: int, name: str, said: str, waits: bool, needs: int) -> None:
        workers = self._place.config.workers
        with self._there:
            there = self._points.setdefault(name, {})
            if len(there) < workers:  # what all have heard stays as it was said
                there[rank] = said
            self._there.notify_all()
            deadline = time.monotonic() + (HOLD_SECONDS if waits else 0.0)
            while (
                not self._complete(there, needs)
                and (left := deadline - time.monotonic()) > 0
                and stream in self._asking[rank]
                and not stream.closed
            ):
                self._there.wait(left)
            if stream not in self._asking[rank]:
                return  # newer questions took its place; its stream is being closed
            heard = [there[each] for each in range(needs)] if self._complete(there, needs) else None
            missing = [each for each in range(needs) if each not in there]
            self._forget()
        head = Header(Kind.WELCOME, run=run_digest(self._place.run), term=self._place.term, attempt=self._place.number)
        if heard is not None:
            stream.send_json(head, {"said": heard})
        else:
            stream.send_json(head, {"missing": missing, "gone": [each for each in self._gone() if each in missing], "begun": self._begun()})

    @staticmethod
    def _complete(there: Mapping[int, str], needs: int) -> bool:
        return all(rank in there for rank in range(needs))

    def _forget(self) -> None:
        size = sum(len(said) for there in self._points.values() for said in there.values())
        workers = self._place.config.workers
        for name in [name for name, there in self._points.items() if len(there) == workers][:-1]:
            if len(self._points) <= MOST_POINTS and size <= MOST_BYTES:
                return
            size -= sum(map(len, self._points.pop(name).values()))


FILE: Final = "stage-cuts.json"
MOST_PARTITION_BYTES: Final = 1 << 20
log = logging.getLogger("psjob.shard")


class PartitionStore:
    """Of one run. `meet` may be called from any thread."""

    def __init__(self, place: ProcessContext, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._lock = threading.Lock()

    def meet(self, stream: NonBlockingStream, header: Header, hello: Mapping[str, Any]) -> InOwnThread:
        """A worker asks which cuts were chosen; worker 0 tells some with its question. Raises WireError for a question out of shape.

        What is returned reads and writes files, so it is for a thread of its own.
        """
        stages, offer = len(self._place.config.stages.replicas), None
        if hello.get("role") != "worker":
            raise WireError(f"a {str(hello.get('role'))[:40]} asks for cuts, which workers do")
        if not stages:
            raise WireError(f"worker {header.worker} asks for cuts, and this job has no stages")
        if "cuts" in hello:
            if header.worker != 0:
                raise WireError(f"worker {header.worker} chooses cuts, which worker 0 does")
            try:
                offer = ChosenCuts.from_json(hello, stages)
            except ValueError as error:
                raise WireError(f"worker 0: {error}") from None
        return partial(self._answer, stream, offer)

    def _answer(self, stream: NonBlockingStream, offer: ChosenCuts | None) -> None:
        head = Header(Kind.WELCOME, run=run_digest(self._place.run), term=self._place.term, attempt=self._place.number)
        try:
            with self._lock:
                kept = self.kept()
                if kept is None and offer is not None:
                    self._keep(offer)
                    kept = offer
        except (CheckpointProblem, Fenced) as problem:
            log.warning("the cuts of the stages are not kept yet: %s", problem)
            raise WireError(f"shard 0 cannot keep the cuts yet: {problem}") from None
        stream.send_json(head, {} if kept is None else kept.to_json())

    def kept(self) -> ChosenCuts | None:
        """What was chosen for this run. Raises CheckpointProblem if that cannot be read."""
        try:
            os.stat(self._folder / FILE)
        except FileNotFoundError:
            return None
        except OSError as error:  # it may be there: other cuts must not take its place
            raise explain_os_error(error, f"look for {FILE}", self._folder) from error
        raw = disk.read_small(self._folder / FILE, MOST_PARTITION_BYTES)
        try:
            found = json.loads(raw)
            return ChosenCuts.from_json(found, len(self._place.config.stages.replicas)) if found["run"] == self._place.run else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointProblem(
                f"{FILE} in {self._folder} does not hold the cuts of this job ({error}); name the cuts in the manifest"
            ) from None

    def _keep(self, chosen: ChosenCuts) -> None:
        term, owner = self._place.term, None
        claim.check_claim(self._folder, term, owner)
        disk.write_whole(self._folder, FILE, [json.dumps({"run": self._place.run, **chosen.to_json()}).encode()])
        claim.check_claim(self._folder, term, owner)
        log.info("%s", chosen.told(self._place.config.stage_names))
