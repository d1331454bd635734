"""Overlap: a block's gradient goes to its shard while backward runs, its weights come back while the next forward runs.

What is sent before `step()` is EARLY data: the shard keeps it for this stream and counts nothing. `step()` turns it into a
push by a frame without payload that names it (HELD). If the script has changed the gradient since (clipping, `GradScaler.unscale_`, by
hand), `step()` pushes the block whole. If it does so in each step, gradients leave at `step()` from then on.

A gradient under a GradScaler leaves multiplied by the factor of the step before, which seldom changes. A step with another factor pushes
its blocks whole.
Answers are awaited by the modules that use them. Hooks tell of gradients as backward makes them, of modules as they begin, and of
readers of the weights.

A block is ready when every parameter of it that had a gradient in the step before has one again. If a step is made of several
backward passes (accumulation), it is ready in the pass in which the step before was through with it.

A module that was seen to run waits for its own parameters. Another one may never run: its parent reads its weights, as attention does
with its output projection. Then the nearest module around it that runs waits for them. What no module waits for is waited for before
the step ends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from psjob.layout import devices
from psjob.layout.blocks import Block, Layout
from psjob.layout.packing import Pack
from psjob.wire.frame import Flag, Header, Kind
from psjob.worker.connection import WorkerLane
from psjob.worker.exchange import WAITS_FOR, Exchange, Gradients, Groups, count_change
from psjob.worker.exits import SessionEnd
from psjob.worker.rows import Rows
from psjob.worker.staging import Staging
from psjob.worker.step_parts import COPY_OUT

log = logging.getLogger("psjob.worker")

GIVEN_UP: Final = 4
"""After so many steps in a row in which a gradient was changed after it had left."""
COMPARED: Final = 64
"""In each so many-th step a gradient on a device is compared with what has left."""


class Readiness:
    """`told` at every gradient of a row of the table, `step_made` at every step."""

    def __init__(self, layout: Layout) -> None:
        self._blocks_of = [tuple(dict.fromkeys(block.index for block, _ in layout.pieces_of(row))) for row in range(len(layout.table))]
        self._rows_of = [tuple(dict.fromkeys(piece.tensor for piece in block.pieces)) for block in layout.blocks]
        self._expected = [1] * len(layout.table)
        """Backward passes of the step before that gave each row a gradient."""
        self._begin()

    def _begin(self) -> None:
        self.seen = [0] * len(self._blocks_of)
        """Gradients of each row since the last step."""
        self.whole: set[int] = set()
        """Blocks that were ready and of which no row has had a gradient since."""
        self._round = [0] * len(self._rows_of)
        self._lacking = [sum(self._expected[row] > 0 for row in rows) for rows in self._rows_of]

    def told(self, row: int) -> list[int]:
        """A row's gradient was accumulated (again). Returns the blocks that are ready with it."""
        self.seen[row] += 1
        ready = []
        for block in self._blocks_of[row]:
            self.whole.discard(block)
            if self._expected[row] and self.seen[row] == self._expected[row] + self._round[block]:
                self._lacking[block] -= 1
                if not self._lacking[block]:
                    self._next_round(block)
                    ready.append(block)
        self.whole.update(ready)
        return ready

    def step_made(self) -> None:
        """What was seen since the last step is a step's whole; a step without any gradient says nothing about the next."""
        if any(self.seen):
            self._expected = self.seen
        self._begin()

    def _next_round(self, block: int) -> None:
        self._round[block] += 1
        self._lacking[block] = sum(
            self._expected[row] > 0 and self.seen[row] < self._expected[row] + self._round[block] for row in self._rows_of[block]
        )


Tree = Mapping[str, Sequence[int]]
"""Rows of the table that each module holds itself, by the module's path; one module under two paths is there twice."""


@dataclass(frozen=True)
class Use:
    """`rank`: by block, 0 for the one that is used first. `waits`: by module path, the blocks it waits for. `at_once`: nobody does."""

    rank: tuple[int, ...]
    waits: Mapping[str, frozenset[int]]
    at_once: frozenset[int]


def learned(layout: Layout, tree: Tree, ran: Sequence[str]) -> Use:
    """`ran` are the paths of the modules that ran in one forward pass, in the order in which each began first."""
    waits: dict[str, set[int]] = {path: set() for path in ran}
    at_once: set[int] = set()
    for path, rows in tree.items():
        blocks = {block.index for row in rows for block, _ in layout.pieces_of(row)}
        waiter = next((around for around in _around(path) if around in waits), None)
        (at_once if waiter is None else waits[waiter]).update(blocks)
    first: dict[int, int] = dict.fromkeys(at_once, -1)
    for position, path in enumerate(ran):
        for block in waits[path]:
            first.setdefault(block, position)
    order = sorted(range(len(layout.blocks)), key=lambda block: (first.get(block, len(ran)), block))
    rank = [0] * len(order)
    for position, block in enumerate(order):
        rank[block] = position
    return Use(tuple(rank), {path: frozenset(blocks) for path, blocks in waits.items()}, frozenset(at_once))


def nothing_learned(layout: Layout) -> Use:
    """Before the first forward pass: the layout's order, and everything is waited for at once."""
    blocks = range(len(layout.blocks))
    return Use(tuple(blocks), {}, frozenset(blocks))


def _around(path: str) -> list[str]:
    """The module itself, then those around it up to the root, whose path is empty."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


CarryOut = Callable[[Callable[[], Any]], Any]


def tree_of(model: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> Tree:
    """Which rows of the table each module holds itself."""
    row_of = {id(p): row for row, p in enumerate(parameters)}
    return {path: [row_of[id(p)] for p in m._parameters.values() if id(p) in row_of] for path, m in _all_of(model)}


def install(model: torch.nn.Module, overlap: Overlap, carry_out: CarryOut, makes_again: Callable[[], bool]) -> None:
    """Hook `overlap` in. `carry_out` runs a call that may end this process; `makes_again`: steps without effect are being made."""
    for row, p in enumerate(overlap.parameters):
        if p.requires_grad and row not in overlap.apart:
            p.register_post_accumulate_grad_hook(_accumulated(overlap, row, makes_again))  # type: ignore[no-untyped-call]
    paths: dict[torch.nn.Module, list[str]] = {}
    for path, module in _all_of(model):
        paths.setdefault(module, []).append(path)
    for module, own in paths.items():
        before_forward(module, Hook(_before_forward(overlap, carry_out, own)), prepend=True)
        before_state(module, Hook(_before_state(overlap, carry_out)))


def before_forward(module: torch.nn.Module, hook: Hook, prepend: bool = False) -> RemovableHandle:
    """Call `hook` with module, positional and named arguments before each forward, also of a scripted module that is called by itself."""
    # Scripted modules refuse by their own name what torch does for them if they are called from Python.
    return torch.nn.Module.register_forward_pre_hook(module, hook, prepend=prepend, with_kwargs=True)


def before_state(module: torch.nn.Module, hook: Hook) -> RemovableHandle:
    """Call `hook` with the module before each `state_dict`, as `before_forward` does."""
    handle: RemovableHandle = torch.nn.Module.register_state_dict_pre_hook(module, hook)  # type: ignore[no-untyped-call]
    return handle


def before_reads(model: torch.nn.Module, act: Callable[[], None]) -> None:
    """Call `act` before each `state_dict` and each forward without gradients, of the model or of a module in it."""

    def evaluates(*_given: object) -> None:
        if not torch.is_grad_enabled():
            act()

    for module in model.modules():
        before_state(module, Hook(lambda *_given: act()))
        before_forward(module, Hook(evaluates), prepend=True)


class Hook:
    """A hook that copies of its module do not have, nor pickles of it."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _forgotten, ()


def _forgotten() -> Callable[..., None]:
    return _nothing


def _nothing(*_given: object) -> None:
    return None


def _accumulated(overlap: Overlap, row: int, makes_again: Callable[[], bool]) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        gradient = p.grad
        if devices.capturing():
            overlap.graphed = True
        elif gradient is not None and gradient.layout is torch.strided and not makes_again():
            overlap.told(row, gradient)

    return hook


def _before_forward(overlap: Overlap, carry_out: CarryOut, paths: Sequence[str]) -> Callable[..., None]:
    def hook(module: torch.nn.Module, *_given: object) -> None:
        if devices.capturing():
            carry_out(overlap.refuse_capture)
        if overlap.learning:
            if torch.is_grad_enabled():
                overlap.ran += [path for path in paths if path not in overlap.ran]
            return
        if overlap.landed():
            return
        # Without gradients, modules may read what is inside them by other ways than in training (torch's fast paths do).
        whole = not torch.is_grad_enabled() or (not module.training and next(module.children(), None) is not None)
        blocks = overlap.all_blocks if whole else frozenset().union(*(overlap.use.waits.get(path, frozenset()) for path in paths))
        carry_out(lambda: overlap.need(blocks))

    return hook


def _before_state(overlap: Overlap, carry_out: CarryOut) -> Callable[..., None]:
    def hook(*_given: object) -> None:
        if not overlap.landed():
            carry_out(lambda: overlap.need(overlap.all_blocks))

    return hook


def _all_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return list(model.named_modules(remove_duplicate=False))


class Overlap:
    """Pushes by way of `exchange`, which it makes, and decides what each of its requests is as it leaves.

    `parameters` are the table's rows, `tree` says which module holds which; those in `apart` have no gradient to push. Gradients are
    staged (also on the CPU), so that the model's own may be changed or freed while theirs is on its way. `device` and `lands` are those of
    `Staging`.
    """

    def __init__(
        self, rows: Rows, parameters: Sequence[torch.Tensor], tree: Tree, device: torch.device, apart: frozenset[int] = frozenset(),
        lands: bool | None = None,
    ) -> None:  # fmt: skip
        layout = rows.state.layout
        self.staging = AwaitedStaging(layout, device, lands)
        self.awaited = self.staging.awaited
        self.exchange = Exchange(rows, self.staging, overlaps=True)
        self.state, self.links = rows.state, rows.links
        self.parameters, self.apart = parameters, apart
        self.ran: list[str] = []
        """Modules of the first forward pass, in the order in which they began; afterwards not looked at."""
        self.use = nothing_learned(layout)
        self.learning = True
        self.graphed = False
        """A gradient was made while a CUDA graph is captured: replays write it, which no hook and no version tells."""
        self._tree = tree
        self._places = [frozenset(block.index for block, _ in layout.pieces_of(row)) for row in range(len(layout.table))]
        self._rows = [tuple(dict.fromkeys(piece.tensor for piece in block.pieces)) for block in layout.blocks]
        self._readiness = Readiness(layout)
        self._staged: dict[int, tuple[torch.Tensor | None, int]] = {}
        """By row: the gradient that was staged since the last step, and its version then."""
        self._issued: set[int] = set()
        """Blocks that were queued as early data since the last step, or that their shard reads where they lie."""
        self._lying: set[int] = set()
        """Of these, the latter."""
        self._early: dict[int, tuple[WorkerLane, int, float]] = {}
        """By block: on which stream its newest early data went, which contents that were, and by which factor they were multiplied."""
        self._changed_steps = 0
        """So many steps in a row had a gradient that was changed after it had left; `GIVEN_UP`: none leaves early any more."""
        self._compares = device.type == "cpu"
        """Gradients are compared with what has left in each step; else in some, for then a device has to be waited for."""
        self._contents = [0] * len(layout.blocks)
        """Counts what each block's staging memory has held."""
        self._busy: list[int] = []
        """Blocks that are being sent this moment."""
        self._sending = threading.Condition()

    # -- in backward ---------------------------------------------------------------------------

    def told(self, row: int, gradient: torch.Tensor) -> None:
        """A gradient has been accumulated: stage it, and send the blocks that are whole with it."""
        parts = self.state.parts
        before = parts.to(COPY_OUT)
        if self._changed_steps < GIVEN_UP and not self.graphed and self._free(row):
            for index in self._places[row] & self._issued:
                self._renew(index)
            self._stage(row, gradient)
            for index in self._readiness.told(row):
                self._issue(index)
        parts.to(before)

    def _free(self, row: int) -> bool:
        """Wait until the push before has no need of the row's staging memory; False where this process's turn is over."""
        state = self.state
        links = {self.links[state.owner[index]] for index in self._places[row]}
        if not any(link.outstanding for link in links):
            return not state.over
        try:
            state.wait(lambda: not any(link.outstanding for link in links), WAITS_FOR)
        except SessionEnd:
            return False  # it is carried out at step(), not inside a backward pass
        return not state.over

    def _stage(self, row: int, gradient: torch.Tensor | None, only: int | None = None) -> None:
        self.staging.put(row, gradient, only)
        self._staged[row] = (gradient, 0 if gradient is None else gradient._version)

    def _issue(self, index: int) -> None:
        for row in self._rows[index]:
            if not self._readiness.seen[row]:
                self._stage(row, None if row in self.apart else self.parameters[row].grad, only=index)
        self.staging.copied(index)
        self._renew(index)
        state = self.state
        link = self.links[state.owner[index]]
        if link.shared:  # a push names its place, where it lies already
            self._issued.add(index)
            self._lying.add(index)
            return
        if index not in self._issued and not self._may_hold(index):
            return
        self._issued.add(index)
        header = state.header(Kind.EARLY, block=index, clock=state.clock, request=self._contents[index])
        link.send_block(header)

    def _may_hold(self, index: int) -> bool:
        """Does the early credit of the block's shard reach for it? Where it does not, the block is pushed whole at the step."""
        state = self.state
        held = [state.layout.blocks[i].nbytes for i in self._issued if state.owner[i] == state.owner[index]]
        return sum(held) + state.layout.blocks[index].nbytes <= self.exchange.early_credit

    def _renew(self, index: int) -> None:
        """The block's staging memory gets other contents: wait until it is not being sent."""
        with self._sending:
            while index in self._busy:
                self._sending.wait(1.0)
            self._contents[index] += 1

    # -- at step() -----------------------------------------------------------------------------

    def push(self, grads: Gradients, hyperparameters: Groups, skip: bool, scale: float, targets: Sequence[torch.Tensor]) -> None:
        """As `Exchange.push`, but comes back while answers are under way for which a module waits."""
        state, exchange = self.state, self.exchange
        state.check()
        exchange.finish()
        self._learn()
        before = state.parts.to(COPY_OUT)
        likely = [] if grads is None or skip else [index for index in self._unchanged(grads) if not self._lies_unshared(index)]
        make = exchange.begin(grads, hyperparameters, skip, scale)
        exchange.expect(targets)
        early: set[int] = set()
        for index in sorted(likely, key=self.order):
            if self._holds(index, grads or ()):
                exchange.request(self.links[state.owner[index]], make, state.layout.blocks[index])
                early.add(index)
        if not skip and (left := self._issued & self._readiness.whole):
            self._note_changes(left > early)
        self._push_rest(make, early, None if skip else grads)
        self.staging.keep_back()
        state.parts.to(before)
        state.stepped()
        self._readiness.step_made()
        self._staged.clear()
        self._issued.clear()
        self._lying.clear()
        count_change(targets)
        if state.reduces:
            exchange.finish()
        else:
            self.need(self.use.at_once)

    def _learn(self) -> None:
        if self.learning and self.ran:
            self.use = learned(self.state.layout, self._tree, self.ran)
            self.learning = False

    def _unchanged(self, grads: Sequence[torch.Tensor | None]) -> list[int]:
        """Blocks whose early data is the gradient of now, as far as torch has counted changes."""
        return [
            index
            for index in sorted(self._issued & self._readiness.whole)
            if all(self._as_staged(row, grads[row]) for row in self._rows[index])
        ]

    def _as_staged(self, row: int, now: torch.Tensor | None) -> bool:
        staged, version = self._staged.get(row, (None, 0))
        return staged is now and (staged is None or staged._version == version)

    def _holds(self, index: int, grads: Sequence[torch.Tensor | None]) -> bool:
        """Is the block's early data the gradient of now in each bit? Changes through `.data` and NumPy are counted by nobody.

        On a device that has to be waited for it is looked at in steps 0, 1, 2, 4 and so on, and in each 64th. Raises SessionEnd (refused)
        if such a change is found there, since the steps between were not looked at.
        """
        clock = self.state.clock
        if not self._compares and clock & (clock - 1) and clock % COMPARED:
            return True
        differs = self.staging.differs(index, grads)
        if differs is not None and not self._compares:
            raise SessionEnd("refused", self._changed_unseen(differs))
        return differs is None

    def _lies_unshared(self, index: int) -> bool:
        """Was the block left for its shard to read where it lies, and the shard cannot any more?"""
        return index in self._lying and not self.links[self.state.owner[index]].shared

    def _changed_unseen(self, row: int) -> str:
        return (
            f"step {self.state.clock}: the gradient of {self.state.layout.table[row].name} was changed through .data or NumPy after "
            "overlap=True had sent it, and torch counts no such change. Change p.grad itself (p.grad.clamp_(…) in place of "
            "p.grad.data.clamp_(…)), or call attach without overlap=True"
        )

    def _note_changes(self, some: bool) -> None:
        """Of the gradients that left early, some have changed since, or none. After several steps with some, none leaves early."""
        self._changed_steps = self._changed_steps + 1 if some else 0
        if self._changed_steps == GIVEN_UP:
            log.warning(
                "the script has changed its gradients after backward in %d steps in a row, so from now on they leave at optimizer.step(): "
                "sent during backward, they would be sent twice", GIVEN_UP,
            )  # fmt: skip

    def _push_rest(self, make: Callable[[Block], Header], early: set[int], grads: Gradients) -> None:
        """Push what no early data stands for, in the layout's order on every worker, within the credit. `grads`: None for no payload.

        Early data has a credit of its own: with one for both, two workers whose blocks are ready in different orders could wait for
        each other.
        """
        state = self.state
        for block in state.layout.blocks:
            if block.index in early:
                continue
            link = self.links[state.owner[block.index]]
            if not link.shared:  # what is lent fills no queue
                self.exchange.await_credit(link, block.nbytes, early)
            self._renew(block.index)
            if grads is not None:
                self.staging.gather(block.index, grads)
            self.exchange.request(link, make, block)

    # -- on the way ----------------------------------------------------------------------------

    def order(self, block: int) -> int:
        """As `Exchange.order`: what the next forward pass uses first."""
        return self.use.rank[block]

    def outgoing(self, lane: WorkerLane, header: Header, pack: Pack) -> tuple[Header, torch.Tensor | None] | None:
        """As `Exchange.outgoing`: for early data that the shard holds, a push is only its name."""
        scale = self.exchange.scale  # read once: the step that begins meanwhile may have another
        with self._sending:
            if header.kind is Kind.EARLY:
                if header.request != self._contents[header.block] or header.clock != self.state.clock:
                    return None
                if self.exchange.compression.feeds_back(lane.link.index, header.block, header.clock):
                    return None  # its residual would count before the step does
                self._early[header.block] = (lane, header.request, scale)
            elif header.kind is Kind.PUSH:
                held = self._early.pop(header.block, None)
                if held is not None and not header.flags and held == (lane, self._contents[header.block], scale):
                    return header._replace(flags=Flag.HELD, part=held[1]), None
            self._busy.append(header.block)
        return self.exchange.payload(lane.link, header, pack, scale)

    def sent(self, header: Header) -> None:
        """The block's staging memory may get other contents."""
        with self._sending:
            if header.block in self._busy:
                self._busy.remove(header.block)
            self._sending.notify_all()

    # -- answers -------------------------------------------------------------------------------

    def landed(self) -> bool:
        """Nobody needs to wait for any block."""
        return not self.awaited and not self.staging.lands

    def refuse_capture(self) -> None:
        """A module runs while a CUDA graph is captured. Raises SessionEnd (refused): a replay calls no module that waits for weights."""
        raise SessionEnd("refused", devices.in_capture("a module of a model that was attached with overlap=True", "attach without it"))

    @property
    def all_blocks(self) -> frozenset[int]:
        return frozenset(range(len(self.state.layout.blocks)))

    def need(self, blocks: Iterable[int]) -> None:
        """Wait until these blocks have landed. Raises SessionEnd."""
        wanted = frozenset(blocks)
        if not self.awaited.isdisjoint(wanted):
            self.state.wait(lambda: self.awaited.isdisjoint(wanted), WAITS_FOR)
        self.staging.settle(wanted)


class AwaitedStaging(Staging):
    """As `Staging`, for a model that is in use while answers land: only an answer that is awaited lands."""

    def __init__(self, layout: Layout, device: torch.device, lands: bool | None) -> None:
        super().__init__(layout, device, lands)
        self.awaited: set[int] = set()
        """Blocks whose answer has not landed; changed with the worker's condition held."""

    def expect(self) -> None:
        super().expect()
        self.awaited.update(range(len(self.layout.blocks)))

    def landing(self, block: int, pack: Pack, targets: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        if block not in self.awaited:
            return pack.flat, lambda: None  # asked for again after it had landed: the model may be in use
        flat, put = super().landing(block, pack, targets)

        def done() -> None:
            put()
            count_change([targets[row] for row in pack.rows])  # a graph that has read the block too early is refused by torch

        return flat, done

    def arrive(self, block: int, targets: Sequence[torch.Tensor], source: Pack) -> None:
        if block in self.awaited:
            super().arrive(block, targets, source)
            count_change([targets[row] for row in source.rows])

    def landed(self, block: int) -> bool:
        counts = block in self.awaited
        self.awaited.discard(block)
        return counts
