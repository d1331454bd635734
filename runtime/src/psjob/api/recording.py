"""Resume records of an attached script: what a restart puts back of a worker.

Writes that must not hold up the training loop: a thread makes them, in their order, some at a time.
"""

from __future__ import annotations

import atexit
import collections
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Generic, TypeVar

import torch

from psjob.api import advice
from psjob.resume import record, tagged
from psjob.resume.record import BuiltBuffers, Generators
from psjob.worker.session import WorkerSession

T = TypeVar("T")
MOST = 10_000
"""Items that wait; above it the oldest are dropped."""
EXIT_SECONDS = 10.0
"""For what still waits when the process ends."""


class BackgroundWriter(Generic[T]):
    """`write` gets the items in their order, up to `together` at a time, in a thread of its own."""

    def __init__(self, write: Callable[[list[T]], None], failed: Callable[[Exception], None], together: int = 100) -> None:
        self._write, self._failed, self._together = write, failed, together
        self._waiting: collections.deque[T] = collections.deque(maxlen=MOST)
        self._changed = threading.Condition()
        self._busy = self._stopped = False
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> None:
        """Have it written soon; never waits. Nothing after a failure."""
        with self._changed:
            if self._stopped:
                return
            self._waiting.append(item)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="psjob-behind", daemon=True)
                self._thread.start()
                atexit.register(self.drain, EXIT_SECONDS)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written; False where that takes longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopped or not (self._waiting or self._busy), seconds)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                items = [self._waiting.popleft() for _ in range(min(self._together, len(self._waiting)))]
                self._busy = True
            problem: Exception | None = None
            try:
                self._write(items)
            except Exception as error:
                problem = error
            with self._changed:
                self._busy, self._stopped = False, problem is not None
                self._changed.notify_all()
            if problem is not None:
                self._failed(problem)
                return


BEHIND: Final = "behind"
"""In a record, among what goes with pushes: so many were under way, and the weights that the worker had were older by as many."""
EXTRA: Final = "extra state of modules"
"""Name of it in a resume record."""


class ResumeRecorder:
    """Of one script, asked at every step boundary: what has not changed since is not encoded again.

    `kept` are the objects whose state is in a record, by name. `ahead`: the shards make the updates, so that a record may be made
    before its step boundary. `buffers`: names of the model's that a record holds; None: all. `lazy`: the first one too, others
    have no memory. `own`: names of those of `kept` that only steps change, as the state of an optimizer of this worker.
    """

    def __init__(
        self, session: WorkerSession, model: torch.nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], ahead: bool,
        buffers: Collection[str] | None = None, lazy: bool = False, own: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.kept = kept
        self.between = {name: thing for name, thing in kept.items() if name not in own}
        """What changes between steps too."""
        self._beginning: torch.Tensor | None = None
        self._session, self._model, self._optimizer, self._ahead, self._buffers = session, model, optimizer, ahead, buffers
        self._first = buffers if lazy else None
        self.built = BuiltBuffers(model)
        self._packer, self._generators = record.RecordPacker(), Generators()
        self._ready: tuple[int, bytes] | None = None
        """The record of a step boundary without a place in the data, by its clock."""

    def initial(self) -> bytes:
        """What a new run begins with: all buffers of the model that have memory. Raises Refused."""
        rng = self._generators.states()
        return self._packer.pack(record.capture(None, 0, self._model, self.kept, self._optimizer, {}, rng, self._first, built=self.built))

    def go_on_with(self, optimizer: torch.optim.Optimizer, stateful: Mapping[str, Any]) -> None:
        """Another optimizer makes the steps from now on; `stateful` came with it."""
        self.kept, self.between = {**self.kept, **stateful}, {**self.between, **stateful}
        self._optimizer, self._ready = optimizer, None
        for each in self.kept.values():
            if isinstance(each, PlainState):
                each.go_on_with(type(optimizer), optimizer)

    def begin_epoch(self, again: torch.Tensor | None) -> None:
        """An epoch begins: records hold this moment from now on. `again`: what a record holds of it, where the epoch continues.

        Raises Refused as `make` does.
        """
        self._ready = None
        if again is not None:
            self._beginning = again
            return
        rng, clock = self._generators.states(), self._session.clock
        whole = record.capture(None, clock, self._model, self.between, self._optimizer, {}, rng, self._buffers, built=self.built)
        self._beginning = torch.frombuffer(bytearray(record.pack(whole)), dtype=torch.uint8)

    def make(self, cursor: dict[str, Any] | None, last: bool = False, step: int | None = None) -> bytes:
        """The record of this moment. `last`: no push will follow, so the residuals of earlier ones are not needed again.

        `step`: how many steps the script has made, where it is ahead of the updates; None: as many as there were updates.

        Raises Refused if it is too large, or a value cannot be kept.
        """
        ready, self._ready = self._ready, None
        clock = self._session.clock if step is None else step
        if ready is not None and cursor is None and not last and ready[0] == clock:
            return ready[1]
        return self._pack(cursor, clock, last)

    def prepare(self) -> None:
        """Make the record of the boundary right after the step under way, while its answers are waited for. Raises Refused."""
        exchange = self._session.exchange
        if self._ahead and not (exchange.overlaps or exchange.delay or exchange.compression.feeds):
            clock = self._session.clock + 1
            self._ready = clock, self._pack(None, clock, False)

    def _pack(self, cursor: dict[str, Any] | None, clock: int, last: bool) -> bytes:
        exchange = self._session.exchange
        wire = {} if last else exchange.compression.state()
        if exchange.behind and not last:
            wire[BEHIND] = exchange.behind
        rng = self._generators.states()
        return self._packer.pack(
            record.capture(cursor, clock, self._model, self.kept, self._optimizer, wire, rng, self._buffers, self._beginning, self.built)
        )


class PlainState:
    """The optimizer's own state, while `state_dict` of the attached one speaks of the shards."""

    def __init__(self, plain: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
        self._plain, self._optimizer = plain, optimizer
        self.kind = plain.__name__

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self._optimizer.param_groups

    def go_on_with(self, plain: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer takes its place."""
        self._plain, self._optimizer, self.kind = plain, optimizer, plain.__name__

    def state_dict(self) -> dict[str, Any]:
        return dict(self._plain.state_dict(self._optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._plain.load_state_dict(self._optimizer, state)


class ExtraState:
    """What modules of a model give as `get_extra_state`: a part of its state_dict that is no tensor."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = modules

    @classmethod
    def of(cls, model: torch.nn.Module) -> dict[str, ExtraState]:
        """By its name in a record; nothing if no module has one that can be put back."""
        own = {name: module for name, module in model.named_modules() if _has_extra_state(module)}
        return {EXTRA: cls(own)} if own else {}

    def state_dict(self) -> dict[str, Any]:
        """By name of the module. What no record can hold is left out, and told."""
        found = {}
        for name, module in self._modules.items():
            try:
                value = module.get_extra_state()
                tagged.encode_value(value, [], f"{name or 'the model'}.get_extra_state()")
            except Exception as error:  # a module may have none before its first use
                advice.tell_once("extra state", f"extra state of modules is not put back after a restart: {str(error)[:200]}")
            else:
                found[name] = value
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each module its own; one of which there is none keeps what it has."""
        for name, module in self._modules.items():
            if name in state:
                module.set_extra_state(state[name])


def _has_extra_state(module: torch.nn.Module) -> bool:
    kind, plain = type(module), torch.nn.Module
    both = kind.get_extra_state is not plain.get_extra_state and kind.set_extra_state is not plain.set_extra_state
    return both and not isinstance(module, torch.jit.ScriptModule)
