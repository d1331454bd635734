"""A process of a worker of several that is not the first: it has no stream, and steps with the one that has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob import contract
from psjob.layout.blocks import Layout, TensorSpec
from psjob.process.config import Place
from psjob.protocol.worker.together import Part
from psjob.worker import exits
from psjob.worker.edges import Edges
from psjob.worker.ending import SessionEnd
from psjob.worker.exchange import Exchange
from psjob.worker.podmemory import PodMemory
from psjob.worker.session import WorkerSession
from psjob.worker.siblings import Said, Sibling
from psjob.worker.together import FollowerExchange

KILL_SECONDS = 60.0
"""The agent ends this process long before, where another has died or all begin again."""


class FollowerSession(WorkerSession):
    """As WorkerSession. `place.sockets` leads to process 0."""

    def __init__(self, place: Place, table: Sequence[TensorSpec], *given: Any) -> None:
        super().__init__(place, table, *given)
        self.links, self.machine.links = [], []
        self.edges = Edges()
        self.memory: PodMemory | None = None
        self._nowhere: frozenset[int] = frozenset()
        self._news: dict[str, Said] = {}
        """What process 0 said last, by its first word."""
        self._first = Sibling(place.sockets[0], "0", self._hears)

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        self._first.say({"table": [spec.to_json() for spec in self.layout.table]})
        said = self._next("joined", "process 0 of this worker to join the job")
        first = self._news["initial"]
        self.memory = PodMemory(self.layout, self.place.config.processes, self.place.local, said.fd)
        machine = self.machine
        machine.record = said.data if said.body["recorded"] else None
        machine.initial = first.data if first.body["initial"] else None
        machine.residual = bool(said.body["residual"])
        machine.clock, machine.joined = int(said.body["joined"]), True
        self.memory.scatter(parameters)

    def edge(self, make_record: Callable[[], bytes], large: bool = False) -> None:
        """Give the record to process 0. Raises SessionEnd."""
        self.check()
        record = self.edges.edge(make_record, large)
        if record is not None:
            self._first.say({"record": self.clock}, record)

    def inside_round(self) -> None:
        self.check()

    def stir(self) -> None:
        self.check()

    def meet(self, part: Part) -> None:
        """Make what this process owns of the sum. Raises SessionEnd."""
        self._first.say({"part": part.to_json()})
        said = self._next("sum", "the other processes of this worker")
        assert self.memory is not None
        self.memory.sum(said.body["sum"], said.body["active"], self.place.config.reduction == "mean")
        self._first.say({"summed": True})

    def take(self, targets: Sequence[torch.Tensor]) -> bool:
        """Take the answer to a step; was it skipped? Raises SessionEnd."""
        body = self._next("answer", "the shards' answer to process 0 of this worker").body
        assert self.memory is not None
        self.memory.scatter(targets)
        self.edges.wanted, self._nowhere = bool(body["wanted"]), frozenset(body["none"])
        return bool(body["skipped"])

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        self._first.say({"through": True}, make_record())
        self.wait(lambda: False, "the checkpoint that holds this worker's end")

    def report(self, numbers: dict[str, float | str]) -> None:
        self._first.say({"report": numbers})

    def inputs(self, sums: list[int]) -> None:
        """Process 0 tells those of the worker."""

    def checkpoint(self) -> None:
        self._first.say({"checkpoint": True})

    def stop(self) -> None:
        """Process 0 is asked too, and decides for all."""

    def watch(self) -> None:
        """Process 0 is watched."""

    def begin_again(self, mode: str, more: Mapping[str, str]) -> None:
        self._wait_for_the_agent()

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._first.close()

    @property
    def nowhere(self) -> frozenset[int]:
        return self._nowhere

    def make_exchange(self) -> Exchange:
        return FollowerExchange(self)

    def _next(self, word: str, what: str) -> Said:
        self.wait(lambda: word in self._news, what)
        with self.cond:
            return self._news.pop(word)

    def _wait_for_the_agent(self) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
        exits.finish(contract.EXIT_RETRY)

    # -- the line's thread ---------------------------------------------------------------------

    def _hears(self, said: Said | None) -> None:
        if said is None:
            if not self.ended:
                self._end(SessionEnd("rewind"))  # process 0 has died, and the agent starts all again
            return
        if "end" in said.body:
            self._end(SessionEnd(str(said.body["end"]), str(said.body["message"])))
            return
        if "layout" in said.body:
            self._adopt(Layout.from_json(said.body["layout"]))
        with self.cond:
            self._news[next(iter(said.body))] = said
            self.cond.notify_all()

    def _adopt(self, layout: Layout) -> None:
        """The job's blocks, which are others than this version would cut where it goes on from a checkpoint of another one."""
        if layout != self.layout:
            self.adopt(layout.to_json()["blocks"])

    def _forget_streams(self) -> None:
        super()._forget_streams()
        self._first.forget()
