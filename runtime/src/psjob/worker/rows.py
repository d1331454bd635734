"""The sparse road of a worker: ids out and rows in, gradients of rows out; the rows themselves live on the shards.

The script's thread calls `ask`, `collect`, `push` and `all`; a link's thread calls `land` when an answer comes and `again` when a shard
has welcomed this worker anew. What both use is guarded by the worker's condition. `all` asks each shard for its ids, page by page, and
checks what comes. A worker and the shards of its host lend each other memory for what it pushes, and for what it has asked for.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from psjob.layout import memory
from psjob.tables import Partition, TableSpec
from psjob.wire.frame import (
    ID_BYTES,
    ID_PAGE,
    LENT_ANSWERS,
    LENT_PUSHES,
    LOOKUP_BYTES,
    LOOKUPS,
    ROWS_ALIGNED,
    Flag,
    Header,
    Kind,
    WireError,
    lookup_limit,
    push_limit,
)
from psjob.wire.shared_memory import Offer, Region, copy_out
from psjob.wire.tcp import Stream
from psjob.worker.connection import ShardConnection, WorkerLane
from psjob.worker.exits import SessionEnd
from psjob.worker.state import SessionState

SECONDS: Final = 120.0
"""For one page of every shard. The first page of a table of 10^8 rows takes a shard some ten seconds."""


@dataclass
class _Page:
    """What one shard is asked for; `above` is its last id that has come, None before the first page."""

    header: Header
    above: torch.Tensor | None
    ids: torch.Tensor | None = None


class RowIds:
    """Of one worker's tables. One table is read at a time. `finish` waits until all that the worker has pushed is answered."""

    def __init__(
        self,
        state: SessionState,
        links: Sequence[ShardConnection],
        specs: Sequence[TableSpec],
        partition: Partition,
        finish: Callable[[], None],
    ) -> None:
        self._state, self._links, self._finish = state, links, finish
        self._specs, self._partition = specs, partition
        self._asked: dict[int, _Page] = {}
        """By shard."""

    def all(self, table: int) -> torch.Tensor:
        """The ids of every row of a table, ascending. Raises SessionEnd, also if a page does not come in SECONDS."""
        state = self._state
        self._finish()
        found: list[torch.Tensor] = []
        due: dict[int, torch.Tensor | None] = {link.index: None for link in self._links}
        while due:
            for shard, above in due.items():
                self._ask(self._links[shard], table, above)
            name = self._specs[table].name
            state.wait(self._complete, f"the ids of table {name}", SECONDS)
            with state.cond:
                pages = {shard: page.ids for shard, page in self._asked.items() if page.ids is not None}
                self._asked = {}
            found += pages.values()
            due = {shard: page[-1:] for shard, page in pages.items() if len(page) == ID_PAGE}
        return torch.sort(torch.cat(found)).values

    def again(self, link: ShardConnection) -> None:
        """A shard has welcomed this worker: ask again for the page that it owes."""
        with self._state.cond:
            page = self._asked.get(link.index)
        if page is not None and page.ids is None:
            link.send(page.header, page.above)

    def land(self, link: ShardConnection, stream: Stream, header: Header) -> None:
        """Read a page. Raises WireError for one that cannot be, and then it is asked for again on another stream."""
        state = self._state
        with state.cond:
            page = self._asked.get(link.index)
        if header.length % ID_BYTES or header.length > ID_PAGE * ID_BYTES or header.flags:
            most = ID_PAGE * ID_BYTES
            raise WireError(
                f"ROW_IDS of {header.length} bytes and flags {header.flags}, expected whole ids of at most {most} bytes, no flag"
            )
        if page is None or page.ids is not None or header.request != page.header.request:
            stream.drain(header)  # of a page that was asked for twice
            return
        ids = torch.empty(header.length // ID_BYTES, dtype=torch.int64, device="cpu")
        stream.recv_into(header, memory.view(ids))
        check_page(self._specs[page.header.table], self._partition, link.index, page.above, ids)
        with state.cond:
            page.ids = ids
            state.cond.notify_all()

    def _complete(self) -> bool:
        return all(page.ids is not None for page in self._asked.values())

    def _ask(self, link: ShardConnection, table: int, above: torch.Tensor | None) -> None:
        state = self._state
        with state.cond:
            page = _Page(state.header(Kind.ROW_IDS, table=table, clock=state.clock, request=link.number()), above)
            self._asked[link.index] = page
        link.send(page.header, above)


def check_page(spec: TableSpec, partition: Partition, shard: int, above: torch.Tensor | None, ids: torch.Tensor) -> None:
    """Raise WireError unless `ids` ascend from beyond `above`, are rows of the table, and lie on that shard."""
    if not len(ids):
        return
    if not bool((ids[1:] > ids[:-1]).all()) or (above is not None and int(ids[0]) <= int(above)):
        raise WireError(f"ROW_IDS of table {spec.name}: the ids of shard {shard} are not in ascending order without a repeat")
    if spec.num_rows is not None and not 0 <= int(ids[0]) <= int(ids[-1]) < spec.num_rows:
        raise WireError(f"ROW_IDS of table {spec.name}: ids go from {int(ids[0])} to {int(ids[-1])}, and it has {spec.num_rows} rows")
    if not bool((partition.shard_of(ids) == shard).all()):
        raise WireError(f"ROW_IDS of table {spec.name}: shard {shard} names rows of other shards")


class RowSharing:
    """Empty until a shard offers. Each shard has answers of its own; pushes to all lie in one region."""

    def __init__(self, shards: int) -> None:
        self._answers: list[Region | None] = [None] * shards
        self._pushes: Region | None = None
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        """Offset and length of what was pushed in the clock in hand, by shard and table."""
        self._used = 0
        self._lock = threading.Lock()

    def take(self, index: int, offer: Offer) -> None:
        """Hand over the memory of pushes to shard `index` and take that of its answers. Raises OSError or WireError."""
        if offer.size != LENT_ANSWERS:
            raise WireError(f"shard {index} lends {offer.size} bytes for rows, expected {LENT_ANSWERS}")
        self.lose(index)  # what it lent before is not where it puts answers once it has been asked again, whatever comes of that
        with self._lock:
            if self._pushes is None:
                self._pushes = Region.lend(LENT_PUSHES)
        self._answers[index] = offer.borrow(self._pushes)

    def lose(self, index: int) -> None:
        """The stream over which shard `index` told of its memory has ended."""
        self._answers[index] = None

    def answers(self, index: int) -> Region | None:
        """The memory in which shard `index` puts rows; None: it sends them."""
        return self._answers[index]

    def begin(self) -> None:
        """A clock begins: every shard has applied what was pushed in the one before."""
        with self._lock:
            self._places.clear()
            self._used = 0

    def stage(self, index: int, table: int, ids: torch.Tensor, grads: torch.Tensor) -> tuple[int, int] | None:
        """Offset and length of a push that lies where shard `index` reads it, put there once a clock. None: it has to be sent."""
        with self._lock:
            if self._answers[index] is None or self._pushes is None:
                return None
            key, length = (index, table), ids.nbytes + grads.nbytes
            if key not in self._places:
                if self._used + length > self._pushes.size:
                    return None
                memory.lent(self._pushes, self._used, ids.numel(), "int64").copy_(ids)
                dtype = str(grads.dtype).removeprefix("torch.")
                memory.lent(self._pushes, self._used + ids.nbytes, grads.numel(), dtype).copy_(grads.view(-1))
                if self._pushes.withdrawn:
                    return None  # the region may have become private before all of it was there
                self._places[key] = (self._used, length)
                self._used += -(-length // ROWS_ALIGNED) * ROWS_ALIGNED
            return self._places[key]

    def withdraw(self) -> None:
        """As Arena.withdraw: nothing that this process writes from now on reaches a shard."""
        if self._pushes is not None:
            self._pushes.withdraw()


LEFT_TO_NOW = 3
"""Places among the lookups on their way to a shard that none of a later step takes."""
log = logging.getLogger("psjob.worker")


@dataclass
class RowRequest:
    """Rows that were asked for. `ids` are in the order of `rows`, by shard; `order` says where they stood (None: there)."""

    table: int
    ids: torch.Tensor
    order: torch.Tensor | None
    counts: list[int]
    rows: torch.Tensor
    version: int
    """The clock whose rows these are, in sync."""
    left: int = 0
    """Lookups without an answer."""
    moved: bool = False
    """In sync: the table has moved on from `version`, for which a process before this one had pushed."""


@dataclass
class _Lookup:
    header: Header
    asked: RowRequest
    begin: int
    end: int
    slot: int = -1
    """Its place among the lookups on their way to the shard, and in the memory that this lends; given anew when it is answered."""
    sent: WorkerLane | None = None
    """By which it was sent last. Never twice by one: the answer to the second would come when the slot is another's."""


@dataclass(frozen=True)
class RowGrads:
    """One table's gradients of a clock: ids as `RowRequest` has them, `counts` of them for each shard."""

    ids: torch.Tensor
    grads: torch.Tensor
    counts: Sequence[int]


class Rows:
    """All tables of the job. `first` gives, by table, the values with which rows 0, 1, … begin (rank 0's are the job's)."""

    def __init__(
        self,
        state: SessionState,
        links: Sequence[ShardConnection],
        specs: Sequence[TableSpec],
        first: Mapping[int, torch.Tensor],
        finish: Callable[[], None],
    ) -> None:
        self.state, self.links, self.specs, self.first = state, links, tuple(specs), first
        self._shards = len(state.place.config.shards)
        self.partition = Partition.even(self._shards)
        self.sharing = RowSharing(self._shards)
        self.listing = RowIds(state, links, self.specs, self.partition, finish)
        self._told: list[bool | None] = [None] * self._shards
        self._free = [list(range(LOOKUPS)) for _ in range(self._shards)]
        """Slots of no lookup."""
        self._asked: list[dict[int, _Lookup]] = [{} for _ in range(self._shards)]
        self._queued: list[deque[_Lookup]] = [deque() for _ in range(self._shards)]
        self._offered: tuple[RowGrads | None, ...] = ()
        self._pushed: tuple[RowGrads | None, ...] = ()
        """Kept until the next clock is pushed, by when this one is applied everywhere."""
        self._bases: dict[tuple[int, int], int] = {}
        """By clock and shard, the least version of the rows that came for it."""
        self.hyperparameters: Sequence[Mapping[str, Any]] = ()
        """Hyperparameters by table, as they are sent with the clock in hand."""

    # -- the script's thread -------------------------------------------------------------------

    def ask(self, table: int, ids: torch.Tensor, ahead: int = 0, out: torch.Tensor | None = None) -> RowRequest:
        """Ask for rows of `ids` (int64, ascending, each there once) as they are after `ahead` more steps of this worker.

        `out` takes the rows ([n, dim] of the table's dtype) in place of memory of its own. Returns at once.
        """
        state, spec = self.state, self.specs[table]
        version = state.clock + ahead
        mine, order, counts = self.split(ids)
        rows = torch.empty(len(ids), spec.dim, dtype=spec.torch_dtype, device="cpu") if out is None else out
        asked = RowRequest(table, mine, order, counts, rows, version)
        needed = (0, state.mode.version_for(version - 1))
        limit, begin = lookup_limit(spec.dim), 0
        touched = []
        with state.cond:
            for shard, count in enumerate(counts):
                for start in range(begin, begin + count, limit):
                    header = state.header(Kind.LOOKUP, table=table, clock=state.clock, version=needed)
                    self._queued[shard].append(_Lookup(header, asked, start, min(start + limit, begin + count)))
                    asked.left += 1
                touched += [shard] if count else []
                begin += count
        for shard in touched:
            self._pump(self.links[shard])
        return asked

    def fits(self, asked: RowRequest) -> bool:
        """Are these the rows of the clock in hand? In async any rows are."""
        return self.state.mode.ahead is None or asked.version == self.state.clock

    def collect(self, asked: RowRequest) -> torch.Tensor:
        """Wait until all rows of `asked` are there. Raises SessionEnd."""
        if asked.left:
            for link in self.links:
                self._pump(link)  # what was of a later step when it was asked for may be of this one
            self.state.wait(lambda: not asked.left, f"rows of table {self.specs[asked.table].name}")
        if asked.moved:
            raise SessionEnd("rewind")
        return asked.rows

    def offer(self, grads: Sequence[RowGrads | None], hyperparameters: Sequence[Mapping[str, Any]]) -> None:
        """What the next push carries, by table (None: no row). Raises SessionEnd if that is too large."""
        for spec, given in zip(self.specs, grads, strict=True):
            if given is not None and max(given.counts) > push_limit(spec.dim):
                raise SessionEnd(
                    "refused", f"a step touches {max(given.counts)} rows of table {spec.name} on one shard, at most {push_limit(spec.dim)}"
                )
        self._offered, self.hyperparameters = tuple(grads), hyperparameters

    def push(self, flags: int, info: int, newest: Callable[[], int]) -> None:
        """Send what was offered to every shard; the caller waits until links owe no answer. `newest`: the newest version of any block."""
        state = self.state
        self._pushed, self._offered = self._offered, ()
        self.sharing.begin()
        with state.cond:
            self._bases = {key: base for key, base in self._bases.items() if key[0] >= state.clock}
            for link in self.links:
                link.requests.unsent = state.owner.count(link.index) + len(self.specs)
        for table in range(len(self.specs)):
            for link in self.links:
                header = state.header(
                    Kind.ROW_PUSH, table=table, block=len(state.layout.blocks) + table, clock=state.clock, flags=flags, info=info,
                    version=self._base(link, newest),
                )  # fmt: skip
                with state.cond:
                    header = link.ask(header)
                self.send(link, header)

    def _base(self, link: ShardConnection, newest: Callable[[], int]) -> tuple[int, int]:
        """What a push was computed on, as far as this shard's rows go; where it had none of them, they are as new as any block."""
        version = newest()
        with self.state.cond:
            return link.attempt, self._bases.get((self.state.clock, link.index), version)

    def initialise(self, info: int) -> None:
        """Rank 0 of a new run gives every shard the first values of its rows, made with the hyperparameters of number `info`."""
        state = self.state
        for table, spec in enumerate(self.specs):
            values = self.first.get(table)
            header = state.header(Kind.ROW_INIT, table=table, info=info)
            limit = lookup_limit(spec.dim)
            for start in range(0, 0 if values is None else len(values), limit):
                assert values is not None
                ids, _, counts = self.split(torch.arange(start, min(start + limit, len(values)), device="cpu"))
                for link, part in zip(self.links, torch.split(ids, counts), strict=True):
                    if len(part) and (lane := link.main) is not None:
                        lane.send_parts(header, [memory.view(part), memory.view(values[part])])
            for link in self.links:
                link.send(state.header(Kind.ROW_INIT, table=table, flags=Flag.STORE))

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        """(ids by shard, where each one stood in `ids`, ids a shard)."""
        if self._shards == 1:
            return ids, None, [len(ids)]
        shard = self.partition.shard_of(ids)
        order = torch.sort(shard, stable=True).indices
        return ids[order], order, torch.bincount(shard, minlength=self._shards).tolist()

    # -- both sides ----------------------------------------------------------------------------

    def send(self, link: ShardConnection, header: Header) -> None:
        """Send a ROW_PUSH of the clock in hand, the first time or again."""
        given = self._pushed[header.table] if self._pushed else None
        if header.flags or given is None:
            link.send(header)
            return
        begin = sum(given.counts[: link.index])
        span = slice(begin, begin + given.counts[link.index])
        ids, grads = given.ids[span], given.grads[span]
        place, lane = self.sharing.stage(link.index, header.table, ids, grads), link.main
        if lane is None:
            return  # it goes out at the next welcome
        if place is not None:
            lane.send_lent(header, *place)
        else:
            lane.send_parts(header, [memory.view(ids), memory.view(grads)])

    # -- the links' threads --------------------------------------------------------------------

    def share(self, link: ShardConnection, offer: Mapping[str, Any] | None) -> None:
        """Exchange memory with a shard that offers it; where that cannot be done, rows go over the stream."""
        if not self.specs:
            return
        try:
            if offer is not None:
                self.sharing.take(link.index, Offer.of(offer, self.state.place.pair))
        except (OSError, WireError) as error:
            log.warning("shard %d: its memory for rows is out of reach: %s", link.index, error)
        shared = self.sharing.answers(link.index) is not None
        if self._told[link.index] != shared:
            self._told[link.index] = shared
            log.info("rows to and from shard %d go over %s", link.index, "shared memory" if shared else "TCP")

    def lose(self, link: ShardConnection) -> None:
        """The stream over which this shard told of its memory has ended."""
        self.sharing.lose(link.index)

    def land_ids(self, link: ShardConnection, stream: Stream, header: Header) -> None:
        """Read a page of ids. Raises as RowIds.land."""
        self.listing.land(link, stream, header)

    def waits(self, link: ShardConnection) -> bool:
        """Does this shard owe rows?"""
        return bool(self._asked[link.index])

    def again(self, link: ShardConnection) -> None:
        """A shard has welcomed this worker: ask again for the rows that it owes."""
        with self.state.cond:
            owed = list(self._asked[link.index].values())
        for lookup in owed:
            self._send(link, lookup)
        self._pump(link)
        self.listing.again(link)

    def land(self, link: ShardConnection, stream: Stream, header: Header, applied: Callable[[Header], None]) -> None:
        """Read ROWS to where they were asked for; `applied` is called if they answer a push."""
        state = self.state
        with state.cond:
            lookup = self._asked[link.index].get(header.request)
        if lookup is None:
            if header.length > max(LOOKUP_BYTES, 4 * max((spec.dim for spec in self.specs), default=0)):
                raise WireError(f"ROWS of {header.length} bytes that nobody asked for")
            stream.drain(header)
            applied(header)
            return
        rows = memory.view(lookup.asked.rows[lookup.begin : lookup.end])
        if header.flags & Flag.LENT:
            self._copy(link, lookup, header, rows)
        else:
            stream.recv_into(header, rows)
        with state.cond:
            if self._asked[link.index].pop(header.request, None) is not None:
                self._free[link.index].append(lookup.slot)
                lookup.asked.left -= 1
                lookup.asked.moved |= state.mode.steady and header.version[1] != lookup.asked.version
                key = lookup.asked.version, link.index
                self._bases[key] = min(header.version[1], self._bases.get(key, header.version[1]))
                if not lookup.asked.left:
                    state.cond.notify_all()
        self._pump(link)

    # -- inside --------------------------------------------------------------------------------

    def _pump(self, link: ShardConnection) -> None:
        """Send what waits, as far as the credit goes."""
        for lookup in self._take(link):
            self._send(link, lookup)

    def _take(self, link: ShardConnection) -> Iterator[_Lookup]:
        while True:
            with self.state.cond:
                lookup = self._next(link.index)
                if lookup is None:
                    return
                number, lookup.slot = link.number(), self._free[link.index].pop()
                lookup.header = lookup.header._replace(request=number)
                self._asked[link.index][number] = lookup
            yield lookup

    def _next(self, shard: int) -> _Lookup | None:
        """The first that may go. What a shard may hold until this step is made leaves places to what this step needs."""
        queued, free = self._queued[shard], len(self._free[shard])
        for at, lookup in enumerate(queued if free else ()):
            if free > LEFT_TO_NOW or lookup.asked.version <= self.state.clock or self.state.mode.ahead is None:
                del queued[at]
                return lookup
        return None

    def _send(self, link: ShardConnection, lookup: _Lookup) -> None:
        with self.state.cond:
            lane = link.lanes[0] if link.welcomed and link.lanes else None
            if lane is None or lookup.sent is lane:
                return
            lookup.sent = lane
            shared = self.sharing.answers(link.index) is not None
        header = lookup.header
        if shared:
            header = header._replace(flags=Flag.PLACE, part=lookup.slot * LOOKUP_BYTES)
        lane.send(header, lookup.asked.ids[lookup.begin : lookup.end])

    def _copy(self, link: ShardConnection, lookup: _Lookup, header: Header, rows: memoryview) -> None:
        """Take rows out of lent memory. Raises WireError if they lie anywhere else than they were asked to."""
        answers, at = self.sharing.answers(link.index), lookup.slot * LOOKUP_BYTES
        if answers is None or (header.part, header.length) != (at, len(rows)):
            raise WireError(f"ROWS of table {header.table}: {header.length} lent bytes at {header.part}, expected {len(rows)} at {at}")
        copy_out(answers.buffer(at, len(rows)), rows)


class Carried:
    """The road of a script's modules: an ending that comes while they wait for rows is carried out by `carry_out`."""

    steps = True

    def __init__(self, rows: Rows, carry_out: Callable[[Callable[[], Any]], Any]) -> None:
        self._rows, self._outermost = rows, carry_out
        self._unwinds = False

    def unwinding(self, call: Callable[[], None]) -> None:
        """An ending that comes inside `call` leaves it first, as it may be an exec that cleans nothing up."""

        def inside() -> None:
            self._unwinds = True
            try:
                call()
            finally:
                self._unwinds = False

        self._carry_out(inside)

    def _carry_out(self, call: Callable[[], Any]) -> None:
        if self._unwinds:
            call()
        else:
            self._outermost(call)

    def ask(self, table: int, ids: torch.Tensor, ahead: int = 0) -> RowRequest:
        return self._rows.ask(table, ids, ahead)

    def collect(self, asked: RowRequest) -> torch.Tensor:
        self._carry_out(lambda: self._rows.collect(asked))
        return asked.rows

    def fits(self, asked: RowRequest) -> bool:
        return self._rows.fits(asked)

    def ids(self, table: int) -> torch.Tensor:
        found: list[torch.Tensor] = []
        self._carry_out(lambda: found.append(self._rows.listing.all(table)))
        return found[0]

    def split(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        return self._rows.split(ids)
