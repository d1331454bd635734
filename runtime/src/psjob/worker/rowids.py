"""Which rows of a table there are: a worker asks each shard for its ids, page by page, and checks what comes.

The script's thread calls `all`; a link's thread calls `land` when an answer comes, and `again` when a shard has welcomed this worker anew.
What both use is guarded by the session's condition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from psjob.layout import memory
from psjob.tables import Partition, TableSpec
from psjob.wire.frame import Header, Kind, WireError
from psjob.wire.rows import ID_BYTES, ID_PAGE
from psjob.wire.tcp import Stream

if TYPE_CHECKING:
    from psjob.worker.link import ShardLink
    from psjob.worker.rows import Rows

SECONDS: Final = 120.0
"""For one page of every shard. The first page of a table of 10^8 rows takes a shard some ten seconds."""


@dataclass
class _Page:
    """What one shard is asked for; `above` is its last id that has come, None before the first page."""

    header: Header
    above: torch.Tensor | None
    ids: torch.Tensor | None = None


class RowIds:
    """Of one worker's tables. One table is read at a time."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._asked: dict[int, _Page] = {}
        """By shard."""

    def all(self, table: int) -> torch.Tensor:
        """The ids of every row of a table, ascending. Raises SessionEnd, also where a page does not come in SECONDS."""
        session = self._rows.session
        session.exchange.finish()
        found: list[torch.Tensor] = []
        due: dict[int, torch.Tensor | None] = {link.index: None for link in session.links}
        while due:
            for shard, above in due.items():
                self._ask(session.links[shard], table, above)
            name = self._rows.specs[table].name
            session.wait(self._complete, f"the ids of table {name}", SECONDS)
            with session.cond:
                pages = {shard: page.ids for shard, page in self._asked.items() if page.ids is not None}
                self._asked = {}
            found += pages.values()
            due = {shard: page[-1:] for shard, page in pages.items() if len(page) == ID_PAGE}
        return torch.sort(torch.cat(found)).values

    def again(self, link: ShardLink) -> None:
        """A shard has welcomed this worker: ask again for the page that it owes."""
        with self._rows.session.cond:
            page = self._asked.get(link.index)
        if page is not None and page.ids is None:
            link.send(page.header, page.above)

    def land(self, link: ShardLink, stream: Stream, header: Header) -> None:
        """Read a page. Raises WireError for one that cannot be, and then it is asked for again on another stream."""
        session = self._rows.session
        with session.cond:
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
        check_page(self._rows.specs[page.header.table], self._rows.partition, link.index, page.above, ids)
        with session.cond:
            page.ids = ids
            session.cond.notify_all()

    def _complete(self) -> bool:
        return all(page.ids is not None for page in self._asked.values())

    def _ask(self, link: ShardLink, table: int, above: torch.Tensor | None) -> None:
        session = self._rows.session
        with session.cond:
            page = _Page(session.header(Kind.ROW_IDS, table=table, clock=session.clock, request=link.number()), above)
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
