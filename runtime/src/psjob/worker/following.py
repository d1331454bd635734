"""A process of a worker of several that is not the first: it has no stream, and steps with the one that has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from psjob.layout.blocks import Layout, TensorSpec
from psjob.process.config import Place
from psjob.protocol.worker.together import Part
from psjob.worker import agreeing, exits, gpus, podsums
from psjob.worker.edges import Edges
from psjob.worker.ending import SessionEnd
from psjob.worker.exchange import Exchange
from psjob.worker.podmemory import PodMemory
from psjob.worker.podsums import PodSum
from psjob.worker.session import WorkerSession
from psjob.worker.siblings import Said, Sibling
from psjob.worker.together import FollowerExchange


class FollowerSession(WorkerSession):
    """As WorkerSession. `place.sockets` leads to process 0."""

    def __init__(self, place: Place, table: Sequence[TensorSpec], *given: Any) -> None:
        super().__init__(place, table, *given)
        self.links, self.machine.links = [], []
        self.edges = Edges()
        self.memory: PodMemory | None = None
        self._sums: PodSum | None = None
        self._nowhere: frozenset[int] = frozenset()
        self._news: dict[str, Said] = {}
        """What process 0 said last, by its first word."""
        self._first = Sibling(place.sockets[0], "0", self._hears)

    # -- the script's thread -------------------------------------------------------------------

    def join(self, parameters: Sequence[torch.Tensor], initial: Callable[[], bytes], hyperparameters: list[dict[str, Any]]) -> None:
        device = gpus.device_of(parameters)
        self._first.say({"table": [spec.to_json() for spec in self.layout.table], "lying": gpus.lying(device).to_json()})
        said = self.next("joined", "process 0 of this worker to join the job")
        first = self._news["initial"]
        self.memory = PodMemory(self.layout, self.place.config.processes, self.place.local, said.fd, device)
        machine = self.machine
        machine.record = said.data if said.body["recorded"] else None
        machine.initial = first.data if first.body["initial"] else None
        machine.residual = bool(said.body["residual"])
        machine.clock, machine.joined = int(said.body["joined"]), True
        self.memory.scatter(parameters)
        self._sums = agreeing.follow(self, device)

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
        self._sum("the other processes of this worker")

    def _sum(self, what: str) -> None:
        said = self.next("sum", what)
        podsums.made_sum(self.sums, said.body["sum"], said.body["active"], self.place.config.reduction == "mean")
        self._first.say({"summed": True})

    def take(self, targets: Sequence[torch.Tensor]) -> bool:
        """Take the answer to a step; was it skipped? Raises SessionEnd."""
        body = self.next("answer", "the shards' answer to process 0 of this worker").body
        assert self.memory is not None
        self.memory.scatter(targets)
        self.edges.wanted, self._nowhere = bool(body["wanted"]), frozenset(body["none"])
        return bool(body["skipped"])

    def leave(self, make_record: Callable[[], bytes], parameters: Sequence[torch.Tensor]) -> None:
        self._first.say({"through": True}, make_record())
        while True:  # a way in which all take part in sums needs this process too
            self._sum("the checkpoint that holds this worker's end")

    def report(self, numbers: dict[str, float | str]) -> None:
        self._first.say({"report": numbers})

    def came_back(self, passes: int) -> None:
        """Process 0 tells those of the worker."""

    def inputs(self, sums: list[int]) -> None:
        """Process 0 tells those of the worker."""

    def data(self, told: Mapping[str, Any]) -> None:
        """Process 0 tells those of the worker."""

    def checkpoint(self) -> None:
        self._first.say({"checkpoint": True})

    def stop(self) -> None:
        """Process 0 is asked too, and decides for all."""

    def watch(self) -> None:
        """Process 0 is watched."""

    def begin_again(self, mode: str, more: Mapping[str, str]) -> None:
        exits.wait_for_the_agent()

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self._first.close()

    @property
    def sums(self) -> PodSum:
        """How gradients get to shared memory. Raises RuntimeError before this worker has joined."""
        if self._sums is None:
            raise RuntimeError("a step was made before this worker joined")
        return self._sums

    @property
    def nowhere(self) -> frozenset[int]:
        return self._nowhere

    def make_exchange(self) -> Exchange:
        return FollowerExchange(self)

    def heard(self, word: str) -> bool:
        return word in self._news

    def tell_first(self, body: Mapping[str, Any]) -> None:
        self._first.say(body)

    def next(self, word: str, what: str) -> Said:
        """What process 0 says under this word. Raises SessionEnd."""
        self.wait(lambda: word in self._news, what)
        with self.cond:
            return self._news.pop(word)

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
