"""A shard's process, once it may import torch: streams in, orders from the coordinator, status out, and the way it ends."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from psjob import contract
from psjob.checkpoint import disk, manifest
from psjob.checkpoint.disk import CheckpointProblem
from psjob.layout.blocks import Layout
from psjob.modes import of as mode_of
from psjob.modes.stages import ASKS
from psjob.process.config import ProcessContext
from psjob.process.errors import Fenced
from psjob.process.supervise import Liveness
from psjob.protocol import records
from psjob.protocol.shard import events as e
from psjob.protocol.shard.events import Phase
from psjob.rules import reduction
from psjob.shard.acceptor import HelloRoom, LogRateLimiter
from psjob.shard.block import ParameterBlock
from psjob.shard.checks import own_hyperparameters
from psjob.shard.control import Control, ExitCalls, WorkerCalls
from psjob.shard.coordinator_driver import CoordinatorDriver, PeerStream
from psjob.shard.keeper import Keeping, LeftMemory
from psjob.shard.pending import Waiter, format_ranks
from psjob.shard.progress import StragglerReport
from psjob.shard.push_metrics import PushNorms
from psjob.shard.rendezvous import PartitionStore, Rendezvous
from psjob.shard.session import WAITING_SECONDS, CoordinatorCalls, RecordsHere, Session, SessionContext
from psjob.shard.state_memory import Outliving
from psjob.shard.store import Store
from psjob.shard.table import ServedTable
from psjob.shard.worker_stream import ShardJobFacts
from psjob.wire import shared_memory
from psjob.wire.event_loop import InOwnThread, NonBlockingStream
from psjob.wire.frame import MAX_BODY, MAX_JSON, MAX_VALUES, Header, Kind, WireError, dump, run_digest
from psjob.wire.reading import StreamClosed, Wants
from psjob.wire.shared_memory import SharedMemoryBroker
from psjob.wire.unauthenticated import one_line

HELLO_VALUES, ROW_VALUES = 100_000, 32
"""Values of a hello of a job that serves: so many, and so many for each tensor and table that it has."""
ROW_BYTES, TABLE_BYTES = 80, 4096
"""Of a tensor beside its name and sizes, and of a table."""
ROOM_SECONDS = 1.0
"""Between two tries to make the run's folder."""
log = logging.getLogger("psjob.shard")


class Server:
    """Everything one shard owns. Shard 0 has a `coordinator` too. Raises ReductionProblem if the job's reduction is none.

    By `keeping` it has its memory held for a process after this one.
    """

    def __init__(self, place: ProcessContext, folder: Path, keeping: Keeping | None = None) -> None:
        config = place.config
        self.place, self.folder = place, folder
        lends = config.transport != "tcp" and shared_memory.possible()
        broker = _broker(place) if lends else None
        self.store = Store(
            place.index, len(config.shards), config.workers, place.number, mode_of(config), place.run, lends,
            reduction.reduction_named(config.reduction), config.stages,
        )  # fmt: skip
        self.store.outliving = Outliving(keeping)
        self.store.silence = config.shard_timeout / 2  # before who asks the status port gives up
        self.store.on_problem = self._broken
        self.store.on_failure = lambda sentence: self.leave(1, sentence)
        self.store.budget = config.gradients
        self.store.non_finite.policy, self.store.non_finite.on_refused = config.non_finite, self._broken
        self.store.max_grad_norm, self.store.processes = config.max_grad_norm, config.processes
        self.store.own = functools.cache(functools.partial(own_hyperparameters, config))  # asked at each change of hyperparameters
        self.store.push_norms = None if config.max_push_norm is None else PushNorms(config.max_push_norm)
        self.store.term, self.store.flushes = place.term, config.flushes
        self.job = ShardJobFacts()
        self.sessions: dict[int, Session] = {}
        """The newest one by rank."""
        self.bad_connections = 0
        self.termination_message: dict[str, Any] = {}
        self.problem: str | None = None
        """What keeps this shard from its folder."""
        exits = ExitCalls(self.leave, self.exit_with, self.fenced)
        workers = WorkerCalls(self.changed, self.drop_sessions, self.release, self.finished)
        self.control = Control(place, folder, self.store, self.job, workers, exits)
        if self.store.decided is not None:
            self.store.decided.arrived = self.control.tell
        self.store.norms.measured = self.control.tell
        self.coordinator = CoordinatorDriver(place, folder, self.store, self.job, self.control.order, exits) if place.index == 0 else None
        self.stragglers = StragglerReport(place.index, self.control.tell, self._missing_elsewhere)
        self.context = SessionContext(
            place, run_digest(place.run), self.store, self.job, broker, self.control.tell, self.initialised,
            None if (c := self.coordinator) is None else CoordinatorCalls(c.hello, c.behind, c.frame, c.ended),
            RecordsHere(), self.control.mark, self.control.left, self.sessions,
        )  # fmt: skip
        self.cuts = PartitionStore(place, folder) if place.index == 0 else None
        self.meetings = Rendezvous(place, self._gone_workers, lambda: self.store.phase is Phase.SERVING) if place.index == 0 else None
        pulses = [self.control.pulse, self.control.disk.pulse]
        self.liveness = Liveness(pulses, config.shard_timeout, self.store.beat)
        self._lock = threading.Lock()
        self._notices = LogRateLimiter()
        self._exit: list[int] = []
        self._gone = threading.Event()
        self._took_up = False
        self._hello_room: tuple[Layout, HelloRoom] | None = None
        self._told_waiting = 0.0

    def take_up(self, held: LeftMemory) -> None:
        """Continue in place of a process of this attempt that was killed. Before `run_until_gone`; raises Untaken if that cannot be."""
        said = self.store.take_up(held)
        live = self.store.admission.live()
        left = frozenset(self.store.admission.rows) - live
        self._took_up = True
        if self.coordinator is not None:
            self.coordinator.take_up(said)
        self.control.post(e.RestartedFromKeeper(said["term"], said["restore_id"], said["restored_by"], said["mode"], left))
        log.warning(
            "%s ended the process of shard %d; another continues from its memory, at step %d",
            held.died,
            self.place.index,
            self.store.span()[0],
        )

    def run_until_gone(self) -> int:
        """Serve until someone says how to exit; returns the exit status."""
        self.liveness.start()
        self.control.disk.put(self._settle_in)
        if self.coordinator is not None:
            coordinator = self.coordinator
            self.store.on_step = coordinator.step_passed
            self.control.answer = lambda body: coordinator.answer(0, body)
            coordinator.start()
        elif self.control.link is not None:
            self.control.answer = self.control.link.say
            self.control.link.start()
        self.control.serve(self._gone, self.tick)
        return self._exit[0]

    @property
    def asked(self) -> bool:
        """Could this shard be asked for something: does its coordinator run, or has it heard the coordinator?"""
        link = self.control.machine.link
        return link is None or link.met or self.job.final

    def _settle_in(self) -> None:
        """Before any other disk work: the run's folder is there, what an earlier life left half done is gone. A full disk is waited for."""
        while True:
            try:
                disk.make_folder(self.folder)
                break
            except CheckpointProblem as problem:
                if self.problem is None:
                    log.warning("%s; this shard waits for it", problem)
                self.problem = str(problem)
            self.control.disk.pulse.idle()
            time.sleep(ROOM_SECONDS)
        self.problem = None
        try:
            disk.remove_files(self.folder, self._orphans())
            if self.place.index and (self.place.number > 1 or self._took_up) and manifest.is_over(self.folder, self.place.run):
                self.control.post(e.RunIsOver())
        except CheckpointProblem as problem:
            log.warning("%s", problem)

    def _orphans(self) -> list[str]:
        """Temp files of earlier attempts of this very shard, and of an earlier process of this one."""
        before = self.place.number + self._took_up
        part = contract.SHARD_PART.format(shard=self.place.index, attempt="@").replace("@", r"(\d+)")
        orphan = re.compile(rf"v\d+-c\d+{part}[.-].*{re.escape(contract.TEMP)}")
        found = ((name, orphan.fullmatch(name)) for name in disk.names_in(self.folder))
        return [name for name, match in found if match is not None and int(match[1]) < before]

    # -- streams -------------------------------------------------------------------------------

    def meet(self, stream: NonBlockingStream, header: Header, hello: dict[str, Any]) -> Wants[None] | InOwnThread:
        """What serves a stream whose hello is of this run: a worker's, or on shard 0 another shard's. Raises WireError for any other."""
        if self.cuts is not None and hello.get("asks") == ASKS:
            return self.cuts.meet(stream, header, hello)
        if self.meetings is not None and hello.get("asks") == records.ASKS:
            return self.meetings.meet(stream, header, hello)
        if hello.get("role") == "worker":
            return self._worker(stream, header, hello)
        if hello.get("role") == "shard" and self.coordinator is not None:
            return PeerStream(self.coordinator, stream, hello).run
        raise WireError(f"role {str(hello.get('role'))[:40]!r} is not served by shard {self.place.index}; expected worker or shard")

    def _gone_workers(self) -> list[int]:
        """Those whose scripts are through."""
        with self.store.lock:
            return [rank for rank, row in self.store.admission.rows.items() if row.left_at is not None]

    def changed(self) -> None:
        """This shard has come to another term or phase: look again at the sessions that wait for that."""
        for session in list(self.context.admitting):
            session.stream.wake()

    def _worker(self, stream: NonBlockingStream, header: Header, hello: dict[str, Any]) -> Wants[None]:
        """What serves a worker's first stream or a further one. Raises WireError, and StreamClosed for a stream that is over already."""
        if not 0 <= header.worker < self.place.config.workers:
            raise WireError(f"worker {header.worker} is not one of this job's {self.place.config.workers}")
        if stream.gone():
            raise StreamClosed(f"{stream.peer}: dialled again meanwhile")  # an old hello must not displace the new one
        if hello.get("lane"):
            known = self.sessions.get(header.worker)
            if known is None or known.incarnation != (header.start, header.rewinds):
                raise WireError(f"worker {header.worker}: a lane before its first stream; dial again")
            return known.run_lane(stream, hello)
        session = Session(self.context, stream, header, hello)
        with self._lock:
            old = self.sessions.get(header.worker)
            if old is not None and old.incarnation > session.incarnation and not old.done.is_set():
                raise WireError(f"worker {header.worker}: a newer process of this rank is here; this one is fenced")
            self.sessions[header.worker] = session
        if old is not None:
            old.close()
        return session.run(old)

    def drop_sessions(self, rewind: bool) -> None:
        """End every worker's stream (before a restore)."""
        with self._lock:
            sessions = list(self.sessions.values())
        for session in sessions:
            if not session.welcomed:
                continue  # it has only just come, and waits for what follows
            if rewind:
                session.rewind()
            else:
                session.hang_up()

    def hello_room(self) -> HelloRoom:
        """What a worker's hello may have: once it is known how large the job's model is, not much more than its tables take."""
        layout = self.store.layout
        if layout is None or self.store.phase is not Phase.SERVING:
            return HelloRoom()
        if self._hello_room is None or self._hello_room[0] is not layout:
            told = sum(ROW_BYTES + 6 * len(t.name) + 20 * len(t.shape) + 5 * len(t.stages) for t in layout.table)
            told += TABLE_BYTES * len(self.store.row_cells)
            met = 2 * records.MOST_BYTES if self.place.config.workers > 1 else 0
            values = min(MAX_VALUES, HELLO_VALUES + ROW_VALUES * (len(layout.table) + len(self.store.row_cells)))
            self._hello_room = layout, HelloRoom(min(MAX_BODY, MAX_JSON + max(met, 2 * told)), values)
        return self._hello_room[1]

    def refuse(self, stream: NonBlockingStream, error: Exception) -> None:
        """Count a bad stream, say why (see LogRateLimiter) and answer; it is closed after."""
        self.bad_connections += 1
        untold = self._notices.told(stream.peer.rsplit(":", 1)[0], time.monotonic())
        if untold is not None:
            more = f" ({untold} more were closed since the last such line)" if untold else ""
            log.warning("closed a stream of %s: %s%s", stream.peer, one_line(error, 1000), more)
        raw = dump({"code": "protocol", "error": str(error)[:500]})
        stream.put_frame(Header(Kind.ERROR, run=self.context.run, term=self.store.term, attempt=self.store.attempt), raw)

    def release(self, snapshot: int) -> None:
        """Workers that marked for a snapshot may continue."""
        for session in list(self.sessions.values()):
            session.tell(Kind.RELEASE, request=snapshot)

    def finished(self) -> None:
        """The job is over: tell every worker."""
        self.job.final = True
        self.changed()
        for session in list(self.sessions.values()):
            session.tell(Kind.FINISHED)

    # -- waiting, ending -----------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Every 2 s tell held pulls who is missing; note it for the status."""
        if self.place.config.step_timeout is not None:
            self.stragglers.tell(self.store, self.store.all_cells(), now, clocks=not self.store.index)
        self.store.keep_counts()
        if now - self._told_waiting < WAITING_SECONDS:
            return
        self._told_waiting = now
        held: dict[int, tuple[float, Waiter, ParameterBlock | ServedTable, list[int], int]] = {}
        for cell in self.store.all_cells():
            if not cell.waiters:
                continue
            with cell.lock:
                for waiter in cell.waiters:
                    seconds = now - waiter.since
                    if seconds >= WAITING_SECONDS and (waiter.rank not in held or seconds > held[waiter.rank][0]):
                        held[waiter.rank] = (seconds, waiter, cell, *self.store.awaited(cell, waiter))
        for seconds, waiter, cell, missing, _ in held.values():
            waiter.to.waiting(waiter, cell, missing, seconds)
        self.job.waiting_for = None
        if held:
            seconds, _, cell, missing, step = max(held.values(), key=lambda entry: entry[0])
            self.job.waiting_for = f"{self.missing(missing, step)} ({cell.name}), for {seconds:.0f} s"

    def missing(self, ranks: list[int], step: int) -> str:
        """A sentence on whom held answers wait for, as a block knows it."""
        if not self.store.mode.decided:
            return f"workers {format_ranks(ranks)} have not pushed step {step}"
        ranks = ranks or self._missing_elsewhere()
        return f"update {step} waits for pushes of workers {format_ranks(ranks)}" if ranks else f"update {step} waits for the coordinator"

    def _missing_elsewhere(self) -> list[int]:
        """Workers of whom another shard has not all, as far as this process knows."""
        return [] if self.coordinator is None else self.coordinator.missing()

    def initialised(self) -> None:
        """Every block and table has its first values."""
        self.control.post(e.AllInitialised())

    def stop(self) -> None:
        """SIGTERM: hand the wish to the coordinator; leave by ourselves when it does not answer."""
        if self.coordinator is not None:
            self.coordinator.stop()
        else:
            self.control.post(e.Terminated())

    def fenced(self, fenced: Fenced) -> None:
        self.termination_message["fenced"] = {"term": fenced.term}
        self.leave(contract.EXIT_FENCED, str(fenced))

    def leave(self, code: int, message: str) -> None:
        """Say why, then exit with `code`."""
        log.warning("%s", message)
        if code in (contract.EXIT_REFUSED, contract.EXIT_CHECKPOINT_LOST):
            self.termination_message["error"] = message[:1000]
        self.exit_with(code)

    def _broken(self, sentence: str) -> None:
        """Pushes cannot be joined, here and after any restart."""
        if not self._exit:
            self.leave(contract.EXIT_REFUSED, sentence)

    def exit_with(self, code: int) -> None:
        if not self._exit:
            self._exit.append(code)
        self._gone.set()
        self.control.wake()

    def close(self) -> None:
        """End the threads of a shard that is to exit, where its process lives on."""
        self.liveness.close()
        self.control.disk.close()
        if self.control.link is not None:
            self.control.link.close()
        if self.coordinator is not None:
            self.coordinator.close()
        if self.context.broker is not None:
            self.context.broker.close()


def _broker(place: ProcessContext) -> SharedMemoryBroker:
    """Where workers come for memory; also by the volume of the pair, if a socket can be made there."""
    name = f"shard-{place.index}-lends"
    try:
        return SharedMemoryBroker(name, place.pair)
    except OSError as error:
        if not place.pair:
            raise
        log.warning("no memory is shared with worker %d: a socket cannot be made in %s: %s", place.index, place.pair, error)
        return SharedMemoryBroker(name)


def exit_now(code: int) -> None:
    """End at once: streams die with the process, nothing is pending that a checkpoint does not hold."""
    logging.shutdown()
    os._exit(code)
